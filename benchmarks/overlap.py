"""What overlap costs and hides, on one GPU: products beside copies of a ring's size, and products cut into chunks.

    python benchmarks/overlap.py [--json PATH]

Copies between GPUs run on copy engines, and one GPU alone has nobody to copy from. Copies within a device would not do:
they run on the SMs (seen: they wait for a kernel that holds every SM). So the copy engines are kept busy with copies of
the ring's size from pinned memory of the host, beside the products of so many layers that these take longer.

Exposed time is what products and copies together take longer than the products alone, as a part of what the copies
take alone: the median of rounds in which both have their turn, so that the clock's drift meets both.
"""

from __future__ import annotations

import argparse
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


def copies(size: int) -> Callable[[], None]:
    """The R - 1 copies that one rank of a ring receives."""
    sources = [torch.empty(size, dtype=torch.uint8).pin_memory() for _ in range(RANKS - 1)]
    targets = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(RANKS - 1)]

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
    copy = copies(size)
    alone = median_us(functools.partial(on, stream, copy), repeats)
    layers = math.ceil(ROOM * alone / ring)

    def products() -> None:
        for _ in range(layers):
            chunked(RANKS)

    ways = (
        products,
        functools.partial(beside, products, lambda: None, stream),
        functools.partial(beside, products, copy, stream),
    )
    rounds = [[median_us(way, max(1, repeats // 2)) for way in ways] for _ in range(ROUNDS)]
    only, empty, together = (statistics.median(times) for times in zip(*rounds, strict=True))
    exposed = statistics.median(together - only for only, _, together in rounds)
    results.append({
        "shape": name, "format": form, "what": "copies", "bytes": size * (RANKS - 1), "layers": layers,
        "products_us": only, "beside_nothing_us": empty, "copies_us": alone, "together_us": together,
        "exposed_us": exposed, "exposed": exposed / alone, "gigabytes_per_second": size * (RANKS - 1) / alone / 1e3,
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
            print(f"{row['shape']:<14} {row['format']:<5} {row['what']:<8} products {row['products_us']:8.1f} us "
                  f"({row['beside_nothing_us']:.1f} beside nothing), "
                  f"copies {row['copies_us']:8.1f} us ({row['gigabytes_per_second']:.0f} GB/s), together "
                  f"{row['together_us']:8.1f} us: {100 * row['exposed']:5.1f} % of the copies exposed")  # fmt: skip


if __name__ == "__main__":
    main()
