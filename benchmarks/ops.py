"""Fused chains of te_dist.ops against the modules they equal, in the same run: forward + backward.

    python benchmarks/ops.py [--json PATH]

time    of RMSNorm, Linear, SwiGLU, Linear in an ops.Sequential, relative to LayerNormMLP (1.00), as a training loop
        sees it and on the device alone; the two are measured in turns, so that the clock's drift meets both
host    microseconds of host time of the same pair at a size where nothing else counts
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from modules import BF16, MLP, RECIPES, step_of, tensors
from timing import host_us, machine, median_us, save, wall_us
from torch import nn

import te_dist
from te_dist import ops

TINY = (128, 256, 256)  # M, hidden, ffn
ROUNDS = 3
CASES: dict[str, te_dist.Recipe | None] = {"none": None, **RECIPES}


def pair(name: str, hidden: int, ffn: int) -> dict[str, nn.Module]:
    """The module and the chain, with the same weights."""
    chosen = CASES[name]
    options: dict[str, Any] = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}
    module = te_dist.LayerNormMLP(hidden, ffn, recipe=chosen, **options, **BF16)
    chain = ops.Sequential(
        ops.RMSNorm(hidden, **BF16),
        ops.Linear(hidden, 2 * ffn, bias=False, recipe=chosen, **BF16),
        ops.SwiGLU(),
        ops.Linear(ffn, hidden, bias=False, recipe=chosen, **BF16),
    )
    with torch.no_grad():
        for mine, theirs in zip(chain.parameters(), module.parameters(), strict=True):
            mine.copy_(theirs)
    return {"module": module, "chain": chain}


def compared(steps: dict[str, Any], measure: Any) -> dict[str, float]:
    """The best of several rounds in which each has its turn."""
    times = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name] = min(times[name], measure(step))
    return times


def same(modules: dict[str, nn.Module], x: torch.Tensor) -> bool:
    with torch.no_grad():
        results = [module(x) for module in modules.values()]
    return torch.equal(*results)


def large(repeats: int) -> list[dict[str, Any]]:
    m, hidden, ffn = MLP
    x, grad = tensors(m, hidden, hidden)
    results = []
    for name in CASES:
        modules = pair(name, hidden, ffn)
        equal = same(modules, x)
        steps = {kind: step_of(module, x, grad) for kind, module in modules.items()}
        results.append(
            {
                "recipe": name,
                "shape": [m, hidden, ffn],
                "equal": equal,
                "wall_us": compared(steps, lambda step: wall_us(step, 5 * repeats)),
                "device_us": compared(steps, lambda step: median_us(step, repeats)),
            }
        )
        del modules, steps
        torch.cuda.empty_cache()
    return results


def tiny() -> list[dict[str, Any]]:
    m, hidden, ffn = TINY
    x, grad = tensors(m, hidden, hidden)
    results = []
    for name in CASES:
        steps = {kind: step_of(module, x, grad) for kind, module in pair(name, hidden, ffn).items()}
        results.append({"recipe": name, "shape": list(TINY), "host_us": compared(steps, host_us)})
    return results


def ratio(times: dict[str, float]) -> float:
    return times["chain"] / times["module"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    report = {**machine(), "host": tiny(), "results": large(options.repeats)}
    save(options.json, report)
    print(f"{report['device']}: chain / LayerNormMLP")
    for row in report["host"]:
        print(f"   {row['recipe']:<8} host {row['host_us']['chain']:7.1f} us  {ratio(row['host_us']):.3f}")
    for row in report["results"]:
        print(
            f"   {row['recipe']:<8} wall {row['wall_us']['chain']:9.1f} us  {ratio(row['wall_us']):.3f}   "
            f"device {row['device_us']['chain']:9.1f} us  {ratio(row['device_us']):.3f}   equal: {row['equal']}"
        )


if __name__ == "__main__":
    main()
