"""The examples run as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HUNG

from te_dist.launch.options import read_config_file

EXAMPLES = Path(__file__).resolve().parent.parent / "launch" / "examples"


def test_the_plain_script_is_short_and_trains_on_four_ranks() -> None:
    script = EXAMPLES / "plain.py"
    lines = [line for line in script.read_text().splitlines() if line.strip()]
    assert len(lines) <= 40
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)],
        capture_output=True, text=True, timeout=HUNG, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 20 and losses[-1] < 0.8 * losses[0]
    assert "te_dist: 6 of 6 linear layers quantized" in done.stdout
    assert "uint8" in done.stdout and "weight, e4m3 per tensor" in done.stdout  # the wire of one step


def test_the_large_config_is_one_that_te_dist_train_reads() -> None:
    pytest.importorskip("yaml")
    values = read_config_file(str(EXAMPLES / "llama_8b.yaml"))
    assert values["lr"] == 3e-4 and values["tp"] == 2 and values["recipe"]["layers.0.*"] == "bf16"


def test_the_slurm_script_is_bash() -> None:
    done = subprocess.run(["bash", "-n", str(EXAMPLES / "train.slurm")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
