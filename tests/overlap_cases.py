"""Layers that overlap, and the same layers that do not."""

from __future__ import annotations

import dataclasses
from typing import Any

from parallel_cases import RECIPES, make, parallel_twin, part, sample, tp_mesh
from torch import Tensor, nn

from te_dist.parallel import set_overlap

# Of a column-parallel and of a row-parallel layer: every method of every product is in one of these or more.
COLUMN_CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "ring": {"column_dgrad": "ring_exchange", "fc1_dgrad": "ring_exchange", "qkv_dgrad": "ring_exchange"},
    "pipeline": {"column_fprop": {"aggregate": True}, "column_dgrad": {"method": "pipeline", "num_splits": 3}},
    "only bulk": {"column_fprop": "off"},
}
ROW_CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "ring": {"row_fprop": "ring_exchange", "fc2_fprop": "ring_exchange", "proj_fprop": "ring_exchange"},
    "together": {"row_fprop": {"num_splits": 1}, "row_dgrad": {"aggregate": True}, "row_wgrad": "off"},
}
CONFIGS = {"column": COLUMN_CONFIGS, "row": ROW_CONFIGS}


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, how it is spread, its recipe, and how it overlaps."""

    kind: str = "linear"
    mode: str = "column"
    recipe: str = "none"
    config: str = "default"
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.kind, self.mode, self.recipe, self.config, *(name for name, _ in self.options)])

    @property
    def is_block(self) -> bool:
        return self.kind in ("layernorm_mlp", "transformer")

    def table(self) -> dict[str, Any]:
        if self.is_block:
            return {**COLUMN_CONFIGS[self.config], **ROW_CONFIGS[self.config]}
        return CONFIGS[self.mode][self.config]

    def layers(self, k: int, n: int, world: int, device: str) -> tuple[nn.Module, nn.Module]:
        """One that does not overlap, and one that does."""
        module = make(self.kind, k, n, RECIPES[self.recipe], device)
        mesh = tp_mesh(world, device)
        plain, other = (
            parallel_twin(module, mesh, self.mode, sequence_parallel=True, **dict(self.options)) for _ in range(2)
        )
        return plain, set_overlap(other, "require", self.table())

    def data(
        self, m: int, k: int, n: int, rank: int, world: int, device: str
    ) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        """This rank's x and dy, and the other arguments of a call."""
        x, dy = sample(m, k, device, 1), sample(m, k if self.is_block else n, device, 2)
        x_dim, dy_dim = (0, 0) if self.is_block else ((0, 1) if self.mode == "column" else (1, 0))
        x, dy = part(x, x_dim, rank, world), part(dy, dy_dim, rank, world)
        if self.kind == "transformer":
            x, dy = x.view(x.shape[0] // 2, 2, -1), dy.view(dy.shape[0] // 2, 2, -1)
        splits = [x.shape[0] // 4, 0, 3 * x.shape[0] // 4]
        return x, dy, (splits,) if self.kind == "grouped" else ()

    def summed(self) -> set[str]:
        """Results that are sums over ranks, or are computed from such: equal to those without overlap only where two
        ranks' numbers are added, because the order differs."""
        if self.is_block:
            return {"y", "dx", "everything"}
        return {"dx", "layer_norm_weight", "layer_norm_bias"} if self.mode == "column" else {"y"}
