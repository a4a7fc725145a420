"""Link: how the ranks of a group reach each other's memory while products run. A schedule knows nothing else of it.

Two of them: messages between processes on the CPU (``MessageLink``, below), and symmetric memory between GPUs
(symmetric.py). Both move the same parts in the same order, so what runs on one has been tested on the other.

Distances: rank r gets from r + d and sends to r - d in a gather, and sends to r + d and gets from r - d in a round of a
reduction, modulo the number of ranks R. In each step every rank sends one part and receives one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from te_dist import transport
from te_dist.groups import resolve_group


class Gathering(Protocol):
    """A gather under way."""

    def wait(self, source: int) -> None:
        """Until the parts of that rank are there, for what is computed next."""

    def finish(self) -> None:
        """Until all of them are, and nobody needs this rank's own parts any more."""


class Rounds(Protocol):
    """The rounds of a reduction under way: in each, parts go to some ranks and come from as many."""

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """One round: `sends[d]` goes to rank + d, `receives[d]` is filled by rank - d. All parts have equal sizes on
        all ranks, and the tensors belong to the link until ``finish``."""

    def wait(self, number: int) -> None:
        """Until what round `number` receives is there, for what is computed next."""

    def finish(self) -> None:
        """Until all is there, and nobody needs what this rank has sent any more."""


class Link(Protocol):
    """One group's way of moving parts while products run."""

    rank: int
    size: int

    def gather(self, parts: Sequence[Tensor], places: Sequence[Tensor], payload: str) -> Gathering:
        """Start to fill ``places[i][r]`` with ``parts[i]`` of every other rank r, the next one's first."""

    def rounds(self, part: Tensor, sends: int, payload: str) -> Rounds:
        """Begin a reduction in which each rank sends so many parts like this one, which is the first of them.

        Called when the first product is there: only then its size is known."""

    def elapsed(self) -> Stopwatch:
        """A watch for the time that products wait for parts."""


class Stopwatch(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self) -> float: ...


def begin(kind: str, group: Any, parts: Sequence[Tensor], payload: str) -> transport.What:
    return transport.begin_exchange(kind, group, parts, parts[0].device, payload)


def begin_reduction(group: Any, part: Tensor, sends: int, payload: str) -> transport.What:
    """Ranks compare, and count, what each of them sends: all of its result but its own part."""
    sent = torch.empty((sends, *part.shape), dtype=part.dtype, device="meta")
    return transport.begin_exchange("reduce_scatter", group, [sent], part.device, payload)


# ------------------------------------------------------------------------------------------------- messages
class MessageLink:
    """Messages over gloo, between tensors on the CPU. The host waits for what it needs; the rest arrives meanwhile."""

    def __init__(self, group: str) -> None:
        process_group = resolve_group(group, "tp_group")
        self.group, self.rank, self.size = group, int(process_group.rank()), int(process_group.size())

    def gather(self, parts: Sequence[Tensor], places: Sequence[Tensor], payload: str) -> MessageGathering:
        group = resolve_group(self.group, "tp_group")
        messages = transport.Messages(group, begin("all_gather", group, parts, payload))
        arrivals: dict[int, list[Any]] = {}
        for distance in range(1, self.size):
            source = (self.rank + distance) % self.size
            arrivals[source] = [messages.receive(source, place[source]) for place in places]
        for distance in range(1, self.size):
            for part in parts:
                messages.send((self.rank - distance) % self.size, part)
        return MessageGathering(messages, arrivals)

    def rounds(self, part: Tensor, sends: int, payload: str) -> MessageRounds:
        group = resolve_group(self.group, "tp_group")
        return MessageRounds(self, transport.Messages(group, begin_reduction(group, part, sends, payload)))

    def elapsed(self) -> HostStopwatch:
        return HostStopwatch()


class MessageGathering:
    def __init__(self, messages: transport.Messages, arrivals: dict[int, list[Any]]) -> None:
        self._messages, self._arrivals = messages, arrivals

    def wait(self, source: int) -> None:
        for message in self._arrivals.pop(source, ()):
            self._messages.wait(message)

    def finish(self) -> None:
        for source in list(self._arrivals):
            self.wait(source)
        self._messages.finish()


class MessageRounds:
    def __init__(self, link: MessageLink, messages: transport.Messages) -> None:
        self._link, self._messages = link, messages
        self._arrivals: list[list[Any]] = []

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        rank, size = self._link.rank, self._link.size
        self._arrivals.append([self._messages.receive((rank - d) % size, place) for d, place in receives.items()])
        for distance, part in sends.items():
            self._messages.send((rank + distance) % size, part)

    def wait(self, number: int) -> None:
        arrivals, self._arrivals[number] = self._arrivals[number], []
        for message in arrivals:
            self._messages.wait(message)

    def finish(self) -> None:
        for number in range(len(self._arrivals)):
            self.wait(number)
        self._messages.finish()


class HostStopwatch:
    """Time of the host, which is what waits on the CPU."""

    def __init__(self) -> None:
        self._total = self._since = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._total += time.perf_counter() - self._since

    def seconds(self) -> float:
        return self._total
