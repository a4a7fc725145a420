"""Operations over two ranks against one process, in eager and compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import FLOORS
from parallel_cases import RECIPES, SUMMED, compare, part, sample, sizes, step, tp_mesh
from torch import nn

from te_dist import ops
from te_dist.parallel import TensorParallel, comm_report, sequence_shards, shard_sizes
from te_dist.recipe import Recipe

Pools = Callable[[int], Any]
CHAINS = ("linear", "collectives")


def chain(kind: str, k: int, n: int, recipe: Recipe | None, device: str, comm: Any, sp: bool) -> ops.Sequential:
    """fc1, an activation and fc2: the weights column- and row-parallel, or the moves as operations of their own."""
    common = {"device": device, "dtype": torch.bfloat16, "recipe": recipe, "bias": False}
    if comm is None:
        return ops.Sequential(ops.Linear(k, n, **common), ops.SReLU(), ops.Linear(n, k, **common))
    if kind == "linear":
        both = {**common, "tensor_parallel_group": comm, "sequence_parallel": sp}
        return ops.Sequential(
            ops.Linear(k, n, tensor_parallel_mode="column", **both),
            ops.SReLU(),
            ops.Linear(n, k, tensor_parallel_mode="row", **both),
        )
    local = n // comm.size
    return ops.Sequential(
        ops.AllGather(comm), ops.Linear(k, local, **common), ops.SReLU(), ops.Linear(local, k, **common),
        ops.ReduceScatter(comm),
    )  # fmt: skip


def weights(module: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if name.endswith("weight")]


def fill(module: nn.Module, whole: nn.Module, rank: int, world: int) -> None:
    with torch.no_grad():
        for mine, theirs, dim in zip(weights(module), weights(whole), (0, 1), strict=True):
            mine.copy_(part(theirs, dim, rank, world))


def chains_match(rank: int, world: int, device: str, kind: str, names: list[str], compiled: bool) -> None:
    m, k, n = sizes(world)
    group = tp_mesh(world, device).get_group()
    wrong: list[str] = []
    for name in names:
        for sp in (True,) if kind == "collectives" else (True, False):
            torch.manual_seed(3)
            one = chain(kind, k, n, RECIPES[name], device, None, sp)
            mine = chain(kind, k, n, RECIPES[name], device, TensorParallel.of(group, None), sp)
            fill(mine, one, rank, world)
            x, dy = sample(m, k, device, 1), sample(m, k, device, 2)
            rows = 0 if sp else None
            shard, dshard = part(x, rows, rank, world), part(dy, rows, rank, world)
            torch._dynamo.reset()
            call = torch.compile(mine, fullgraph=True, backend="aot_eager") if compiled else None
            for _ in range(2):
                expected = list(step(one, x, dy).values())
                made = step(mine, shard, dshard, call=call)
                dims = (rows, rows, 0, 1)  # y, dx and the weights, whatever their names
                cut = {key: part(value, dim, rank, world) for key, value, dim in zip(made, expected, dims, strict=True)}
                # Every result is behind a sum over ranks: y's own, or that of dx.
                wrong += compare(f"{name} {kind} sp={sp}", made, cut, set(), SUMMED if name == "none" else 20.0)
                if compiled:
                    eager = step(mine, shard, dshard)
                    if name != "delayed":
                        wrong += [key for key, value in eager.items() if not torch.equal(made[key], value)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_chains_match_one_process(rank_pools: Pools, device: str, kind: str, compiled: bool) -> None:
    names = list(RECIPES) if not compiled else ["current", "mxfp8"]
    rank_pools(2).run(chains_match, device, kind, names, compiled)


def chains_match_uneven(rank: int, world: int, device: str, tokens: int) -> None:
    """Tokens that the ranks cannot share evenly, or of which the last has none."""
    k, n = 48, 16 * world
    comm, rows = TensorParallel.of(tp_mesh(world, device).get_group(), None), shard_sizes(tokens, world)
    wrong: list[str] = []
    for name, recipe in RECIPES.items():
        torch.manual_seed(3)
        one = chain("linear", k, n, recipe, device, None, True)
        mine = chain("linear", k, n, recipe, device, comm, True)
        fill(mine, one, rank, world)
        x, dy = (sample(2 * tokens, k, device, seed).view(tokens, 2, k) for seed in (1, 2))
        expected = list(step(one, x, dy).values())
        with sequence_shards(rows):
            made = step(mine, part(x, 0, rank, world), part(dy, 0, rank, world))
        pairs = zip(made, expected, (0, 0, 0, 1), strict=True)
        cut = {key: part(value, dim, rank, world) for key, value, dim in pairs}
        # An error of the first product goes through the square of the activation, and is made twice.
        wrong += compare(name, made, cut, set(), SUMMED if name == "none" else FLOORS[name] - 9)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("world", "tokens"), [(2, 9), (4, 5)])
def test_chains_with_uneven_and_empty_shards(rank_pools: Pools, device: str, world: int, tokens: int) -> None:
    rank_pools(world).run(chains_match_uneven, device, tokens)


def quantized_bytes_travel(rank: int, world: int, kind: str) -> None:
    m, k, n = sizes(world)
    comm = TensorParallel.of(tp_mesh(world).get_group(), None)
    mine = chain(kind, k, n, RECIPES["mxfp8"], "cpu", comm, True)
    x = part(sample(m, k, "cpu", 1), 0, rank, world)
    with comm_report() as report:
        y = mine(x)
    assert y.shape == x.shape
    gathers = report.select(kind="all_gather")
    assert gathers and all(entry.dtype == "uint8" for entry in gathers), report


@pytest.mark.parametrize("kind", CHAINS)
def test_quantized_bytes_travel(rank_pools: Pools, kind: str) -> None:
    rank_pools(2).run(quantized_bytes_travel, kind)
