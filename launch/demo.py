"""``te-dist demo``: a small Llama on four ranks, TP x FSDP2 with sequence parallelism, in bf16 and in three recipes.

All runs start from the same weights and read the same data. One of them is stopped half way, and resumed from its
checkpoint. What is left is a table, and a page with the curves.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import te_dist
from te_dist.launch.config import TrainConfig
from te_dist.launch.doctor import table
from te_dist.launch.progress import short, size_text
from te_dist.launch.runs import Run, read_run

RECIPES = ("bf16", "fp8_current", "fp8_block", "nvfp4")
RESUMED = "fp8_current"  # the one that is stopped half way
RANKS = 4


def config_for(recipe: str, out: Path, steps: int, device: str) -> TrainConfig:
    return TrainConfig(
        preset="1m",
        layers=2,
        seq_len=64,
        micro_batch=4,
        steps=steps,
        lr=2e-3,
        warmup=max(1, steps // 10),
        recipe={"*": recipe},
        min_layer_size=0,
        tp=2,
        sp=True,
        monitor_every=0 if recipe == "bf16" else max(1, steps // 4),
        keep_checkpoints=1,
        run_dir=str(out / recipe),
        device=device,
        report=False,
    )


def work(out: Path, steps: int, device: str) -> int:
    """What each rank does."""
    from te_dist.launch import runtime
    from te_dist.launch.stopping import name_of
    from te_dist.launch.trainer import Trainer

    world = runtime.start(device, timeout=120)
    for recipe in RECIPES:
        config = config_for(recipe, out, steps, device)
        config.progress = "bar" if sys.stdout.isatty() else "none"
        parts = [steps // 2, None] if recipe == RESUMED and steps > 1 else [None]
        for until in parts:
            trainer = Trainer(config, world)
            if world.is_first:
                resumed = f", resumed from the checkpoint of step {trainer.done.step}" if trainer.resumed_from else ""
                print(f"  training {recipe}{resumed}", flush=True)
            result = trainer.train(until=until)
            if result.stopped_by:
                if world.is_first:
                    print(f"te-dist demo: {name_of(result.stopped_by)}, stopped in step {result.step} of {recipe}")
                return 128 + result.stopped_by
    runtime.stop()
    return 0


def launch(out: Path, steps: int, device: str) -> int:
    """The four ranks, under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", "te_dist.launch.demo", "--out", str(out), "--steps", str(steps), "--device", device, "--rank"]
    # One thread each: four ranks share this machine.
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise


def as_table(runs: list[Run]) -> str:
    base = runs[0]
    rows: list[tuple[str, ...]] = [
        (
            run.name,
            f"{run.series('loss')[0][1]:.3f}",
            f"{run.final_loss:.3f}",
            "-" if run is base else f"{run.final_loss - base.final_loss:+.3f}",
            "-" if run.eval_loss is None else f"{run.eval_loss:.3f}",
            f"{size_text(run.wire_bytes)}",
            short(run.tokens_per_s),
            f"at step {run.resumes[0]}" if run.resumes else "",
        )
        for run in runs
    ]
    header = ("recipe", "first loss", "final loss", "against bf16", "held out", "wire/step", "tokens/s", "resumed")
    return table(header, rows)


def main(argv: list[str] | None = None) -> int:
    """Train, print the table of losses, write the page."""
    parser = argparse.ArgumentParser(prog="te-dist demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=80, help="training steps per recipe (default 80)")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder that is written anew")
    enough = torch.cuda.device_count() >= RANKS
    parser.add_argument("--device", default="cuda" if enough else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank:
        return work(options.out, options.steps, options.device)
    if options.steps < 1:
        parser.error(f"--steps expects at least 1 but got {options.steps}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no CUDA device; `te-dist doctor` says more")
    return show(options.out, options.steps, options.device)


def show(out: Path, steps: int, device: str) -> int:
    from te_dist.launch.report import write_report

    for recipe in RECIPES:  # of an earlier demo
        shutil.rmtree(out / recipe, ignore_errors=True)
    print(
        f"te_dist {te_dist.__version__} on torch {torch.__version__}, {RANKS} ranks on {device}: TP=2 x FSDP=2, SP on"
    )
    print(f"a 2-layer Llama, {steps} steps in each recipe; {RESUMED} is stopped half way and resumed\n", flush=True)
    begun = time.perf_counter()
    code = launch(out, steps, device)
    if code:
        print(f"te-dist demo: the ranks ended with code {code}; what they said is above", file=sys.stderr)
        return code
    folders = [out / recipe for recipe in RECIPES]
    page = write_report(folders, out / "report.html")
    print(f"\n{as_table([read_run(folder) for folder in folders])}\n")
    print(f"{time.perf_counter() - begun:.0f} s")
    picture = page.with_suffix(".png")
    print(f"plot:   {picture}" if picture.exists() else "no plot: pip install 'te-dist[plots]' has matplotlib")
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
