"""SymmetricLink: GPUs of one machine read each other's memory while products run.

Every rank publishes its parts in a workspace that the others can read, and pulls theirs: copies between devices, on a
lane of its own (a CUDA stream), so that products keep the multiprocessors. In time, for R = 4 and rank r:

    lane      [publish][barrier][pull r+1][pull r+2][pull r+3][barrier]
    products  [ product of r's own rows   ][ r+1    ][ r+2    ][ r+3 ]

The first barrier says that everybody has published, the last that everybody has read: until then nothing may be
published in the same place. All exchanges of a group run on one lane in one order, which is the same on all ranks, so
two of them never share the workspace.

torch's ``_pipelined_multi_all_gather_and_consume`` and ``_pipelined_produce_and_all2all`` do the like. They are not
used because their barriers wait for ever: a rank that was killed would leave the others spinning. Here every barrier
ends with the group's timeout, by a trap that the next synchronisation raises as a CUDA error. Besides, this lane serves
all schedules, also those in which a collective runs beside one product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from te_dist import torch_compat, transport
from te_dist.groups import resolve_group
from te_dist.parallel.userbuffers.links import begin, begin_reduction

_ALIGNMENT = 256  # bytes, of parts in the workspace
_GRANULE = 2 << 20  # bytes, by which a workspace grows: the driver maps no less
_CHANNEL = 0  # of the signals; one lane needs one


class Lane(Protocol):
    """Where copies run, beside the products."""

    def follow(self) -> None:
        """What is put on the lane next waits for the products that were started so far."""

    def run(self, work: Callable[[], Any]) -> None:
        """Put work on the lane."""

    def mark(self) -> Any:
        """A point on the lane, behind what was put there so far."""

    def wait(self, mark: Any) -> None:
        """Products that are started next wait for that point."""

    def finish(self) -> None:
        """The host waits for all that is on the lane."""

    def is_captured(self) -> bool:
        """Whether a CUDA graph is being recorded, which must contain the whole lane."""


class StreamLane:
    """A CUDA stream. Of high priority: it runs copies and barriers of one block, which should start at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def run(self, work: Callable[[], Any]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        self._stream.synchronize()

    def is_captured(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class Workspace:
    """Memory that all ranks of a group can read, and the signals that belong to it. It only grows; all ranks grow it
    at the same place in their programs."""

    def __init__(self, group: str, device: torch.device, lane: Lane) -> None:
        self._group, self._device, self._lane = group, device, lane
        self._memory: Tensor | None = None
        self._handle: Any = None
        self.size = 0
        self.timeout_ms = 0

    def ensure(self, size: int) -> Any:
        """The handle of at least so many bytes."""
        if size > self.size:
            self._grow(size)
        return self._handle

    def _grow(self, size: int) -> None:
        if self._lane.is_captured():
            raise RuntimeError(
                f"te_dist: overlap over group {self._group!r} needs a workspace of {size} bytes and has {self.size}, "
                f"and a CUDA graph that is being captured cannot contain its growth; run the layer once before the "
                f"capture, or call te_dist.parallel.userbuffers.reserve(group, {size})"
            )
        group = resolve_group(self._group, "tp_group")
        self._lane.finish()  # nobody reads this rank's workspace any more, as the last barrier has said
        wanted = torch.tensor([size], dtype=torch.int64, device=self._device)
        everyone = transport.all_gather([wanted], group, "workspace").wait()[0].tolist()
        if len(set(everyone)) > 1:
            raise transport.RanksDisagree(
                f"te_dist: the ranks of group {self._group!r} ask for overlap workspaces of different sizes, which "
                f"would not fit each other; they expect equal layers and shapes but got {everyone} bytes, by rank",
                self._group,
            )
        # A half more than is needed now, so that sequences that grow slowly do not grow it each time.
        size = -(-max(size, self.size * 3 // 2) // _GRANULE) * _GRANULE
        self.close()
        self._memory, self._handle = torch_compat.allocate_symmetric(size, self._device, self._group)
        self.size = size
        self.timeout_ms = int(1e3 * torch_compat.group_timeout(group, self._device))

    def barrier(self) -> None:
        self._handle.barrier(channel=_CHANNEL, timeout_ms=self.timeout_ms)

    def close(self) -> None:
        self._memory = self._handle = None
        self.size = 0


class SymmetricLink:
    """The ``Link`` of tensors on GPUs."""

    def __init__(self, group: str, device: torch.device, lane: Lane | None = None) -> None:
        process_group = resolve_group(group, "tp_group")
        self.group, self.device = group, device
        self.rank, self.size = int(process_group.rank()), int(process_group.size())
        self.lane = StreamLane(device) if lane is None else lane
        self.workspace = Workspace(group, device, self.lane)
        self._in_graphs = False

    def end(self, arrived: Any, closed: Any) -> None:
        """Products wait for what an exchange has brought, or for its last barrier. That concerns the next exchange,
        which follows on the lane; but a graph must end with all that it has begun. Nor are replays on the lane: once
        there is a graph, what runs outside of it must be over before products go on, or a replay would publish where
        others still read. (What came before the first capture is over by then: ``torch.cuda.graph`` synchronizes.)"""
        self._in_graphs = self._in_graphs or self.lane.is_captured()
        self.lane.wait(closed if self._in_graphs else arrived)

    def prepare(self) -> None:
        """Have a workspace, so that what can fail has failed. All ranks call this."""
        self.workspace.ensure(_GRANULE)

    def reserve(self, size: int) -> None:
        """Have a workspace of so many bytes, before a CUDA graph is captured. All ranks call this."""
        self.workspace.ensure(size)

    def close(self) -> None:
        self.lane.finish()
        self.workspace.close()

    def elapsed(self) -> EventStopwatch:
        return EventStopwatch(self.device)

    def gather(self, parts: Sequence[Tensor], places: Sequence[Tensor], payload: str) -> SymmetricGathering:
        begin("all_gather", resolve_group(self.group, "tp_group"), parts, payload)
        offsets, end = [], 0
        for part in parts:
            offsets.append(end)
            end += _aligned(part)
        handle = self.workspace.ensure(end)
        lane, rank = self.lane, self.rank
        lane.follow()

        def spot(owner: int, index: int) -> Tensor:
            return _spot(handle, owner, parts[index], offsets[index])

        def publish() -> None:
            for index, part in enumerate(parts):
                spot(rank, index).copy_(part)
            self.workspace.barrier()

        def pull(source: int) -> None:
            for index, place in enumerate(places):
                place[source].copy_(spot(source, index))

        lane.run(publish)
        arrived: dict[int, Any] = {}
        for distance in range(1, self.size):
            source = (rank + distance) % self.size
            lane.run(lambda source=source: pull(source))  # type: ignore[misc]
            arrived[source] = lane.mark()
        lane.run(self.workspace.barrier)
        return SymmetricGathering(self, arrived, lane.mark(), (parts, places))

    def rounds(self, part: Tensor, sends: int, payload: str) -> SymmetricRounds:
        begin_reduction(resolve_group(self.group, "tp_group"), part, sends, payload)
        return SymmetricRounds(self, self.workspace.ensure(sends * _aligned(part)), _aligned(part), sends)


class SymmetricGathering:
    def __init__(self, link: SymmetricLink, arrived: dict[int, Any], closed: Any, kept: Any) -> None:
        self._link, self._arrived, self._closed = link, arrived, closed
        self._kept = kept  # the lane reads and writes them: nobody may reuse their memory before products wait for it
        self._last = list(arrived.values())[-1]

    def wait(self, source: int) -> None:
        self._link.lane.wait(self._arrived[source])

    def finish(self) -> None:
        self._link.end(self._last, self._closed)
        self._kept = None

    def __del__(self) -> None:
        if self._kept is not None:  # an error came in between: memory is given back to products that wait for the lane
            with contextlib.suppress(Exception):
                self.finish()


class SymmetricRounds:
    """A slot of the workspace for each part that a rank sends: none is written twice."""

    def __init__(self, link: SymmetricLink, handle: Any, slot: int, sends: int) -> None:
        self._link, self._handle, self._slot, self._sends = link, handle, slot, sends
        self._used = 0
        self._arrived: list[Any] = []
        self._closed: Any = None
        self._kept: list[Any] = []

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        link, handle, lane = self._link, self._handle, self._link.lane
        rank, size = link.rank, link.size
        # Parts for the same distance lie in the same slot on all ranks.
        slots = {distance: self._slot * (self._used + index) for index, distance in enumerate(sends)}
        self._used += len(sends)
        if self._used > self._sends or list(sends) != list(receives):
            raise AssertionError(f"{self._used} of {self._sends} parts; to {list(sends)}, from {list(receives)}")
        lane.follow()

        def publish() -> None:
            for distance, part in sends.items():
                _spot(handle, rank, part, slots[distance]).copy_(part)
            link.workspace.barrier()

        def pull() -> None:
            for distance, place in receives.items():
                place.copy_(_spot(handle, (rank - distance) % size, place, slots[distance]))

        lane.run(publish)
        lane.run(pull)
        self._arrived.append(lane.mark())
        self._kept.append((dict(sends), dict(receives)))
        if self._used == self._sends:
            # Before anything else can be put on the lane.
            lane.run(link.workspace.barrier)
            self._closed = lane.mark()

    def wait(self, number: int) -> None:
        self._link.lane.wait(self._arrived[number])

    def finish(self) -> None:
        if self._closed is None:
            raise AssertionError(f"only {self._used} of {self._sends} parts were sent")
        self._link.end(self._arrived[-1], self._closed)
        self._kept.clear()

    def __del__(self) -> None:
        if self._kept:  # as above; if not all was sent, there is no last barrier, nor a next exchange
            with contextlib.suppress(Exception):
                self.wait(-1) if self._closed is None else self.finish()


def _aligned(part: Tensor) -> int:
    return -(-part.numel() * part.element_size() // _ALIGNMENT) * _ALIGNMENT


def _spot(handle: Any, owner: int, like: Tensor, offset: int) -> Tensor:
    """A tensor like another one in a rank's workspace; get_buffer counts offsets in elements."""
    return handle.get_buffer(owner, like.shape, like.dtype, offset // like.element_size())


class EventStopwatch:
    """Time of the stream that products run on. Not of a graph's capture, in which nothing runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._since: torch.cuda.Event | None = None

    def start(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._since = torch.cuda.Event(enable_timing=True)
            self._since.record(torch.cuda.current_stream(self._device))

    def stop(self) -> None:
        if self._since is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record(torch.cuda.current_stream(self._device))
            self._spans.append((self._since, end))
            self._since = None

    def seconds(self) -> float:
        for _, end in self._spans:
            end.synchronize()
        return sum(start.elapsed_time(end) for start, end in self._spans) / 1e3
