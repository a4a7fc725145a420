"""The quantized weights of a layer: made for one call, or kept from one to the next."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from te_dist.modules.state import LayerState
from te_dist.pipeline.args import TensorOrQuantized
from te_dist.pipeline.config import LayerConfig
from te_dist.pipeline.function import LayerCall, flatten_weights, rebuild_weights
from te_dist.pipeline.weights import quantize_weight_part, weight_quantizer
from te_dist.recipe import Recipe
from te_dist.tensors.quantized_tensor import QuantizedTensor
from te_dist.tensors.storage import QuantizedStorage


class WeightWorkspaces(LayerState):
    """The part of a layer that quantizes its weights."""

    def _drop_workspaces(self) -> None:
        self._workspaces: list[Tensor] | None = None  # flat buffers, see flatten_weights
        self._workspace_storages: tuple[list[Tensor], list[list[TensorOrQuantized]]] | None = None
        self._workspace_recipe: Recipe | None = None
        self._workspace_fresh = False

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
