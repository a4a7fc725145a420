"""``te-dist demo``: a small Llama, first in one process in every recipe, then on four ranks, TP x FSDP2 with SP.

All runs start from the same weights and read the same data. One of them is stopped half way, and resumed from its
checkpoint. What is left is a table, what one step put on the wire, and a page with the curves.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import te_dist
from te_dist.launch import runtime
from te_dist.launch.config import ConfigError, TrainConfig
from te_dist.launch.doctor import table
from te_dist.launch.progress import short, size_text
from te_dist.launch.ranks import run_ranks
from te_dist.launch.runs import Run, read_runs
from te_dist.launch.stopping import StopRequest, name_of
from te_dist.launch.trainer import Trainer
from te_dist.launch.wire import REPORT

ALONE = ("bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")  # in one process
SPREAD = ("bf16", "fp8_current", "fp8_block", "nvfp4")  # on four ranks
RESUMED = "fp8_current"  # the one of those that is stopped half way
RANKS = 4
SEQUENCES = 8  # of a step


def folders(out: Path) -> Iterator[tuple[str, str, Path]]:
    """(stage, recipe, folder) of every run."""
    for stage, recipes in (("1-rank", ALONE), (f"{RANKS}-ranks", SPREAD)):
        yield from ((stage, recipe, out / stage / recipe) for recipe in recipes)


def config_for(recipe: str, folder: Path, steps: int, device: str, spread: bool) -> TrainConfig:
    """The same run either way: four ranks are two data-parallel ones, each with half of the sequences."""
    return TrainConfig(
        preset="1m",
        layers=2,
        seq_len=64,
        micro_batch=SEQUENCES // 2 if spread else SEQUENCES,
        steps=steps,
        lr=2e-3,
        warmup=max(1, steps // 10),
        recipe={"*": recipe},
        min_layer_size=0,
        tp=2 if spread else 1,
        sp=spread,
        monitor_every=0 if recipe == "bf16" else max(1, steps // 4),
        keep_checkpoints=1,
        run_dir=str(folder),
        device=device,
        report=False,
        progress="bar" if sys.stdout.isatty() else "none",
    )


def train(recipe: str, folder: Path, steps: int, device: str, world: runtime.World | None) -> int:
    """One run, in parts where it is to be resumed; the number of the signal that stopped it, or 0."""
    spread = world is not None
    # From the start, so that Ctrl-C while the model is built ends as it does in training.
    with StopRequest() as request:
        for until in [steps // 2, None] if spread and recipe == RESUMED and steps > 1 else [None]:
            trainer = Trainer(config_for(recipe, folder, steps, device, spread), world)
            if stopped_by := trainer.world.agree_any(request.number):
                return stopped_by
            first = trainer.world.is_first
            if first and trainer.resumed_from:
                print(f"  {recipe:<12} is resumed from the checkpoint of step {trainer.done.step}", flush=True)
            begun = time.perf_counter()
            result = trainer.train(until, request)
            if result.stopped_by:
                return result.stopped_by
            if first:
                seconds = time.perf_counter() - begun
                print(f"  {recipe:<12} step {result.step:>3}  loss {result.loss:.3f}  {seconds:.0f} s", flush=True)
    return 0


def rank(out: Path, steps: int, device: str) -> int:
    """What each of the four ranks does."""
    world = runtime.start(device, timeout=TrainConfig.timeout)
    try:
        for stage, recipe, folder in folders(out):
            if stage != "1-rank" and (stopped_by := train(recipe, folder, steps, device, world)):
                return 128 + stopped_by
    finally:
        runtime.stop()
    return 0


def as_table(runs: list[Run]) -> str:
    base = runs[0]
    rows: list[tuple[str, ...]] = [
        (
            run.name,
            f"{run.series('loss')[0][1]:.3f}",
            f"{run.final_loss:.3f}",
            "-" if run is base else f"{run.final_loss - base.final_loss:+.3f}",
            "-" if run.eval_loss is None else f"{run.eval_loss:.3f}",
            size_text(run.wire_bytes) if run.wire else "-",
            short(run.tokens_per_s),
            f"at step {run.resumes[0]}" if run.resumes else "",
        )
        for run in runs
    ]
    header = ("run", "first loss", "final loss", "against bf16", "held out", "wire/step", "tokens/s", "resumed")
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
        return rank(options.out, options.steps, options.device)
    if options.steps < 1:
        parser.error(f"--steps expects at least 1 but got {options.steps}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no CUDA device; `te-dist doctor` says more")
    try:
        code = show(options.out, options.steps, options.device)
    except (ConfigError, OSError) as error:
        print(f"te-dist demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # between two runs, or before the ranks are there
        code = 128 + signal.SIGINT
    if code > 128:
        print(f"\nte-dist demo: stopped by {name_of(code - 128)}", file=sys.stderr)
    elif code:
        print(f"te-dist demo: the ranks ended with code {code}; what they said is above", file=sys.stderr)
    return code


def show(out: Path, steps: int, device: str) -> int:
    from te_dist.launch.report import write_report

    begun = time.perf_counter()
    runs = list(folders(out))
    for _, _, folder in runs:  # of an earlier demo
        shutil.rmtree(folder, ignore_errors=True)
    print(f"te_dist {te_dist.__version__} on torch {torch.__version__}: a 2-layer Llama, {steps} steps in each recipe")
    print(f"\none process on {device}", flush=True)
    torch.set_num_threads(1)  # tensors as small as these gain nothing from more
    for stage, recipe, folder in runs:
        if stage == "1-rank" and (stopped_by := train(recipe, folder, steps, device, None)):
            return 128 + stopped_by
    print(f"\n{RANKS} ranks on {device}: TP=2 x FSDP=2, SP on; {RESUMED} is stopped half way and resumed", flush=True)
    arguments = ["--out", str(out), "--steps", str(steps), "--device", device, "--rank"]
    if code := run_ranks("te_dist.launch.demo", arguments, RANKS):
        return code
    wire = next(folder for stage, recipe, folder in runs if stage != "1-rank" and recipe == RESUMED) / REPORT
    if wire.exists():  # not of a single step: the second is counted
        print(f"\nwhat rank 0 put on the wire with {RESUMED}, {wire.read_text()}")
    where = [folder for _, _, folder in runs]
    title = f"te_dist demo: one process, and {RANKS} ranks with TP x FSDP2 and SP"
    page = write_report(where, out / "report.html", title)
    print(f"\n{as_table(read_runs(where))}\n")
    print(f"{time.perf_counter() - begun:.0f} s")
    picture = page.with_suffix(".png")
    print(f"plot:   {picture}" if picture.exists() else "no plot: pip install 'te-dist[plots]' has matplotlib")
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
