"""NVFP4: two levels of scales, and the Hadamard transform of its column plane."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from te_dist import reference
from te_dist.formats import HADAMARD_SIGN_MASK
from te_dist.kernels.backend import FLOAT_CODE, find, is_shapes_only, pointer, run, store_all
from te_dist.kernels.per_tensor import amax_scratch
from te_dist.kernels.sources import Matrix, described, materialize, taken_by, written
from te_dist.producers import Plain, Producer


def _signs(random_signs: bool) -> int:
    return HADAMARD_SIGN_MASK if random_signs else 0


def _taken(x: Matrix, noop: Tensor | None) -> Any:
    """`x` as the amax takes it: a producer where it is made on the fly. Not under a no-op flag: where that is set, a
    matrix that nobody has written would seem to be there."""
    if noop is not None and isinstance(x, Producer) and not is_shapes_only():
        return materialize(x)
    return taken_by(x, "amax_nvfp4")


def amax_nvfp4(
    x: Matrix,
    amax_row: Tensor | None,
    amax_col: Tensor | None,
    *,
    with_rht: bool,
    random_signs: bool,
    noop: Tensor | None = None,
) -> None:
    with_rht = with_rht and amax_col is not None  # the transform is the column plane's
    x = _taken(x, noop)
    kernel = find(x.device, "amax_nvfp4")
    if kernel is not None:
        source = described(x)
        if isinstance(x, Producer) and not isinstance(x, Plain) and source:
            source = (written(x, *source),)
        run(
            kernel, x.device, *source, with_rht, _signs(random_signs),
            pointer(amax_row), pointer(amax_col), pointer(noop),
        )  # fmt: skip
        return
    values = reference.amax_nvfp4(x, with_rht=with_rht, random_signs=random_signs)
    store_all((amax_row, amax_col), values, noop)


def quantize_nvfp4(
    x: Matrix,
    amax_row: Tensor | None,
    amax_col: Tensor | None,
    row: Tensor | None,
    row_scale: Tensor | None,
    col: Tensor | None,
    col_scale: Tensor | None,
    *,
    two_d: bool,
    with_rht: bool,
    random_signs: bool,
    rng_state: Tensor | None,
    noop: Tensor | None = None,
) -> None:
    with_rht = with_rht and col is not None
    x = taken_by(x, "quantize_nvfp4")
    kernel = find(x.device, "quantize_nvfp4")
    if kernel is not None:
        run(
            kernel, x.device, *described(x), two_d, with_rht, _signs(random_signs), pointer(rng_state),
            pointer(amax_row), pointer(amax_col), pointer(row), pointer(row_scale), pointer(col), pointer(col_scale),
            pointer(noop),
        )  # fmt: skip
        return
    values = reference.quantize_nvfp4(
        x,
        amax_row,
        amax_col,
        two_d=two_d,
        with_rht=with_rht,
        random_signs=random_signs,
        rng_state=rng_state,
        rowwise=row is not None,
        columnwise=col is not None,
    )
    store_all((row, row_scale, col, col_scale), values, noop)


def quantize_nvfp4_current(
    x: Matrix,
    amax_row: Tensor | None,
    amax_col: Tensor | None,
    row: Tensor | None,
    row_scale: Tensor | None,
    col: Tensor | None,
    col_scale: Tensor | None,
    *,
    two_d: bool,
    with_rht: bool,
    random_signs: bool,
    rng_state: Tensor | None,
    noop: Tensor | None = None,
) -> None:
    """``amax_nvfp4`` and ``quantize_nvfp4`` in one call."""
    with_rht = with_rht and col is not None
    x = _taken(x, noop)
    kernel = find(x.device, "quantize_nvfp4_current")
    if kernel is None:
        amax_nvfp4(x, amax_row, amax_col, with_rht=with_rht, random_signs=random_signs, noop=noop)
        quantize_nvfp4(
            x,
            amax_row,
            amax_col,
            row,
            row_scale,
            col,
            col_scale,
            two_d=two_d,
            with_rht=with_rht,
            random_signs=random_signs,
            rng_state=rng_state,
            noop=noop,
        )
        return
    room = amax_scratch(x.device, 3)
    source = described(x)
    rest = (
        two_d, with_rht, _signs(random_signs), pointer(rng_state), pointer(amax_row), pointer(amax_col), pointer(room),
        pointer(row), pointer(row_scale), pointer(col), pointer(col_scale), pointer(noop),
    )  # fmt: skip
    # Many norms are made twice, some activations once, and neither is written. Others are, on the way to the amax.
    if not run(kernel, x.device, *source, *rest):
        run(kernel, x.device, written(x, *source), *rest)


def dequantize_nvfp4(
    data: Tensor,
    scale: Tensor,
    amax: Tensor,
    out: Tensor,
    *,
    columnwise: bool,
    with_rht: bool,
    random_signs: bool,
) -> None:
    kernel = find(data.device, "dequantize_nvfp4")
    if kernel is not None:
        run(
            kernel, data.device, pointer(data), pointer(scale), pointer(amax), columnwise, with_rht,
            _signs(random_signs), pointer(out), FLOAT_CODE[out.dtype], *out.shape,
        )  # fmt: skip
        return
    values = reference.dequantize_nvfp4(
        data, scale, amax, columnwise=columnwise, with_rht=with_rht, random_signs=random_signs
    )
    out.copy_(values)
