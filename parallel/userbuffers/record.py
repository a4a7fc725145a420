"""What overlapped, as it happens; te_dist.parallel.overlap_report collects it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from te_dist.parallel.userbuffers.links import Link, Stopwatch
from te_dist.transport import state as transport_state

T = TypeVar("T")


@dataclasses.dataclass
class Entry:
    """One product with its collective, of one call of a layer.

    Attributes:
        layer, phase: who asked for it, in "forward" or "backward".
        product: "fprop", "dgrad" or "wgrad"; method: how it overlapped.
        chunks: how many products, or how many messages beside one, it was cut into.
        bytes: what this rank handed over.
        watch: measures how long products waited for parts, or a result for its end.
    """

    layer: str
    phase: str
    product: str
    method: str
    chunks: int = 0
    bytes: int = 0
    watch: Stopwatch | None = None

    def end(self, chunks: int, size: int) -> None:
        self.chunks, self.bytes = chunks, size

    def ended(self, result: T, chunks: int, size: int) -> T:
        self.end(chunks, size)
        return result

    def timed(self, wait: Callable[[], None]) -> None:
        if self.watch is None:
            wait()
            return
        self.watch.start()
        wait()
        self.watch.stop()

    @property
    def exposed(self) -> float:
        """Seconds."""
        return 0.0 if self.watch is None else self.watch.seconds()


class Recorder:
    """Who listens; an attribute costs nothing where nobody does."""

    entries: list[Entry] | None = None


recorder = Recorder()


def begin(product: str, method: str, link: Link) -> Entry:
    entry = Entry(transport_state.layer, transport_state.phase, product, method)
    if recorder.entries is not None:
        entry.watch = link.elapsed()
        recorder.entries.append(entry)
    return entry
