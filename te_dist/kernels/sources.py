"""What a kernel reads: a matrix in memory, or the description of one that it makes on the fly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist import reference_producers
from te_dist.formats import matrix_size
from te_dist.kernels.backend import FLOAT_CODE, find, is_shapes_only, pointer, run, store
from te_dist.producers import (
    ACTIVATION_CODES,
    COLUMN_TILE_ROWS,
    ActivationGradient,
    ActivationOutput,
    NormOutput,
    Plain,
    Producer,
)

# What is quantized: a matrix, or the description of one. Any, because `taken_by` turns one into the other.
Matrix = Any  # Tensor | Producer


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


def described(x: Tensor | Producer, column_sums: bool = True) -> tuple[Any, ...]:
    """Pointer, dtype code, M, K and row stride; `x` is 2-D with unit stride along K. A producer goes as one tuple."""
    if is_shapes_only():
        return ()
    if isinstance(x, Producer):
        return (producer_fields(x, column_sums),)
    rows, cols = x.shape
    return x.data_ptr(), FLOAT_CODE[x.dtype], rows, cols, max(x.stride(0), cols)


def written(p: Producer, fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """producer_fields of one that the kernel makes and writes; it is in memory from then on."""
    p.materialized = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    return (*fields, p.materialized.data_ptr())


def vector(v: Tensor | None) -> tuple[int, int]:
    return (0, 0) if v is None else (pointer(v), FLOAT_CODE[v.dtype])


def producer_fields(p: Producer, column_sums: bool = True) -> tuple[Any, ...]:
    """The fields of csrc/api.h's Source, in order. Statistics are made by whoever is asked first, and so are column
    sums, unless the kernel makes none."""
    if is_shapes_only():
        return ()
    rows, cols = p.shape
    stride = max(p.x.stride(0), p.x.shape[1])
    partials = 0
    if column_sums and not p.partials_ready:
        partials, p.partials_ready = pointer(p.partials), True
    head = (p.x.data_ptr(), FLOAT_CODE[p.x.dtype], rows, cols, stride, p.kind)
    if isinstance(p, NormOutput):
        make_stats, p.stats_ready = not p.stats_ready, True
        return (
            *head, 0, False, p.zero_centered, make_stats, p.eps, 0, 0,
            *vector(p.weight), *vector(p.bias), pointer(p.mean), pointer(p.rstd), partials,
        )  # fmt: skip
    if isinstance(p, ActivationOutput):
        code = ACTIVATION_CODES[p.activation]
        return (*head, code, p.gated, False, False, 0.0, 0, 0, 0, 0, *vector(p.bias), 0, 0, partials)
    if isinstance(p, ActivationGradient):
        code, grad_stride = ACTIVATION_CODES[p.activation], max(p.grad.stride(0), p.grad.shape[1])
        return (
            *head, code, p.gated, False, False, 0.0, p.grad.data_ptr(), grad_stride,
            0, 0, *vector(p.bias), 0, 0, partials,
        )  # fmt: skip
    return (*head, 0, False, False, False, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, partials)  # see plain_with_sums


def plain_with_sums(address: int, code: int, rows: int, cols: int, partials: int) -> tuple[Any, ...]:
    """A contiguous matrix whose columns are to be added up, as one argument of a kernel."""
    return (
        address, code, rows, cols, cols, Plain.kind, 0, False, False, False, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, partials,
    )  # fmt: skip


def column_tiles(rows: int) -> int:
    return -(-rows // COLUMN_TILE_ROWS)


# What the CUDA kernels make on the fly: kernel -> kinds of producers.
_MADE = (NormOutput, ActivationOutput, ActivationGradient)
_FUSED: dict[str, tuple[type[Producer], ...]] = {
    "amax": _MADE,  # makes no column sums: the cast that follows does
    "cast_scaled": (Plain, *_MADE),
    "cast_current": (Plain, *_MADE),
    "quantize_block": (Plain, *_MADE),
    "quantize_mxfp8": (Plain, *_MADE),
    "amax_nvfp4": (Plain, *_MADE),  # and writes what is made, for the cast
}


def fuses(p: Producer, kernel: str) -> bool:
    """Whether the CUDA kernel takes the producer itself; the rules on shapes are those of csrc/check.cpp's is_fused."""
    if type(p) not in _FUSED.get(kernel, ()):
        return False
    if p.device.type != "cuda" or p.dtype != torch.bfloat16 or p.numel() == 0 or find(p.device, kernel) is None:
        return False
    rows, cols = p.shape
    if max(rows, cols) >= 2**30 or cols % 8:
        return False
    bias = getattr(p, "bias", None)
    matrices, vectors = [p.x], [getattr(p, "weight", None), bias]
    if isinstance(p, ActivationGradient):
        matrices.append(p.grad)
        if p.gated and cols % 256:  # made in pairs of tiles, half the columns apart
            return False
    if bias is not None and bias.dtype != p.dtype and not isinstance(p, NormOutput):
        return False  # two values of it are added by one instruction
    return all(t.data_ptr() % 16 == 0 and (rows == 1 or t.stride(0) % 8 == 0) for t in matrices) and all(
        v is None or v.data_ptr() % 16 == 0 for v in vectors
    )


def taken_by(x: Tensor | Producer, kernel: str) -> Any:
    """`x` as `kernel` can take it: a producer stays one only where it is fused."""
    if not isinstance(x, Producer) or is_shapes_only():
        return x
    sums_missing = x.partials is not None and not x.partials_ready and kernel != "amax"
    if x.materialized is not None and not sums_missing:
        return x.materialized
    return x if fuses(x, kernel) else materialize(x)


def materialize(p: Producer) -> Tensor:
    """The produced matrix [M, K] in memory, with its statistics and column sums where it has any. Made once."""
    made = p.materialized
    if made is not None and (p.partials is None or p.partials_ready):
        return made
    kernel = find(p.device, "produce")
    if kernel is not None:
        out = None
        if made is None:
            out = made = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        run(kernel, p.device, producer_fields(p), pointer(out), FLOAT_CODE[p.dtype], *p.shape)
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
