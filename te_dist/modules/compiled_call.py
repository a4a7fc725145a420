"""A layer's call while Dynamo traces it: constants that are baked in, and the ops of te_dist/dynamo/layer.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist.comm import sequence_shards
from te_dist.dynamo import layer as compiled
from te_dist.modules.delayed import DelayedState
from te_dist.modules.gathered import gathered_slots
from te_dist.modules.given import GivenInput, check_given, input_quantizer
from te_dist.modules.weight_gradients import WeightGradients
from te_dist.modules.workspaces import WeightWorkspaces
from te_dist.pipeline.config import CallFlags, LayerSpec, resolve
from te_dist.recipe import DelayedScaling, NoRecipe, Recipe
from te_dist.tensors.gathered import GatheredWeight, stand_in
from te_dist.torch_compat import constant_in_graphs, traces_checkpoint

NO_RECIPE = NoRecipe()


@constant_in_graphs
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


@constant_in_graphs
def is_checkpointed() -> bool:
    """Whether Dynamo traces the inside of activation checkpointing, where a graph may change no attribute: weights are
    quantized with every call there, and kept by none."""
    return traces_checkpoint()


class CompiledCall:
    """One compiled call between its preparation and its forward op."""

    def __init__(
        self,
        spec: LayerSpec,
        flags: CallFlags,
        recipe: Recipe,
        kept: list[int],
        saves: tuple[bool, bool, str, tuple[int, ...]],
        weights: tuple[int, Any, Any],
        delayed: bool,
        draws_seeds: bool,
    ) -> None:
        self.spec, self.flags, self.recipe, self.kept, self.saves = spec, flags, recipe, kept, saves
        self.weight_count, self.gathered_buffers, self.gathered_amaxes = weights
        self.delayed, self.draws_seeds = delayed, draws_seeds
        self.detached: list[Tensor | None] = []
        self.weights: list[Tensor] = []
        self.scales: Tensor | None = None
        self.histories: list[Tensor] = []
        self.records = False


def by_host_or_device(splits: list[int] | Tensor | None) -> tuple[list[int] | None, Tensor | None]:
    """The rows of each group, or where each ends on the device."""
    return (None, splits) if isinstance(splits, Tensor) else (splits, None)


@constant_in_graphs
def trains_with_seeds(spec: LayerSpec, recipe: Recipe | None) -> bool:
    """Whether a training step under this recipe draws seeds. The first forward of reentrant checkpointing, which has
    no gradients, draws them too and drops them: the recomputation gets its random state, and without a draw the
    generator would stand still and every step would round alike."""
    return resolve(spec, recipe, CallFlags(True, (True,) * spec.param_count)).draws_seed


class CompiledCalls(WeightWorkspaces, DelayedState, WeightGradients):
    """The part of a layer that runs while Dynamo traces."""

    recomputed_in_graph = False  # some compiled graph computes this layer's forward again in backward

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
        spec = call.spec
        if not any(grads):
            seeded = self.training and trains_with_seeds(spec, recipe)
            op = compiled.forward_op(call.saves[2], seeded)
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
        spec = self._spec_for(recipe)
        shards = sequence_shards.rows if self._is_parallel else ()
        is_gathered = gathered is not None
        by = (None, None, False, False) if given is None else given[1:]
        call = CompiledCall(
            spec, *_call_constants(spec, recipe, caching, None, device_splits, is_gathered, shards, *by, *grads)
        )
        amaxes = None
        if call.delayed and isinstance(recipe, DelayedScaling):
            call.records = any(grads) or self.training
            call.scales, call.histories = self._scales_compiled(recipe, call.records and update)
        detached = [None if p is None else p.detach() if gathered is None else stand_in(p) for p in params]
        call.detached = detached
        scales, weight_count = call.scales, call.weight_count
        if gathered is not None:
            if is_checkpointed():
                self._note_traced_recomputation()
            call.weights = [gathered[slot].buffer_of(name, slot) for slot, name in call.gathered_buffers]
            if call.delayed and scales is not None:
                amaxes = torch.zeros_like(scales)
                for slot, index in call.gathered_amaxes:
                    holder = gathered[slot]
                    assert holder is not None
                    at = slot if holder.is_stack else 0
                    amaxes[index : index + 1] = holder.weight_amaxes[at : at + 1]
        elif weight_count:
            if caching and self._workspaces is not None and self._workspace_recipe is recipe:
                call.weights = list(self._workspaces)
                if update or skip is not None:
                    like = call.weights[0]
                    amaxes = torch.zeros_like(scales) if scales is not None else like.new_zeros(1, dtype=torch.float32)
                    torch.ops.te_dist.update_weights(
                        detached, call.weights, amaxes, scales, skip, spec, call.recipe, call.flags
                    )
            else:
                quantize = (
                    torch.ops.te_dist.quantize_weights_exchanged
                    if self._is_parallel
                    else torch.ops.te_dist.quantize_weights
                )
                made = quantize(detached, scales, spec, call.recipe, call.flags)
                call.weights = list(made[:weight_count])
                amaxes = made[weight_count] if call.delayed else None
                if caching:
                    self._workspaces = call.weights
                    self._workspace_recipe = recipe
        if call.records and amaxes is not None:
            self._record_compiled(call.histories, amaxes)
        return call

    @constant_in_graphs
    def _note_traced_recomputation(self) -> None:
        """As note_recomputation in eager code; a graph says it once, while it is traced."""
        for layer in self._alike():
            layer.recomputed_in_graph = True
