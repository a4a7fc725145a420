"""ShardedLayer and WholeWeight: what the parameters of one layer have in common while FSDP2 gathers them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_dist import delayed_scaling
from te_dist.modules.base import QuantizedLayer
from te_dist.parallel.fsdp.decision import Decision, decide
from te_dist.parallel.fsdp.torch_fsdp import TrainingState
from te_dist.recipe import DelayedScaling, Recipe, recipe_in_force
from te_dist.tensors.gathered import Gathering
from te_dist.tensors.storage import QuantizedStorage
from te_dist.torch_compat import in_backward

if TYPE_CHECKING:
    from te_dist.parallel.fsdp.weight import ShardedWeight


class WholeWeight:
    """A weight as its layer multiplies it: mostly one parameter, or several that the layer joins (q, k and v; gate and
    up). Its parts are gathered each by itself, into buffers that they share.

    Attributes:
        parts: in the order of their rows, which is that in which FSDP2 gathers them.
        gathering: what the layer is told about it.
    """

    def __init__(self, name: str) -> None:
        self.parts: list[ShardedWeight] = []
        self.gathering = Gathering(name)
        self._storages: dict[Any, QuantizedStorage] = {}

    def storage(self, decision: Decision, dtype: torch.dtype, device: torch.device) -> QuantizedStorage:
        """The storage that the parts fill under this decision; made once."""
        key = decision.key
        if key not in self._storages:
            with torch.inference_mode(False):
                if decision.codec is not None:
                    self._storages[key] = decision.codec.storage(dtype, device)
                else:
                    assert decision.quantizer is not None
                    shape = self.parts[0].shape
                    self._storages[key] = decision.quantizer.make_empty(shape, dtype=dtype, device=device)
        return self._storages[key]


class ShardedLayer:
    """A layer whose weights one FSDP parameter group shards: they are gathered alike."""

    def __init__(self, layer: QuantizedLayer, name: str) -> None:
        self.layer, self.name = layer, name
        self.weights: list[ShardedWeight] = []
        self._decisions: dict[Recipe | None, list[Decision]] = {}
        # Of the last forward: autocast's scope is gone when backward gathers again.
        self.forward_recipe: Recipe | None = None
        self.forward_scales: Tensor | None = None
        self._scales_recipe: Recipe | None = None

    def recipe(self, state: TrainingState) -> Recipe | None:
        """The recipe to gather for."""
        if state == TrainingState.PRE_BACKWARD or in_backward():
            return self.forward_recipe
        recipe = recipe_in_force(self.layer.recipe)
        if state == TrainingState.FORWARD:
            self.forward_recipe = recipe
        return recipe

    def decisions(self, recipe: Recipe | None) -> list[Decision]:
        """For each of ``weights``."""
        found = self._decisions.get(recipe)
        if found is None:
            found = self._decisions[recipe] = decide(self.layer, recipe, [w.portion for w in self.weights])
        return found

    def prepare_scales(self, recipe: DelayedScaling, advances: bool) -> Tensor:
        """Delayed scaling: the scales that the layer's coming forward uses, or that its last one used. They are kept
        for the gathers of this forward and of its backward, which on a GPU run on a stream of their own: it does not
        wait for those who write the layer's buffers."""
        layer = self.layer
        layer._ensure_delayed(recipe)
        self._bring_state_to_device()
        scales, history, largest = layer.fp8_scale, layer.fp8_amax_history, layer._fp8_largest
        assert scales is not None and history is not None and largest is not None
        made = scales.clone()
        if advances:
            delayed_scaling.advance(history.clone(), made, largest, recipe.margin, recipe.amax_compute_algo)
        self.forward_scales, self._scales_recipe = made, recipe
        return made

    def _bring_state_to_device(self) -> None:
        """A layer makes its state where its parameters are: on the host, if that is where FSDP2 keeps the shards."""
        layer, device = self.layer, self.weights[0].param.device
        assert layer.fp8_scale is not None and layer.fp8_amax_history is not None and layer._fp8_largest is not None
        if layer.fp8_scale.device != device:
            layer.fp8_scale = layer.fp8_scale.to(device)
            layer.fp8_amax_history = layer.fp8_amax_history.to(device)
            layer._fp8_largest = layer._fp8_largest.to(device)

    def scales(self, recipe: DelayedScaling, state: TrainingState) -> Tensor:
        """For a gather in this state."""
        kept = self.forward_scales
        if state == TrainingState.IDLE and not in_backward():  # by hand, at any time
            scales = self.prepare_scales(recipe, self.layer.training)
            self.forward_scales = kept
            return scales
        if kept is None or self._scales_recipe != recipe:  # scoped inside of the root's forward
            return self.prepare_scales(recipe, self.layer.training)
        return kept
