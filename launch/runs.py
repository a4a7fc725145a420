"""A finished (or running) run, read back from its folder."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from te_dist.launch.config import ConfigError, TrainConfig
from te_dist.launch.metrics import MetricsLog, read_metrics
from te_dist.launch.options import read_config_file
from te_dist.launch.recipes import patterns_from, short_label

SETTLED = 10  # the final loss is the mean of at most so many logged steps,
LAST_PART = 0.2  # all of them in this part of the run


@dataclasses.dataclass
class Run:
    """What metrics.jsonl, config.yaml and layers.json of a run say."""

    folder: Path
    name: str
    config: dict[str, Any]
    events: list[dict[str, Any]]
    layers: list[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        """The entries of one kind, by step."""
        return sorted((e for e in self.events if e["event"] == event), key=lambda e: e.get("step", 0))

    def series(self, key: str, event: str = "step") -> list[tuple[int, float]]:
        return [(e["step"], e[key]) for e in self.of(event) if isinstance(e.get(key), int | float)]

    @property
    def start(self) -> dict[str, Any]:
        starts = self.of("start")
        return starts[-1] if starts else {}

    @property
    def recipe(self) -> str:
        return short_label(patterns_from(self.config.get("recipe", "bf16")))

    @property
    def steps(self) -> int:
        series = self.series("loss")
        return series[-1][0] if series else 0

    @property
    def final_loss(self) -> float:
        logged = self.series("loss")[-SETTLED:]
        last = [loss for step, loss in logged if step > (1 - LAST_PART) * logged[-1][0]]
        return sum(last) / len(last) if last else float("nan")

    @property
    def eval_loss(self) -> float | None:
        series = self.series("loss", "eval")
        return series[-1][1] if series else None

    @property
    def tokens_per_s(self) -> float:
        """The median: the first steps compile and warm up."""
        rates = sorted(rate for _, rate in self.series("tokens_per_s"))
        return rates[len(rates) // 2] if rates else 0.0

    @property
    def memory(self) -> float:
        return max((value for _, value in self.series("memory")), default=0.0)

    @property
    def mfu(self) -> float | None:
        values = sorted(value for _, value in self.series("mfu"))
        return values[len(values) // 2] if values else None

    @property
    def resumes(self) -> list[int]:
        return [e["step"] for e in self.of("resume")]

    @property
    def wire(self) -> list[dict[str, Any]]:
        """The collectives of the step that was counted."""
        counted = self.of("wire")
        return counted[-1]["collectives"] if counted else []

    @property
    def wire_bytes(self) -> int:
        return sum(row["bytes"] for row in self.wire)

    @property
    def gathers(self) -> list[dict[str, Any]]:
        """How FSDP2 gathers each weight."""
        found = self.of("gathers")
        return found[-1]["weights"] if found else []

    @property
    def quantization(self) -> tuple[int, dict[str, Any]] | None:
        """(step, statistics) of the last sampled step."""
        sampled = self.of("quantization")
        return (sampled[-1]["step"], sampled[-1]["layers"]) if sampled else None


def read_run(folder: str | Path, name: str | None = None) -> Run:
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"{str(path)!r} is no folder of a run")
    if not (path / MetricsLog.FILE).exists():
        raise ConfigError(f"{str(path)!r} is no folder of a run: it has no {MetricsLog.FILE}")
    events = read_metrics(path)
    config: dict[str, Any] = {}
    if (path / "config.yaml").exists():
        config = TrainConfig(**read_config_file(str(path / "config.yaml"))).as_dict()
    layers = json.loads((path / "layers.json").read_text()) if (path / "layers.json").exists() else []
    return Run(path, name or path.name, config, events, layers)


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Runs under short names that tell them apart."""
    runs = [read_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        common = os.path.commonpath([run.folder.resolve() for run in runs])
        for run in runs:
            run.name = os.path.relpath(run.folder.resolve(), common)
    return runs
