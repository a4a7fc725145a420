"""Delayed scaling in a layer: its scales and histories, ordinary buffers that move on with every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist import delayed_scaling
from te_dist.modules.state import LayerState
from te_dist.pipeline.config import roles
from te_dist.pipeline.function import LayerCall
from te_dist.recipe import DelayedScaling, Recipe
from te_dist.torch_compat import constant_in_graphs, hidden_from_modes, in_backward

# In the state_dict of a layer that uses delayed scaling, never required of one that is loaded.
DELAYED_BUFFERS = ("fp8_scale", "fp8_amax_history")


class Recomputed:
    """What a forward that is computed again during backward must find as it was: the recipe, which may have been
    that of a scope, and delayed scaling's scales, which a later forward may have moved on."""

    def __init__(self, recipe: Recipe | None) -> None:
        self.recipe = recipe
        self.scales: Tensor | None = None


class DelayedState(LayerState):
    """The part of a layer that keeps delayed scaling's buffers."""

    fp8_scale: Tensor | None
    fp8_amax_history: Tensor | None
    _fp8_largest: Tensor | None

    @constant_in_graphs
    def _ensure_delayed(self, recipe: DelayedScaling) -> None:
        """Buffers of delayed scaling for this recipe; existing ones stay, their history is cut or extended."""
        # Where the state is, if there is some: parameters may have been offloaded.
        device = next(self.parameters()).device if self.fp8_scale is None else self.fp8_scale.device
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

    @constant_in_graphs
    def _ensure_delayed_of_alike(self, recipe: DelayedScaling) -> None:
        """While Dynamo traces: also for the layers that may share this one's graph, which guards on the buffers. One
        after the other would be one graph after the other."""
        self._ensure_delayed(recipe)
        device = next(self.parameters()).device
        for layer in self._alike():
            if layer.recipe is self.recipe and next(layer.parameters()).device == device:
                layer._ensure_delayed(recipe)

    def _delayed_is_ready(self, recipe: Any) -> bool:
        history = self.fp8_amax_history
        if history is None or self.fp8_scale is None or self._fp8_largest is None:
            return False
        return history.shape[0] == recipe.amax_history_len

    def _reset_delayed(self) -> None:
        """Part of ``reset_parameters``: delayed scaling starts over."""
        if self._buffers.get("fp8_scale") is not None:
            assert self.fp8_scale is not None and self.fp8_amax_history is not None
            self.fp8_scale.fill_(1.0)
            self.fp8_amax_history.zero_()
            self._fp8_largest = None  # made at the next call

    # ---------------------------------------------------------------------------------------- a call
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

    def _scales_compiled(self, recipe: DelayedScaling, advances: bool) -> tuple[Tensor, list[Tensor]]:
        """Delayed scaling's scales for this call, and the histories that what it sees is recorded in."""
        self._ensure_delayed_of_alike(recipe)
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
