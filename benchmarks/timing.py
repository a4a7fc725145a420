"""What the GPU benchmarks share: timing, the description of the machine, and the file that results go to."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import te_dist


def median_us(function: Callable[[], object], repeats: int = 30, delay: int = 10_000_000) -> float:
    """Median device time of one call. A delay queued in front hides the host's launch time."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(delay)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def wall_us(function: Callable[[], object], repeats: int = 200) -> float:
    """Time per call as a training loop sees it: host and device, whichever is slower. Best of five runs."""
    for _ in range(10):
        function()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats // 5):
            function()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / (repeats // 5))
    return best * 1e6


def host_us(function: Callable[[], object], repeats: int = 200) -> float:
    """Host time per call, the device left behind. Best of five runs."""
    for _ in range(20):
        function()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats // 5):
            function()
        best = min(best, (time.perf_counter() - start) / (repeats // 5))
    torch.cuda.synchronize()
    return best * 1e6


def machine() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "te_dist": te_dist.__version__,
    }


def save(path: Path | None, report: dict[str, Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
