"""Products of quantized operands against torch's bf16 matmul, in the same run.

python benchmarks/gemm.py [--json PATH]
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from timing import machine, median_us, save

import te_dist
from te_dist.gemm import dispatch_table, gemm

SHAPES = ((8192, 4096, 4096), (8192, 14336, 4096), (8192, 28672, 8192), (2048, 4096, 4096))  # M, N, K


def formats() -> dict[str, dict[str, te_dist.Quantizer]]:
    block = te_dist.Float8BlockQuantizer
    return {
        "fp8 per tensor": {
            "x": te_dist.Float8CurrentScalingQuantizer("e4m3"),
            "w": te_dist.Float8CurrentScalingQuantizer("e4m3"),
            "dy": te_dist.Float8CurrentScalingQuantizer("e5m2"),
        },
        "fp8 blockwise": {
            "x": block("e4m3", block_scaling_dim=1),
            "w": block("e4m3", block_scaling_dim=2),
            "dy": block("e4m3", block_scaling_dim=1),
        },
        "mxfp8": dict.fromkeys(("x", "w", "dy"), te_dist.MXFP8Quantizer("e4m3")),
    }


def measure(m: int, n: int, k: int, repeats: int) -> list[dict[str, Any]]:
    x, w, dy = (torch.randn(a, b, device="cuda", dtype=torch.bfloat16) for a, b in ((m, k), (n, k), (m, n)))
    plain = {"fprop": lambda: x @ w.t(), "dgrad": lambda: dy @ w, "wgrad": lambda: dy.t() @ x}
    base = {kind: median_us(function, repeats) for kind, function in plain.items()}
    flops = 2.0 * m * n * k
    rows = [
        {"shape": [m, n, k], "format": "bf16", "kind": kind, "us": us, "tflops": flops / us / 1e6, "speedup": 1.0}
        for kind, us in base.items()
    ]
    for name, quantizers in formats().items():
        made = {role: q.quantize({"x": x, "w": w, "dy": dy}[role]) for role, q in quantizers.items()}
        for kind, (a, b) in {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}.items():
            run = functools.partial(gemm, made[a], made[b], kind=kind, out_dtype=torch.bfloat16)
            us = median_us(run, repeats)
            rows.append(
                {
                    "shape": [m, n, k],
                    "format": name,
                    "kind": kind,
                    "us": us,
                    "tflops": flops / us / 1e6,
                    "speedup": base[kind] / us,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here, and these are figures of its matrix products")
    results = [row for shape in SHAPES for row in measure(*shape, options.repeats)]
    dispatch = {f"{row.a} x {row.b}": row.implementation for row in dispatch_table("cuda")}
    save(options.json, {**machine(), "dispatch": dispatch, "results": results})
    for row in results:
        shape = "x".join(map(str, row["shape"]))
        print(
            f"{shape:<18} {row['format']:<15} {row['kind']:<6} {row['us']:8.1f} us {row['tflops']:7.0f} TFLOP/s "
            f"{row['speedup']:5.2f} x bf16"
        )


if __name__ == "__main__":
    main()
