"""Which kernels a LayerNormMLP step consists of, by time: python benchmarks/profile_mlp.py [recipe]"""

from __future__ import annotations

import sys

import torch
from modules import BF16, MLP, RECIPES, step_of, tensors
from torch.profiler import ProfilerActivity, profile

import te_dist


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "current"
    rows, hidden, ffn = MLP
    x, grad = tensors(rows, hidden, hidden)
    options = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}
    module = te_dist.LayerNormMLP(hidden, ffn, recipe=RECIPES[name], **options, **BF16)
    step = step_of(module, x, grad)
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[:24]:
        print(f"{event.device_time_total / 5:9.1f} us  {event.count / 5:4.0f} x  {event.key[:100]}")


if __name__ == "__main__":
    main()
