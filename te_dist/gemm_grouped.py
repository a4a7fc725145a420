"""Grouped GEMMs: one product per expert over a ragged batch.

Letters: M tokens of all groups, M_e of group e, K in, N out, E groups.

    fprop  y[M, N]     : rows of group e = x_e[M_e, K] . w_e[N, K]^T
    dgrad  dx[M, K]    : rows of group e = dy_e[M_e, N] . w_e[N, K]
    wgrad  dw[E, N, K] : dw_e = dy_e[M_e, N]^T . x_e[M_e, K]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from te_dist import gemm_native
from te_dist.formats import TORCH_FP8, DType
from te_dist.gemm import KINDS, Operand, _check_pair, _operand, gemm
from te_dist.gemm_native import Factor, padded
from te_dist.tensors import Float8TensorStorage, NVFP4TensorStorage, QuantizedStorage

Grouped = Operand | Sequence[Operand]


def grouped_gemm(
    a: Grouped,
    b: Grouped,
    *,
    kind: str,
    out_dtype: torch.dtype,
    splits: Sequence[int] | None = None,
    offsets: Tensor | None = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The products of all groups; equal to calling ``gemm`` for each.

    Args:
        a, b: the operands of ``gemm``. What is ragged (x and dy) is a sequence with one operand per group, or one
            operand whose rows are cut. A weight is a sequence, or a plain tensor [E, N, K].
        splits: rows of each group. Not needed if `a` is a sequence.
        offsets: int32 [E], the row where each group ends, on the device. Never read on the host: only for products
            that torch has a grouped kernel for (see ``has_grouped_kernel``), unless splits are given as well.
        bias: [E, N], or one [N] per group.
        out: [M, N], [M, K] or [E, N, K].
        options: accumulate, use_split_accumulator and backend, as for ``gemm``.
    """
    if kind not in KINDS:
        raise ValueError(f"grouped_gemm expects kind to be one of {list(KINDS)} but got {kind!r}")
    if offsets is not None and not _is_sequence(a):
        if bias is None and out is None and not options and has_grouped_kernel(a, b, kind=kind, out_dtype=out_dtype):
            return _grouped_kernel(cast(Operand, a), b, kind, offsets)
        if splits is None and offsets.device.type != "cpu":
            raise ValueError(
                "grouped_gemm has no kernel that reads device offsets for these operands (plain bf16, or per-tensor "
                "E4M3 without bias, out or options, with a bf16 result and sizes in multiples of 16); pass splits="
            )
        splits = torch.diff(offsets, prepend=offsets.new_zeros(1)).tolist() if splits is None else splits
    group_a = _groups(a, splits, column=kind == "wgrad", name=KINDS[kind][0][0])
    splits = [operand.shape[:-1].numel() for operand in group_a]
    if not splits:
        raise ValueError("grouped_gemm expects at least one group")
    group_b = _groups(b, splits, column=True, name="x") if kind == "wgrad" else _weights(b, len(splits))
    targets: Sequence[Tensor | None] = [None] * len(splits)
    if out is not None:
        targets = out.unbind(0) if kind == "wgrad" else out.view(-1, out.shape[-1]).split(list(splits))
    results = [
        gemm(*pair, kind=kind, out_dtype=out_dtype, bias=None if bias is None else bias[i], out=target, **options)
        for i, (pair, target) in enumerate(zip(zip(group_a, group_b, strict=True), targets, strict=True))
    ]
    if out is not None:
        return out
    if kind == "wgrad":
        return torch.stack(results)
    result = torch.cat(results)
    return result if _is_sequence(a) else result.view(*cast(Operand, a).shape[:-1], result.shape[-1])


# ------------------------------------------------------------------------------------------------- groups
def _is_sequence(value: Grouped) -> bool:
    return not isinstance(value, Tensor | QuantizedStorage)


def _groups(value: Grouped, splits: Sequence[int] | None, *, column: bool, name: str) -> list[Operand]:
    """A ragged operand as one matrix per group."""
    if _is_sequence(value):
        groups = [_operand(operand, name) for operand in cast(Sequence[Operand], value)]
        sizes = [operand.shape[:-1].numel() for operand in groups]
        if splits is not None and list(splits) != sizes:
            raise ValueError(f"grouped_gemm expects groups of {list(splits)} rows but {name} has {sizes}")
        return [group.view((size, group.shape[-1])) for size, group in zip(sizes, groups, strict=True)]
    if splits is None:
        raise ValueError(f"grouped_gemm expects splits= or offsets= to cut {name}, or one {name} per group")
    whole = _operand(cast(Operand, value), name)
    rows = whole.shape[:-1].numel()
    if sum(splits) != rows or min(splits, default=0) < 0:
        raise ValueError(f"grouped_gemm expects splits that add up to the {rows} rows of {name} but got {list(splits)}")
    if isinstance(whole, Tensor):
        return list(whole.reshape(rows, whole.shape[-1]).split(list(splits)))
    ends = torch.tensor(list(splits)).cumsum(0).tolist()
    return [_cut(whole, end - size, end, column, name) for size, end in zip(splits, ends, strict=True)]


def _weights(value: Grouped, groups: int) -> list[Operand]:
    if isinstance(value, QuantizedStorage):
        raise ValueError("grouped_gemm expects w as one quantized storage per group but got a single one")
    weights: list[Operand] = [*value.unbind(0)] if isinstance(value, Tensor) else [*value]
    if len(weights) != groups:
        raise ValueError(f"grouped_gemm expects a w for each of {groups} groups but got {len(weights)}")
    return weights


def _cut(storage: QuantizedStorage, start: int, end: int, column: bool, name: str) -> QuantizedStorage:
    """Rows start to end as a storage with the one plane that is read. Exact, hence not for scales that span rows."""
    factor = Factor(name, storage, column)
    rows, cols = storage.matrix_shape
    quantizer = storage.quantizer.with_usage(rowwise=not column, columnwise=column)
    buffers: dict[str, Tensor | None] = {}
    if isinstance(storage, Float8TensorStorage):
        buffers["_scale_inv"] = storage._scale_inv
        if column and storage._transpose is not None:
            buffers["_transpose"] = storage._transpose[:, start:end].contiguous()
        elif not column and storage._data is not None:
            buffers["_data"] = storage._data.view(rows, cols)[start:end]
    elif column or factor.format == "128x128":
        raise ValueError(
            f"grouped_gemm cannot cut the {'column' if column else 'row'} plane of {name} ({factor.format}): its "
            f"blocks span rows of several groups; quantize each group and pass a list"
        )
    elif storage.has_rowwise:
        data, scale = gemm_native._plane(storage, False)
        scale = scale[:, start:end] if factor.format == "1x128" else scale[start:end]
        specs = quantizer._describe_buffers((end - start, cols), storage.dtype)
        buffers["_rowwise_data"] = data.view(rows, -1)[start:end] if rows else data.view(specs["_rowwise_data"][0])
        # clone and not contiguous(): a single k block counts as contiguous with any stride, and scaled_mm looks at it.
        fitted = padded(scale, *specs["_rowwise_scale_inv"][0])
        buffers["_rowwise_scale_inv"] = fitted.clone(memory_format=torch.contiguous_format)
        if isinstance(storage, NVFP4TensorStorage):
            buffers["_amax_rowwise"] = storage._amax_rowwise
    return type(storage)(buffers, shape=(end - start, cols), dtype=storage.dtype, quantizer=quantizer)


# ------------------------------------------------------------------------------------------------- grouped kernels
def has_grouped_kernel(a: Grouped, b: Grouped, *, kind: str, out_dtype: torch.dtype) -> bool:
    """Whether torch multiplies all groups in one kernel that reads the offsets on the device.

    That is for bf16 tensors, and for per-tensor E4M3 (fprop and dgrad, on compute capability 9 and 10) as the special
    case of one scale per row; the result is bf16 and sizes are multiples of 16.
    """
    functional = torch.nn.functional
    if out_dtype != torch.bfloat16:
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        sizes = (a.shape[-1], *b.shape[-2:]) if kind != "wgrad" else (a.shape[-1], b.shape[-1])
        plain = type(a) is type(b) is Tensor and a.dtype == b.dtype == torch.bfloat16 and a.dim() == 2
        return plain and not any(size % 16 for size in sizes) and hasattr(functional, "grouped_mm")
    if kind == "wgrad" or not isinstance(a, Float8TensorStorage) or not _is_sequence(b):
        return False
    weights = cast(Sequence[Operand], b)
    if not weights or not all(isinstance(weight, Float8TensorStorage) for weight in weights):
        return False
    all_e4m3 = all(gemm_native.fp8_dtype(Factor("", operand, False)) == DType.kFloat8E4M3 for operand in (a, *weights))
    sizes_fit = not any(size % 16 for size in (a.shape[-1], *weights[0].shape))
    device, capability, _ = gemm_native.machine(a.device)
    native = device == "cuda" and capability[0] in (9, 10) and hasattr(functional, "scaled_grouped_mm")
    return native and all_e4m3 and sizes_fit


def _grouped_kernel(a: Operand, b: Grouped, kind: str, offsets: Tensor) -> Tensor:
    functional: Any = torch.nn.functional
    if offsets.dtype != torch.int32 or offsets.dim() != 1:
        raise ValueError(f"grouped_gemm expects offsets int32 [E] but got {offsets.dtype} {list(offsets.shape)}")
    if isinstance(a, Tensor):
        a, b = gemm_native.aligned(a.detach()), gemm_native.aligned(cast(Tensor, b).detach())
        if kind == "wgrad":
            return functional.grouped_mm(a.t(), b, offs=offsets)
        return functional.grouped_mm(a, b.transpose(-2, -1) if kind == "fprop" else b, offs=offsets)
    (role_a, _), (role_b, column) = KINDS[kind]
    e4m3 = TORCH_FP8[DType.kFloat8E4M3]
    factor_a = Factor(role_a, a, False)
    factors = [Factor(role_b, weight, column) for weight in cast(Sequence[Operand], b)]
    for factor in factors:
        _check_pair(kind, factor_a, factor)
    arguments = [gemm_native._tensorwise(factor, *factor.size) for factor in factors]
    weights = torch.stack([data.view(torch.uint8) for data, _ in arguments]).view(e4m3)  # [E, C, D]
    data, scales = gemm_native._tensorwise(factor_a, *factor_a.size)
    row_wise = functional.ScalingType.RowWise
    return functional.scaled_grouped_mm(
        gemm_native.aligned(data),
        weights.transpose(-2, -1),
        scales[0].expand(data.shape[0]).contiguous(),
        row_wise,
        torch.stack([scale[0] for _, scale in arguments]).expand(-1, weights.shape[1]).contiguous(),
        row_wise,
        offs=offsets,
        output_dtype=torch.bfloat16,
        use_fast_accum=kind == "fprop",
    ).view(*a.shape[:-1], weights.shape[1])
