"""CUDA kernels against the memory limit: time, bytes that must move, and the share of the copy bandwidth measured here.

    python benchmarks/kernels.py [--json PATH] [--shape 16384x8192 ...] [--only TEXT]
    python benchmarks/kernels.py --json PATH --merge PART ...   # reports of some cases into one of all; needs no GPU

Times are medians over CUDA events. Each call of a kernel reads another input, several of them together larger than the
L2 cache. The limit is the device-to-device copy bandwidth (bytes read plus written) of the same run. Cases that name a
norm or an activation quantize its result, made on the fly; "torch.compile" cases do the same with generated kernels.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import te_dist
from te_dist import kernels
from te_dist.producers import (
    GATED_ACTIVATIONS,
    ActivationGradient,
    ActivationOutput,
    NormOutput,
    Plain,
    Producer,
)

L2_BYTES = 64 * 2**20


def median_us(functions: list[Callable[[], object]], repeats: int) -> float:
    """Median time of one call, rotating through `functions`: the mean of theirs, which depend on their data (NVFP4's
    does, on whether amaxes make values ties)."""
    for function in functions:
        function()
    torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in functions]
    for i in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Queue behind a short delay, so that the host's launch time is not part of the measurement.
        torch.cuda._sleep(1_000_000)
        start.record()
        functions[i % len(functions)]()
        end.record()
        end.synchronize()
        times[i % len(functions)].append(start.elapsed_time(end) * 1e3)
    medians = [sorted(of_one)[len(of_one) // 2] for of_one in times if of_one]
    return sum(medians) / len(medians)


def copy_bandwidth(repeats: int) -> float:
    """Bytes per microsecond of a large device-to-device copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_us([lambda: target.copy_(source)], repeats)


class Case(NamedTuple):
    name: str
    bytes: float  # that must move, per element of the quantized matrix
    call: Callable[[Any], object]  # of an input [rows, cols], or of what `prepare` makes of it
    wide: bool = False  # the input is [rows, 2 cols]
    prepare: Callable[[Tensor], Any] | None = None  # not measured


PLANES = (("row", {"columnwise": False}, 1), ("row+column", {}, 2))
COLUMN = ("column", {"rowwise": False}, 1)
MX_BYTES = 1 + 1 / 32
NV_BYTES = 0.5 + 1 / 16


@functools.cache
def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Made once: a call that is measured makes none."""
    return torch.ones(shape, device="cuda", dtype=dtype)


def quantize_cases() -> Iterator[Case]:
    """A bf16 matrix in memory: read once per pass, each plane written once."""
    current, block = te_dist.Float8CurrentScalingQuantizer, te_dist.Float8BlockQuantizer
    mxfp8, nvfp4 = te_dist.MXFP8Quantizer, te_dist.NVFP4Quantizer
    scale, seen = ones(1), torch.zeros(1, device="cuda")
    for label, usage, planes in (*PLANES, COLUMN):
        found = {
            "given scale": (te_dist.Float8Quantizer(scale, seen, "e4m3", **usage), 2 + planes),
            "current scaling": (current("e4m3", **usage), 4 + planes),
            "current scaling e5m2": (current("e5m2", **usage), 4 + planes),
            "blockwise 1x128": (block("e4m3", block_scaling_dim=1, **usage), 2 + planes),
            "blockwise 1x128 e5m2": (block("e5m2", block_scaling_dim=1, **usage), 2 + planes),
            "blockwise 1x128 any scale": (
                block("e4m3", block_scaling_dim=1, force_pow_2_scales=False, **usage),
                2 + planes,
            ),
            "blockwise 128x128": (block("e4m3", block_scaling_dim=2, **usage), 2 + planes),
            "mxfp8 1x32": (mxfp8("e4m3", **usage), 2 + planes * MX_BYTES),
            "mxfp8 1x32 e5m2": (mxfp8("e5m2", **usage), 2 + planes * MX_BYTES),
            "mxfp8 32x32": (mxfp8("e4m3", with_2d_quantization=True, **usage), 2 + planes * MX_BYTES),
            "nvfp4 1x16": (nvfp4(**usage), 4 + planes * NV_BYTES),
            "nvfp4 1x16 RHT": (nvfp4(with_rht=True, **usage), 4 + planes * NV_BYTES),
            "nvfp4 1x16 RHT stochastic": (
                nvfp4(with_rht=True, stochastic_rounding=True, **usage),
                4 + planes * NV_BYTES,
            ),
            "nvfp4 16x16": (nvfp4(with_2d_quantization=True, **usage), 4 + planes * NV_BYTES),
        }
        for name, (quantizer, moved) in found.items():
            yield Case(f"{name}, {label}", moved, lambda x, q=quantizer: q.quantize(x))


def other_cases() -> Iterator[Case]:
    """What else there is to do with a matrix that is in memory, quantized or not."""
    amax = torch.zeros(1, device="cuda")
    yield Case("amax", 2, lambda x: kernels.amax(x, amax))
    formats = {
        "per-tensor fp8": (te_dist.Float8CurrentScalingQuantizer("e4m3"), 1),
        "blockwise 1x128": (te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=1), 1),
        "blockwise 128x128": (te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=2), 1),
        "mxfp8 1x32": (te_dist.MXFP8Quantizer("e4m3"), MX_BYTES),
        "nvfp4 1x16": (te_dist.NVFP4Quantizer(), NV_BYTES),
    }
    for name, (quantizer, stored) in formats.items():
        yield Case(f"dequantize {name}", stored + 2, lambda q: q.dequantize(), prepare=quantizer.quantize)

    def data(x: Tensor) -> Tensor:
        return x.view(torch.uint8)[:, : x.shape[1]].contiguous()

    def nibbles(x: Tensor) -> Tensor:
        return x.view(torch.uint8)[:, : x.shape[1] // 2].contiguous()

    def scales(x: Tensor) -> Tensor:
        return x.view(torch.uint8)[:, : x.shape[1] // 32].contiguous()

    yield Case("fp8 transpose", 2, kernels.transpose_bytes, prepare=data)
    yield Case("fp4 transpose", 1, kernels.transpose_nibbles, prepare=nibbles)
    yield Case("mxfp8 scale swizzle", 2 / 32, kernels.swizzle_scales, prepare=scales)


def norm(x: Tensor, layer_norm: bool) -> NormOutput:
    rows, cols = x.shape
    weight = ones(cols, dtype=torch.bfloat16)
    stats = torch.empty(2, rows, device=x.device)
    centered = (weight, stats[0]) if layer_norm else (None, None)
    return NormOutput(x, weight, *centered, stats[1], eps=1e-5)


def with_sums(made: Producer) -> Producer:
    made.want_column_sums()
    return made


def producer_cases() -> Iterator[Case]:
    """What a norm or an activation makes, quantized; `read` are the bytes that making it once reads per element."""
    grads: dict[tuple[int, int], Tensor] = {}

    def grad(rows: int, cols: int) -> Tensor:
        shape = (rows, cols)
        if shape not in grads:
            grads[shape] = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return grads[shape]

    def activation(name: str, bias: bool = False) -> Callable[[Tensor], Producer]:
        return lambda x: ActivationOutput(x, name, ones(x.shape[1], dtype=torch.bfloat16) if bias else None)

    def gradient(name: str, sums: bool = False, bias: bool = False) -> Callable[[Tensor], Producer]:
        def make(x: Tensor) -> Producer:
            gated = name in GATED_ACTIVATIONS
            dy = grad(x.shape[0], x.shape[1] // 2 if gated else x.shape[1])
            made = ActivationGradient(dy, x, name, ones(x.shape[1], dtype=torch.bfloat16) if bias else None)
            return with_sums(made) if sums else made

        return make

    producers: dict[str, tuple[Callable[[Tensor], Producer], float, bool]] = {
        "rmsnorm": (lambda x: norm(x, False), 2, False),
        "layernorm": (lambda x: norm(x, True), 2, False),
        **{name: (activation(name), 2, False) for name in ("silu", "gelu", "qgelu", "relu", "srelu")},
        "gelu with bias": (activation("gelu", bias=True), 2, False),
        **{name: (activation(name), 4, True) for name in ("swiglu", "geglu", "reglu")},
        "swiglu with bias": (activation("swiglu", bias=True), 4, True),
        **{f"d{name}": (gradient(name), 4, False) for name in ("gelu", "silu", "relu")},
        **{f"d{name}": (gradient(name), 3, False) for name in ("swiglu", "geglu")},
        "dgelu with bias": (gradient("gelu", bias=True), 4, False),
        "dswiglu with bias": (gradient("swiglu", bias=True), 3, False),
        "dgelu and bias gradient": (gradient("gelu", sums=True), 4, False),
        "dswiglu and bias gradient": (gradient("swiglu", sums=True), 3, False),
        "column sums": (lambda x: with_sums(Plain(x)), 2, False),
    }
    scale, seen = ones(1), torch.zeros(1, device="cuda")
    for label, usage, planes in PLANES:
        formats = {
            "given scale": (te_dist.Float8Quantizer(scale, seen, "e4m3", **usage), 1, planes),
            "current scaling": (te_dist.Float8CurrentScalingQuantizer("e4m3", **usage), 2, planes),
            "blockwise 1x128": (te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=1, **usage), 1, planes),
            "blockwise 128x128": (te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=2, **usage), 1, planes),
            "mxfp8 1x32": (te_dist.MXFP8Quantizer("e4m3", **usage), 1, planes * MX_BYTES),
            "nvfp4 1x16 RHT": (te_dist.NVFP4Quantizer(with_rht=True, **usage), 2, planes * NV_BYTES),
        }
        for format, (quantizer, passes, written) in formats.items():
            for name, (make, read, wide) in producers.items():

                def call(x: Tensor, q: te_dist.Quantizer = quantizer, m: Callable[[Tensor], Producer] = make) -> object:
                    made = m(x)
                    return q.quantize_produced(made, made.shape)

                yield Case(f"{name} + {format}, {label}", passes * read + written, call, wide)

    def backward(x: Tensor, layer_norm: bool) -> object:
        rows, cols = x.shape
        stats = ones(rows)
        return kernels.norm_backward(
            grad(rows, cols),
            x,
            ones(cols, dtype=torch.bfloat16),
            stats if layer_norm else None,
            stats,
            zero_centered=False,
            bias_grad=layer_norm,
        )

    yield Case("rmsnorm gradient", 6, lambda x: backward(x, False))
    yield Case("layernorm gradient", 6, lambda x: backward(x, True))


def compiled_cases() -> Iterator[Case]:
    """The same bytes by torch.compile: what a user without these kernels would write."""

    def current(x: Tensor, columns: bool) -> tuple[Tensor, ...]:
        scale = 448.0 / x.abs().amax().float()
        row = (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale_inv = scale.reciprocal()
        return (row, row.t().contiguous(), scale_inv) if columns else (row, scale_inv)

    def rmsnorm(x: Tensor, columns: bool) -> tuple[Tensor, ...]:
        wide = x.float()
        made = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5)
        return current(made.to(x.dtype), columns)

    def swiglu(x: Tensor, columns: bool) -> tuple[Tensor, ...]:
        first, second = x.chunk(2, dim=1)
        return current(torch.nn.functional.silu(first) * second, columns)

    functions = {"": (current, 2, False), "rmsnorm + ": (rmsnorm, 2, False), "swiglu + ": (swiglu, 4, True)}
    for label, _, planes in PLANES:
        for name, (function, read, wide) in functions.items():
            compiled = torch.compile(function, dynamic=False)
            call = lambda x, f=compiled, p=planes: f(x, p == 2)  # noqa: E731
            yield Case(f"torch.compile {name}current scaling, {label}", 2 * read + planes, call, wide)


def measure(
    rows: int, cols: int, bandwidth: float, repeats: int, wanted: Callable[[str], bool]
) -> list[dict[str, object]]:
    count = max(2, -(-L2_BYTES * 3 // (rows * cols * 2)))
    made: dict[int, list[Tensor]] = {}
    results = []
    for case in (*quantize_cases(), *other_cases(), *producer_cases(), *compiled_cases()):
        if not wanted(case.name):
            continue
        width = 2 * cols if case.wide else cols
        if width not in made:
            made[width] = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        kept: list[object] = [None] * count  # the results: each call writes to other memory than the last ones

        def call(i: int, x: Any, case: Case = case, kept: list[object] = kept) -> None:
            kept[i] = case.call(x)

        operands = [x if case.prepare is None else case.prepare(x) for x in made[width]]
        us = median_us([lambda i=i, x=x, c=call: c(i, x) for i, x in enumerate(operands)], repeats)
        del kept, call, operands
        limit = case.bytes * rows * cols / bandwidth
        result = {"kernel": case.name, "shape": [rows, cols], "us": us, "limit_us": limit, "fraction": limit / us}
        print(f"{rows}x{cols:<6} {case.name:<42} {us:8.1f} us   limit {limit:7.1f} us   {100 * limit / us:5.1f} %")
        results.append(result)
    return results


MACHINE = ("device", "torch", "cuda", "python", "te_dist")


def merged(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """`whole` with the cases of `part` in the place of its own. Each keeps the copy bandwidth of its run."""
    for key in MACHINE:
        if whole[key] != part[key]:
            raise ValueError(f"{key}: {part[key]!r} is not {whole[key]!r}, so these figures do not belong together")
    rows = {}
    for report in (whole, part):
        for row in report["results"]:
            bandwidth = {"copy_bandwidth_tb_s": report["copy_bandwidth_tb_s"]}
            rows[row["kernel"], tuple(row["shape"])] = {**bandwidth, **row}
    return {**whole, "results": list(rows.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="*", default=["16384x8192", "4096x4096", "8192x28672"])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name holds one of these")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="reports of some cases, for --json's")
    options = parser.parse_args()
    if options.merge:
        if options.json is None:
            parser.error("--merge needs --json, the report that its cases go into")
        whole = json.loads(options.json.read_text())
        for path in options.merge:
            whole = merged(whole, json.loads(path.read_text()))
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
        return
    if not torch.cuda.is_available():
        parser.error("there is no GPU here, and these are figures of GPU kernels")
    if not getattr(kernels.extension, "has_cuda", False):
        parser.error("te_dist was built without its CUDA kernels: this would time the reference")
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(options.repeats)
    device = torch.cuda.get_device_name()
    print(f"{device}, copy bandwidth {bandwidth / 1e6:.2f} TB/s")
    report: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "te_dist": te_dist.__version__,
        "copy_bandwidth_tb_s": bandwidth / 1e6,
        "results": [],
    }
    for shape in options.shape:
        rows, cols = (int(part) for part in shape.split("x"))
        wanted = functools.partial(holds_one_of, options.only)
        report["results"] += measure(rows, cols, bandwidth, options.repeats, wanted)
        if options.json:  # after each shape: a run that is cut short leaves those that were done
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(report, indent=1) + "\n")


def holds_one_of(parts: list[str], name: str) -> bool:
    return any(part in name for part in parts)


if __name__ == "__main__":
    main()
