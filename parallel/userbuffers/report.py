"""overlap_report: what overlapped, product by product."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from te_dist.modules.base import QuantizedLayer
from te_dist.parallel.userbuffers.comm import Overlapped
from te_dist.parallel.userbuffers.methods import OFF, PRODUCTS
from te_dist.parallel.userbuffers.record import Entry, recorder
from te_dist.plan import Move

_HEADINGS = ("layer", "phase", "product", "method", "chunks", "count", "bytes", "exposed ms")


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a product of a layer is set to do.

    Attributes:
        layer: its name in the model; stage: of the GEMM within it, "" for the only one.
        product: "fprop", "dgrad" or "wgrad".
        method: "ring_exchange", "pipeline", "bulk" or "off".
        reason: why it is off.
    """

    layer: str
    stage: str
    product: str
    method: str
    reason: str


def decisions(model: nn.Module) -> list[Decision]:
    """Of every product of a model's parallel layers."""
    found: list[Decision] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer) or not layer.spec.communicates:
            continue
        label = name or layer.spec.name or type(layer).__name__
        for stage in layer.spec.stages:
            comm: Any = stage.comm
            methods = None
            if isinstance(comm, Overlapped):
                methods = comm.row if comm.plan.y is Move.REDUCE_SCATTER else comm.column
            for product in PRODUCTS:
                method = OFF if methods is None else methods.of(product).name
                reason = getattr(layer, "_overlap_reason", "") if method == OFF else ""
                found.append(Decision(label, stage.name, product, method, reason))
    return found


class OverlapReport:
    """What ``overlap_report()`` has seen on this rank. Printed as a table, in which equal entries share a line."""

    def __init__(self, model: nn.Module | None) -> None:
        self.entries: list[Entry] = []
        self.decisions = [] if model is None else decisions(model)

    def select(
        self, layer: str | None = None, product: str | None = None, method: str | None = None, phase: str | None = None
    ) -> list[Entry]:
        """The entries with these properties."""
        return [
            e
            for e in self.entries
            if layer in (None, e.layer)
            and product in (None, e.product)
            and method in (None, e.method)
            and phase in (None, e.phase)
        ]

    def exposed(self, **properties: Any) -> float:
        """Seconds that products of the selected entries waited for parts; arguments as for ``select``."""
        return sum(e.exposed for e in self.select(**properties))

    def __str__(self) -> str:
        merged: dict[tuple[str, ...], list[float]] = {}
        for e in self.entries:
            sums = merged.setdefault((e.layer or "-", e.phase or "-", e.product, e.method, str(e.chunks)), [0, 0, 0.0])
            sums[0] += 1
            sums[1] += e.bytes
            sums[2] += e.exposed
        rows: list[tuple[str, ...]] = [_HEADINGS]
        rows += [(*key, str(int(n)), f"{int(size):,}", f"{1e3 * time:.3f}") for key, (n, size, time) in merged.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        lines = ["te_dist: communication that ran beside products, on this rank"]
        for row in rows:
            cells = [c.rjust(w) if i > 3 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, *self._not_overlapped()])

    def _not_overlapped(self) -> list[str]:
        """Layers that do not overlap at all, with the reason."""
        layers: dict[str, list[Decision]] = {}
        for decision in self.decisions:
            layers.setdefault(decision.layer, []).append(decision)
        return [
            f"{layer}: off{f' ({found[0].reason})' if found[0].reason not in ('', OFF) else ''}"
            for layer, found in layers.items()
            if all(decision.method == OFF for decision in found)
        ]


@contextlib.contextmanager
def overlap_report(model: nn.Module | None = None, verbose: bool = False) -> Iterator[OverlapReport]:
    """See which products overlap with communication inside, on this rank, in how many parts and at what cost.

    Times are of the host on the CPU, and of the stream that products run on on a GPU, where reading them waits for it.

    Args:
        model: list its layers that do not overlap as well, with the reason.
        verbose: print the table at the end.

    Example:
        >>> from te_dist.parallel import overlap_report
        >>> with overlap_report() as report:
        ...     pass  # a training step
        >>> report.entries
        []
    """
    report = OverlapReport(model)
    before, recorder.entries = recorder.entries, report.entries
    try:
        yield report
    finally:
        recorder.entries = before
        if before is not None:  # an outer report counts too
            before.extend(report.entries)
        if verbose:
            print(report)
