"""A profiler trace of some steps, for Perfetto or chrome://tracing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from te_dist.launch.runtime import World


class StepProfiler:
    """Records steps START .. STOP - 1 on every rank, into run_dir/profile/rank<N>.json."""

    def __init__(self, steps: tuple[int, int] | None, run_dir: Path, world: World) -> None:
        self.steps, self.world = steps, world
        self.path = run_dir / "profile" / f"rank{world.rank}.json"
        self._profiler: Any = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        if self.steps is not None and step == self.steps[0]:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.world.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        if self._profiler is None:
            yield
        else:
            with torch.profiler.record_function(f"step {step}"):
                yield
            assert self.steps is not None
            if step == self.steps[1] - 1:
                self.close()

    def close(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.path))
