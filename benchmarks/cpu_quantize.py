"""Time of the CPU kernels against the torch reference, per format and plane, in one process.

    python benchmarks/cpu_quantize.py [--rows 4096] [--cols 4096] [--json PATH]

Both run through ``Quantizer.quantize`` on the same tensor with the same number of threads, and must give the same bytes
before anything is timed. Times are medians, the two backends taking turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch

import te_dist
from te_dist import Quantizer, kernels

Row = dict[str, object]


def cases() -> dict[str, Quantizer]:
    nvfp4 = te_dist.NVFP4Quantizer
    return {
        "delayed scaling": te_dist.Float8Quantizer(torch.tensor([64.0]), torch.zeros(1), "e4m3"),
        "current scaling": te_dist.Float8CurrentScalingQuantizer("e4m3"),
        "blockwise 1x128": te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=1),
        "blockwise 128x128": te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=2),
        "MXFP8 1x32": te_dist.MXFP8Quantizer("e4m3"),
        "MXFP8 32x32": te_dist.MXFP8Quantizer("e4m3", with_2d_quantization=True),
        "NVFP4 1x16": nvfp4(),
        "NVFP4 16x16": nvfp4(with_2d_quantization=True),
        "NVFP4 1x16, RHT": nvfp4(with_rht=True),
        "NVFP4 1x16, RHT, stochastic": nvfp4(with_rht=True, stochastic_rounding=True),
    }


def timed_ms(quantizer: Quantizer, x: torch.Tensor, rng: torch.Tensor | None) -> float:
    start = time.perf_counter()
    quantizer.quantize(x, rng_state=rng)
    return (time.perf_counter() - start) * 1e3


def measure(name: str, quantizer: Quantizer, x: torch.Tensor, repeats: int) -> Row:
    stochastic = getattr(quantizer, "stochastic_rounding", False)
    rng = torch.tensor([1, 2]) if stochastic else None
    mine = quantizer.copy().quantize(x, rng_state=rng)
    with te_dist.use_backend("reference"):
        theirs = quantizer.copy().quantize(x, rng_state=rng)
    for buffer, a, b in zip(mine.inner_names(), mine.inner_tensors(), theirs.inner_tensors(), strict=True):
        if not torch.equal(a, b):
            raise AssertionError(f"{name}: kernel and reference differ in {buffer}")
    kernel, reference = [], []
    for _ in range(repeats):
        kernel += [timed_ms(quantizer, x, rng) for _ in range(3)]
        with te_dist.use_backend("reference"):
            reference.append(timed_ms(quantizer, x, rng))
    kernel_ms, reference_ms = (sorted(times)[len(times) // 2] for times in (kernel, reference))
    return {
        "format": name,
        "planes": "both" if quantizer.columnwise else "row",
        "reference_ms": reference_ms,
        "kernel_ms": kernel_ms,
        "ratio": reference_ms / kernel_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    if kernels.backend_name("cpu") == "reference":
        parser.error("there are no CPU kernels to time; te-dist doctor says why")
    torch.manual_seed(0)
    x = torch.randn(options.rows, options.cols, dtype=torch.bfloat16)
    variant = kernels.extension_info()["cpu variant"]
    print(f"{options.rows} x {options.cols} bfloat16, {torch.get_num_threads()} threads, variant {variant}")
    print(f"{'format':<28} {'planes':<6} {'reference ms':>12} {'kernel ms':>10} {'ratio':>7}")
    rows: list[Row] = []
    for planes in ("row", "both"):
        for name, quantizer in cases().items():
            row = measure(name, quantizer.with_usage(columnwise=planes == "both"), x, options.repeats)
            rows.append(row)
            print(
                f"{name:<28} {planes:<6} {row['reference_ms']:>12.1f} {row['kernel_ms']:>10.2f} {row['ratio']:>6.1f}x",
                flush=True,
            )
    print(f"smallest ratio {min(float(str(row['ratio'])) for row in rows):.1f}x")
    if options.json:
        report = {
            "te_dist": te_dist.__version__,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "variant": variant,
            "threads": torch.get_num_threads(),
            "shape": [options.rows, options.cols],
            "dtype": "bfloat16",
            "results": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
