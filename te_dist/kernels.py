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

from te_dist import reference, reference_producers, torch_compat
from te_dist.formats import HADAMARD_SIGN_MASK, DType, matrix_size
from te_dist.producers import (
    ACTIVATION_CODES,
    COLUMN_TILE_ROWS,
    ActivationGradient,
    ActivationOutput,
    NormOutput,
    Plain,
    Producer,
)

_extension: ModuleType | None = None
extension_error = ""
try:
    import te_dist._kernels as _extension  # type: ignore[no-redef]
except ModuleNotFoundError:
    # A checkout on the path before an installed te_dist, for one: name the folder that was looked into.
    extension_error = f"no _kernels in {os.path.dirname(__file__)}"
except ImportError as error:
    extension_error = str(error)

# What is quantized: a matrix, or the description of one. Any, because `_matrix` turns one into the other.
Matrix = Any  # Tensor | Producer

_FLOAT_CODE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FP8_CODE = {DType.kFloat8E4M3: 0, DType.kFloat8E5M2: 1}

# Device type -> name -> function.
_TABLES: dict[str, dict[str, Any]] = {}
if _extension is not None:
    _TABLES["cpu"] = vars(_extension.cpu)
    if _extension.has_cuda:
        _TABLES["cuda"] = vars(_extension.cuda)

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


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """No kernel runs inside, and no product: buffers are allocated and that is all. For fake implementations."""
    global _forced
    previous, _forced = _forced, "shapes"
    try:
        yield
    finally:
        _forced = previous


def is_shapes_only() -> bool:
    return _forced == "shapes"


def _nothing(*_: Any) -> None:
    """Every kernel, while only shapes are asked for."""


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
    if _forced == "shapes":
        return _nothing
    if _forced == "reference":
        return None
    table = _TABLES.get(device.type)
    return None if table is None else table.get(kernel)


def _call(function: Any, device: torch.device, *args: Any) -> None:
    """Run an extension function on the caller's stream, or with as many threads as torch uses."""
    if function is _nothing:
        return
    if device.type == "cpu":
        function(*args, torch.get_num_threads())
    elif device.index is None or device.index == torch_compat.current_cuda_device():
        function(*args, torch_compat.current_raw_stream(torch_compat.current_cuda_device()))
    else:
        with torch.cuda.device(device):
            function(*args, torch_compat.current_raw_stream(device.index))


def _input(x: Tensor | Producer, column_sums: bool = True) -> tuple[Any, ...]:
    """Pointer, dtype code, M, K and row stride; `x` is 2-D with unit stride along K. A producer goes as one tuple."""
    if _forced == "shapes":
        return ()
    if isinstance(x, Producer):
        return (_producer(x, column_sums),)
    rows, cols = x.shape
    return x.data_ptr(), _FLOAT_CODE[x.dtype], rows, cols, max(x.stride(0), cols)


def _vector(v: Tensor | None) -> tuple[int, int]:
    return (0, 0) if v is None else (_ptr(v), _FLOAT_CODE[v.dtype])


def _producer(p: Producer, column_sums: bool = True) -> tuple[Any, ...]:
    """The fields of csrc/api.h's Source, in order. Statistics are made by whoever is asked first, and so are column
    sums, unless the kernel makes none."""
    if _forced == "shapes":
        return ()
    rows, cols = p.shape
    stride = max(p.x.stride(0), p.x.shape[1])
    partials = 0
    if column_sums and not p.partials_ready:
        partials, p.partials_ready = _ptr(p.partials), True
    head = (p.x.data_ptr(), _FLOAT_CODE[p.x.dtype], rows, cols, stride, p.kind)
    if isinstance(p, NormOutput):
        make_stats, p.stats_ready = not p.stats_ready, True
        if make_stats and p.device.type == "cuda":
            p.workspace = torch.empty(1 + _column_tiles(rows), dtype=torch.int32, device=p.device)
        return (
            *head, 0, False, p.zero_centered, make_stats, p.eps, 0, 0,
            *_vector(p.weight), *_vector(p.bias), _ptr(p.mean), _ptr(p.rstd), partials, _ptr(p.workspace),
        )  # fmt: skip
    if isinstance(p, ActivationOutput):
        code = ACTIVATION_CODES[p.activation]
        return (*head, code, p.gated, False, False, 0.0, 0, 0, 0, 0, *_vector(p.bias), 0, 0, partials, 0)
    if isinstance(p, ActivationGradient):
        code, grad_stride = ACTIVATION_CODES[p.activation], max(p.grad.stride(0), p.grad.shape[1])
        return (
            *head, code, p.gated, False, False, 0.0, p.grad.data_ptr(), grad_stride,
            0, 0, *_vector(p.bias), 0, 0, partials, 0,
        )  # fmt: skip
    return (*head, 0, False, False, False, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, partials, 0)  # see plain_with_sums


def functions(device: torch.device) -> dict[str, Any] | None:
    """The compiled kernels of a device by name; None where the reference is to run."""
    return _TABLES.get(device.type) if _forced == "auto" else None


def plain_with_sums(address: int, code: int, rows: int, cols: int, partials: int) -> tuple[Any, ...]:
    """A contiguous matrix whose columns are to be added up, as one argument of a kernel."""
    return (
        address, code, rows, cols, cols, Plain.kind, 0, False, False, False, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, partials, 0,
    )  # fmt: skip


def _column_tiles(rows: int) -> int:
    return -(-rows // COLUMN_TILE_ROWS)


def _ptr(tensor: Tensor | None) -> int:
    return 0 if tensor is None or _forced == "shapes" else tensor.data_ptr()


def as_rows(x: Tensor) -> Tensor:
    """[..., K] -> [M, K] with unit stride along K; a view where the strides allow it."""
    if x.is_neg():
        x = x.resolve_neg()  # a lazily negated view: its memory holds the other sign
    matrix = x
    if x.dim() != 2:
        matrix = x.reshape(matrix_size(x.shape))
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


# ------------------------------------------------------------------------------------------------- producers
# What the CUDA kernels make on the fly: kernel -> kinds of producers and fp8 formats. Not NVFP4, and no 2-D blocks.
_MADE = (NormOutput, ActivationOutput, ActivationGradient)
_E4M3, _FP8 = (DType.kFloat8E4M3,), tuple(_FP8_CODE)
_FUSED: dict[str, tuple[tuple[type[Producer], ...], tuple[DType, ...]]] = {
    "amax": (_MADE, ()),  # makes no column sums: the cast that follows does
    "cast_scaled": ((Plain, *_MADE), _FP8),
    "cast_current": ((Plain, *_MADE), _FP8),
    "quantize_block": ((Plain, *_MADE), _E4M3),
    "quantize_mxfp8": ((Plain, *_MADE), _E4M3),
}


def _fuses(p: Producer, kernel: str, fp8: DType | None, two_d: bool) -> bool:
    """Whether the CUDA kernel takes the producer itself; the rules on shapes are those of csrc/check.cpp's is_fused."""
    kinds, formats = _FUSED.get(kernel, ((), ()))
    if two_d or type(p) not in kinds or (fp8 is not None and fp8 not in formats):
        return False
    if p.device.type != "cuda" or p.dtype != torch.bfloat16 or p.numel() == 0 or _backend(p.device, kernel) is None:
        return False
    rows, cols = p.shape
    if max(rows, cols) >= 2**30 or cols % 8:
        return False
    matrices, vectors = [p.x], [getattr(p, "weight", None), getattr(p, "bias", None)]
    if isinstance(p, ActivationGradient):
        matrices.append(p.grad)
        if p.gated and cols % 256:  # made in pairs of tiles, half the columns apart
            return False
    elif isinstance(p, NormOutput) and kernel == "amax" and (cols > 16384 or (p.mean is None and p.bias is not None)):
        return False  # whole rows in registers, and a bias only beside a mean
    return all(t.data_ptr() % 16 == 0 and (rows == 1 or t.stride(0) % 8 == 0) for t in matrices) and all(
        v is None or v.data_ptr() % 16 == 0 for v in vectors
    )


def _matrix(x: Tensor | Producer, kernel: str, fp8: DType | None = None, two_d: bool = False) -> Any:
    """`x` as `kernel` can take it: a producer stays one only where it is fused."""
    if not isinstance(x, Producer) or _forced == "shapes":
        return x
    sums_missing = x.partials is not None and not x.partials_ready and kernel != "amax"
    if x.materialized is not None and not sums_missing:
        return x.materialized
    return x if _fuses(x, kernel, fp8, two_d) else materialize(x)


def materialize(p: Producer) -> Tensor:
    """The produced matrix [M, K] in memory, with its statistics and column sums where it has any. Made once."""
    made = p.materialized
    if made is not None and (p.partials is None or p.partials_ready):
        return made
    kernel = _backend(p.device, "produce")
    if kernel is not None:
        out = None
        if made is None:
            out = made = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        _call(kernel, p.device, _producer(p), _ptr(out), _FLOAT_CODE[p.dtype], *p.shape)
    else:
        made = _materialize_by_reference(p)
    p.materialized = made
    return made


def _materialize_by_reference(p: Producer) -> Tensor:
    made = p.materialized
    if isinstance(p, NormOutput) and made is None:
        if not p.stats_ready:
            mean, rstd = reference_producers.norm_stats(p.x, layer_norm=p.mean is not None, eps=p.eps)
            store(p.mean, mean, None)
            store(p.rstd, rstd, None)
            p.stats_ready = True
        made = reference_producers.norm_output(p.x, p.weight, p.bias, p.mean, p.rstd, zero_centered=p.zero_centered)
    elif isinstance(p, ActivationOutput) and made is None:
        made = reference_producers.activation_output(p.x, p.activation, p.gated, p.bias)
    elif isinstance(p, ActivationGradient) and made is None:
        made = reference_producers.activation_gradient(p.grad, p.x, p.activation, p.gated, p.bias)
    if made is None:
        raise TypeError(f"materialize got a {type(p).__name__}, which it cannot make")
    if p.partials is not None and not p.partials_ready:
        store(p.partials, reference_producers.column_partials(made.float()), None)
        p.partials_ready = True
    return made


def column_sums(p: Producer, dtype: torch.dtype) -> Tensor:
    """[K]: what the columns of a produced matrix add up to; ``want_column_sums`` was called before it was made."""
    if p.partials is None:
        raise ValueError(f"column_sums needs {type(p).__name__}.want_column_sums() before the matrix is made")
    if not p.partials_ready:
        materialize(p)
    return reduce_partials(p.partials, dtype)


def reduce_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [tiles, K] -> [K]."""
    kernel = _backend(partials.device, "reduce_partials")
    if kernel is None:
        return reference_producers.reduce_partials(partials).to(dtype)
    out = torch.empty(partials.shape[1], dtype=dtype, device=partials.device)
    _call(kernel, partials.device, _ptr(partials), partials.shape[0], _ptr(out), _FLOAT_CODE[dtype], 1, out.shape[0])
    return out


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    zero_centered: bool,
    weight_grad: bool = True,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx [M, K] of x's dtype, and the gradients of weight and bias [K] of the weight's dtype where they are wanted."""
    kernel = _backend(x.device, "norm_backward")
    weight_partials: Tensor | None
    bias_partials: Tensor | None
    if kernel is None:
        dx, weight_partials, bias_partials = reference_producers.norm_backward(
            grad, x, weight, mean, rstd, zero_centered=zero_centered
        )
    else:
        rows, cols = x.shape
        tiles = _column_tiles(rows)
        dx = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
        partials = torch.empty((weight_grad + bias_grad, tiles, cols), dtype=torch.float32, device=x.device)
        weight_partials = partials[0] if weight_grad else None
        bias_partials = partials[-1] if bias_grad else None
        workspace = torch.empty((2, rows), dtype=torch.float32, device=x.device) if x.device.type == "cuda" else None
        _call(
            kernel, x.device, *_input(x), _ptr(grad), max(grad.stride(0), cols), *_vector(weight), zero_centered,
            _ptr(mean), _ptr(rstd), _ptr(dx), _FLOAT_CODE[dx.dtype], rows, cols,
            _ptr(weight_partials), _ptr(bias_partials), _ptr(workspace),
        )  # fmt: skip
    return (
        dx,
        reduce_partials(weight_partials, weight.dtype) if weight_grad and weight_partials is not None else None,
        reduce_partials(bias_partials, weight.dtype) if bias_grad and bias_partials is not None else None,
    )


# ------------------------------------------------------------------------------------------------- per tensor
def amax(x: Matrix, out: Tensor, *, accumulate: bool = False, noop: Tensor | None = None) -> None:
    """out [1] <- max|x|, or the maximum of that and out."""
    x = _matrix(x, "amax")
    kernel = _backend(x.device, "amax")
    if kernel is not None:
        _call(kernel, x.device, *_input(x, column_sums=False), _ptr(out), accumulate, _ptr(noop))
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
    x = _matrix(x, "cast_scaled", fp8)
    kernel = _backend(x.device, "cast_scaled")
    if kernel is not None:
        _call(
            kernel, x.device, *_input(x), _ptr(scale), _FP8_CODE[fp8],
            _ptr(row), _ptr(col), _ptr(scale_inv), _ptr(amax), _ptr(noop),
        )  # fmt: skip
        return
    if amax is not None:
        store(amax, reference._canonical_amax(torch.maximum(amax, reference.amax(x))), noop)
    values = reference.cast_scaled(x, scale, fp8, rowwise=row is not None, columnwise=col is not None)
    for out, value in zip((row, col, scale_inv), values, strict=True):
        store(out, value, noop)


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
    x = _matrix(x, "cast_current", fp8)
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


def quantize_current(
    x: Matrix,
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
    *,
    fp8: DType,
    eps: float,
    power_of_2: bool,
) -> None:
    """``amax`` and ``cast_current`` in one call."""
    device = x.device
    kernel = _backend(device, "quantize_current")
    # Both halves must be able to make the matrix, or neither does.
    if isinstance(x, Producer) and kernel is not None and not is_shapes_only():
        made = _matrix(x, "cast_current", fp8)
        x = made if isinstance(made, Tensor) or type(x) is Plain or _fuses(x, "amax", None, False) else materialize(x)
    value = torch.empty(1, dtype=torch.float32, device=device)
    if kernel is None:
        amax(x, value)
        cast_current(x, value, row, col, scale_inv, fp8=fp8, eps=eps, power_of_2=power_of_2)
        return
    _call(
        kernel, device, *_input(x), _ptr(value), eps, power_of_2, _FP8_CODE[fp8],
        _ptr(row), _ptr(col), _ptr(scale_inv),
    )  # fmt: skip


def dequantize_tensor(data: Tensor, scale_inv: Tensor, out: Tensor, *, fp8: DType, columnwise: bool) -> None:
    kernel = _backend(data.device, "dequantize_tensor")
    if kernel is not None:
        _call(
            kernel, data.device, _ptr(data), columnwise, _FP8_CODE[fp8], _ptr(scale_inv),
            _ptr(out), _FLOAT_CODE[out.dtype], *out.shape,
        )  # fmt: skip
        return
    out.copy_(reference.dequantize_tensor(data, scale_inv, fp8, columnwise))


def advance_scales(history: Tensor, scales: Tensor, largest: Tensor, *, margin: int, most_recent: bool) -> None:
    """Delayed scaling's step, in place; see ``te_dist.delayed_scaling.advance``."""
    kernel = _backend(history.device, "advance_scales")
    if kernel is not None and -126 <= margin <= 127:
        _call(kernel, history.device, _ptr(history), _ptr(scales), _ptr(largest), *history.shape, margin, most_recent)
        return
    reference.advance_scales(history, scales, largest, margin=margin, most_recent=most_recent)


# ------------------------------------------------------------------------------------------------- blockwise fp8
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
    x = _matrix(x, "quantize_block", fp8, two_d=block_dim == 2)
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
    x = _matrix(x, "quantize_mxfp8", fp8, two_d)
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
    x: Matrix,
    amax_row: Tensor | None,
    amax_col: Tensor | None,
    *,
    with_rht: bool,
    random_signs: bool,
    noop: Tensor | None = None,
) -> None:
    with_rht = with_rht and amax_col is not None  # the transform is the column plane's
    x = _matrix(x, "amax_nvfp4")
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
    x = _matrix(x, "quantize_nvfp4")
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
