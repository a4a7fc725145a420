"""A rank that fails, dies or disagrees: the others end with an error that names the cause, soon, and none hangs."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_cases import RECIPES, linear, own_mesh, parallel_twin, sample
from ranks import say, what_was_said

import te_dist
from te_dist import failures
from te_dist.parallel import parallelize

Pools = Callable[[int], Any]
TIMEOUT = datetime.timedelta(seconds=240)  # of the groups
SOON = 120  # seconds in which any rank ends once another has failed: it did not wait for the timeout
SHORT_TIMEOUT = datetime.timedelta(seconds=8)  # where the timeout is what ends the wait


def layer_of(mesh: Any, device: str, recipe: str = "current") -> Any:
    return parallel_twin(linear("linear", 64, 64, RECIPES[recipe], device), mesh, "column", sequence_parallel=True)


def raises_in_forward(rank: int, mesh: Any, device: str) -> None:
    layer = layer_of(mesh, device)
    x = sample(32, 64, device, 1)
    layer(x)
    layer(x[:, :32] if rank == 1 else x)  # rank 1 brings an input of the wrong width


def raises_in_user_code(rank: int, mesh: Any, device: str) -> None:
    layer = layer_of(mesh, device)
    x = sample(32, 64, device, 1).requires_grad_()
    y = layer(x)
    if rank == 1:
        raise KeyError("the data loader has no more batches")
    y.sum().backward()


def is_killed(rank: int, mesh: Any, device: str) -> None:
    layer = layer_of(mesh, device)
    x = sample(32, 64, device, 1).requires_grad_()
    y = layer(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    y.sum().backward()


def is_killed_compiled(rank: int, mesh: Any, device: str) -> None:
    call = call_of("transformer", mesh, device, "current", True)
    y = call(sample(64, 64, device, 1).view(32, 2, 64).requires_grad_())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    y.sum().backward()


def other_shape(rank: int, mesh: Any, device: str) -> None:
    layer = layer_of(mesh, device)
    layer(sample(32, 64, device, 1))
    layer(sample(32 + 32 * rank, 64, device, 1))


def other_recipe(rank: int, mesh: Any, device: str) -> None:
    layer = layer_of(mesh, device, "mxfp8" if rank == 0 else "block")
    layer(sample(128, 64, device, 1))


def other_layer(rank: int, mesh: Any, device: str) -> None:
    """One rank is a layer ahead: a gather meets a reduction."""
    layer = layer_of(mesh, device, "mxfp8")
    row = parallel_twin(linear("linear", 64, 64, None, device), mesh, "row")
    (layer if rank == 0 else row)(sample(32, 64 if rank == 0 else 32, device, 1))


def sticks(rank: int, mesh: Any, device: str) -> None:
    """A rank that does not come: the group's own timeout ends the wait."""
    layer = layer_of(mesh, device, "mxfp8")
    if rank == 1:
        time.sleep(SHORT_TIMEOUT.total_seconds() + 3)
        return
    layer(sample(32, 64, device, 1))


CASES = {
    "raises": (raises_in_forward, "RankFailed", ("rank 1 raised ValueError", "last dimension to be 64", "[32, 32]")),
    "shape": (other_shape, "RanksDisagree", ("rank 0:", "[32, 64]", "rank 1:", "[64, 64]", "layer")),
    "recipe": (other_recipe, "RanksDisagree", ("MX e4m3 1x32", "e4m3 1x128 blocks")),
    "layer": (other_layer, "RanksDisagree", ("all_gather", "all_reduce")),
    "stuck": (sticks, "RankFailed", ("gave no sign of life", "imed out")),
}
DEATHS = {
    "user code": (raises_in_user_code, "RankFailed", ("rank 1 raised KeyError", "no more batches")),
    "killed": (is_killed, "RankFailed", ("rank(s) [1] gave no sign of life",)),
    "killed, compiled": (is_killed_compiled, "RankFailed", ("rank(s) [1] gave no sign of life",)),
}


class Clock:
    """When what is measured began."""

    start = 0.0


clock = Clock()


def outcome(fn: Any, rank: int, mesh: Any, device: str, *args: Any) -> tuple[str, float]:
    clock.start = time.monotonic()
    try:
        fn(rank, mesh, device, *args)
        said = "ended"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - clock.start


def fails(rank: int, world: int, device: str, name: str) -> tuple[str, float]:
    mesh = own_mesh(device, SHORT_TIMEOUT if name == "stuck" else TIMEOUT)
    result = outcome(CASES[name][0], rank, mesh, device)
    time.sleep(0.5)
    dist.barrier()  # the ranks themselves are fine
    return result


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_fails_ends_the_others(rank_pools: Pools, device: str, name: str) -> None:
    results = rank_pools(2).run(fails, device, name)
    _, kind, words = CASES[name]
    for said, seconds in results if kind == "RanksDisagree" else results[:1]:
        assert said.startswith(kind) and all(word in said for word in words), said
        assert seconds < SOON


# ------------------------------------------------------------------------------------------------- every layer
KINDS = ("linear", "layernorm_linear", "layernorm_mlp", "grouped", "transformer", "shared gather")
COMPILED = ("transformer", "shared gather")


class Projections(torch.nn.Module):
    """Two layers that share the gather of their block."""

    def __init__(self, recipe: str, device: str) -> None:
        super().__init__()
        self.q, self.k = (linear("linear", 64, 64, RECIPES[recipe], device) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) * self.k(x)


def call_of(kind: str, mesh: Any, device: str, recipe: str, compiled: bool) -> Any:
    """A callable of [s, 2, 64] tensors."""
    if kind == "shared gather":
        model = torch.nn.Sequential(Projections(recipe, device))
        layer: Any = parallelize(model, mesh, {"0": "gather", "0.?": "column"}, sequence_parallel=True)
    elif kind == "transformer":
        layer = te_dist.TransformerLayer(
            64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, recipe=RECIPES[recipe],
            device=device, name="layer",
        )  # fmt: skip
        layer = parallel_twin(layer, mesh, "column", sequence_parallel=True)
    else:
        layer = parallel_twin(linear(kind, 64, 64, RECIPES[recipe], device), mesh, "column", sequence_parallel=True)
    if compiled:
        torch._dynamo.reset()
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    if kind == "grouped":
        return lambda x: layer(x, [x.shape[0] * 2, 0, 0])
    return layer


def breaks(rank: int, mesh: Any, device: str, kind: str, fault: str, compiled: bool) -> None:
    """Rank 1 does something else than rank 0, after a step that went well."""
    clock.start = time.monotonic()
    recipe = "block" if fault == "recipe" and rank == 1 else "mxfp8"
    call = call_of(kind, mesh, device, recipe, compiled)
    x = sample(128, 64, device, 1).view(64, 2, 64)
    if fault == "recipe":
        call(x)
        return
    call(x).sum().backward()
    dist.barrier()
    clock.start = time.monotonic()  # what went well does not count
    if fault == "raises":
        call(x[..., :32] if rank == 1 else x)
    elif fault == "shape":
        call(torch.cat([x, x]) if rank == 1 else x)


FAULTS = {
    "raises": ("RankFailed", ("rank 1 raised ValueError", "last dimension to be 64")),
    "shape": ("RanksDisagree", ("rank 0:", "rank 1:", "layer")),
    "recipe": ("RanksDisagree", ("MX e4m3 1x32", "e4m3 1x128 blocks")),
}


def all_faults(rank: int, world: int, device: str, kind: str) -> list[tuple[str, str, float]]:
    results = []
    for compiled in (False, True) if kind in COMPILED else (False,):
        for fault in FAULTS:
            mesh = own_mesh(device, TIMEOUT)
            said, seconds = outcome(breaks, rank, mesh, device, kind, fault, compiled)
            results.append((f"{fault} {'compiled' if compiled else 'eager'}", said, seconds))
            time.sleep(0.5)
            dist.barrier()
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_every_layer(rank_pools: Pools, device: str, kind: str) -> None:
    results = rank_pools(2).run(all_faults, device, kind)
    for rank, outcomes in enumerate(results):
        for what, said, seconds in outcomes:
            error, words = FAULTS[what.split()[0]]
            if rank == 1 and error == "RankFailed":
                assert "last dimension" in said or "32" in said, (what, said)
                continue
            assert error in said and all(word in said for word in words), (kind, what, said)
            assert seconds < SOON, (kind, what, seconds)


def continues(rank: int, world: int, device: str) -> None:
    """An error that all ranks raise alike breaks nothing: none of them takes another's for a failure of its own."""
    mesh = own_mesh(device, TIMEOUT)
    layer = layer_of(mesh, device)
    for _ in range(2):
        with pytest.raises(ValueError, match="last dimension"):
            layer(sample(32, 32, device, 1))
        if rank == 1:
            time.sleep(1)  # rank 0 waits, and looks for notes
        layer(sample(32, 64, device, 1))


def test_an_error_of_all_ranks_breaks_nothing(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(continues, device)


# ------------------------------------------------------------------------------------------------- processes that end
def _serve(rank: int, folder: str, device: str, name: str, world: int) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    failures.GRACE_SECONDS = 5  # however busy the machine
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    dist.barrier()  # all are there, however busy the machine
    mesh = own_mesh(device, TIMEOUT)
    if rank == 1:
        try:
            DEATHS[name][0](rank, mesh, device)
        except KeyError:
            sys.excepthook(*sys.exc_info())  # as the interpreter does where nobody catches it
            os._exit(1)
    said, seconds = outcome(DEATHS[name][0], rank, mesh, device)
    say(folder, rank, said, seconds, world - 1)


# gloo passes what it gathers from rank to rank: of four, the one opposite a rank that is gone has no broken connection.
@pytest.mark.parametrize(("name", "world"), [*((name, 2) for name in DEATHS), ("user code", 4), ("killed", 4)])
def test_a_process_that_ends_ends_the_others(tmp_path: Path, device: str, name: str, world: int) -> None:
    """Although all others stay; and none that is there is said to be gone."""
    outcomes = what_was_said(_serve, tmp_path, device, name, world, world=world)
    assert len(outcomes) == world - 1
    for said, seconds in outcomes:
        assert said.startswith(DEATHS[name][1]) and all(word in said for word in DEATHS[name][2]), said
        assert seconds < SOON
