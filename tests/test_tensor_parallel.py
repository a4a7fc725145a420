"""Layers over several ranks against one process: bit-equal where no sum crosses ranks, close where one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel_cases import (
    MODES,
    RECIPES,
    SUMMED,
    compare,
    linear,
    parallel_twin,
    param_dim,
    part,
    sample,
    sizes,
    step,
    tp_mesh,
)

Pools = Callable[[int], Any]


def expected_parts(
    one: dict[str, torch.Tensor], twin: Any, mode: str, sp: bool, rank: int, world: int
) -> dict[str, torch.Tensor]:
    """This rank's part of what one process got."""
    rows = 0 if sp else None
    y_dim, dx_dim = (1, rows) if mode == "column" else (rows, 1)
    made = {"y": part(one["y"], y_dim, rank, world), "dx": part(one["dx"], dx_dim, rank, world)}
    for name in one:
        if name not in made:
            made[name] = part(one[name], param_dim(twin, name), rank, world)
    return made


def linear_matches(rank: int, world: int, device: str, kind: str, names: list[str], options: dict[str, Any]) -> None:
    m, k, n = sizes(world)
    wrong: list[str] = []
    for recipe in names:
        for label, (mode, sp) in MODES.items():
            if kind == "layernorm_linear" and mode == "row":
                continue
            layer = linear(kind, k, n, RECIPES[recipe], device)
            twin = parallel_twin(layer, tp_mesh(world, device), mode, sequence_parallel=sp, **options)
            x, dy = sample(m, k, device, 1), sample(m, n, device, 2)
            x_dim, dy_dim = (0 if sp else None, 1) if mode == "column" else (1, 0 if sp else None)
            exact = {"weight", "bias"} | ({"y"} if mode == "column" else {"dx"})
            if sp and mode == "row":
                exact -= {"bias"}  # summed over the ranks
            if kind == "layernorm_linear" and sp:
                # The norm's own sums over rows are made rank by rank.
                exact -= {"layer_norm_weight", "layer_norm_bias"}
            for _ in range(2 if recipe == "delayed" else 1):  # a second step has scales that were recorded
                one = step(layer, x, dy)
                mine = step(twin, part(x, x_dim, rank, world), part(dy, dy_dim, rank, world))
                expected = expected_parts(one, twin, mode, sp, rank, world)
                wrong += compare(f"{recipe} {label}", mine, expected, exact, SUMMED)
            if recipe == "delayed":
                for buffer in ("fp8_scale", "fp8_amax_history"):
                    if not torch.equal(getattr(layer, buffer), getattr(twin, buffer)):
                        wrong.append(f"{label} {buffer}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear"])
@pytest.mark.parametrize("world", [2, 4])
def test_linear_matches_one_process(rank_pools: Pools, device: str, world: int, kind: str) -> None:
    names = list(RECIPES) if world == 2 else ["current", "mxfp8"]
    rank_pools(world).run(linear_matches, device, kind, names, {}, timeout=200)
