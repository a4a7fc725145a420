"""CUDA kernels against the memory limit: time, bytes that must move, and the share of the copy bandwidth measured here.

    python benchmarks/kernels.py [--json PATH] [--shape 16384x8192 ...]

Times are medians over CUDA events. Each call of a kernel reads another input, several of them together larger than the
L2 cache. The limit is the device-to-device copy bandwidth (bytes read plus written) of the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import te_dist

L2_BYTES = 64 * 2**20


def median_us(functions: list[Callable[[], object]], repeats: int) -> float:
    """Median time of one call, rotating through `functions`."""
    for function in functions:
        function()
    torch.cuda.synchronize()
    times = []
    for i in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Queue behind a short delay, so that the host's launch time is not part of the measurement.
        torch.cuda._sleep(200_000)
        start.record()
        functions[i % len(functions)]()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def copy_bandwidth(repeats: int) -> float:
    """Bytes per microsecond of a large device-to-device copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_us([lambda: target.copy_(source)], repeats)


def cases() -> dict[str, tuple[te_dist.Quantizer, float]]:
    """Quantizer and bytes per element that must move (bf16 input read once per pass, each plane written once)."""
    found: dict[str, tuple[te_dist.Quantizer, float]] = {}
    for label, usage, planes in (("row", {"columnwise": False}, 1), ("row+column", {}, 2)):
        found[f"current scaling, {label}"] = te_dist.Float8CurrentScalingQuantizer("e4m3", **usage), 4 + planes
        for dim, name in ((1, "1x128"), (2, "128x128")):
            quantizer = te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=dim, **usage)
            found[f"blockwise {name}, {label}"] = quantizer, 2 + planes
        found[f"mxfp8 1x32, {label}"] = te_dist.MXFP8Quantizer("e4m3", **usage), 2 + planes * (1 + 1 / 32)
        nvfp4 = te_dist.NVFP4Quantizer(with_rht=True, **usage)
        found[f"nvfp4 1x16 RHT, {label}"] = nvfp4, 4 + planes * (0.5 + 1 / 16)
    return found


def measure(rows: int, cols: int, bandwidth: float, repeats: int) -> list[dict[str, object]]:
    count = max(2, -(-L2_BYTES * 3 // (rows * cols * 2)))
    inputs = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    results = []
    for name, (quantizer, bytes_per_element) in cases().items():
        outs = [quantizer.make_empty((rows, cols), device="cuda") for _ in inputs]

        def call(x: Tensor, out: te_dist.QuantizedStorage, q: te_dist.Quantizer = quantizer) -> object:
            return q.quantize(x, out=out)

        functions = [lambda x=x, out=out, c=call: c(x, out) for x, out in zip(inputs, outs, strict=True)]
        us = median_us(functions, repeats)
        moved = bytes_per_element * rows * cols
        results.append(
            {
                "kernel": name,
                "shape": [rows, cols],
                "us": us,
                "limit_us": moved / bandwidth,
                "fraction": moved / bandwidth / us,
            }
        )
        del outs
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="*", default=["16384x8192", "4096x4096"])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bandwidth = copy_bandwidth(options.repeats)
    results = []
    for shape in options.shape:
        rows, cols = (int(part) for part in shape.split("x"))
        results += measure(rows, cols, bandwidth, options.repeats)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "te_dist": te_dist.__version__,
        "copy_bandwidth_tb_s": bandwidth / 1e6,
        "results": results,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['device']}, copy bandwidth {report['copy_bandwidth_tb_s']:.2f} TB/s")
    for r in results:
        rows, cols = r["shape"]
        print(
            f"{rows}x{cols:<6} {r['kernel']:<28} {r['us']:8.1f} us   limit {r['limit_us']:7.1f} us   "
            f"{100 * r['fraction']:5.1f} %"
        )


if __name__ == "__main__":
    main()
