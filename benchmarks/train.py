"""te-dist train from end to end: tokens per second and peak memory of every recipe against bf16, compiled.

    python benchmarks/train.py [--json PATH] [--recipes bf16 fp8_current ...] [--runs DIR] [options of te-dist train]

Each recipe is a process of its own. The results are written after each of them, so a run that is cut short leaves
those that were done; finished ones are not run again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from timing import save

from te_dist.launch.compare import numbers
from te_dist.launch.doctor import table
from te_dist.launch.report import summary_rows
from te_dist.launch.runs import read_runs

RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8")  # the first is what the others are measured by
# Eight blocks of an 8B Llama: what fits one GPU with fp32 weights and AdamW (28 GB, and about 20 of activations).
OPTIONS = ["--preset", "8b", "--layers", "8", "--seq-len", "8192", "--micro-batch", "1", "--steps", "50", "--compile"]
QUIET = ["--log-every", "5", "--eval-batches", "0", "--no-final-checkpoint", "--no-report", "--progress", "lines"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file for the results")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="where the runs go")
    options, others = parser.parse_known_args()
    done, failed = [], []
    for recipe in options.recipes:
        folder = options.runs / recipe
        if not (folder / "done").exists():
            begun = time.perf_counter()
            command = [sys.executable, "-m", "te_dist.launch.train", *OPTIONS, *QUIET, *others]
            command += ["--recipe", recipe, "--run-dir", str(folder)]
            print(f"== {recipe}: {' '.join(command[1:])}", flush=True)
            if subprocess.run(command).returncode:
                failed.append(recipe)
                continue
            (folder / "done").touch()
            print(f"== {recipe}: {time.perf_counter() - begun:.0f} s with start and compilation", flush=True)
        done.append(folder)
        save(options.json, numbers(read_runs(done)))
    if done:
        header, rows = summary_rows(read_runs(done))
        print(table(tuple(header), [tuple(row) for row in rows]))
    if failed:
        print(f"failed: {', '.join(failed)}; what they said is above", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
