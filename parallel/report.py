"""comm_report: what te_dist put on the wire, collective by collective."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from te_dist import transport

CHECK = "check"  # the ranks' comparison of what they are about to do


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce" or "check".
        group: the c10d name of the process group.
        dtype: of what was sent.
        bytes: what this rank handed to the collective; padding included, other ranks' shares not.
        layer, phase: who asked for it, in "forward" or "backward"; "" outside of te_dist's layers.
        payload: the format of a gathered tensor and its planes, or "amax".
        step: the number of ``next_step()`` calls before it.
    """

    kind: str
    group: str
    dtype: str
    bytes: int
    layer: str
    phase: str
    payload: str
    step: int


class CommReport:
    """What ``comm_report()`` has counted. Printed as a table, in which equal collectives share a line."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self.step = 0

    def next_step(self) -> None:
        """Count what follows as another training step."""
        self.step += 1

    def select(
        self,
        kind: str | None = None,
        layer: str | None = None,
        phase: str | None = None,
        payload: str | None = None,
        step: int | None = None,
    ) -> list[Collective]:
        """The collectives with these properties, without the ranks' checks unless kind asks for them."""
        return [
            c
            for c in self.collectives
            if (c.kind == kind if kind is not None else c.kind != CHECK)
            and layer in (None, c.layer)
            and phase in (None, c.phase)
            and payload in (None, c.payload)
            and step in (None, c.step)
        ]

    def bytes(self, **properties: Any) -> int:
        """What this rank handed to the selected collectives; arguments as for ``select``."""
        return sum([c.bytes for c in self.select(**properties)])

    def __str__(self) -> str:
        merged: dict[tuple[str, ...], list[int]] = {}
        for c in self.select():
            entry = merged.setdefault((c.layer or "-", c.phase or "-", c.kind, c.payload or "-", c.dtype), [0, 0])
            entry[0] += 1
            entry[1] += c.bytes
        rows: list[tuple[str, ...]] = [("layer", "phase", "collective", "payload", "dtype", "count", "bytes")]
        rows += [(*key, str(count), f"{size:,}") for key, (count, size) in merged.items()]
        rows.append(("total", "", "", "", "", str(len(self.select())), f"{self.bytes():,}"))
        widths = [max(len(row[column]) for row in rows) for column in range(7)]
        lines = []
        for row in rows:
            cells = [
                cell.rjust(width) if column > 4 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        checks = len(self.select(kind=CHECK))
        steps = f", {self.step + 1} steps" if self.step else ""
        title = f"te_dist: collectives of this rank{steps} (bytes that it handed over)"
        ending = [f"and {checks} checks of 8 bytes that the ranks agree"] if checks else []
        return "\n".join([title, *lines, *ending])


@contextlib.contextmanager
def comm_report(verbose: bool = False) -> Iterator[CommReport]:
    """Count the collectives that te_dist starts inside, on this rank.

    Args:
        verbose: print the table at the end.

    Example:
        >>> from te_dist.parallel import comm_report
        >>> with comm_report() as report:
        ...     pass  # a training step
        >>> len(report.collectives)
        0
    """
    report = CommReport()
    before = transport.state.recorder

    def record(record: transport.Record) -> None:
        report.collectives.append(Collective(*record, report.step))
        if before is not None:  # an outer report counts too
            before(record)

    transport.state.recorder = record
    try:
        yield report
    finally:
        transport.state.recorder = before
        if verbose:
            print(report)
