"""What ranks leave in the store for each other, and what is found there."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from te_dist import failures, torch_compat
from te_dist.parallel import RankFailed, RanksDisagree

Pools = Callable[[int], Any]


def two_groups() -> tuple[Any, Any]:
    one, other = (dist.new_group([0, 1]) for _ in range(2))
    return one, other


def passes_on(rank: int, world: int) -> None:
    """A rank that ends for another's sake: who waits for it in another group learns why, and only there."""
    one, other = two_groups()
    error = RankFailed("te_dist: it cannot end", "rank 5 raised KeyError: 'x'", one.group_name)
    if rank == 1:
        for group in (one, other):
            failures.announce(group.group_name, 3, error)
    dist.barrier()
    if rank == 0:
        assert failures.look(one) == "", "its ranks have found that out themselves"
        assert failures.look(other) == "rank 1 gave up: rank 5 raised KeyError: 'x'"
    dist.barrier()
    if rank == 1:
        failures.announce(other.group_name, 4, ValueError("a wrong width"), " in fc1 (forward)")
    dist.barrier()
    if rank == 0:  # a cause counts more than a consequence
        assert failures.look(other) == "rank 1 raised ValueError in fc1 (forward): a wrong width"


def disagrees(rank: int, world: int) -> None:
    """All ranks of its group raise it; those of another group may wait for one of them."""
    one, other = two_groups()
    if rank == 1:
        for group in (one, other):
            failures.announce(group.group_name, 0, RanksDisagree("they differ", one.group_name))
    dist.barrier()
    if rank == 0:
        assert failures.look(one) == ""
        assert failures.look(other) == "rank 1 raised RanksDisagree: they differ"


def fails_alike(rank: int, world: int) -> None:
    """An error that this rank had at the same place, too, does not end what it does next."""
    group, _ = two_groups()
    failures.announce(group.group_name, rank, ValueError(f"of rank {rank}"))
    failures.announce(group.group_name, 1, ValueError("of both"))
    dist.barrier()
    assert failures.look(group) == ""
    dist.barrier()
    if rank == 1:
        failures.announce(group.group_name, 2, ValueError("of rank 1 alone"))
    dist.barrier()
    assert failures.look(group) == ("" if rank else "rank 1 raised ValueError: of rank 1 alone")


def asks(rank: int, world: int) -> None:
    """Who waits anywhere is there, in whichever group; who does not is silent."""
    one, other = two_groups()
    failures.GRACE_SECONDS, before = 1.0, failures.GRACE_SECONDS
    try:
        if rank == 0:
            assert "rank(s) [1] gave no sign of life" in failures.find_cause(one)
            assert failures.find_cause(one, they_look=False) == "", "as with NCCL: the host waits for nothing"
        dist.barrier()
        failures.GRACE_SECONDS = 60.0
        if rank == 0:
            assert failures.find_cause(one) == ""
            torch_compat.default_store().set("test/answered", "1")
        else:
            while not torch_compat.default_store().check(["test/answered"]):
                assert failures.look(other) == ""
        dist.barrier()
    finally:
        failures.GRACE_SECONDS = before


class Gone:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("Broken pipe")


def loses_the_store(rank: int, world: int) -> None:
    real = torch_compat.default_store
    group, _ = two_groups()
    torch_compat.default_store = Gone
    try:
        failures.announce(group.group_name, 0, ValueError("x"))  # it raises nothing of its own
        failures.give_up(group, 0, "x")
        assert failures.look(group) == ""
        cause = failures.find_cause(group)
        assert "the store of the job is out of reach" in cause and "Broken pipe" in cause
        torch_compat.default_store = real
        assert failures.find_cause(dist.ProcessGroup(rank, world)) == "", "a group that torch does not know"
        torch_compat.default_store = lambda: None
        assert failures.look(group) == failures.find_cause(group) == ""
    finally:
        torch_compat.default_store = real


@pytest.mark.parametrize("case", [passes_on, disagrees, fails_alike, asks, loses_the_store])
def test_between_ranks(rank_pools: Pools, case: Callable[[int, int], None]) -> None:
    rank_pools(2).run(case)


def test_errors_travel_between_processes() -> None:
    """As an exception does that a pool of processes hands over."""
    for error in (RankFailed("text", "cause", "group"), RanksDisagree("text", "group")):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == "text" and vars(copy) == vars(error)
    assert RankFailed("text").cause == "text"
