"""What a person sees while a run goes on: a bar on a terminal (with rich), lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any


def short(number: float) -> str:
    """1234567 -> 1.23M."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 999.5 or unit == "P":
            return f"{number:.3g}{unit}"
        number /= 1000.0
    raise AssertionError("unreachable")


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def describe(values: dict[str, Any]) -> str:
    """The numbers of one step in a line."""
    parts = [f"loss {values['loss']:.4f}", f"grad {values['grad_norm']:.3f}", f"{short(values['tokens_per_s'])} tok/s"]
    if values.get("mfu") is not None:
        parts.append(f"MFU {100 * values['mfu']:.1f}%")
    parts.append(size_text(values["memory"]))
    return "  ".join(parts)


class Lines:
    """A line per logged step, at most about 40 of them."""

    def __init__(self, steps: int, first: int) -> None:
        self.steps, self.every = steps, max(1, (steps - first + 1) // 40)
        self.first = first

    def step(self, step: int, values: dict[str, Any]) -> None:
        if step % self.every == 0 or step in (self.first, self.steps):
            print(f"step {step:>{len(str(self.steps))}}/{self.steps}  {describe(values)}", flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class Silent(Lines):
    def step(self, step: int, values: dict[str, Any]) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class Bar(Lines):
    """rich's bar; what is said meanwhile stays above it."""

    def __init__(self, steps: int, first: int, name: str = "") -> None:
        super().__init__(steps, first)
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn(f"training {name}".rstrip(), markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self.task = self.progress.add_task("training", total=steps, completed=first - 1, text="")
        self.progress.start()

    def step(self, step: int, values: dict[str, Any]) -> None:
        self.progress.update(self.task, completed=step, text=describe(values))

    def say(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self.progress.stop()


def progress_for(kind: str, steps: int, first: int, enabled: bool, name: str = "") -> Lines:
    """`kind`: "auto" is a bar where rich is installed and the output is a terminal; `name`: what is trained."""
    if not enabled or kind == "none":
        return Silent(steps, first)
    if kind == "bar" or (kind == "auto" and sys.stdout.isatty()):
        try:
            return Bar(steps, first, name)
        except ImportError:
            if kind == "bar":
                print("te-dist: the bar needs rich (pip install rich); lines are shown")
    return Lines(steps, first)
