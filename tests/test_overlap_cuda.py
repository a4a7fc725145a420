"""Overlap on real symmetric memory, streams and signals. All ranks share one GPU, which
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 permits; tests/test_overlap.py compares every method and format."""

from __future__ import annotations

import datetime
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from overlap_cases import Case
from parallel_cases import RECIPES, SUMMED, compare, linear, own_mesh, parallel_twin, sample, sizes, step, tp_mesh
from ranks import say, what_was_said

from te_dist.parallel import set_overlap
from te_dist.parallel.userbuffers import schedules
from te_dist.parallel.userbuffers.registry import link_for

pytestmark = pytest.mark.cuda
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
Pools = Callable[[int], Any]
ITERATIONS = 500
DEVICE = "cuda:0"


def delay(choice: random.Random) -> None:
    """Up to about a tenth of a millisecond on the current stream."""
    torch.cuda._sleep(choice.randrange(200_000))


def value(rank: int, turn: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1000 * turn + rank))


def races(rank: int, world: int) -> int:
    """Iterations with numbers that are not those of this very iteration, on this rank."""
    torch.cuda.set_device(0)
    link: Any = link_for(tp_mesh(world, "cuda").get_group().group_name, torch.device(DEVICE))
    choice = random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    rows, width = 64, 512
    for turn in range(ITERATIONS):
        part = value(rank, turn, (rows, width))
        places = [torch.full((world, rows, width), float("nan"), device=DEVICE)]
        out = torch.full((world, rows, width), float("nan"), device=DEVICE)
        delay(choice)

        def consume(ranks: list[int], arrived: list[torch.Tensor], out: torch.Tensor = out) -> None:
            delay(choice)
            for index, source in enumerate(ranks):
                out[source].copy_(arrived[0][index] * 2)

        gathering = schedules.gather_and_consume(link, [part], places, consume, payload="race")
        gathering.finish()
        for source in range(world):
            wrong += (out[source] != value(source, turn, (rows, width)) * 2).any()
        # What was read is poisoned where it lay, once the lane's last barrier says that everybody has read it.
        link.lane.run(lambda: link.workspace._memory.fill_(0xFF))

        def produce(target: int, turn: int = turn) -> torch.Tensor:
            delay(choice)
            return value(100 + 10 * rank + target, turn, (rows, width))

        finish = schedules.produce_and_reduce(link, produce, payload="race")
        total = value(100 + rank, turn, (rows, width))
        for source in range(1, world):
            total = total + value(100 + 10 * source + rank, turn, (rows, width))
        wrong += (finish() != total).any()
        link.lane.run(lambda: link.workspace._memory.fill_(0xFF))
    torch.cuda.synchronize()
    return int(wrong)


@pytest.mark.parametrize("world", [2, 4])
def test_no_races_under_delays(rank_pools: Pools, world: int) -> None:
    assert rank_pools(world).run(races) == [0] * world


def leaks(rank: int, world: int) -> tuple[int, int]:
    torch.cuda.set_device(0)
    m, k, n = sizes(world)
    layers = []
    for mode in ("column", "row"):
        case = Case("linear", mode, "block", "ring")
        layers.append((case.layers(k, n, world, "cuda")[1], case.data(m, k, n, rank, world, "cuda")))
    used = []
    for turn in range(200):
        for layer, (x, dy, _) in layers:
            step(layer, x, dy)
        if turn in (20, 199):
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    return used[0], used[1]


def test_no_leak(rank_pools: Pools) -> None:
    for early, late in rank_pools(2).run(leaks):
        assert late <= early


def replays(rank: int, world: int) -> None:
    """Recipes without amaxes: those go over the group's own backend, and gloo's host cannot be captured.

    Outside of graphs, the last rank reads late: a replay must not publish before that."""
    torch.cuda.set_device(0)
    m, k, n = sizes(world)
    link: Any = link_for(tp_mesh(world, "cuda").get_group().group_name, torch.device(DEVICE))
    meet = link.workspace.barrier
    slept = 0

    def meet_and_sleep() -> None:
        nonlocal slept
        slept += 1
        meet()
        torch.cuda._sleep(40_000_000)  # longer than the others need to replay

    wrong: list[str] = []
    for mode in ("column", "row"):
        for recipe in ("none", "block"):
            options = {"sequence_parallel": True}
            module = linear("linear", k, n, RECIPES[recipe], "cuda", bias=False)
            layer = set_overlap(parallel_twin(module, tp_mesh(world, "cuda"), mode, **options), "require")
            case = Case("linear", mode, recipe)
            x, dy, _ = case.data(m, k, n, rank, world, "cuda")
            x.requires_grad_()

            def run(x: torch.Tensor = x, dy: torch.Tensor = dy, layer: Any = layer) -> list[torch.Tensor]:
                y = layer(x)
                return [y, *torch.autograd.grad(y, [x, layer.weight], dy)]

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made = run()
            link.workspace.barrier = meet_and_sleep if rank == world - 1 else meet
            for seed in (5, 6, 7):
                with torch.no_grad():
                    x.copy_(sample(*x.shape, "cuda", 10 * seed + rank))
                    dy.copy_(sample(*dy.shape, "cuda", 100 * seed + rank))
                graph.replay()
                got = [t.to_local() if hasattr(t, "to_local") else t for t in made]
                got = [t.detach().clone() for t in got]
                expected = [t.to_local() if hasattr(t, "to_local") else t for t in run()]
                names = ("y", "dx", "weight")
                wrong += compare(
                    f"{mode} {recipe} {seed}", dict(zip(names, got, strict=True)),
                    {name: t.detach() for name, t in zip(names, expected, strict=True)}, set(names), SUMMED,
                )  # fmt: skip
            link.workspace.barrier = meet
    assert not wrong, "\n".join(wrong)
    assert (slept > 0) == (rank == world - 1)


@pytest.mark.parametrize("world", [2, 4])
def test_a_captured_layer_replays(rank_pools: Pools, world: int) -> None:
    rank_pools(world).run(replays)


# ------------------------------------------------------------------------------------------------- a rank that dies
TIMEOUT = datetime.timedelta(seconds=10)


def _serve(rank: int, folder: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = own_mesh("cuda", TIMEOUT)
    link: Any = link_for(mesh.get_group().group_name, torch.device(DEVICE))
    link.prepare()
    dist.barrier()
    start = time.monotonic()
    if rank == 1:
        os._exit(1)
    try:
        # Past the agreement, as if the other had died within the exchange.
        link.lane.run(link.workspace.barrier)
        torch.cuda.synchronize()
        said = "ended"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    say(folder, rank, said, time.monotonic() - start)


def test_a_barrier_ends_without_a_rank_that_died(tmp_path: Path) -> None:
    ((said, seconds),) = what_was_said(_serve, tmp_path)
    assert "Error" in said and seconds < 3 * TIMEOUT.total_seconds(), (seconds, said)
