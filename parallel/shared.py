"""One gather for several layers: q, k and v, or gate and up, that take the same rows.

te_dist's fused layers (LayerNormLinear with parameters_split, LayerNormMLP, MultiheadAttention) need none of this: they
have one product, hence one gather. For models with separate layers, the block around them gathers its input once:

    x_m -> quantize -> all_gather -> the layers' own products, without communication
    dx_m = reduce_scatter(sum of the layers' dx)                     one collective, where each layer would have one

What the block sees has the shape of the whole. In eager code it is a QuantizedTensor, which te_dist's layers take as it
is. In a compiled graph it is a plain tensor, the dequantized whole; the layers take the bytes that it was made of, and
where nobody else reads the values no graph ever makes them.

Under delayed scaling x has one scale for all the layers, the first one's. Layers that have always seen the same x have
the same scale; each of them records what was seen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from te_dist import delayed_scaling, kernels
from te_dist.modules.base import QuantizedLayer
from te_dist.modules.compiled_call import NO_RECIPE, CompiledCall
from te_dist.modules.given import GivenInput, input_quantizer
from te_dist.modules.scopes import scope
from te_dist.modules.state import shared_name
from te_dist.parallel import ops
from te_dist.parallel.comm import TensorParallel
from te_dist.pipeline.config import CallFlags, LayerSpec
from te_dist.pipeline.function import LayerCall
from te_dist.proto import TensorProto
from te_dist.quantizers import Quantizer
from te_dist.recipe import DelayedScaling, Recipe
from te_dist.tensors import QuantizedStorage, QuantizedTensor
from te_dist.tensors.quantized_tensor import wrap
from te_dist.torch_compat import constant_in_graphs, in_backward


@constant_in_graphs
def _gather_constants(
    spec: LayerSpec, recipe: Recipe | None, input_grad: bool, weight_grad: bool
) -> tuple[CallFlags, Recipe, Quantizer | None, int]:
    """How the gathered input is quantized, and in how many buffers; executed while tracing, and baked in."""
    flags = CallFlags(input_grad, (weight_grad, False))
    quantizer = input_quantizer(spec, recipe, input_grad, weight_grad)
    count = 1 if quantizer is None else len(quantizer._describe_buffers((32, 32)))
    return flags, recipe or NO_RECIPE, quantizer, count


class _GatherOnce(torch.autograd.Function):
    """The whole of x; its buffers, in a compiled graph; its amax, under delayed scaling."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        spec: LayerSpec,
        recipe: Recipe,
        flags: CallFlags,
        quantizer: Quantizer | None,
        count: int,
        group: str,
        ranks: int,
        label: str,
        reduce_dtype: torch.dtype | None,
    ) -> Any:
        ctx.constants = (group, ranks, label, reduce_dtype)
        compiling = torch.compiler.is_compiling()
        gather = torch.ops.te_dist.gather_input if compiling else ops.gather_input
        made = gather(x, scale, spec, recipe, flags, group, ranks, label)
        if quantizer is None:
            return (made[0],)
        shape = [x.shape[0] * ranks, *x.shape[1:]]
        matrix = [x.shape[:-1].numel() * ranks, x.shape[-1]]
        if compiling:
            whole = torch.ops.te_dist.dequantize(made[:count], quantizer, matrix, x.dtype).view(shape)
            ctx.mark_non_differentiable(*made)
            return (whole, *made)
        proto = TensorProto(tuple(matrix), x.dtype, quantizer, device=x.device)
        storage = proto.assemble(dict(zip(proto.inner_names(), made[:count], strict=True)))
        seen = made[count:]
        ctx.mark_non_differentiable(*seen)
        return (wrap(storage.view(tuple(shape))), *seen)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *unused: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        scatter = torch.ops.te_dist.scatter_input_gradient if compiling else ops.scatter_input_gradient
        return scatter(dy, *ctx.constants), *(None,) * 10


class SharedGather:
    """The hook on a block, and what it and the layers inside tell each other.

    Attributes:
        layers: which take the block's gathered input.
        whole: that input, in a compiled graph, while the block runs.
        given: its quantized form there.
        amax: of the latest input, under delayed scaling.
    """

    def __init__(self, layers: list[Any], group: str, ranks: int, label: str, reduce_dtype: torch.dtype | None) -> None:
        self.layers, self.group, self.ranks, self.label, self.reduce_dtype = layers, group, ranks, label, reduce_dtype
        self.traced_label = shared_name(label)  # of equal blocks, compiled one by one, one label
        self.whole: Tensor | None = None
        self.given: GivenInput | None = None
        self.amax: Tensor | None = None

    @staticmethod
    def join(layer: Any, mesh: DeviceMesh, options: Any) -> None:
        """Make a column-parallel layer one that takes rows which are gathered already."""
        stages = list(layer.spec.stages)
        if mesh.size() == 1:
            return
        if len(stages) != 1 or stages[0].produce != "identity" or stages[0].groups:
            raise ValueError(
                f'{layer._label()} normalizes its input or has groups, and gathers for itself; a plan\'s "gather" is '
                f"for separate linear layers"
            )
        plain = dataclasses.replace(options, sequence_parallel=False)
        comm: TensorParallel = dataclasses.replace(plain.comm(mesh, None), mode="")
        stage = dataclasses.replace(stages[0], comm=comm)
        # The input is the gathered copy, which is what all of the layers keep.
        layer.spec = dataclasses.replace(layer.spec, stages=(stage,), save_original_input=False)
        layer._reset_caches()
        layer._takes_gathered = True

    @staticmethod
    def attach(block: nn.Module, mesh: DeviceMesh, name: str, reduce_dtype: torch.dtype | None) -> None:
        if mesh.size() == 1:
            return
        label = name or type(block).__name__
        layers: list[Any] = [m for m in block.modules() if getattr(m, "_takes_gathered", False)]
        if not layers:
            raise ValueError(f'parallelize: {label} is to "gather" its input, but no column-parallel layer is inside')
        hook = SharedGather(layers, str(mesh.get_group().group_name), mesh.size(), label, reduce_dtype)
        for layer in layers:
            layer._shared = hook
        block.register_forward_pre_hook(hook, with_kwargs=True)
        block.register_forward_hook(hook.release)

    # ---------------------------------------------------------------------------------------- the block
    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.gather(args[0]), *args[1:]), kwargs
        if not kwargs:
            raise TypeError(f"{self.label} expects an argument to gather but got none")
        first = next(iter(kwargs))
        return args, {**kwargs, first: self.gather(kwargs[first])}

    def release(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The block has run. A graph that left something here would return it, and keep it alive."""
        self.whole = self.given = None
        if torch.compiler.is_compiling():
            self.amax = None

    def gather(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or isinstance(x, QuantizedTensor):
            raise TypeError(f"{self.label} expects its first argument to be a plain tensor but got {type(x).__name__}")
        layer = self.layers[0]
        if x.dim() < 2 or x.shape[-1] != layer.in_features:
            text = (
                f"{self.label} expects the input's last dimension to be {layer.in_features}, and at least two "
                f"dimensions, but got shape {list(x.shape)}"
            )
            layer._announce(False, text)
            raise ValueError(text)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        recipe = layer._recipe_of_call()
        spec = layer._spec_for(recipe)
        label = self.traced_label if torch.compiler.is_compiling() else self.label
        on = torch.is_grad_enabled()
        weight_grad = on and any([_trains_weight(each) for each in self.layers])
        input_grad = on and x.requires_grad
        flags, known, quantizer, count = _gather_constants(spec, recipe, input_grad, weight_grad)
        scale = None
        if quantizer is not None and isinstance(recipe, DelayedScaling):
            trains = layer.training or (on and (input_grad or any([p.requires_grad for p in layer.parameters()])))
            scale = _scale_of(layer, recipe, trains)
        whole, *made = _GatherOnce.apply(
            x, scale, spec, known, flags, quantizer, count, self.group, self.ranks, label, self.reduce_dtype
        )
        self.amax = made[-1] if scale is not None else None
        if torch.compiler.is_compiling() and quantizer is not None:
            self.whole = whole
            self.given = GivenInput(made[:count], spec, recipe, input_grad, weight_grad)
        return whole


def _trains_weight(layer: nn.Module) -> bool:
    return any([param.requires_grad for name, param in layer.named_parameters() if "weight" in name])


def _scale_of(layer: Any, recipe: DelayedScaling, trains: bool) -> Tensor:
    """float32 [1]: the scale that the layer's input has in the call to come, which advances it itself. Whether that
    call says is_first_microbatch=False, and so advances nothing, is not known here: then x is a step ahead."""
    compiling = torch.compiler.is_compiling()
    if compiling:
        layer._ensure_delayed_of_alike(recipe)
    elif not layer._delayed_is_ready(recipe):
        layer._ensure_delayed(recipe)
    scales, history = layer.fp8_scale, layer.fp8_amax_history
    fresh = scope.depth > 0 and layer._workspace_fresh
    if not trains or fresh or (not compiling and in_backward()):
        return scales[:1].clone()
    scales, history = scales.clone(), history.clone()
    if compiling:
        torch.ops.te_dist.advance_scales(history, scales, layer._fp8_largest, recipe.margin, recipe.amax_compute_algo)
    else:
        delayed_scaling.advance(history, scales, layer._fp8_largest, recipe.margin, recipe.amax_compute_algo)
    return scales[:1]


class TakesGathered(QuantizedLayer):
    """What a layer does with an input that its block has gathered; nothing where there is no such block."""

    _shared: SharedGather | None = None

    def _given_input(self, inp: Tensor) -> GivenInput | None:
        shared = self._shared
        return shared.given if shared is not None and inp is shared.whole else None

    def _fill_call(self, call: LayerCall, *args: Any, **kwargs: Any) -> None:
        super()._fill_call(call, *args, **kwargs)
        shared = self._shared
        if shared is None or not call.config.delayed or not isinstance(call.x, QuantizedStorage):
            return
        if shared.amax is not None and call.amaxes is not None:
            kernels.amax(shared.amax.view(1, 1), call.amaxes[:1], accumulate=True)

    def _begin_compiled(
        self, recipe: Recipe | None, params: Any, grads: Any, caching: bool, update: bool, skip: Any,
        device_splits: bool, gathered: Any = None, given: GivenInput | None = None,
    ) -> CompiledCall:  # fmt: skip
        call = super()._begin_compiled(recipe, params, grads, caching, update, skip, device_splits, gathered, given)
        shared = self._shared
        if given is not None and call.records and shared is not None and shared.amax is not None:
            seen = torch.zeros_like(call.scales)  # type: ignore[arg-type]
            seen[:1] = shared.amax
            self._record_compiled(call.histories, seen)
        return call
