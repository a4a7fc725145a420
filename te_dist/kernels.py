"""The only door to the compiled kernels: checks nothing but what would be unsafe, and picks a backend per device.

    cuda tensors -> _kernels.cuda        cpu tensors -> _kernels.cpu        else -> reference.py

Every function writes into buffers that the caller allocated (see ``Quantizer.alloc_tensors``), so that what a fake
kernel promises is what the real one fills. Inputs are 2-D. ``TE_DIST_BACKEND=reference`` forces the reference.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from te_dist import reference, torch_compat
from te_dist.formats import HADAMARD_SIGN_MASK, DType

_extension: ModuleType | None = None
extension_error = ""
try:
    import te_dist._kernels as _extension  # type: ignore[no-redef]
except ModuleNotFoundError:
    # A checkout on the path before an installed te_dist, for one: name the folder that was looked into.
    extension_error = f"no _kernels in {os.path.dirname(__file__)}"
except ImportError as error:
    extension_error = str(error)

_FLOAT_CODE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FP8_CODE = {DType.kFloat8E4M3: 0, DType.kFloat8E5M2: 1}

BACKENDS = ("auto", "reference")
_forced = os.environ.get("TE_DIST_BACKEND", "auto")
if _forced not in BACKENDS:
    raise ValueError(f"TE_DIST_BACKEND expects one of {BACKENDS} but got {_forced!r}")


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend inside a ``with`` block: "reference", or "auto" to undo ``TE_DIST_BACKEND``."""
    global _forced
    if name not in BACKENDS:
        raise ValueError(f"use_backend expects one of {BACKENDS} but got {name!r}")
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


def has_extension() -> bool:
    return _extension is not None


def extension_info() -> dict[str, str]:
    """What was built, for ``doctor``."""
    if _extension is None:
        return {"extension": f"missing ({extension_error})"}
    return {
        "extension": str(_extension.__file__),
        "cpu variant": _cpu_variant(),
        "cuda architectures": str(_extension.cuda_archs) or "none (built without nvcc)",
    }


def _cpu_variant() -> str:
    try:
        return str(_extension.cpu.variant()) if _extension is not None else "none"
    except ValueError as error:  # TE_DIST_CPU_VARIANT names one that is not there
        return str(error)


def backend_name(device: torch.device | str, kernel: str = "quantize_block") -> str:
    """ "cuda", "cpu" or "reference": what runs `kernel` for tensors on `device`."""
    device = torch.device(device)
    return device.type if _backend(device, kernel) is not None else "reference"


def _backend(device: torch.device, kernel: str) -> Any:
    if _extension is None or _forced == "reference":
        return None
    if device.type == "cuda" and _extension.has_cuda:
        return getattr(_extension.cuda, kernel, None)
    return getattr(_extension.cpu, kernel, None) if device.type == "cpu" else None


def _call(function: Any, device: torch.device, *args: Any) -> None:
    """Run an extension function on the caller's stream, or with as many threads as torch uses."""
    if device.type == "cpu":
        function(*args, torch.get_num_threads())
    elif device.index is None or device.index == torch.cuda.current_device():
        function(*args, torch_compat.current_raw_stream(torch.cuda.current_device()))
    else:
        with torch.cuda.device(device):
            function(*args, torch_compat.current_raw_stream(device.index))


def _input(x: Tensor) -> tuple[int, int, int, int, int]:
    """Pointer, dtype code, M, K and row stride; `x` is 2-D with unit stride along K."""
    rows, cols = x.shape
    return x.data_ptr(), _FLOAT_CODE[x.dtype], rows, cols, max(x.stride(0), cols)


def _ptr(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def as_rows(x: Tensor) -> Tensor:
    """[..., K] -> [M, K] with unit stride along K; a view where the strides allow it."""
    if x.is_neg():
        x = x.resolve_neg()  # a lazily negated view: its memory holds the other sign
    matrix = x
    if x.dim() != 2:
        rows, cols = x.shape[:-1].numel(), x.shape[-1]
        matrix = x.reshape(rows, cols)
    if matrix.shape[1] > 1 and matrix.stride(1) != 1:
        return matrix.contiguous()
    # A broadcast or overlapping row stride would read the same memory twice, which is fine; a shorter one than K
    # cannot be described to the kernels.
    return matrix if matrix.shape[0] <= 1 or matrix.stride(0) >= matrix.shape[1] else matrix.contiguous()


def store(out: Tensor | None, value: Tensor | None, noop: Tensor | None) -> None:
    """out <- value, unless the no-op flag is set; without a host sync."""
    if out is None or value is None:
        return
    value = value.reshape(out.shape)
    out.copy_(value if noop is None else torch.where(noop.reshape(()) != 0, out, value))


# ------------------------------------------------------------------------------------------------- per tensor
def amax(x: Tensor, out: Tensor, *, accumulate: bool = False, noop: Tensor | None = None) -> None:
    """out [1] <- max|x|, or the maximum of that and out."""
    kernel = _backend(x.device, "amax")
    if kernel is not None:
        _call(kernel, x.device, *_input(x), _ptr(out), accumulate, _ptr(noop))
        return
    value = reference.amax(x)
    store(out, reference._canonical_amax(torch.maximum(out, value)) if accumulate else value, noop)


def cast_scaled(
    x: Tensor,
    scale: Tensor,
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
    *,
    fp8: DType,
    noop: Tensor | None = None,
) -> None:
    kernel = _backend(x.device, "cast_scaled")
    if kernel is not None:
        _call(
            kernel, x.device, *_input(x), _ptr(scale), _FP8_CODE[fp8],
            _ptr(row), _ptr(col), _ptr(scale_inv), _ptr(noop),
        )  # fmt: skip
        return
    values = reference.cast_scaled(x, scale, fp8, rowwise=row is not None, columnwise=col is not None)
    for out, value in zip((row, col, scale_inv), values, strict=True):
        store(out, value, noop)


def cast_current(
    x: Tensor,
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
    kernel = _backend(x.device, "cast_current")
    if kernel is not None:
        _call(
            kernel, x.device, *_input(x), _ptr(amax), eps, power_of_2, _FP8_CODE[fp8],
            _ptr(row), _ptr(col), _ptr(scale_inv), _ptr(noop),
        )  # fmt: skip
        return
    wanted = {"rowwise": row is not None, "columnwise": col is not None}
    values = reference.cast_current(x, amax, fp8, eps=eps, power_of_2=power_of_2, **wanted)
    for out, value in zip((row, col, scale_inv), values, strict=True):
        store(out, value, noop)


def dequantize_tensor(data: Tensor, scale_inv: Tensor, out: Tensor, *, fp8: DType, columnwise: bool) -> None:
    kernel = _backend(data.device, "dequantize_tensor")
    if kernel is not None:
        _call(
            kernel, data.device, _ptr(data), columnwise, _FP8_CODE[fp8], _ptr(scale_inv),
            _ptr(out), _FLOAT_CODE[out.dtype], *out.shape,
        )  # fmt: skip
        return
    out.copy_(reference.dequantize_tensor(data, scale_inv, fp8, columnwise))


# ------------------------------------------------------------------------------------------------- blockwise fp8
def quantize_block(
    x: Tensor,
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
    kernel = _backend(x.device, "quantize_block")
    if kernel is not None:
        _call(
            kernel, x.device, *_input(x), block_dim, eps, power_of_2, _FP8_CODE[fp8],
            _ptr(row), _ptr(row_scale), _ptr(col), _ptr(col_scale), _ptr(noop),
        )  # fmt: skip
        return
    wanted = {"rowwise": row is not None, "columnwise": col is not None}
    values = reference.quantize_block(x, fp8, block_dim=block_dim, eps=eps, power_of_2=power_of_2, **wanted)
    for out, value in zip((row, row_scale, col, col_scale), values, strict=True):
        store(out, value, noop)


def dequantize_block(data: Tensor, scale: Tensor, out: Tensor, *, fp8: DType, block_dim: int, columnwise: bool) -> None:
    kernel = _backend(data.device, "dequantize_block")
    if kernel is not None:
        _call(
            kernel, data.device, _ptr(data), _ptr(scale), columnwise, block_dim, _FP8_CODE[fp8],
            _ptr(out), _FLOAT_CODE[out.dtype], *out.shape,
        )  # fmt: skip
        return
    out.copy_(reference.dequantize_block(data, scale, fp8, block_dim=block_dim, columnwise=columnwise))


# ------------------------------------------------------------------------------------------------- mxfp8
def quantize_mxfp8(
    x: Tensor,
    row: Tensor | None,
    row_scale: Tensor | None,
    col: Tensor | None,
    col_scale: Tensor | None,
    *,
    fp8: DType,
    two_d: bool,
    noop: Tensor | None = None,
) -> None:
    kernel = _backend(x.device, "quantize_mxfp8")
    if kernel is not None:
        _call(
            kernel, x.device, *_input(x), two_d, _FP8_CODE[fp8],
            _ptr(row), _ptr(row_scale), _ptr(col), _ptr(col_scale), _ptr(noop),
        )  # fmt: skip
        return
    wanted = {"rowwise": row is not None, "columnwise": col is not None}
    values = reference.quantize_mxfp8(x, fp8, two_d=two_d, **wanted)
    for out, value in zip((row, row_scale, col, col_scale), values, strict=True):
        store(out, value, noop)


def dequantize_mxfp8(data: Tensor, scale: Tensor, out: Tensor, *, fp8: DType, columnwise: bool) -> None:
    kernel = _backend(data.device, "dequantize_mxfp8")
    if kernel is not None:
        _call(
            kernel, data.device, _ptr(data), _ptr(scale), columnwise, _FP8_CODE[fp8],
            _ptr(out), _FLOAT_CODE[out.dtype], *out.shape,
        )  # fmt: skip
        return
    out.copy_(reference.dequantize_mxfp8(data, scale, fp8, columnwise=columnwise))


# ------------------------------------------------------------------------------------------------- nvfp4
def _signs(random_signs: bool) -> int:
    return HADAMARD_SIGN_MASK if random_signs else 0


def amax_nvfp4(
    x: Tensor,
    amax_row: Tensor | None,
    amax_col: Tensor | None,
    *,
    with_rht: bool,
    random_signs: bool,
    noop: Tensor | None = None,
) -> None:
    with_rht = with_rht and amax_col is not None  # the transform is the column plane's
    kernel = _backend(x.device, "amax_nvfp4")
    if kernel is not None:
        _call(
            kernel, x.device, *_input(x), with_rht, _signs(random_signs),
            _ptr(amax_row), _ptr(amax_col), _ptr(noop),
        )  # fmt: skip
        return
    values = reference.amax_nvfp4(x, with_rht=with_rht, random_signs=random_signs)
    for out, value in zip((amax_row, amax_col), values, strict=True):
        store(out, value, noop)


def quantize_nvfp4(
    x: Tensor,
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
    kernel = _backend(x.device, "quantize_nvfp4")
    if kernel is not None:
        _call(
            kernel, x.device, *_input(x), two_d, with_rht, _signs(random_signs), _ptr(rng_state),
            _ptr(amax_row), _ptr(amax_col), _ptr(row), _ptr(row_scale), _ptr(col), _ptr(col_scale),
            _ptr(noop),
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
    for out, value in zip((row, row_scale, col, col_scale), values, strict=True):
        store(out, value, noop)


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
    kernel = _backend(data.device, "dequantize_nvfp4")
    if kernel is not None:
        _call(
            kernel, data.device, _ptr(data), _ptr(scale), _ptr(amax), columnwise, with_rht,
            _signs(random_signs), _ptr(out), _FLOAT_CODE[out.dtype], *out.shape,
        )  # fmt: skip
        return
    values = reference.dequantize_nvfp4(
        data, scale, amax, columnwise=columnwise, with_rht=with_rht, random_signs=random_signs
    )
    out.copy_(values)


# ------------------------------------------------------------------------------------------------- layout
def transpose_bytes(data: Tensor) -> Tensor:
    """uint8 [R, C] -> [C, R]."""
    kernel = _backend(data.device, "transpose_bytes")
    if kernel is None:
        return data.t().contiguous()
    data = data.contiguous()
    out = data.new_empty((data.shape[1], data.shape[0]))
    _call(kernel, data.device, _ptr(data), *data.shape, _ptr(out))
    return out


def transpose_nibbles(data: Tensor) -> Tensor:
    """Packed FP4 [R, C/2] -> [C, R/2]; R must be even."""
    rows, cols = data.shape[0], 2 * data.shape[1]
    if rows % 2:
        raise ValueError(f"transpose_nibbles expects an even number of rows but got {rows}")
    kernel = _backend(data.device, "transpose_nibbles")
    if kernel is None:
        return reference.transpose_nibbles(data)
    data = data.contiguous()
    out = data.new_empty((cols, rows // 2))
    _call(kernel, data.device, _ptr(data), rows, cols, _ptr(out))
    return out


def swizzle_scales(scale: Tensor) -> Tensor:
    """Block scale bytes [rows, cols] into the order of 128x4 tiles that cuBLAS reads."""
    rows, cols = scale.shape
    if rows % 128 or cols % 4:
        raise ValueError(
            f"swizzle_scales expects rows in multiples of 128 and columns in multiples of 4 but got {rows} x {cols}"
        )
    kernel = _backend(scale.device, "swizzle_scales")
    if kernel is None:
        return reference.swizzle_scales(scale)
    scale = scale.contiguous()
    out = torch.empty_like(scale)
    _call(kernel, scale.device, _ptr(scale), rows, cols, _ptr(out))
    return out
