"""One gather for several layers: q, k and v, or gate and up, that take the same rows.

te_dist's fused layers (LayerNormLinear with parameters_split, LayerNormMLP, MultiheadAttention) need none of this: they
have one product, hence one gather. For models with separate layers, the block around them gathers its input once:

    x_m -> quantize -> all_gather -> the layers' own products, without communication
    dx_m = reduce_scatter(sum of the layers' dx)                     one collective, where each layer would have one

What the block sees is a QuantizedTensor with the shape of the whole, which te_dist's layers take as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from te_dist import kernels, transport
from te_dist.groups import resolve_group
from te_dist.modules.base import QuantizedLayer
from te_dist.modules.parameters import local_part
from te_dist.parallel import wire
from te_dist.parallel.collectives import _start_whole
from te_dist.parallel.comm import TensorParallel
from te_dist.quantizers import Quantizer
from te_dist.recipe import DelayedScaling
from te_dist.tensors import QuantizedTensor
from te_dist.tensors.quantized_tensor import wrap


class _GatherOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer | None, group: str, label: str) -> Tensor:
        ctx.group, ctx.label = group, label
        process_group = resolve_group(group, "tp_group")
        with transport.layer_scope(label, "forward", group):
            if quantizer is None:
                return _start_whole(x.contiguous(), process_group).wait()
            wire.check_shard(quantizer, x.shape[:-1].numel(), label)
            storage = quantizer.quantize(kernels.as_rows(x).view(x.shape), amax_reduction_group=group)
            return wrap(_start_whole(storage, process_group).wait())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        with transport.layer_scope(ctx.label, "backward", ctx.group):
            made = transport.reduce_scatter(dy.contiguous(), resolve_group(ctx.group, "tp_group")).wait()
        return made, None, None, None


class SharedGather:
    """The hook on a block, and what it knows: the first layer inside that takes the gathered input."""

    def __init__(self, layer: QuantizedLayer, group: str, label: str) -> None:
        self.layer, self.group, self.label = layer, group, label

    @staticmethod
    def join(layer: Any, mesh: DeviceMesh, options: Any) -> None:
        """Make a column-parallel layer one that takes rows which are gathered already."""
        stages = list(layer.spec.stages)
        if mesh.size() == 1:
            return
        if len(stages) != 1 or stages[0].produce != "identity":
            raise ValueError(
                f'{layer._label()} normalizes its input and gathers for itself; a plan\'s "gather" is for separate '
                f"linear layers"
            )
        plain = dataclasses.replace(options, sequence_parallel=False)
        comm: TensorParallel = dataclasses.replace(plain.comm(mesh, None), mode="")
        layer.spec = dataclasses.replace(layer.spec, stages=(dataclasses.replace(stages[0], comm=comm),))
        layer._reset_caches()
        layer._takes_gathered = True

    @staticmethod
    def attach(block: nn.Module, mesh: DeviceMesh, name: str) -> None:
        if mesh.size() == 1:
            return
        label = name or type(block).__name__
        takers: list[Any] = [m for m in block.modules() if getattr(m, "_takes_gathered", False)]
        if not takers:
            raise ValueError(f'parallelize: {label} is to "gather" its input, but no column-parallel layer is inside')
        hook = SharedGather(takers[0], str(mesh.get_group().group_name), label)
        block.register_forward_pre_hook(hook, with_kwargs=True)

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            raise ValueError(
                f"{self.label}: a plan's \"gather\" is for eager code; te_dist's fused layers, which gather once as "
                f"well, compile"
            )
        if args:
            return (self.gather(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: self.gather(kwargs[first])}

    def gather(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or isinstance(x, QuantizedTensor):
            raise TypeError(f"{self.label} expects its first argument to be a plain tensor but got {type(x).__name__}")
        layer = self.layer
        recipe = layer._recipe_of_call()
        if isinstance(recipe, DelayedScaling):
            raise ValueError(
                f'{self.label}: a plan\'s "gather" has one scale for several layers, and DelayedScaling one for each; '
                f"use Float8CurrentScaling"
            )
        params = [local_part(p) for p in layer._slots()]
        quantizer = layer._config(recipe, x, params, False).stages[0].x
        return _GatherOnce.apply(x, quantizer, self.group, self.label)
