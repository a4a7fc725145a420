"""Time of the CPU kernels against the reference, per format and plane, in one process.

    python benchmarks/cpu_quantize.py [--rows 4096] [--cols 4096] [--json PATH]

Both sides start from the same tensor, use the same number of threads and allocate what they return. Where
only the row plane is wanted, the reference computes only the row plane, so the ratio compares equal work.
Current scaling and NVFP4 include the amax over the tensor. The kernels' result is compared with the
reference's before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_dist import kernels, reference
from te_dist.formats import BLOCK_SIZE, MXFP8_BLOCK_SIZE, DType

FP8 = DType.kFloat8E4M3
Buffers = tuple[Tensor, ...]
Run = Callable[[], Buffers]


@dataclass(frozen=True)
class Case:
    """One format and one choice of planes: the two functions compute the same buffers."""

    format: str
    planes: str
    reference: Run
    kernel: Run


@dataclass(frozen=True)
class Result:
    format: str
    planes: str
    reference_ms: float
    kernel_ms: float
    ratio: float


def _like(layout: Buffers) -> list[Tensor]:
    return [torch.empty_like(buffer) for buffer in layout]


def _padded(planes: list[Tensor]) -> list[Tensor | None]:
    """Row plane alone: no column data, no column scale."""
    return [*planes, None, None] if len(planes) == 2 else list(planes)


# ------------------------------------------------------------------------------------------------- per tensor
def _row_cast(x: Tensor, scale: Tensor) -> Buffers:
    return reference.encode_fp8(x.float() * scale, FP8), reference._reciprocal(scale)


def per_tensor_case(x: Tensor, both: bool, current: bool) -> Case:
    given = torch.tensor([37.5])
    options: dict[str, Any] = {"eps": 0.0, "power_of_2": False}

    def by_reference() -> Buffers:
        scale = given
        if current:
            overflow = reference.FLOAT_MAX
            scale = reference.scale_from_amax(reference.amax(x), FP8, overflow=overflow, **options)
        return reference.cast_scaled(x, scale, FP8) if both else _row_cast(x, scale)

    layout = by_reference()

    def by_kernel() -> Buffers:
        buffers = _like(layout)
        row, col, scale_inv = buffers if both else (buffers[0], None, buffers[1])
        if current:
            amax = torch.empty(1)
            kernels.amax(x, amax)
            kernels.cast_current(x, amax, row, col, scale_inv, fp8=FP8, **options)
        else:
            kernels.cast_scaled(x, given, row, col, scale_inv, fp8=FP8)
        return tuple(buffers)

    name = "current scaling" if current else "delayed scaling"
    return Case(name, "both" if both else "row", by_reference, by_kernel)


# ------------------------------------------------------------------------------------------------- blockwise
def block_case(x: Tensor, both: bool, block_dim: int) -> Case:
    options: dict[str, Any] = {"eps": 0.0, "power_of_2": True}

    def by_reference() -> Buffers:
        if both:
            return reference.quantize_block(x, FP8, block_dim=block_dim, **options)
        tile_rows = BLOCK_SIZE if block_dim == 2 else 1
        data, scale = reference._block_plane(x, tile_rows, FP8, 0.0, True)
        return data, reference._pad_inner(scale if block_dim == 2 else scale.t())

    layout = tuple(buffer.contiguous() for buffer in by_reference())

    def by_kernel() -> Buffers:
        buffers = _like(layout)
        kernels.quantize_block(x, *_padded(buffers), fp8=FP8, block_dim=block_dim, **options)
        return tuple(buffers)

    name = "blockwise 128x128" if block_dim == 2 else "blockwise 1x128"
    return Case(name, "both" if both else "row", by_reference, by_kernel)


def _mxfp8_row(x: Tensor, two_d: bool) -> Buffers:
    """The first half of reference.quantize_mxfp8; the sizes of this benchmark leave nothing to pad."""
    tile = (MXFP8_BLOCK_SIZE if two_d else 1, MXFP8_BLOCK_SIZE)
    code = reference.e8m0_from_amax(reference._tile_amax(x, *tile), FP8)
    factor = reference._spread(reference.e8m0_encode_factor(code), *tile, x.shape)
    return reference.encode_fp8(x.float() * factor, FP8), code.repeat_interleave(tile[0], 0)


def mxfp8_case(x: Tensor, both: bool, two_d: bool) -> Case:
    def by_reference() -> Buffers:
        return reference.quantize_mxfp8(x, FP8, two_d=two_d) if both else _mxfp8_row(x, two_d)

    layout = by_reference()

    def by_kernel() -> Buffers:
        buffers = _like(layout)
        kernels.quantize_mxfp8(x, *_padded(buffers), fp8=FP8, two_d=two_d)
        return tuple(buffers)

    name = "MXFP8 32x32" if two_d else "MXFP8 1x32"
    return Case(name, "both" if both else "row", by_reference, by_kernel)


# ------------------------------------------------------------------------------------------------- nvfp4
def nvfp4_case(
    x: Tensor, both: bool, name: str, *, two_d: bool = False, rht: bool = False, random: bool = False
) -> Case:
    rng_state = torch.tensor([1234, 0]) if random else None
    options: dict[str, Any] = {"two_d": two_d, "with_rht": rht, "random_signs": rht, "rng_state": rng_state}
    transform: dict[str, Any] = {"with_rht": rht and both, "random_signs": rht}

    def by_reference() -> Buffers:
        amaxes = reference.amax_nvfp4(x, **transform)
        planes = reference.quantize_nvfp4(x, *amaxes, **options, columnwise=both)
        return tuple(plane for plane in planes if plane is not None)

    layout = by_reference()

    def by_kernel() -> Buffers:
        amaxes = torch.empty(1), torch.empty(1)
        kernels.amax_nvfp4(x, amaxes[0], amaxes[1] if both else None, **transform)
        buffers = _like(layout)
        kernels.quantize_nvfp4(x, *amaxes, *_padded(buffers), **options)
        return tuple(buffers)

    return Case(name, "both" if both else "row", by_reference, by_kernel)


def all_cases(x: Tensor) -> list[Callable[[], Case]]:
    """Built one at a time: each holds reference results."""
    cases: list[Callable[[], Case]] = []
    for both in (False, True):
        cases += [
            partial(per_tensor_case, x, both, current=True),
            partial(per_tensor_case, x, both, current=False),
            partial(block_case, x, both, block_dim=1),
            partial(block_case, x, both, block_dim=2),
            partial(mxfp8_case, x, both, two_d=False),
            partial(mxfp8_case, x, both, two_d=True),
            partial(nvfp4_case, x, both, "NVFP4 1x16"),
            partial(nvfp4_case, x, both, "NVFP4 16x16", two_d=True),
            partial(nvfp4_case, x, both, "NVFP4 1x16, stochastic", random=True),
        ]
    # The transform touches the column plane alone.
    cases.append(partial(nvfp4_case, x, True, "NVFP4 1x16, RHT", rht=True))
    cases.append(partial(nvfp4_case, x, True, "NVFP4 1x16, RHT, stochastic", rht=True, random=True))
    return cases


# ------------------------------------------------------------------------------------------------- timing
def median_ms(run: Run, repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def measure(case: Case, repeats: int) -> Result:
    for wanted, got in zip(case.reference(), case.kernel(), strict=True):
        if not torch.equal(wanted, got):
            raise SystemExit(f"{case.format}, {case.planes}: the kernel differs from the reference")
    reference_ms = median_ms(case.reference, repeats)
    kernel_ms = median_ms(case.kernel, 5 * repeats)
    return Result(case.format, case.planes, reference_ms, kernel_ms, reference_ms / kernel_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="a multiple of 128")
    parser.add_argument("--cols", type=int, default=4096, help="a multiple of 128")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of the reference; kernels: 5x")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    if args.rows % 128 or args.cols % 128:
        parser.error(f"--rows and --cols expect multiples of 128 but got {args.rows} and {args.cols}")
    if kernels.backend_name("cpu") != "cpu":
        raise SystemExit(f"the CPU kernels are not available: {kernels.extension_info()}")

    torch.manual_seed(0)
    x = torch.randn(args.rows, args.cols).to(getattr(torch, args.dtype))
    variant, threads = kernels.extension_info()["cpu variant"], torch.get_num_threads()
    print(f"{args.rows} x {args.cols} {args.dtype}, {threads} threads, variant {variant}")
    print(f"{'format':<28} {'planes':<6} {'reference ms':>12} {'kernel ms':>10} {'ratio':>7}")
    results = []
    for build in all_cases(x):
        result = measure(build(), args.repeats)
        results.append(result)
        print(
            f"{result.format:<28} {result.planes:<6} {result.reference_ms:>12.1f} {result.kernel_ms:>10.2f} "
            f"{result.ratio:>6.1f}x"
        )
    print(f"smallest ratio {min(result.ratio for result in results):.1f}x")
    if args.json:
        machine = {"rows": args.rows, "cols": args.cols, "dtype": args.dtype, "threads": threads}
        document = {**machine, "variant": variant, "results": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
