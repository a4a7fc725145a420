"""A rank that fails or dies while products and communication overlap: the others end soon, with the cause."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_cases import RECIPES, linear, own_mesh, parallel_twin, sample
from ranks import say, what_was_said

from te_dist import failures, transport
from te_dist.parallel import set_overlap

Pools = Callable[[int], Any]
TIMEOUT = datetime.timedelta(seconds=240)  # of the groups
SOON = 120  # seconds in which any rank ends once another has failed: it did not wait for the timeout


def layer_of(mode: str) -> tuple[Any, torch.Tensor]:
    mesh = own_mesh("cpu", TIMEOUT)
    layer = parallel_twin(linear("linear", 64, 64, RECIPES["mxfp8"], "cpu"), mesh, mode, sequence_parallel=True)
    x = sample(64, 64 if mode == "column" else 32, "cpu", 1).requires_grad_()
    return set_overlap(layer, "require", {"row_fprop": "ring_exchange"}), x


def stops_sending(action: Callable[[], None]) -> None:
    """From now on this rank agrees to an exchange, and then does something else."""

    def send(self: Any, rank: int, tensor: torch.Tensor) -> None:
        action()

    transport.Messages.send = send  # type: ignore[method-assign]


def comes_late() -> None:
    """From now on this rank begins to receive when another may be gone: then its backend raises at once."""
    receive = transport.Messages.receive

    def late(self: Any, rank: int, tensor: torch.Tensor) -> Any:
        time.sleep(1)
        return receive(self, rank, tensor)

    transport.Messages.receive = late  # type: ignore[method-assign]


def raise_error() -> None:
    raise ArithmeticError("this rank's product went wrong")


def outcome(rank: int, mode: str, action: Callable[[], None], late: bool = False) -> tuple[str, float]:
    layer, x = layer_of(mode)
    layer(x).sum().backward()  # all is well
    if rank == 1:
        stops_sending(action)
    elif rank == 0 and late:
        comes_late()
    start = time.monotonic()
    try:
        layer(x).sum().backward()
        said = "ended"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - start


def raises(rank: int, world: int, mode: str) -> tuple[str, float]:
    before = transport.Messages.send
    try:
        result = outcome(rank, mode, raise_error)
    finally:
        transport.Messages.send = before  # type: ignore[method-assign]
    time.sleep(0.3)
    dist.barrier()  # the ranks themselves are fine
    return result


@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_rank_that_raises_ends_the_others(rank_pools: Pools, mode: str) -> None:
    (said, seconds), (own, _) = rank_pools(2).run(raises, mode)
    assert said.startswith("RankFailed") and "rank 1 raised ArithmeticError" in said and "went wrong" in said, said
    assert seconds < SOON
    assert own.startswith("ArithmeticError")


# ------------------------------------------------------------------------------------------------- processes that end
WORLD = 3


def _serve(rank: int, folder: str, late: bool) -> None:
    torch.set_num_threads(1)
    failures.GRACE_SECONDS = 5  # however busy the machine
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    dist.barrier()  # all are there
    said, seconds = outcome(rank, "column", lambda: os.kill(os.getpid(), signal.SIGKILL), late)
    say(folder, rank, said, seconds, WORLD - 1)


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "late"])
def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path, late: bool) -> None:
    outcomes = what_was_said(_serve, tmp_path, late, world=WORLD)
    assert len(outcomes) == WORLD - 1
    for said, seconds in outcomes:
        assert said.startswith("RankFailed") and "rank(s) [1] gave no sign of life" in said, said
        assert seconds < SOON
