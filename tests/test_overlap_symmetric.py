"""The link over symmetric memory, with its ranks as threads, its streams as threads of theirs, and delays everywhere.

This runs the code that GPUs run, without one: memory that others can read is a tensor, a stream is a thread that works
through a queue, and the host goes on meanwhile. A wait that is missing, or a place that is written too early, shows as
wrong numbers, because places are poisoned between exchanges and inputs change each time.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import HUNG
from torch import Tensor

from te_dist import torch_compat, transport
from te_dist.parallel.userbuffers import schedules, symmetric
from te_dist.parallel.userbuffers.symmetric import SymmetricLink

DEVICE = torch.device("cpu")


class ThreadLane:
    """A stream as a thread. Products run in the caller's thread, so they need no following."""

    def __init__(self, seed: int, delay: float) -> None:
        self.work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.random, self.delay, self.errors = random.Random(seed), delay, []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while (work := self.work.get()) is not None:
            if self.delay:
                time.sleep(self.random.random() * self.delay)
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

    def follow(self) -> None:
        pass

    def run(self, work: Callable[[], Any]) -> None:
        self.work.put(work)

    def mark(self) -> threading.Event:
        reached = threading.Event()
        self.work.put(reached.set)
        return reached

    def wait(self, mark: threading.Event) -> None:
        assert mark.wait(20), "a rank did not come"
        assert not self.errors, self.errors

    def finish(self) -> None:
        self.wait(self.mark())

    def is_captured(self) -> bool:
        return False


class GraphLane(ThreadLane):
    """A lane of which a graph can be made, whose replays run where products do, in the caller's thread."""

    def __init__(self, seed: int, delay: float) -> None:
        super().__init__(seed, delay)
        self.graph: list[Callable[[], Any]] | None = None

    def capture(self, begin: Callable[[], Any]) -> Callable[[], None]:
        self.graph = graph = []
        begin()
        self.graph = None

        def replay() -> None:
            for work in graph:
                work()

        return replay

    def run(self, work: Callable[[], Any]) -> None:
        super().run(work) if self.graph is None else self.graph.append(work)

    def mark(self) -> threading.Event:
        return super().mark() if self.graph is None else threading.Event()

    def wait(self, mark: threading.Event) -> None:
        if self.graph is None:
            super().wait(mark)

    def is_captured(self) -> bool:
        return self.graph is not None


class Machine:
    """What torch and the driver do for the ranks of one group."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.meeting = ranks, threading.Barrier(ranks, timeout=HUNG)
        self.allocations = 0
        self.here = threading.local()
        self.offered: list[Any] = [None] * ranks

    def everyone(self, value: Any) -> list[Any]:
        self.offered[self.here.rank] = value
        self.meeting.wait()
        found = list(self.offered)
        self.meeting.wait()
        return found

    def allocate(self, size: int, device: torch.device, group: str) -> tuple[Tensor, Any]:
        rank = self.here.rank
        memory = torch.full((size,), 0xFF, dtype=torch.uint8)
        memories = self.everyone(memory)
        if rank == 0:
            self.allocations += 1
        barrier = threading.Barrier(self.ranks, timeout=HUNG) if rank == 0 else None
        barriers = self.everyone(barrier)

        def get_buffer(owner: int, shape: Any, dtype: torch.dtype, offset: int) -> Tensor:
            start = offset * dtype.itemsize
            count = torch.Size(shape).numel() * dtype.itemsize
            assert start + count <= size, "outside of the workspace"
            return memories[owner][start : start + count].view(dtype).view(shape)

        def wait(channel: int, timeout_ms: int) -> None:
            assert timeout_ms > 0, "a barrier without an end"
            barriers[0].wait()

        return memory, SimpleNamespace(get_buffer=get_buffer, barrier=wait)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Machine]:
    def make(ranks: int) -> Machine:
        made = Machine(ranks)
        group = SimpleNamespace(rank=lambda: made.here.rank, size=lambda: ranks, group_name="threads")

        def gathered(tensors: list[Tensor], group: Any, payload: str) -> Any:
            return transport.Done([torch.cat(made.everyone(tensors[0]))])

        monkeypatch.setattr(symmetric, "resolve_group", lambda *args: group)
        monkeypatch.setattr(symmetric, "begin", lambda *args: None)
        monkeypatch.setattr(symmetric, "begin_reduction", lambda *args: None)
        monkeypatch.setattr(transport, "all_gather", gathered)
        monkeypatch.setattr(torch_compat, "allocate_symmetric", made.allocate)
        monkeypatch.setattr(torch_compat, "group_timeout", lambda *args: 20.0)
        return made

    return make


def run_ranks(
    machine: Machine,
    job: Callable[[SymmetricLink, random.Random], None],
    delay: float,
    first_delay: float | None = None,
    lane_type: type[ThreadLane] = ThreadLane,
) -> None:
    """`delay`: the longest before anything on a lane; `first_delay`: on that of rank 0."""
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        machine.here.rank = rank
        lane = lane_type(rank, delay if rank or first_delay is None else first_delay)
        try:
            job(SymmetricLink("threads", DEVICE, lane), random.Random(100 + rank))
        except BaseException as error:
            failures.append(error)
            machine.meeting.abort()
        lane.work.put(None)

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(machine.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures


def value(rank: int, turn: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * turn + rank)).to(dtype)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("together", [1, 2])
def test_gathers_under_delays(machine: Any, ranks: int, together: int) -> None:
    def job(link: SymmetricLink, random: random.Random) -> None:
        for turn in range(12):
            rows = 3 + turn % 4  # the workspace has no place for the next one's larger parts
            shapes = [(rows, 5), (rows,)]
            parts = [value(link.rank, turn, shape) for shape in shapes]
            places = [torch.full((ranks, *shape), float("nan"), dtype=torch.bfloat16) for shape in shapes]
            seen: dict[int, list[Tensor]] = {}

            def consume(sources: list[int], arrived: list[Tensor], seen: dict[int, list[Tensor]] = seen) -> None:
                for index, source in enumerate(sources):
                    seen[source] = [t[index].clone() for t in arrived]
                time.sleep(random.random() * 0.002)

            gathering = schedules.gather_and_consume(
                link, parts, places, consume, payload="", together=together
            )
            # A second one beside a product, before the first has ended.
            extra = value(link.rank, turn + 500, (7,))
            beside = torch.full((ranks, 7), float("nan"), dtype=torch.bfloat16)
            other = link.gather([extra], [beside], "")
            gathering.finish()
            other.finish()
            for rank in range(ranks):
                wanted = [value(rank, turn, shape) for shape in shapes]
                assert all(torch.equal(a, b) for a, b in zip(seen[rank], wanted, strict=True)), (link.rank, turn)
                if rank != link.rank:
                    assert torch.equal(beside[rank], value(rank, turn + 500, (7,))), (link.rank, turn)
            link.lane.finish()
            machine_poison(link)

    run_ranks(machine(ranks), job, 0.002)


def machine_poison(link: SymmetricLink) -> None:
    assert link.workspace._memory is not None
    link.workspace._memory.fill_(0xFF)  # bf16's NaN


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_reductions_under_delays(machine: Any, ranks: int) -> None:
    def job(link: SymmetricLink, random: random.Random) -> None:
        for turn in range(10):
            rows, width = 2 + turn % 3, 300
            # In float32 the order of a sum shows.
            mine = [value(link.rank * 10 + target, turn, (rows, width), torch.float32) for target in range(ranks)]

            def rows_of(target: int, mine: list[Tensor] = mine) -> Tensor:
                time.sleep(random.random() * 0.002)
                return mine[target].clone()

            def features(first: int, last: int, mine: list[Tensor] = mine) -> Tensor:
                time.sleep(random.random() * 0.002)
                return torch.cat(mine)[:, first:last].contiguous()

            # Two reductions under way at once, and a third that follows before the second was waited for.
            one = schedules.produce_and_reduce(link, rows_of, payload="")
            two = schedules.produce_features_and_reduce(
                link, features, schedules.feature_bounds(width, 3), payload=""
            )
            bulk = schedules.produce_features_and_reduce(link, features, [(0, width)], payload="")
            total = torch.zeros(rows, width)
            for rank in range(ranks):
                total += value(rank * 10 + link.rank, turn, (rows, width), torch.float32)
            for finish in (one, bulk, two):
                assert torch.equal(finish(), total), (link.rank, turn)

    run_ranks(machine(ranks), job, 0.002)


def test_a_workspace_grows_for_all_ranks_alike(machine: Any) -> None:
    made = machine(2)

    def job(link: SymmetricLink, random: random.Random) -> None:
        link.prepare()
        link.reserve(1 << 20)  # is there
        assert link.workspace.size == 2 << 20
        link.reserve(5 << 20)
        assert link.workspace.size == 6 << 20
        link.reserve(7 << 20)
        assert link.workspace.size == 10 << 20  # half as much again, in whole granules
        with pytest.raises(transport.RanksDisagree, match=r"\[20971520, 31457280\] bytes"):
            link.reserve((20 + 10 * link.rank) << 20)

    run_ranks(made, job, 0)
    assert made.allocations == 3


def test_a_capture_cannot_grow_it(machine: Any) -> None:
    def job(link: SymmetricLink, random: random.Random) -> None:
        link.lane.is_captured = lambda: True  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=r"run the layer once before the capture"):
            link.gather([torch.ones(4)], [torch.ones(2, 4)], "")

    run_ranks(machine(2), job, 0)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("reduction", [False, True])
def test_replays_between_other_exchanges(machine: Any, reduction: bool, finished: bool) -> None:
    """A replay is not on the lane, and must not publish where others still read what came before it, be it finished or
    dropped, as where an error comes in between."""

    def job(link: SymmetricLink, random: random.Random) -> None:
        lane: Any = link.lane
        part, places = torch.empty(4), [torch.empty(2, 4)]
        link.prepare()
        replay = lane.capture(lambda: link.gather([part], places, "").finish())
        other = 1 - link.rank
        for turn in range(20):
            received = torch.full((2, 4), float("nan"))
            mine = value(link.rank, turn, (4,), torch.float32)
            exchange: Any
            if reduction:
                exchange = link.rounds(mine, 1, "")
                exchange.start({1: mine}, {1: received[other]})
            else:
                exchange = link.gather([mine], [received], "")
            if finished:
                exchange.finish()
            del exchange
            part.copy_(value(link.rank, turn + 100, (4,), torch.float32))
            replay()
            assert torch.equal(received[other], value(other, turn, (4,), torch.float32)), turn
            assert torch.equal(places[0][other], value(other, turn + 100, (4,), torch.float32)), turn

    run_ranks(machine(2), job, 0.005, first_delay=0.0, lane_type=GraphLane)


def test_the_race_would_be_seen(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: without the barrier at the end, a rank publishes over what others still read."""
    original = symmetric.Workspace.barrier
    counts = threading.local()

    def every_other(workspace: Any) -> None:
        counts.n = getattr(counts, "n", 0) + 1
        if counts.n % 2:
            original(workspace)

    monkeypatch.setattr(symmetric.Workspace, "barrier", every_other)
    wrong: list[int] = []

    def job(link: SymmetricLink, random: random.Random) -> None:
        gatherings = []
        for turn in range(20):
            places = [torch.full((2, 4), float("nan"), dtype=torch.bfloat16)]
            gatherings.append((turn, places, link.gather([value(link.rank, turn, (4,))], places, "")))
        for turn, places, gathering in gatherings:
            gathering.finish()
            if not torch.equal(places[0][1 - link.rank], value(1 - link.rank, turn, (4,))):
                wrong.append(turn)

    run_ranks(machine(2), job, 0.003, first_delay=0.0)
    assert wrong
