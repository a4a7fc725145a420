"""te_dist's modules against bf16 torch modules in the same run: forward + backward.

    python benchmarks/modules.py [--json PATH]

time    of one step relative to bf16 (1.00), weights quantized anew in every step, as a training loop sees it
floor   products at the fp8 rate measured here, plus the bytes of the quantize kernels at the copy bandwidth
host    microseconds of host time of a layer so small that nothing else counts
memory  peak of a forward + backward above what inputs, parameters and gradients take
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import host_us, machine, median_us, save, wall_us
from torch import Tensor, nn

import te_dist
from te_dist import recipe

LINEARS = ((8192, 4096, 4096), (2048, 4096, 4096), (8192, 4096, 14336), (8192, 8192, 28672))  # M, K, N
MLP = (8192, 4096, 14336)  # M, hidden, ffn
RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


class PlainMLP(nn.Module):
    """The bf16 baseline: torch's own RMSNorm, SiLU and Linear."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-5, **BF16)
        self.fc1 = nn.Linear(hidden, 2 * ffn, bias=False, **BF16)
        self.fc2 = nn.Linear(ffn, hidden, bias=False, **BF16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return self.fc2(nn.functional.silu(gate) * up)


def step_of(module: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Callable[[], None]:
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []

    def step() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        module(x).backward(grad)

    return step


def tensors(rows: int, cols: int, out: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, cols, **BF16, requires_grad=True), torch.randn(rows, out, **BF16)


def fp8_rate(repeats: int) -> float:
    """FLOP per microsecond of a large per-tensor FP8 product."""
    from te_dist.gemm import gemm

    quantizer = te_dist.Float8CurrentScalingQuantizer("e4m3")
    a, b = (quantizer.quantize(torch.randn(8192, 8192, **BF16)) for _ in range(2))
    us = median_us(lambda: gemm(a, b, kind="fprop", out_dtype=torch.bfloat16), repeats)
    return 2.0 * 8192**3 / us


def copy_rate(repeats: int) -> float:
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_us(lambda: target.copy_(source), repeats)


def floor_us(m: int, k: int, n: int, flops: float, bandwidth: float, delayed: bool) -> float:
    """Three products and the quantization of x, w and dy, each with both planes."""
    per_element = 4.0 if delayed else 6.0
    elements = m * k + k * n + m * n
    return 3 * 2.0 * m * k * n / flops + per_element * elements / bandwidth


def compare(make: dict[str, nn.Module], x: Tensor, grad: Tensor, repeats: int) -> dict[str, dict[str, float]]:
    rows = {}
    for name, module in make.items():
        step = step_of(module, x, grad)
        rows[name] = {"device_us": median_us(step, repeats), "wall_us": wall_us(step, 5 * repeats)}
    base = rows["bf16"]
    for row in rows.values():
        row["relative"] = row["wall_us"] / base["wall_us"]
        row["relative_device"] = row["device_us"] / base["device_us"]
    return rows


def linears(repeats: int, flops: float, bandwidth: float) -> list[dict[str, Any]]:
    results = []
    for m, k, n in LINEARS:
        x, grad = tensors(m, k, n)
        modules: dict[str, nn.Module] = {"bf16": nn.Linear(k, n, bias=False, **BF16)}
        for name, chosen in RECIPES.items():
            modules[name] = te_dist.Linear(k, n, bias=False, recipe=chosen, **BF16)
        for name in ("bf16", "current"):
            modules[f"{name} compiled"] = torch.compile(modules[name], fullgraph=True)
        rows = compare(modules, x, grad, repeats)
        floors = {
            kind: floor_us(m, k, n, flops, bandwidth, kind == "delayed") / rows["bf16"]["device_us"]
            for kind in ("current", "delayed")
        }
        results.append({"case": "Linear", "shape": [m, k, n], "rows": rows, "floor": floors})
    return results


def peak_mib(step: Callable[[], None]) -> float:
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def mlp(repeats: int) -> dict[str, Any]:
    m, hidden, ffn = MLP
    x, grad = tensors(m, hidden, hidden)
    rows: dict[str, Any] = {}
    peaks: dict[str, float] = {}
    for name in ("bf16", "bf16 compiled", *RECIPES, "current compiled"):
        kind = name.removesuffix(" compiled")
        module: nn.Module
        if kind == "bf16":
            module = PlainMLP(hidden, ffn)
        else:
            options: dict[str, Any] = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}
            module = te_dist.LayerNormMLP(hidden, ffn, recipe=RECIPES[kind], **options, **BF16)
        run = torch.compile(module, fullgraph=True) if name != kind else module
        step = step_of(run, x, grad)
        rows[name] = {"device_us": median_us(step, repeats), "wall_us": wall_us(step, 5 * repeats)}
        peaks[name] = peak_mib(step)
        del run, module, step
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    for row in rows.values():
        row["relative"] = row["wall_us"] / rows["bf16"]["wall_us"]
        row["relative_device"] = row["device_us"] / rows["bf16"]["device_us"]
    return {"case": "RMSNorm + SwiGLU MLP", "shape": [m, hidden, ffn], "rows": rows, "peak_mib": peaks}


def host() -> dict[str, Any]:
    x, grad = tensors(128, 256, 256)
    times = {"bf16": host_us(step_of(nn.Linear(256, 256, **BF16), x, grad))}
    for name, chosen in RECIPES.items():
        times[name] = host_us(step_of(te_dist.Linear(256, 256, recipe=chosen, **BF16), x, grad))
    layer = te_dist.Linear(256, 256, recipe=RECIPES["current"], **BF16)
    times["current, weight kept"] = host_us(step_of(lambda t: layer(t, is_first_microbatch=False), x, grad))
    return {"case": "Linear 128x256x256", "host_us": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    tiny = host()
    flops, bandwidth = fp8_rate(options.repeats), copy_rate(options.repeats)
    results = [*linears(options.repeats, flops, bandwidth), mlp(options.repeats)]
    report = {**machine(), "fp8_tflops": flops / 1e6, "copy_tb_s": bandwidth / 1e6, "host": tiny, "results": results}
    save(options.json, report)
    print(f"{report['device']}: fp8 {flops / 1e6:.0f} TFLOP/s, copy {bandwidth / 1e6:.2f} TB/s")
    print("host us:", {name: round(us) for name, us in tiny["host_us"].items()})
    for result in results:
        shape = "x".join(map(str, result["shape"]))
        print(f"{result['case']} {shape}  floor { {k: round(v, 3) for k, v in result.get('floor', {}).items()} }")
        for name, row in result["rows"].items():
            peak = f"  peak {result['peak_mib'][name]:.0f} MiB" if "peak_mib" in result else ""
            print(
                f"   {name:<18} {row['wall_us']:9.1f} us wall  {row['device_us']:9.1f} us device   "
                f"{row['relative']:.3f} ({row['relative_device']:.3f}){peak}"
            )


if __name__ == "__main__":
    main()
