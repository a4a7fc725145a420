"""Bytes on the wire of one step, into the metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import te_dist.parallel
from te_dist.launch.metrics import MetricsLog

REPORT = "comm_report.txt"


@contextlib.contextmanager
def count_bytes(wanted: bool, step: int, log: MetricsLog, run_dir: Path) -> Iterator[None]:
    """Write what rank 0 handed to te_dist's collectives in this step: by kind, payload and dtype into the metrics, and
    by layer into a file."""
    if not wanted or not dist.is_initialized():
        yield
        return
    with te_dist.parallel.comm_report() as report:
        yield
    merged: dict[tuple[str, str, str, str], list[int]] = {}
    for c in report.select():
        entry = merged.setdefault((c.kind, c.payload, c.dtype, c.phase), [0, 0])
        entry[0] += 1
        entry[1] += c.bytes
    rows: list[dict[str, Any]] = [
        {"kind": kind, "payload": payload, "dtype": dtype, "phase": phase, "count": count, "bytes": size}
        for (kind, payload, dtype, phase), (count, size) in merged.items()
    ]
    log.write("wire", step=step, collectives=rows)
    if log.enabled:
        (run_dir / REPORT).write_text(f"step {step}\n{report}\n")


def weight_gathers(model: nn.Module) -> list[dict[str, Any]]:
    """How FSDP2 gathers the weights of te_dist's layers, a row each; none without FSDP2."""
    return [
        {
            "name": p.name,
            "how": p.how,
            "format": p.format,
            "bytes": p.forward_bytes + p.backward_bytes,
            "bf16_bytes": p.bf16_bytes,
            "reason": p.reason,
        }
        for p in te_dist.parallel.all_gather_report(model).parameters
    ]
