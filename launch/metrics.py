"""The metrics of a run: one JSON object per line, and how fast and how large it is."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import torch

# Dense bf16 FLOP/s by what torch calls the device (vendors' data sheets).
PEAK_BF16 = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


def peak_flops(device: torch.device) -> float | None:
    """bf16 FLOP/s of this device, or None where it is not known: then there is no MFU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_BF16.items() if key in name), None)


def memory_bytes(device: torch.device) -> int:
    """The most that torch allocated on a GPU since it was reset; elsewhere what this process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MetricsLog:
    """metrics.jsonl of a run directory; on other ranks than the first it writes nothing."""

    FILE = "metrics.jsonl"

    def __init__(self, folder: Path, enabled: bool, tensorboard: bool = False) -> None:
        self._file = None
        self._board: Any = None
        self.enabled = enabled
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / self.FILE).open("a", buffering=1)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, event: str, **values: Any) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps({"event": event, "time": round(time.time(), 3), **values}) + "\n")
        step = values.get("step")
        if self._board is not None and step is not None:
            for name, value in values.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run. A line that a killed process left unfinished is dropped; of two lines for one step (before
    and after a resume) the later one counts."""
    path = folder / MetricsLog.FILE
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text().splitlines()):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(entry, dict) or "event" not in entry:
            continue
        if entry["event"] == "resume":  # what came after the checkpoint did not happen
            kept = {k: e for k, e in kept.items() if "step" not in e or e["step"] <= entry["step"]}
        key = (entry["event"], entry["step"]) if "step" in entry else (entry["event"], "line", number)
        kept[key] = entry
    return list(kept.values())
