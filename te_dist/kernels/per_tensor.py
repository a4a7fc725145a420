"""FP8 with one scale for a tensor: its amax, casts, delayed scaling's step."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import reference
from te_dist.formats import DType
from te_dist.kernels.backend import (
    AMAX_ROOM,
    FLOAT_CODE,
    FP8_CODE,
    find,
    is_shapes_only,
    pointer,
    run,
    store,
    store_all,
)
from te_dist.kernels.sources import Matrix, described, fuses, materialize, taken_by
from te_dist.producers import Plain, Producer


def amax(x: Matrix, out: Tensor, *, accumulate: bool = False, noop: Tensor | None = None) -> None:
    """out [1] <- max|x|, or the maximum of that and out."""
    x = taken_by(x, "amax")
    kernel = find(x.device, "amax")
    if kernel is not None:
        run(kernel, x.device, *described(x, column_sums=False), pointer(out), accumulate, pointer(noop))
        return
    value = reference.amax(x)
    store(out, reference._canonical_amax(torch.maximum(out, value)) if accumulate else value, noop)


def cast_scaled(
    x: Matrix,
    scale: Tensor,
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
    *,
    fp8: DType,
    amax: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """amax [1], where given, is raised to max|x| on the way."""
    x = taken_by(x, "cast_scaled")
    kernel = find(x.device, "cast_scaled")
    if kernel is not None:
        run(
            kernel, x.device, *described(x), pointer(scale), FP8_CODE[fp8],
            pointer(row), pointer(col), pointer(scale_inv), pointer(amax), pointer(noop),
        )  # fmt: skip
        return
    if amax is not None:
        store(amax, reference._canonical_amax(torch.maximum(amax, reference.amax(x))), noop)
    values = reference.cast_scaled(x, scale, fp8, rowwise=row is not None, columnwise=col is not None)
    store_all((row, col, scale_inv), values, noop)


def cast_current(
    x: Matrix,
    amax: Tensor,
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
    *,
    fp8: DType,
    eps: float,
    power_of_2: bool,
    noop: Tensor | None = None,
) -> None:
    x = taken_by(x, "cast_current")
    kernel = find(x.device, "cast_current")
    if kernel is not None:
        run(
            kernel, x.device, *described(x), pointer(amax), eps, power_of_2, FP8_CODE[fp8],
            pointer(row), pointer(col), pointer(scale_inv), pointer(noop),
        )  # fmt: skip
        return
    wanted = {"rowwise": row is not None, "columnwise": col is not None}
    values = reference.cast_current(x, amax, fp8, eps=eps, power_of_2=power_of_2, **wanted)
    store_all((row, col, scale_inv), values, noop)


def amax_scratch(device: torch.device, count: int = 1) -> Tensor:
    """Room for `count` amaxes while kernels find them, uninitialised."""
    return torch.empty(count * AMAX_ROOM if device.type == "cuda" else count, dtype=torch.float32, device=device)


def quantize_current(
    x: Matrix,
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
    *,
    fp8: DType,
    eps: float,
    power_of_2: bool,
    noop: Tensor | None = None,
) -> None:
    """``amax`` and ``cast_current`` in one call."""
    device = x.device
    kernel = find(device, "quantize_current")
    # Both halves must be able to make the matrix, or neither does.
    if isinstance(x, Producer) and kernel is not None and not is_shapes_only():
        made = taken_by(x, "cast_current")
        x = made if isinstance(made, Tensor) or type(x) is Plain or fuses(x, "amax") else materialize(x)
    if kernel is None:
        value = torch.empty(1, dtype=torch.float32, device=device)
        amax(x, value)
        cast_current(x, value, row, col, scale_inv, fp8=fp8, eps=eps, power_of_2=power_of_2, noop=noop)
        return
    value = amax_scratch(device)
    run(
        kernel, device, *described(x), pointer(value), eps, power_of_2, FP8_CODE[fp8],
        pointer(row), pointer(col), pointer(scale_inv), pointer(noop),
    )  # fmt: skip


def dequantize_tensor(data: Tensor, scale_inv: Tensor, out: Tensor, *, fp8: DType, columnwise: bool) -> None:
    kernel = find(data.device, "dequantize_tensor")
    if kernel is not None:
        run(
            kernel, data.device, pointer(data), columnwise, FP8_CODE[fp8], pointer(scale_inv),
            pointer(out), FLOAT_CODE[out.dtype], *out.shape,
        )  # fmt: skip
        return
    out.copy_(reference.dequantize_tensor(data, scale_inv, fp8, columnwise))


def advance_scales(history: Tensor, scales: Tensor, largest: Tensor, *, margin: int, most_recent: bool) -> None:
    """Delayed scaling's step, in place; see ``te_dist.delayed_scaling.advance``."""
    kernel = find(history.device, "advance_scales")
    if kernel is not None and -126 <= margin <= 127:
        run(
            kernel,
            history.device,
            pointer(history),
            pointer(scales),
            pointer(largest),
            *history.shape,
            margin,
            most_recent,
        )
        return
    reference.advance_scales(history, scales, largest, margin=margin, most_recent=most_recent)
