"""Runs of te-dist train for tests: tiny, and told where to put things."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from patience import HUNG

from te_dist.launch.config import TrainConfig
from te_dist.launch.metrics import read_metrics
from te_dist.launch.trainer import Trainer

TINY: dict[str, Any] = {
    "layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "seq_len": 32, "micro_batch": 2, "steps": 6,
    "warmup": 2, "eval_batches": 1, "progress": "none", "report": False, "device": "cpu",
}  # fmt: skip


def config_of(run_dir: Path, **options: Any) -> TrainConfig:
    return TrainConfig(**{**TINY, "run_dir": str(run_dir), **options})


def train(run_dir: Path, **options: Any) -> Any:
    return Trainer(config_of(run_dir, **options)).train()


def losses(run_dir: Path) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in read_metrics(run_dir) if e["event"] == "step"}


def flags(run_dir: Path, **options: Any) -> list[str]:
    """The same as a command line."""
    given = []
    for name, value in {**TINY, "progress": "lines", "run_dir": str(run_dir), **options}.items():
        flag = name.replace("_", "-")
        given += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return given


def start(
    run_dir: Path, ranks: int = 1, restarts: int = 0, torchrun: bool = True, **options: Any
) -> subprocess.Popen[str]:
    """te-dist train in processes of its own; several under torchrun, or started by te-dist itself."""
    launcher = ["-m", "te_dist.launch.cli", "train"]
    if ranks > 1 and not torchrun:
        launcher += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    elif ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        launcher += ["--max-restarts", str(restarts), "-m", "te_dist.launch.train"]
    return subprocess.Popen(
        [sys.executable, *launcher, *flags(run_dir, **options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str], limit: float = HUNG) -> None:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and max(losses(run_dir), default=0) >= step:
            return
        if process.poll() is not None:
            out, errors = process.communicate()
            raise AssertionError(f"ended with {process.returncode} before step {step}\n{out}\n{errors}")
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no step {step} within {limit} s")


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def finish(process: subprocess.Popen[str], limit: float = HUNG) -> tuple[int, str, str]:
    try:
        out, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        for child in children(process.pid):
            os.kill(child, signal.SIGKILL)
        process.kill()
        out, errors = process.communicate()
        raise AssertionError(f"did not end within {limit} s\n{out}\n{errors}") from None
    return process.returncode, out, errors
