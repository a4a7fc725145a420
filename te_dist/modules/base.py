"""QuantizedLayer: what Linear, LayerNormLinear, LayerNormMLP and GroupedLinear share.

A subclass names its parameters in the order of its LayerSpec's slots; everything else, from the choice of the recipe
to the weight workspaces and delayed scaling's buffers, happens here, once for eager and once for compiled code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist import delayed_scaling, kernels
from te_dist.comm import sequence_shards
from te_dist.dynamo import layer as compiled
from te_dist.formats import INPUT_DTYPES
from te_dist.modules.gathered import (
    check_gathered,
    gathered_slots,
    gathered_weights,
    note_recomputation,
    record_gathered_amaxes,
)
from te_dist.modules.parameters import like_parameter, local_part, spread_state
from te_dist.modules.scopes import layers, scope
from te_dist.pipeline.args import TensorOrQuantized
from te_dist.pipeline.backward import run_delayed
from te_dist.pipeline.config import CallFlags, LayerConfig, LayerSpec, resolve, roles
from te_dist.pipeline.forward import layer_forward
from te_dist.pipeline.function import EagerLayer, LayerCall, draw_seeds, flatten_weights, forward_args, rebuild_weights
from te_dist.pipeline.shards import norm_lead, out_lead, rows_per_entry
from te_dist.pipeline.weights import quantize_weight_part, weight_quantizer
from te_dist.quantizers import NVFP4Quantizer, Quantizer
from te_dist.recipe import DelayedScaling, NoRecipe, Recipe, interned, is_scoped, recipe_in_force
from te_dist.tensors.gathered import GatheredWeight, stand_in
from te_dist.tensors.quantized_tensor import QuantizedTensor
from te_dist.tensors.storage import QuantizedStorage
from te_dist.torch_compat import hidden_from_modes, in_backward, traces_checkpoint

NO_RECIPE = NoRecipe()
# Delayed scaling's buffers: in the state_dict of a layer that uses it, never required of one that is loaded.
DELAYED_BUFFERS = ("fp8_scale", "fp8_amax_history")
# What Transformer Engine writes beside the parameters; we accept and ignore it.
FOREIGN_STATE = "_extra_state"


class Recomputed:
    """What a forward that is computed again during backward must find as it was: the recipe, which may have been
    that of a scope, and delayed scaling's scales, which a later forward may have moved on."""

    def __init__(self, recipe: Recipe | None) -> None:
        self.recipe = recipe
        self.scales: Tensor | None = None


@torch.compiler.assume_constant_result
def _call_constants(
    spec: LayerSpec,
    recipe: Recipe | None,
    keep_planes: bool,
    main_grad_dtype: torch.dtype | None,
    device_splits: bool,
    gathered: bool,
    shards: tuple[Any, ...],
    given_by: LayerSpec | None,
    given_recipe: Recipe | None,
    given_input_grad: bool,
    given_weight_grad: bool,
    *grads: bool,
) -> tuple[Any, ...]:
    """What a compiled call must know before its ops run; executed while tracing, and baked in."""
    given = None
    if given_by is not None:
        given = input_quantizer(given_by, given_recipe, given_input_grad, given_weight_grad)
    flags = CallFlags(grads[0], tuple(grads[1:]), keep_planes, main_grad_dtype, device_splits, gathered, shards, given)
    config = resolve(spec, recipe, flags)
    if given is not None:
        check_given(spec.name or spec.module_type, config, given)
    kept, saves = compiled.shapes_of(config)
    weight_count = sum(
        len(stage.weight._describe_buffers((32, 32))) * stage.spec.weights
        for stage in config.stages
        if stage.weight is not None
    )
    found = gathered_slots(config) if gathered else ((), ())
    return flags, recipe or NO_RECIPE, kept, saves, (weight_count, *found), config.delayed, config.draws_seed


class CompiledCall:
    """One compiled call between its preparation and its forward op."""

    def __init__(
        self,
        flags: CallFlags,
        recipe: Recipe,
        kept: list[int],
        saves: tuple[Any, ...],
        weights: tuple[int, Any, Any],
        delayed: bool,
        draws_seeds: bool,
    ) -> None:
        self.flags, self.recipe, self.kept, self.saves = flags, recipe, kept, saves
        self.weight_count, self.gathered_buffers, self.gathered_amaxes = weights
        self.delayed, self.draws_seeds = delayed, draws_seeds
        self.detached: list[Tensor | None] = []
        self.weights: list[Tensor] = []
        self.scales: Tensor | None = None
        self.histories: list[Tensor] = []
        self.records = False


class GivenInput(NamedTuple):
    """A compiled call's input, quantized before it: as the layer of that spec would quantize its own, under that
    recipe and where these gradients are wanted. Not the quantizer itself: Dynamo cannot pass on a constant that it
    was given while tracing."""

    buffers: list[Tensor]
    spec: LayerSpec
    recipe: Recipe | None
    input_grad: bool
    weight_grad: bool


def input_quantizer(spec: LayerSpec, recipe: Recipe | None, input_grad: bool, weight_grad: bool) -> Quantizer | None:
    """What the layer's first product reads its input by; None where that is not quantized."""
    flags = CallFlags(input_grad, (weight_grad,) + (False,) * (spec.param_count - 1))
    stage = resolve(spec, recipe, flags).stages[0]
    return stage.x if stage.fprop else None


def check_given(label: str, config: LayerConfig, given: Quantizer) -> None:
    """Raise unless the layer's first product reads what an input was quantized by."""
    wanted, both = config.stages[0].x, {"rowwise": True, "columnwise": True}
    layout = None if wanted is None else wanted.with_usage(**both)
    if config.stages[0].spec.produce != "identity" or layout != given.layout_quantizer().with_usage(**both):
        needed = "an unquantized tensor" if layout is None else f"one quantized by {wanted!r}, or an unquantized one"
        raise ValueError(f"{label} got an input quantized by {given!r} but expects {needed}")


def by_host_or_device(splits: list[int] | Tensor | None) -> tuple[list[int] | None, Tensor | None]:
    """The rows of each group, or where each ends on the device."""
    return (None, splits) if isinstance(splits, Tensor) else (splits, None)


@torch.compiler.assume_constant_result
def _trains_with_seeds(spec: LayerSpec, recipe: Recipe | None) -> bool:
    """Whether a training step under this recipe draws seeds. The first forward of reentrant checkpointing, which has
    no gradients, draws them too and drops them: the recomputation gets its random state, and without a draw the
    generator would stand still and every step would round alike."""
    return resolve(spec, recipe, CallFlags(True, (True,) * spec.param_count)).draws_seed


class QuantizedLayer(torch.nn.Module):
    """Base of the layers.

    Attributes:
        recipe: the layer's own recipe; None takes that of the surrounding ``te_dist.autocast``.
        spec: the layer's fixed description.
    """

    spec: LayerSpec
    recipe: Recipe | None
    fp8_scale: Tensor | None
    fp8_amax_history: Tensor | None
    _fp8_largest: Tensor | None
    recomputed_in_graph = False  # some compiled graph computes this layer's forward again in backward
    # te_dist.parallel has given this layer's stages a Comm and its parameters a place on a mesh.
    _is_parallel = False

    def _init_layer(self, spec: LayerSpec, recipe: Recipe | None, *, fuse_wgrad_accumulation: bool = False,
                    delay_wgrad_compute: bool = False) -> None:  # fmt: skip
        """Called by subclasses at the end of ``__init__``, when the parameters are there."""
        self.spec = spec
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"{self._label()} expects recipe to be a te_dist recipe or None but got {recipe!r}")
        self.recipe = interned(recipe)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.wgrad_store: list[object] | None = [] if delay_wgrad_compute else None
        self._reset_caches()
        for name in (*DELAYED_BUFFERS, "_fp8_largest"):
            self.register_buffer(name, None, persistent=name in DELAYED_BUFFERS)
        if isinstance(recipe, DelayedScaling):
            self._ensure_delayed(recipe)
        layers.add(self)

    def _reset_caches(self) -> None:
        self._workspaces: list[Tensor] | None = None  # flat buffers, see flatten_weights
        self._workspace_storages: tuple[list[Tensor], list[list[TensorOrQuantized]]] | None = None
        self._workspace_recipe: Recipe | None = None
        self._workspace_fresh = False
        self._configs: dict[Any, LayerConfig] = {}
        self._configs_recipe: Recipe | None = None
        self._forward_recipe: Recipe | None = None

    def _label(self) -> str:
        name = getattr(self, "spec", None) and self.spec.name
        return f"{type(self).__name__} {name!r}" if name else type(self).__name__

    def _slots(self) -> list[Tensor | None]:
        """The parameters in the order of the spec's slots."""
        raise NotImplementedError(f"{type(self).__name__} must define _slots")

    # ---------------------------------------------------------------------------------------- entry
    def _run(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        skip_weight_update: Tensor | None = None,
        splits: list[int] | Tensor | None = None,
        recomputed: Recomputed | None = None,
    ) -> Any:
        recipe = self._recipe_of_call() if recomputed is None else recomputed.recipe
        params = self._slots()
        gathered = gathered_weights(params)
        if self._is_parallel:
            params = [local_part(param) for param in params]
        weight = params[2 if self.spec.stages[0].produce == "norm" else 0]
        assert weight is not None
        self._check_input(inp, weight)
        device_type = inp.device.type
        if torch.is_autocast_enabled(device_type):
            out_dtype = torch.get_autocast_dtype(device_type)
            if inp.dtype != out_dtype and not isinstance(inp, QuantizedTensor):
                inp = inp.to(out_dtype)
            with torch.autocast(device_type, enabled=False):
                return self._run_in(
                    recipe, inp, params, is_first_microbatch, skip_weight_update, splits, recomputed, gathered
                )
        return self._run_in(recipe, inp, params, is_first_microbatch, skip_weight_update, splits, recomputed, gathered)

    def _recipe_of_call(self) -> Recipe | None:
        """The recipe in force. Activation checkpointing computes forward again inside backward, where the scope of the
        first one is gone: without any scope there, that one's recipe counts again."""
        recipe = recipe_in_force(self.recipe)
        if torch.compiler.is_compiling():
            return recipe
        if in_backward() and not is_scoped():
            return self._forward_recipe if self.recipe is None else recipe
        self._forward_recipe = recipe
        return recipe

    def _run_in(
        self,
        recipe: Recipe | None,
        inp: Tensor,
        params: list[Tensor | None],
        is_first_microbatch: bool | None,
        skip_weight_update: Tensor | None,
        splits: list[int] | Tensor | None,
        recomputed: Recomputed | None,
        gathered: list[GatheredWeight | None] | None,
    ) -> Any:
        frozen = scope.depth > 0
        # A gathered weight is its own workspace.
        caching = gathered is None and (frozen or is_first_microbatch is not None or skip_weight_update is not None)
        update = not self._workspace_fresh if frozen else is_first_microbatch is not False
        if torch.compiler.is_compiling():
            result = self._run_compiled(recipe, inp, params, caching, update, skip_weight_update, splits, gathered)
        else:
            # Activation checkpointing runs forward again inside backward: on the workspace that it had made.
            update = update and not (caching and in_backward())
            first = is_first_microbatch is True
            result = self._run_eager(
                recipe, inp, params, caching, update, first, skip_weight_update, splits, recomputed, gathered
            )
        if frozen:
            self._workspace_fresh = True
        return result

    def _check_input(self, inp: Tensor, weight: Tensor) -> None:
        depth = weight.shape[-1]
        if not isinstance(inp, Tensor):
            raise TypeError(f"{self._label()} expects a tensor but got {type(inp).__name__}")
        if inp.dtype not in INPUT_DTYPES:
            raise TypeError(
                f"{self._label()} expects an input of float32, float16 or bfloat16 but got "
                f"{str(inp.dtype).removeprefix('torch.')}"
            )
        if self._is_parallel and inp.dim() < 2 and self.spec.shards_rows:
            raise ValueError(
                f"{self._label()} expects an input of at least two dimensions under sequence parallelism but got "
                f"shape {list(inp.shape)}"
            )
        if inp.dim() == 0 or inp.shape[-1] != depth:
            raise ValueError(
                f"{self._label()} expects the input's last dimension to be {depth} but got shape {list(inp.shape)}"
            )
        if inp.device != weight.device:
            raise ValueError(
                f"{self._label()} expects the input on {weight.device}, where its weight is, but got it on {inp.device}"
            )

    # ---------------------------------------------------------------------------------------- eager
    def _run_eager(
        self,
        recipe: Recipe | None,
        inp: Tensor,
        params: list[Tensor | None],
        caching: bool,
        update: bool,
        first: bool,
        skip: Tensor | None,
        splits: list[int] | Tensor | None,
        recomputed: Recomputed | None,
        gathered: list[GatheredWeight | None] | None,
    ) -> Any:
        if gathered is not None:
            check_gathered(self._label(), recipe, gathered)
        config = self._config(recipe, inp, params, caching, isinstance(splits, Tensor), gathered is not None)
        flags = config.flags
        if gathered is not None:
            note_recomputation(config, gathered)
        call = LayerCall(config, [], inp.dtype, inp, inp.shape[:-1])
        call.splits, call.offsets = by_host_or_device(splits)
        if self._is_parallel:
            call.unit = rows_per_entry(inp.shape)
        if isinstance(inp, QuantizedTensor):
            call.x = self._quantized_input(config, inp.quantized_storage)
        else:
            call.x = kernels.as_rows(inp.detach())
        self._fill_call(call, recipe, params, caching, update, skip, recomputed, gathered)
        if not flags.any_grad:
            result = layer_forward(forward_args(call, params))
            if self.training and _trains_with_seeds(self.spec, recipe):
                draw_seeds(self.spec, inp)
            lead = out_lead(config, call.lead, result.out.shape[0]) if self._is_parallel else call.lead
            out = result.out.view(*lead, result.out.shape[-1])
            normed = result.norm_output
            if normed is None:
                return out
            return out, normed.view(*norm_lead(config, call.lead, normed.shape[0]), normed.shape[-1])
        if config.draws_seed:
            call.seeds = draw_seeds(self.spec, inp)
        if self.fuse_wgrad_accumulation:
            # The attributes are on the parameters themselves, not on what a rank has of them.
            self._main_grads(call, self._slots() if self._is_parallel else params, first)
        call.wgrad_store = self.wgrad_store
        return EagerLayer.apply(call, inp, *params)

    def _fill_call(
        self,
        call: LayerCall,
        recipe: Recipe | None,
        params: Sequence[Tensor | None],
        caching: bool,
        update: bool,
        skip: Tensor | None = None,
        recomputed: Recomputed | None = None,
        gathered: list[GatheredWeight | None] | None = None,
    ) -> None:
        """Delayed scaling's scales and the weights as the products read them."""
        # What inference mode makes, training could not use later.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
            if call.config.delayed:
                self._delayed_call(call, recipe, update, recomputed)
                if gathered is not None:
                    record_gathered_amaxes(call.config, gathered, call.amaxes)
            call.weights = self._eager_weights(call, params, caching, update, skip, recipe)

    def _config(
        self,
        recipe: Recipe | None,
        inp: Tensor,
        params: Sequence[Tensor | None],
        caching: bool,
        device_splits: bool = False,
        gathered: bool = False,
    ) -> LayerConfig:
        on = torch.is_grad_enabled()
        grads = (on and inp.requires_grad, *[on and p is not None and p.requires_grad for p in params])
        return self._config_of(recipe, params, grads, caching, device_splits, inp, gathered)

    def _config_of(
        self,
        recipe: Recipe | None,
        params: Sequence[Tensor | None],
        grads: tuple[bool, ...],
        caching: bool,
        device_splits: bool = False,
        inp: Tensor | None = None,
        gathered: bool = False,
    ) -> LayerConfig:
        """The configuration of a call; `grads`: of the input, then of every slot."""
        if recipe is not self._configs_recipe:
            self._check_recipe(recipe, params)
            self._configs, self._configs_recipe = {}, recipe
        key: Any = (grads, caching, device_splits, gathered)
        shards = sequence_shards.rows if self._is_parallel else ()
        if shards:
            key = (*key, shards)
        config = self._configs.get(key)
        if config is None:
            flags = CallFlags(
                grads[0], grads[1:], caching, device_splits=device_splits, gathered=gathered, shards=shards
            )
            config = resolve(self.spec, recipe, flags)
            self._configs[key] = config
            if inp is not None:
                self._config_made(config, inp)
        return config

    def _config_made(self, config: LayerConfig, inp: Tensor) -> None:
        """Hook: the layer has met a new combination of recipe and flags."""

    def _check_recipe(self, recipe: Recipe | None, params: Sequence[Tensor | None]) -> None:
        """Shapes that a format cannot hold, said with the layer's name."""
        if recipe is None or isinstance(recipe, DelayedScaling):
            return
        config = resolve(self.spec, recipe, CallFlags(True, (True,) * self.spec.param_count))
        for stage in config.stages:
            weight = params[stage.weight_slot]
            if weight is not None and any(isinstance(q, NVFP4Quantizer) for q in (stage.x, stage.weight, stage.dy)):
                for what, size in (("out_features", weight.shape[0]), ("in_features", weight.shape[1])):
                    if size % 2:
                        raise ValueError(
                            f"{self._label()}: NVFP4 packs two values a byte and expects {what} to be even "
                            f"but it is {size}"
                        )

    def _quantized_input(self, config: LayerConfig, storage: QuantizedStorage) -> QuantizedStorage:
        check_given(self._label(), config, storage.quantizer)
        wanted = config.stages[0].x
        assert wanted is not None
        rows, cols = storage.matrix_shape
        storage = storage.view((rows, cols))
        has = (storage.has_rowwise or not wanted.rowwise) and (storage.has_columnwise or not wanted.columnwise)
        try:
            return storage if has else storage.with_usage(rowwise=wanted.rowwise, columnwise=wanted.columnwise)
        except ValueError:
            raise ValueError(
                f"{self._label()} got an input quantized by {storage.quantizer!r} but expects one with "
                f"rowwise={wanted.rowwise} and columnwise={wanted.columnwise}, which this format cannot derive"
            ) from None

    def _eager_weights(
        self,
        call: LayerCall,
        params: Sequence[Tensor | None],
        caching: bool,
        update: bool,
        skip: Tensor | None,
        recipe: Recipe | None,
    ) -> list[list[TensorOrQuantized]]:
        config = call.config
        kept = self._cached_storages(config, params, recipe) if caching else None
        weights: list[list[TensorOrQuantized]] = []
        made = kept is None
        for index, stage in enumerate(config.stages):
            group: list[TensorOrQuantized] = []
            for g in range(stage.spec.weights):
                param = params[stage.weight_slot + g]
                assert param is not None
                if stage.weight is None and not isinstance(param, QuantizedTensor):
                    group.append(param.detach())
                    continue
                quantizer = weight_quantizer(config, stage, call.scales, call.amaxes, g)
                workspace = None if kept is None else kept[index][g]
                used, new = quantize_weight_part(
                    param,
                    quantizer,
                    workspace if isinstance(workspace, QuantizedStorage) else None,
                    update,
                    skip,
                    caching,
                    stage.spec.comm.amax_group("weight"),
                )
                group.append(used)
                made = made or new is not None
            weights.append(group)
        if caching and made:
            buffers = flatten_weights(weights)
            self._workspaces, self._workspace_storages = buffers, (buffers, weights)
            self._workspace_recipe = recipe
        return weights

    def _cached_storages(
        self, config: LayerConfig, params: Sequence[Tensor | None], recipe: Recipe | None
    ) -> list[list[TensorOrQuantized]] | None:
        """The workspaces of an earlier call under an equal recipe, which compiled code may have made."""
        buffers = self._workspaces
        if buffers is None or self._workspace_recipe != recipe:
            return None
        if buffers and buffers[0].device != next(p for p in params if p is not None).device:
            return None
        if self._workspace_storages is None or self._workspace_storages[0] is not buffers:
            self._workspace_storages = (buffers, rebuild_weights(config, params, buffers))
        return self._workspace_storages[1]

    # ---------------------------------------------------------------------------------------- wgrad scheduling
    def _main_grads(self, call: LayerCall, params: Sequence[Tensor | None], first: bool) -> None:
        """Where the weights' gradients accumulate; see ``fuse_wgrad_accumulation``. The first microbatch overwrites."""
        targets: list[Tensor | None] = [None] * len(params)
        for stage in call.config.stages:
            for slot in range(stage.weight_slot, stage.bias_slot):
                param = params[slot]
                if param is None or not param.requires_grad:
                    continue
                getter = getattr(param, "get_main_grad", None)
                main_grad = getter() if getter is not None else getattr(param, "main_grad", None)
                if self._is_parallel:
                    main_grad = local_part(main_grad)
                if main_grad is None:
                    raise ValueError(
                        f"{self._label()}: fuse_wgrad_accumulation expects main_grad on each weight; set "
                        f"weight.main_grad = torch.zeros_like(weight, dtype=torch.float32) first"
                    )
                targets[slot] = main_grad
                if first or getattr(param, "overwrite_main_grad", False):
                    call.overwrite_main_grads |= {slot}
                if hasattr(param, "grad_added_to_main_grad"):
                    param.grad_added_to_main_grad = True
                    # Megatron's hooks on the parameter run only if autograd has a gradient for it. Not before
                    # backward_dw() though, where main_grad is made there.
                    if self.wgrad_store is None:
                        call.placeholder_grads |= {slot}
        call.main_grads = targets

    def need_backward_dw(self) -> bool:
        """Whether weight gradients are waiting for ``backward_dw``."""
        return bool(self.wgrad_store)

    def backward_dw(self) -> None:
        """Compute the weight gradients that ``delay_wgrad_compute`` has put off, into ``.grad`` or ``main_grad``."""
        if self.wgrad_store is None:
            return
        products, self.wgrad_store[:] = list(self.wgrad_store), []
        params = self._slots()
        with torch.no_grad():
            for slot, gradient in run_delayed(products).items():
                param = params[slot]
                assert param is not None
                self._add_gradient(param, slot, gradient)

    def _add_gradient(self, param: Tensor, slot: int, gradient: Tensor) -> None:
        """Where a delayed gradient goes; another place if the slot is only a part of a parameter."""
        if self._is_parallel:
            gradient = like_parameter(gradient, param)
        param.grad = gradient if param.grad is None else param.grad + gradient

    # ---------------------------------------------------------------------------------------- compiled
    def _run_compiled(
        self,
        recipe: Recipe | None,
        inp: Tensor,
        params: list[Tensor | None],
        caching: bool,
        update: bool,
        skip: Tensor | None,
        splits: list[int] | Tensor | None,
        gathered: list[GatheredWeight | None] | None = None,
    ) -> Any:
        on = torch.is_grad_enabled()
        grads = [on and inp.requires_grad] + [on and p is not None and p.requires_grad for p in params]
        sizes, offsets = by_host_or_device(splits)
        on_device = isinstance(splits, Tensor)
        given = self._given_input(inp)
        call = self._begin_compiled(recipe, params, grads, caching, update, skip, on_device, gathered, given)
        weights = call.weights if given is None else [*given.buffers, *call.weights]
        spec = self.spec
        if not any(grads):
            seeded = self.training and _trains_with_seeds(spec, recipe)
            op = compiled.forward_op(self._is_parallel, seeded)
            made = op(
                inp if given is None else compiled.shape_alone(inp),
                call.detached,
                weights,
                call.scales,
                sizes or [],
                offsets,
                spec,
                call.recipe,
                call.flags,
                inp.dtype,
            )
            if call.records:
                self._record_compiled(call.histories, made[2 if spec.return_norm_output else 1])
            return (made[0], made[1]) if spec.return_norm_output else made[0]
        return compiled.CompiledLayer.apply(
            inp, spec, call.recipe, call.flags, inp.dtype, sizes or [], len(weights), call.kept, call.saves,
            call.delayed, call.draws_seeds, offsets, call.scales, call.histories[0] if call.delayed else None,
            *weights, *params,
        )  # fmt: skip

    def _given_input(self, inp: Tensor) -> GivenInput | None:
        """The quantized form of a compiled call's input, where somebody has made it; te_dist.parallel does."""
        return None

    def _begin_compiled(
        self,
        recipe: Recipe | None,
        params: list[Tensor | None],
        grads: list[bool],
        caching: bool,
        update: bool,
        skip: Tensor | None,
        device_splits: bool,
        gathered: list[GatheredWeight | None] | None = None,
        given: GivenInput | None = None,
    ) -> CompiledCall:
        """Everything of a compiled call that comes before its forward op: constants, scales, quantized weights."""
        if self.wgrad_store is not None or self.fuse_wgrad_accumulation:
            raise ValueError("delay_wgrad_compute and fuse_wgrad_accumulation are for eager code; turn them off")
        shards = sequence_shards.rows if self._is_parallel else ()
        is_gathered = gathered is not None
        by = (None, None, False, False) if given is None else given[1:]
        call = CompiledCall(
            *_call_constants(self.spec, recipe, caching, None, device_splits, is_gathered, shards, *by, *grads)
        )
        amaxes = None
        if call.delayed and isinstance(recipe, DelayedScaling):
            call.records = any(grads) or self.training
            call.scales, call.histories = self._scales_compiled(recipe, call.records and update)
        detached = [None if p is None else p.detach() if gathered is None else stand_in(p) for p in params]
        call.detached = detached
        scales, weight_count = call.scales, call.weight_count
        if gathered is not None:
            self._note_traced_recomputation()
            call.weights = [getattr(gathered[slot], name) for slot, name in call.gathered_buffers]
            if call.delayed and scales is not None:
                amaxes = torch.zeros_like(scales)
                for slot, index in call.gathered_amaxes:
                    holder = gathered[slot]
                    assert holder is not None
                    amaxes[index : index + 1] = holder.weight_amax
        elif weight_count:
            if caching and self._workspaces is not None and self._workspace_recipe is recipe:
                call.weights = list(self._workspaces)
                if update or skip is not None:
                    like = call.weights[0]
                    amaxes = torch.zeros_like(scales) if scales is not None else like.new_zeros(1, dtype=torch.float32)
                    torch.ops.te_dist.update_weights(
                        detached, call.weights, amaxes, scales, skip, self.spec, call.recipe, call.flags
                    )
            else:
                quantize = (
                    torch.ops.te_dist.quantize_weights_exchanged
                    if self._is_parallel
                    else torch.ops.te_dist.quantize_weights
                )
                made = quantize(detached, scales, self.spec, call.recipe, call.flags)
                call.weights = list(made[:weight_count])
                amaxes = made[weight_count] if call.delayed else None
                if caching:
                    self._workspaces = call.weights
                    self._workspace_recipe = recipe
        if call.records and amaxes is not None:
            self._record_compiled(call.histories, amaxes)
        return call

    def _scales_compiled(self, recipe: DelayedScaling, advances: bool) -> tuple[Tensor, list[Tensor]]:
        """Delayed scaling's scales for this call, and the histories that what it sees is recorded in."""
        self._ensure_delayed(recipe)
        scales, history = self.fp8_scale, self.fp8_amax_history
        assert scales is not None and history is not None
        if advances:
            torch.ops.te_dist.advance_scales(
                history, scales, self._fp8_largest, recipe.margin, recipe.amax_compute_algo
            )
        return scales, [history]

    def _record_compiled(self, histories: list[Tensor], amaxes: Tensor, of_forward: bool = True) -> None:
        at = 0
        for history in histories:
            torch.ops.te_dist.record_amaxes(history, amaxes[at : at + history.shape[1]], of_forward)
            at += history.shape[1]

    @torch.compiler.assume_constant_result
    def _note_traced_recomputation(self) -> None:
        """As note_recomputation in eager code; a graph says it once, while it is traced."""
        if traces_checkpoint():
            self.recomputed_in_graph = True

    # ---------------------------------------------------------------------------------------- delayed scaling
    @torch.compiler.assume_constant_result
    def _ensure_delayed(self, recipe: DelayedScaling) -> None:
        """Buffers of delayed scaling for this recipe; existing ones stay, their history is cut or extended."""
        device = next(p for p in self._slots() if p is not None).device
        count, length = self.spec.scale_count, recipe.amax_history_len
        dtypes = [recipe.fp8_format.dtype(role.is_gradient) for role in roles(self.spec)]
        if self.fp8_scale is None:
            self.fp8_scale = torch.ones(count, dtype=torch.float32, device=device)
            self.fp8_amax_history = torch.zeros(length, count, dtype=torch.float32, device=device)
        if self._fp8_largest is None or self._fp8_largest.device != device:
            self._fp8_largest = delayed_scaling.largest_of(dtypes, device)
        history = self.fp8_amax_history
        assert history is not None
        if history.shape[0] != length:
            resized = history.new_zeros(length, count)
            shared = min(length, history.shape[0])
            resized[:shared] = history[:shared]
            self.fp8_amax_history = resized

    def _delayed_is_ready(self, recipe: Any) -> bool:
        history = self.fp8_amax_history
        if history is None or self.fp8_scale is None or self._fp8_largest is None:
            return False
        return history.shape[0] == recipe.amax_history_len

    def _delayed_call(
        self, call: LayerCall, recipe: Recipe | None, update: bool, recomputed: Recomputed | None
    ) -> None:
        assert isinstance(recipe, DelayedScaling)
        if not self._delayed_is_ready(recipe):
            self._ensure_delayed(recipe)
        scales, history = self.fp8_scale, self.fp8_amax_history
        assert scales is not None and history is not None and self._fp8_largest is not None
        # Activation checkpointing runs forward again inside backward: same scales, and what it sees was recorded. The
        # first forward of its reentrant kind has no gradients, and is told from evaluation by the module's mode.
        records = (call.config.flags.any_grad or self.training) and not in_backward()
        if records and update:
            with hidden_from_modes():
                delayed_scaling.advance(history, scales, self._fp8_largest, recipe.margin, recipe.amax_compute_algo)
        # Saved for backward by value: the next microbatch may advance them before this one's backward runs.
        call.scales = scales.clone() if call.config.flags.any_grad else scales
        if recomputed is not None:
            recomputed.scales = call.scales = call.scales if recomputed.scales is None else recomputed.scales
        scratch, newest = torch.zeros_like(scales), history[0]
        call.amaxes = newest if records else scratch
        call.grad_amaxes = newest

    def _reset_delayed(self) -> None:
        """Part of ``reset_parameters``: delayed scaling starts over."""
        if self._buffers.get("fp8_scale") is not None:
            assert self.fp8_scale is not None and self.fp8_amax_history is not None
            self.fp8_scale.fill_(1.0)
            self.fp8_amax_history.zero_()
            self._fp8_largest = None  # made at the next call

    # ---------------------------------------------------------------------------------------- state
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """A checkpoint of nn.Linear, of another recipe, or of Transformer Engine loads in strict mode too."""
        state_dict.pop(prefix + FOREIGN_STATE, None)
        for name in DELAYED_BUFFERS:
            given = state_dict.get(prefix + name)
            current = getattr(self, name)
            if given is not None and (current is None or current.shape != given.shape):
                device = next(p for p in self._slots() if p is not None).device
                setattr(self, name, torch.empty_like(given, device=device))
            elif given is None and current is not None:
                state_dict[prefix + name] = current  # nothing to load: stays
        if self._is_parallel:
            spread_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is cheap to make again: a copied module starts with empty caches."""
        state = dict(self.__dict__)
        for name in ("_workspaces", "_workspace_storages", "_workspace_recipe", "_configs_recipe"):
            state[name] = None
        state["_workspace_fresh"], state["_configs"] = False, {}
        state.pop("_lean", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.recipe = interned(self.recipe)
        layers.add(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with contextlib.suppress(AttributeError):
            self._workspaces = self._workspace_storages = self._workspace_recipe = None
            self._workspace_fresh = False
        before = {name: self._buffers.get(name) for name in (*DELAYED_BUFFERS, "_fp8_largest")}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers.get(name)
            if old is None or new is None:
                continue
            if old.is_meta and not new.is_meta:  # to_empty: memory that nobody has filled
                self._reset_delayed()
                break
            if new.dtype != old.dtype:  # .half() and the like are about parameters
                self._buffers[name] = old.to(device=new.device)
        return self
