"""``te-dist demo``: a small Llama learns to write Python, in bf16 and in every recipe, from the same start."""

from __future__ import annotations

import argparse
import argparse as _text  # a long piece of Python that every machine has
import contextlib
import dataclasses
import inspect
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import te_dist
from te_dist import recipe
from te_dist.launch.doctor import table
from te_dist.launch.llama import TinyLlama

RECIPES: dict[str, recipe.Recipe | None] = {
    "bf16": None,
    "FP8 delayed scaling": recipe.DelayedScaling(amax_history_len=16),
    "FP8 current scaling": recipe.Float8CurrentScaling(),
    "FP8 blockwise": recipe.Float8BlockScaling(),
    "MXFP8": recipe.MXFP8BlockScaling(),
    "NVFP4": recipe.NVFP4BlockScaling(),
}
BATCH, LENGTH = 8, 64
SETTLED = 10  # the final loss is the mean of so many steps


@dataclasses.dataclass
class Run:
    """The training of one recipe."""

    name: str
    losses: list[float]
    seconds: float

    @property
    def final(self) -> float:
        last = self.losses[-SETTLED:]
        return sum(last) / len(last)


class Progress:
    """A bar on a terminal, and a line per recipe elsewhere."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.is_terminal = enabled and sys.stdout.isatty()

    def start(self, name: str) -> None:
        if self.enabled and not self.is_terminal:
            print(f"  training {name}", flush=True)

    def step(self, name: str, done: int, of: int, loss: float) -> None:
        if self.is_terminal:
            bar = "=" * (30 * done // of)
            end = "\n" if done == of else ""
            print(f"\r  training {name:<20} [{bar:<30}] {done:>4}/{of}  loss {loss:.3f}", end=end, flush=True)


def text() -> Tensor:
    """The source of a standard module as tokens below 128."""
    source = inspect.getsource(_text).encode("ascii", "replace")
    return torch.tensor(list(source), dtype=torch.int64)


def batches(steps: int, device: torch.device) -> list[Tensor]:
    """The same for every recipe: [BATCH, LENGTH + 1] tokens each."""
    tokens = text()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(tokens) - LENGTH - 1, (steps, BATCH), generator=generator)
    return [torch.stack([tokens[s : s + LENGTH + 1] for s in row.tolist()]).to(device) for row in starts]


def train(name: str, chosen: recipe.Recipe | None, data: list[Tensor], progress: Progress) -> Run:
    torch.manual_seed(0)
    model = TinyLlama(length=LENGTH).to(data[0].device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    losses: list[float] = []
    progress.start(name)
    scope = te_dist.autocast(recipe=chosen) if chosen is not None else contextlib.nullcontext()
    start = time.perf_counter()
    for step, tokens in enumerate(data):
        with scope:
            logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress.step(name, step + 1, len(data), losses[-1])
    return Run(name, losses, time.perf_counter() - start)


def train_all(steps: int, device: torch.device, progress: Progress) -> list[Run]:
    data = batches(steps, device)
    return [train(name, chosen, data, progress) for name, chosen in RECIPES.items()]


def as_table(runs: list[Run]) -> str:
    base = runs[0].final
    rows: list[tuple[str, ...]] = [
        (r.name, f"{r.losses[0]:.3f}", f"{r.final:.3f}", f"{r.final - base:+.3f}", f"{r.seconds:.1f} s") for r in runs
    ]
    return table(("recipe", "first loss", "final loss", "against bf16", "time"), rows)


def plot(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for run in runs:
        style = {"color": "black", "linewidth": 2.0} if run is runs[0] else {"linewidth": 1.2}
        axes[0].plot(run.losses, label=run.name, **style)
        axes[1].plot([a - b for a, b in zip(run.losses, runs[0].losses, strict=True)], label=run.name, **style)
    axes[0].set_title("loss", fontsize=11)
    axes[1].set_title("difference from bf16 at each step", fontsize=11)
    for axis in axes:
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle("te_dist: a small Llama, the same start and data in every recipe")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _parallel_rank(rank: int, folder: str, steps: int, device: str) -> None:
    """One of two processes that train a Llama together. gloo, so that both may share a GPU, or have none."""
    import torch.distributed as dist

    from te_dist.launch.tensor_parallel import train as train_parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        seen: list[float] = []
        data = batches(steps, torch.device(device))
        report, _ = train_parallel(RECIPES["MXFP8"], data, lambda step, loss: seen.append(loss))
        if rank == 0:
            print(f"  loss {seen[0]:.3f} -> {seen[-1]:.3f}; what one rank sent in the last step:\n", flush=True)
            print(f"{report}\n", flush=True)
    finally:
        dist.destroy_process_group()


def train_parallel(steps: int, device: torch.device) -> None:
    """Two ranks with tensor and sequence parallelism, and the comm report of one step."""
    import tempfile

    import torch.multiprocessing as mp

    print(f"the same data in MXFP8 over two ranks, tensor and sequence parallel, {steps} steps", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_parallel_rank, args=(folder, steps, device.type), nprocs=2, join=True)


def main(argv: list[str] | None = None) -> int:
    """Train, print the table of losses, save the curves; then train over two ranks."""
    parser = argparse.ArgumentParser(prog="te-dist demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=120, help="training steps per recipe (default 120)")
    parser.add_argument("--parallel-steps", type=int, default=20, help="training steps over two ranks (default 20)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--plot", type=Path, default=Path("demo_output/losses.png"), help="where the plot goes")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps expects at least 1 but got {options.steps}")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no CUDA device; `te-dist doctor` says more")

    print(f"te_dist {te_dist.__version__} on torch {torch.__version__}, {device}")
    print(f"a 2-layer Llama on {BATCH} x {LENGTH} tokens of Python, {options.steps} steps in each recipe\n", flush=True)
    runs = train_all(options.steps, device, Progress())
    print(f"\n{as_table(runs)}\n")
    if options.parallel_steps > 0:
        train_parallel(options.parallel_steps, device)
    try:
        plot(runs, options.plot)
    except ImportError:
        print("matplotlib is not installed, so there is no plot: pip install 'te-dist[plots]'")
    else:
        print(f"plot: {options.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
