"""FP8 with a scale for each block: 1x128 and 128x128 with float scales, and MXFP8."""

from __future__ import annotations

from torch import Tensor

from te_dist import reference
from te_dist.formats import DType
from te_dist.kernels.backend import FLOAT_CODE, FP8_CODE, find, pointer, run, store_all
from te_dist.kernels.sources import Matrix, described, taken_by


def quantize_block(
    x: Matrix,
    row: Tensor | None,
    row_scale: Tensor | None,
    col: Tensor | None,
    col_scale: Tensor | None,
    *,
    fp8: DType,
    block_dim: int,
    eps: float,
    power_of_2: bool,
    noop: Tensor | None = None,
) -> None:
    x = taken_by(x, "quantize_block")
    kernel = find(x.device, "quantize_block")
    if kernel is not None:
        run(
            kernel, x.device, *described(x), block_dim, eps, power_of_2, FP8_CODE[fp8],
            pointer(row), pointer(row_scale), pointer(col), pointer(col_scale), pointer(noop),
        )  # fmt: skip
        return
    wanted = {"rowwise": row is not None, "columnwise": col is not None}
    values = reference.quantize_block(x, fp8, block_dim=block_dim, eps=eps, power_of_2=power_of_2, **wanted)
    store_all((row, row_scale, col, col_scale), values, noop)


def dequantize_block(data: Tensor, scale: Tensor, out: Tensor, *, fp8: DType, block_dim: int, columnwise: bool) -> None:
    kernel = find(data.device, "dequantize_block")
    if kernel is not None:
        run(
            kernel, data.device, pointer(data), pointer(scale), columnwise, block_dim, FP8_CODE[fp8],
            pointer(out), FLOAT_CODE[out.dtype], *out.shape,
        )  # fmt: skip
        return
    out.copy_(reference.dequantize_block(data, scale, fp8, block_dim=block_dim, columnwise=columnwise))


def quantize_mxfp8(
    x: Matrix,
    row: Tensor | None,
    row_scale: Tensor | None,
    col: Tensor | None,
    col_scale: Tensor | None,
    *,
    fp8: DType,
    two_d: bool,
    noop: Tensor | None = None,
) -> None:
    x = taken_by(x, "quantize_mxfp8")
    kernel = find(x.device, "quantize_mxfp8")
    if kernel is not None:
        run(
            kernel, x.device, *described(x), two_d, FP8_CODE[fp8],
            pointer(row), pointer(row_scale), pointer(col), pointer(col_scale), pointer(noop),
        )  # fmt: skip
        return
    wanted = {"rowwise": row is not None, "columnwise": col is not None}
    values = reference.quantize_mxfp8(x, fp8, two_d=two_d, **wanted)
    store_all((row, row_scale, col, col_scale), values, noop)


def dequantize_mxfp8(data: Tensor, scale: Tensor, out: Tensor, *, fp8: DType, columnwise: bool) -> None:
    kernel = find(data.device, "dequantize_mxfp8")
    if kernel is not None:
        run(
            kernel, data.device, pointer(data), pointer(scale), columnwise, FP8_CODE[fp8],
            pointer(out), FLOAT_CODE[out.dtype], *out.shape,
        )  # fmt: skip
        return
    out.copy_(reference.dequantize_mxfp8(data, scale, fp8, columnwise=columnwise))
