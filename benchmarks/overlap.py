"""What overlap costs and hides, on one GPU: products beside copies of a ring's size, and products cut into chunks.

    python benchmarks/overlap.py [--json PATH]

Copies between GPUs run on copy engines, and one GPU alone has nobody to copy from. So its copy engines are kept busy in
other ways: with copies within the device that are asked to leave the SMs alone ("engine": cudaMemcpyBatchAsync with
PreferOverlapWithCompute), and with copies from pinned memory of the host ("host", which only copy engines do). For
comparison, copies within the device as torch does them ("device", where the driver may use SMs). Copies that take
longer than one layer's products run beside those of several layers.

Exposed time is what products and copies together take longer than the products alone, as a part of what the copies
take alone: the median of rounds in which both have their turn, so that the clock's drift meets both.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import machine, median_us, save

import te_dist
from te_dist.gemm import gemm

RANKS = 8
TOKENS = 8192
ROUNDS = 7
ROOM = 1.5  # how much longer than the copies the products beside them take at least
# fc1 and fc2 of one layer under TP 8: K and N of this rank's product; "gather": x travels, else y does.
SHAPES = {
    "llama 8B fc1": (4096, 2 * 14336 // RANKS, "gather"),
    "llama 8B fc2": (14336 // RANKS, 4096, "reduce"),
    "llama 70B fc1": (8192, 2 * 28672 // RANKS, "gather"),
    "llama 70B fc2": (28672 // RANKS, 8192, "reduce"),
}


def operands(k: int, n: int, form: str) -> tuple[Callable[[int, int], Any], Any]:
    """Some rows of x as the product reads them, and the weight."""
    x = torch.randn(TOKENS, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    if form == "bf16":
        return (lambda first, rows: x[first : first + rows]), w
    quantizer = te_dist.Float8CurrentScalingQuantizer("e4m3", columnwise=False)
    chunks: dict[tuple[int, int], Any] = {}

    def rows_of(first: int, rows: int) -> Any:
        if (first, rows) not in chunks:
            chunks[first, rows] = quantizer.quantize(x[first : first + rows])
        return chunks[first, rows]

    return rows_of, quantizer.quantize(w)


def product(x: Any, w: Any) -> torch.Tensor:
    return gemm(x, w, kind="fprop", out_dtype=torch.bfloat16)


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("locations", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    ]  # fmt: skip


IN_STREAM_ORDER, PREFER_OVERLAP = 1, 1


def engine_copies(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], None]:
    """Copies within the device on its copy engines. Raises where CUDA has no such call."""
    function = ctypes.CDLL("libcudart.so.13").cudaMemcpyBatchAsync
    count = len(targets)
    pointers = [(ctypes.c_void_p * count)(*[t.data_ptr() for t in group]) for group in (targets, sources)]
    sizes = (ctypes.c_size_t * count)(*[t.numel() for t in targets])
    attributes, first = _Attributes(IN_STREAM_ORDER, (0, 0, 0, 0), PREFER_OVERLAP), ctypes.c_size_t(0)

    def run() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = function(*pointers, sizes, ctypes.c_size_t(count), ctypes.byref(attributes), ctypes.byref(first),
                         ctypes.c_size_t(1), stream)  # fmt: skip
        if error:
            raise RuntimeError(f"cudaMemcpyBatchAsync: error {error}")

    return run


def copies(kind: str, size: int) -> Callable[[], None]:
    """The R - 1 copies that one rank of a ring receives."""
    if kind == "host":
        sources = [torch.empty(size, dtype=torch.uint8).pin_memory() for _ in range(RANKS - 1)]
    else:
        sources = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(RANKS - 1)]
    targets = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(RANKS - 1)]
    if kind == "engine":
        return engine_copies(targets, sources)

    def run() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    return run


def on(stream: torch.cuda.Stream, work: Callable[[], object]) -> None:
    beside(lambda: None, work, stream)


def beside(first: Callable[[], object], second: Callable[[], object], stream: torch.cuda.Stream) -> None:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second()
    first()
    torch.cuda.current_stream().wait_stream(stream)


def measure(name: str, form: str, repeats: int) -> list[dict[str, Any]]:
    k, n, moves = SHAPES[name]
    rows_of, w = operands(k, n, form)
    chunk = TOKENS // RANKS
    width = k if moves == "gather" else n
    size = chunk * width * (1 if form == "fp8" and moves == "gather" else 2)

    def chunked(count: int) -> None:
        rows = TOKENS // count
        for index in range(count):
            product(rows_of(index * rows, rows), w)

    whole = median_us(functools.partial(chunked, 1), repeats)
    results = []
    for count in (2, 4, RANKS):
        us = median_us(functools.partial(chunked, count), repeats)
        results.append({"shape": name, "format": form, "what": "chunks", "chunks": count, "us": us,
                        "efficiency": whole / us})  # fmt: skip
    ring = results[-1]["us"]
    stream = torch.cuda.Stream(priority=-1)
    for kind in ("engine", "device", "host"):
        copy = copies(kind, size)
        alone = median_us(functools.partial(on, stream, copy), repeats)
        layers = max(1, math.ceil(ROOM * alone / ring))

        def products(layers: int = layers) -> None:
            for _ in range(layers):
                chunked(RANKS)

        both = functools.partial(beside, products, copy, stream)
        rounds = [(median_us(products, repeats // 2), median_us(both, repeats // 2)) for _ in range(ROUNDS)]
        exposed = statistics.median(together - only for only, together in rounds)
        results.append({
            "shape": name, "format": form, "what": f"copies: {kind}", "bytes": size * (RANKS - 1), "layers": layers,
            "products_us": statistics.median(only for only, _ in rounds), "copies_us": alone,
            "together_us": statistics.median(together for _, together in rounds), "exposed_us": exposed,
            "exposed": exposed / alone, "gigabytes_per_second": size * (RANKS - 1) / alone / 1e3,
        })  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    results = [row for name in SHAPES for form in ("bf16", "fp8") for row in measure(name, form, options.repeats)]
    save(options.json, {**machine(), "tokens": TOKENS, "ranks": RANKS, "results": results})
    for row in results:
        if row["what"] == "chunks":
            print(f"{row['shape']:<14} {row['format']:<5} {row['chunks']} chunks: {row['us']:8.1f} us, "
                  f"{100 * row['efficiency']:5.1f} % of one product's speed")  # fmt: skip
        else:
            print(f"{row['shape']:<14} {row['format']:<5} {row['what']:<15} products {row['products_us']:8.1f} us, "
                  f"copies {row['copies_us']:8.1f} us ({row['gigabytes_per_second']:.0f} GB/s), together "
                  f"{row['together_us']:8.1f} us: {100 * row['exposed']:5.1f} % of the copies exposed")  # fmt: skip


if __name__ == "__main__":
    main()
