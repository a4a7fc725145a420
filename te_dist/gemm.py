"""GEMMs on quantized storages: one function for fprop, dgrad and wgrad, and the table that picks its implementation.

Letters: M tokens, K in, N out, E groups. Orientations: a plane is read along its own K (row) or its own M (column).

    fprop  y[M, N]  = x[M, K] . w[N, K]^T      row plane of x,     row plane of w
    dgrad  dx[M, K] = dy[M, N] . w[N, K]       row plane of dy,    column plane of w
    wgrad  dw[N, K] = dy[M, N]^T . x[M, K]     column plane of dy, column plane of x

Nothing here is recorded by autograd: the modules' autograd functions call it.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import cast

import torch
from torch import Tensor

from te_dist import gemm_native, kernels, reference
from te_dist.capability import RULES, cuda_version
from te_dist.formats import BLOCK_SIZE, INPUT_DTYPES, DType, ceil_div
from te_dist.gemm_direct import direct, fast_accumulation
from te_dist.gemm_native import HIGH_PRECISION, Factor, scaled_product
from te_dist.reference_producers import fma as _fma
from te_dist.tensors import (
    Float8BlockwiseQTensorStorage,
    IdentityTensorStorage,
    QuantizedStorage,
    QuantizedTensor,
)

Operand = Tensor | QuantizedStorage

# kind: the roles of the two operands, and whether each is read from its column plane.
KINDS = {
    "fprop": (("x", False), ("w", False)),
    "dgrad": (("dy", False), ("w", True)),
    "wgrad": (("dy", True), ("x", True)),
}
BACKENDS = ("auto", "native", "emulate")


# ------------------------------------------------------------------------------------------------- dispatch
@dataclasses.dataclass(frozen=True)
class DispatchRow:
    """How the product of a plane of format `a` with one of format `b` is computed on a device."""

    a: str
    b: str
    device: str
    capability: tuple[int, int]  # (0, 0) where the device has none
    implementation: str  # a name of gemm_native.NATIVE, "matmul", "emulate" or "refuse"
    reason: str


ANY = "any"
# a, b, what runs it natively, and the recipe whose rule in capability.py says where. The first row that fits counts.
_PAIRS = (
    (HIGH_PRECISION, HIGH_PRECISION, "matmul", ""),
    ("per-tensor", "per-tensor", "scaled_mm_tensorwise", "Float8CurrentScaling"),
    ("1x128", "128x128", "scaled_mm_1x128_128x128", "Float8BlockScaling"),
    ("128x128", "1x128", "scaled_mm_128x128_1x128", "Float8BlockScaling"),
    ("1x128", "1x128", "scaled_mm_1x128_1x128", "Float8BlockScaling"),
    ("128x128", "128x128", "refuse", ""),
    ("mxfp8", "mxfp8", "scaled_mm_mxfp8", "MXFP8BlockScaling"),
    ("nvfp4", "nvfp4", "scaled_mm_nvfp4", "NVFP4BlockScaling"),
    ("nvfp4 rht", "nvfp4 rht", "scaled_mm_nvfp4", "NVFP4BlockScaling"),
    ("nvfp4 rht, no signs", "nvfp4 rht, no signs", "scaled_mm_nvfp4", "NVFP4BlockScaling"),
    (ANY, ANY, "emulate", ""),
)
_FIXED_REASONS = {
    "matmul": "torch.mm",
    "refuse": "no recipe pairs two operands of 128x128 blocks; quantize one of them with block_scaling_dim=1",
    "emulate": "no kernel multiplies two different formats",
}


def dispatch_table(
    device: torch.device | str,
    *,
    capability: tuple[int, int] | None = None,
    cuda: tuple[int, int] | None = None,
) -> tuple[DispatchRow, ...]:
    """Which implementation multiplies which formats on `device`; of some other machine if its versions are given.

    Example:
        >>> from te_dist.gemm import dispatch_table
        >>> next(row.implementation for row in dispatch_table("cpu") if row.a == "mxfp8")
        'emulate'
    """
    device = torch.device(device)
    if device.type == "cuda" and capability is None:
        return _table(gemm_native.machine(device))
    return _table((device.type, capability or (0, 0), cuda or cuda_version()))


@functools.cache
def _table(machine: gemm_native.Machine) -> tuple[DispatchRow, ...]:
    kind, capability, _ = machine
    rows = []
    for a, b, implementation, recipe in _PAIRS:
        reason = _FIXED_REASONS.get(implementation, "")
        if recipe:
            native, reason = _native_support(recipe, machine)
            implementation = implementation if native else "emulate"
        rows.append(DispatchRow(a, b, kind, capability, implementation, reason))
    return tuple(rows)


def _native_support(recipe: str, machine: gemm_native.Machine) -> tuple[bool, str]:
    kind, capability, cuda = machine
    rule = next(rule for rule in RULES if rule.recipe == recipe)
    if kind != "cuda":
        return False, f"no FP8 matrix units on {kind}"
    here = f"compute capability {capability[0]}.{capability[1]}, CUDA {cuda[0]}.{cuda[1]}"
    if not rule.holds(capability, cuda):
        return False, f"needs {rule.needs}; this is {here}"
    if gemm_native.scaled_mm_api() is None:
        return False, f"needs torch.nn.functional.scaled_mm (torch 2.10); this is {torch.__version__}"
    return True, here


@functools.cache
def _row(a: str, b: str, machine: gemm_native.Machine) -> DispatchRow:
    row = next(row for row in _table(machine) if (row.a, row.b) in ((a, b), (ANY, ANY)))
    return dataclasses.replace(row, a=a, b=b)


@functools.cache
def _announce_emulation(row: DispatchRow, device: str) -> None:
    """One warning per format and device in the life of the process; clear with ``cache_clear()``."""
    pair = row.a if row.a == row.b else f"{row.a} x {row.b}"
    warnings.warn(
        f"te_dist: the GEMM of {pair} on {device} is emulated (dequantize, then an unquantized matmul): {row.reason}",
        stacklevel=4,
    )


def _choose(a: Factor, b: Factor, backend: str) -> str:
    """The implementation for two operands."""
    device = a.device
    row = _row(a.format, b.format, gemm_native.machine(device))
    if row.implementation == "refuse":
        raise ValueError(f"GEMM of {a.role} ({row.a}) with {b.role} ({row.b}): {row.reason}")
    if row.implementation == "matmul":
        return "matmul"
    if backend == "emulate":
        return "emulate"
    if gemm_native.needs_e4m3(row.implementation) and DType.kFloat8E5M2 in map(gemm_native.fp8_dtype, (a, b)):
        row = dataclasses.replace(row, implementation="emulate", reason="cuBLASLt scales blocks of E4M3 only")
    if row.implementation == "emulate":
        if backend == "native":
            raise ValueError(
                f"GEMM of {a.role} ({row.a}) with {b.role} ({row.b}) has no native kernel on {device}: {row.reason}"
            )
        if device.type != "cpu":
            _announce_emulation(row, str(device))
    return row.implementation


# ------------------------------------------------------------------------------------------------- gemm
def gemm(
    a: Operand,
    b: Operand,
    *,
    kind: str,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """One of the three products of a linear layer, on storages or plain tensors.

    Args:
        a, b: x and w for "fprop", dy and w for "dgrad", dy and x for "wgrad". Leading dimensions count as rows.
        out_dtype: float32, float16 or bfloat16.
        bias: [last dimension of the result], added in float32 before the cast.
        out: where to write, of `out_dtype`.
        accumulate: add into `out` (float32 or bfloat16) instead, rounding once.
        use_split_accumulator: add up in float32 (True), or in the tensor core's shorter accumulator (False). By
            default the latter for fprop alone. Only native per-tensor FP8 has the choice; all else is float32.
        backend: "native" raises where there is no native kernel; "emulate" dequantizes and sums in float32;
            "auto" prefers native and says once where it emulates.

    Example:
        >>> import torch, te_dist
        >>> from te_dist.gemm import gemm
        >>> quantizer = te_dist.MXFP8Quantizer("e4m3")
        >>> x, w = (quantizer.quantize(torch.ones(rows, 64)) for rows in (4, 32))
        >>> gemm(x, w, kind="fprop", out_dtype=torch.bfloat16)[0, 0].item()
        64.0
    """
    if out is None and backend == "auto" and not kernels.is_shapes_only():
        (_, column_a), (_, column_b) = KINDS.get(kind, (("", False),) * 2)
        fast = fast_accumulation(kind, use_split_accumulator)
        result = direct(a, b, column_a, column_b, out_dtype, bias, fast)
        if result is not None:
            return result
    _check_options(kind, out_dtype, backend)
    factor_a, factor_b = (
        Factor(role, _operand(value, role), column) for value, (role, column) in zip((a, b), KINDS[kind], strict=True)
    )
    _check_pair(kind, factor_a, factor_b)
    shape = _result_shape(kind, factor_a, factor_b)
    _check_bias_and_out(shape, factor_a.device, out_dtype, bias, out, accumulate)
    if kernels.is_shapes_only():
        return out if out is not None else torch.empty(shape, dtype=out_dtype, device=factor_a.device)
    implementation = _choose(factor_a, factor_b, backend)
    dtype = torch.float32 if accumulate else out_dtype
    if implementation == "matmul":
        result = _matmul(factor_a.values(), factor_b.values(), bias, dtype)
    elif implementation == "emulate":
        # bf16 holds MXFP8's values (4 bits times a power of two, above 2^-133), and multiplies on tensor cores.
        exact = factor_a.device.type == "cuda" and factor_a.format == factor_b.format == "mxfp8"
        wide = torch.bfloat16 if exact else torch.float32
        result = _matmul(factor_a.values(wide).to(wide), factor_b.values(wide).to(wide), bias, dtype)
    else:
        fast = fast_accumulation(kind, use_split_accumulator)
        result = scaled_product(implementation, factor_a, factor_b, bias=bias, dtype=dtype, fast_accumulation=fast)
    result = result.reshape(shape)
    if out is None:
        return result.to(out_dtype).contiguous()  # of a padded product only a part is left
    return out.add_(result) if accumulate else out.copy_(result)


def _matmul(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a . b^T + bias, summed in float32; of type `dtype`, or float32 for the caller to cast."""
    if a.is_cuda and a.dtype == b.dtype != torch.float32 and dtype in (a.dtype, torch.float32):
        if bias is not None and bias.dtype == dtype == a.dtype:
            return torch.addmm(bias, a, b.t())
        if bias is None and dtype == a.dtype:
            return torch.mm(a, b.t())
        result = torch.mm(a, b.t(), out_dtype=torch.float32)
    else:
        result = torch.mm(a.float(), b.float().t())
    return result if bias is None else result.add_(bias.float())


def _operand(value: Operand, role: str) -> Operand:
    """A plain tensor or a quantized storage; wrappers are opened."""
    if isinstance(value, QuantizedTensor):
        value = value.quantized_storage
    if isinstance(value, IdentityTensorStorage):
        value = value._hp_data
    if isinstance(value, QuantizedStorage):
        return value
    if not isinstance(value, Tensor):
        raise TypeError(f"gemm expects {role} to be a tensor or a quantized storage but got {type(value).__name__}")
    if value.dtype not in INPUT_DTYPES:
        raise TypeError(f"gemm expects {role} quantized, or in float32, float16 or bfloat16, but got {value.dtype}")
    if value.dim() == 0:
        raise ValueError(f"gemm expects {role} to have at least one dimension but got a 0-d tensor")
    return value.detach()


def _result_shape(kind: str, a: Factor, b: Factor) -> torch.Size:
    leading = [a.size[0]] if kind == "wgrad" else list(a.operand.shape[:-1])
    return torch.Size([*leading, b.size[0]])


def _check_options(kind: str, out_dtype: torch.dtype, backend: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"gemm expects kind to be one of {list(KINDS)} but got {kind!r}")
    if backend not in BACKENDS:
        raise ValueError(f"gemm expects backend to be one of {list(BACKENDS)} but got {backend!r}")
    if out_dtype not in INPUT_DTYPES:
        raise ValueError(f"gemm expects out_dtype to be float32, float16 or bfloat16 but got {out_dtype}")


def _check_pair(kind: str, a: Factor, b: Factor) -> None:
    for factor in (a, b):
        plane = "column" if factor.column else "row"
        operand = factor.operand
        if isinstance(operand, QuantizedStorage) and not (
            operand.has_columnwise if factor.column else operand.has_rowwise
        ):
            raise ValueError(
                f"{kind} reads the {plane} plane of {factor.role}, which {operand!r} does not have; "
                f"quantize with {plane}wise=True"
            )
    if a.size[1] != b.size[1]:
        summed = {"fprop": "K", "dgrad": "N", "wgrad": "M"}[kind]
        raise ValueError(
            f"{kind} sums over {summed} and expects {a.role} and {b.role} to agree on it but {a.role} "
            f"{list(a.operand.shape)} has {a.size[1]} and {b.role} {list(b.operand.shape)} has {b.size[1]}"
        )
    if a.device != b.device:
        raise ValueError(
            f"{kind} expects its operands on one device but {a.role} is on {a.device} and {b.role} on {b.device}"
        )


def _check_bias_and_out(
    shape: torch.Size,
    device: torch.device,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
) -> None:
    if bias is not None and (bias.shape != shape[-1:] or bias.device != device):
        raise ValueError(
            f"gemm expects bias of shape {list(shape[-1:])} on {device} but got {list(bias.shape)} on {bias.device}"
        )
    if out is None:
        if accumulate:
            raise ValueError("gemm with accumulate=True expects out=, the tensor to add into")
        return
    if out.shape != shape or out.dtype != out_dtype or out.device != device:
        raise ValueError(
            f"gemm expects out of shape {list(shape)}, {out_dtype} on {device} but got {list(out.shape)}, {out.dtype} "
            f"on {out.device}"
        )
    if accumulate and out_dtype == torch.float16:
        raise ValueError("gemm accumulates into float32 or bfloat16 but out is float16, whose sums overflow")


# ------------------------------------------------------------------------------------------------- reference
def reference_block_gemm(
    a: QuantizedStorage, b: QuantizedStorage, out_dtype: torch.dtype, *, kind: str = "fprop", bias: Tensor | None = None
) -> Tensor:
    """Blockwise FP8 in the order of a kernel that scales every 128-wide k block:

        p = qa . qb^T;  y = fma(p * s_first, s_second, y)

    where s_first belongs to the operand with 1x128 tiles (to `a` if both have). Each p is summed exactly and rounded
    to float32 once. Slow, and for tests.
    """
    sides = [Factor(role, _operand(v, role), column) for v, (role, column) in zip((a, b), KINDS[kind], strict=True)]
    _check_pair(kind, *sides)
    (rows, depth), (columns, _) = sides[0].size, sides[1].size
    values, scales = zip(*(_decoded_blocks(side) for side in sides), strict=True)
    y = torch.zeros((rows, columns), dtype=torch.float32, device=a.device)
    for block in range(ceil_div(depth, BLOCK_SIZE)):
        span = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
        p = (values[0][:, span] @ values[1][:, span].t()).float()
        scale_a, scale_b = scales[0][:, block, None], scales[1][None, :, block]
        first, second = (scale_b, scale_a) if sides[0].format == "128x128" else (scale_a, scale_b)
        y = _fma(p * first, second.expand_as(p), y)
    return (y if bias is None else y + bias.float()).to(out_dtype).view(_result_shape(kind, *sides))


def _decoded_blocks(side: Factor) -> tuple[Tensor, Tensor]:
    """Unscaled values as float64 [R, D] and scales [R, ceil(D/128)] of one operand."""
    storage = cast(Float8BlockwiseQTensorStorage, side.operand)
    data, scale = gemm_native._plane(storage, side.column)
    fp8 = gemm_native.fp8_dtype(side)
    if not isinstance(storage, Float8BlockwiseQTensorStorage) or fp8 is None:
        raise ValueError(f"reference_block_gemm expects blockwise storages but got {side.format} for {side.role}")
    rows, depth = side.size
    per_row = scale.t()[:rows] if side.format == "1x128" else scale.repeat_interleave(BLOCK_SIZE, 0)[:rows]
    return reference.decode_fp8(data.view(rows, depth), fp8).double(), per_row[:, : ceil_div(depth, BLOCK_SIZE)]
