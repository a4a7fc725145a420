"""The products that training consists of, with as little as possible between the caller and torch.

``gemm`` checks, pads and dispatches, which takes longer on the host than launching a small product does. A pair of
operands that needs none of it is multiplied here; anything else gets None and takes the long way. Both give the same
bits: they end in the same call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from te_dist import gemm_native
from te_dist.capability import RULES
from te_dist.formats import TORCH_FP8, DType
from te_dist.tensors import Float8BlockwiseQTensorStorage, Float8TensorStorage, QuantizedStorage

E5M2 = DType.kFloat8E5M2
_ALIGNED = 15  # sizes in multiples of 16 need no padding


def fast_accumulation(kind: str, use_split_accumulator: bool | None) -> bool:
    """Whether a product keeps its sums in the tensor core's short accumulator: unless told, only fprop does."""
    return kind == "fprop" if use_split_accumulator is None else not use_split_accumulator


@functools.cache
def _is_native(recipe: str, device: torch.device) -> bool:
    if device.type != "cuda" or gemm_native.scaled_mm_api() is None:
        return False
    _, capability, cuda = gemm_native.machine(device)
    return next(rule for rule in RULES if rule.recipe == recipe).holds(capability, cuda)


@functools.cache
def _block_recipes() -> tuple[int, int, int]:
    """The codes of 1x128 tiles, of 128x128 tiles and of no swizzle."""
    api = gemm_native.scaled_mm_api()
    scaling = api.ScalingType
    return scaling.BlockWise1x128.value, scaling.BlockWise128x128.value, api.SwizzleType.NO_SWIZZLE.value


def direct(
    a: Tensor | QuantizedStorage,
    b: Tensor | QuantizedStorage,
    column_a: bool,
    column_b: bool,
    dtype: torch.dtype,
    bias: Tensor | None,
    fast_accumulation: bool,
) -> Tensor | None:
    """a . b^T (+ bias) of two matrices, each read from its row or its column plane; None if that needs more care."""
    kind = type(a)
    if kind is not type(b) and not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return None
    if bias is not None and bias.dtype != dtype:
        return None
    if kind is Float8TensorStorage:
        return _per_tensor(a, b, column_a, column_b, dtype, bias, fast_accumulation)  # type: ignore[arg-type]
    if kind is Float8BlockwiseQTensorStorage:
        return _blockwise(a, b, column_a, column_b, dtype, bias)  # type: ignore[arg-type]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _plain(a, b, column_a, column_b, dtype, bias)
    return None


def _is_aligned(data_a: Tensor, data_b: Tensor, scale_a: Tensor, scale_b: Tensor) -> bool:
    """Whether planes (bytes) and scales (floats) begin where cuBLASLt can read them: parts of a stack may not."""
    planes = data_a.storage_offset() % 16 == 0 and data_b.storage_offset() % 16 == 0
    return planes and scale_a.storage_offset() % 4 == 0 and scale_b.storage_offset() % 4 == 0


def _plain(
    a: Tensor, b: Tensor, column_a: bool, column_b: bool, dtype: torch.dtype, bias: Tensor | None
) -> Tensor | None:
    if not (a.is_cuda and a.dtype == b.dtype == dtype != torch.float32 and a.dim() == b.dim() == 2):
        return None
    left, right = (a.t() if column_a else a), (b if column_b else b.t())
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def _per_tensor(
    a: Float8TensorStorage,
    b: Float8TensorStorage,
    column_a: bool,
    column_b: bool,
    dtype: torch.dtype,
    bias: Tensor | None,
    fast_accumulation: bool,
) -> Tensor | None:
    data_a, data_b = (a._transpose if column_a else a._data), (b._transpose if column_b else b._data)
    if data_a is None or data_b is None or data_a.dim() != 2 or data_b.dim() != 2:
        return None
    depth, columns = data_a.shape[1], data_b.shape[0]
    if depth != data_b.shape[1] or (depth | columns) & _ALIGNED or 0 in (depth, columns, data_a.shape[0]):
        return None
    if (bias is not None and dtype == torch.float32) or not _is_native("Float8CurrentScaling", data_a.device):
        return None
    type_a, type_b = a.quantizer.fp8_dtype, b.quantizer.fp8_dtype
    if (type_a == E5M2 and type_b == E5M2) or not _is_aligned(data_a, data_b, a._scale_inv, b._scale_inv):
        return None
    return torch._scaled_mm(
        data_a.view(TORCH_FP8[type_a]),
        data_b.view(TORCH_FP8[type_b]).t(),
        a._scale_inv,
        b._scale_inv,
        bias,
        None,
        dtype,
        fast_accumulation,
    )


def _blockwise(
    a: Float8BlockwiseQTensorStorage,
    b: Float8BlockwiseQTensorStorage,
    column_a: bool,
    column_b: bool,
    dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor | None:
    data_a, scale_a = gemm_native._plane(a, column_a)
    data_b, scale_b = gemm_native._plane(b, column_b)
    if data_a is None or data_b is None or data_a.dim() != 2 or data_b.dim() != 2:
        return None
    (rows, depth), columns = data_a.shape, data_b.shape[0]
    if depth != data_b.shape[1] or (depth | columns | rows) & _ALIGNED or 0 in (rows, depth, columns):
        return None
    if (bias is not None and dtype == torch.float32) or not _is_native("Float8BlockScaling", data_a.device):
        return None
    quantizer_a, quantizer_b = a.quantizer, b.quantizer
    type_a, type_b = quantizer_a.fp8_dtype, quantizer_b.fp8_dtype
    tiles_a, tiles_b = quantizer_a.block_scaling_dim, quantizer_b.block_scaling_dim
    if E5M2 in (type_a, type_b) or tiles_a == tiles_b == 2 or not _is_aligned(data_a, data_b, scale_a, scale_b):
        return None
    a_codes, b_codes = data_a.view(TORCH_FP8[type_a]), data_b.view(TORCH_FP8[type_b])
    return multiply_blocks(a_codes, scale_a, b_codes, scale_b, bias, dtype, tiles_a, tiles_b)


def multiply_blocks(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tiles_a: int,
    tiles_b: int,
) -> Tensor:
    """a [R, D] . b [C, D]^T (+ bias) of fp8 codes. tiles: 1 for 1x128 scales, 2 for 128x128 ones, as they are kept."""
    row_tiles, square_tiles, no_swizzle = _block_recipes()
    return torch._scaled_mm_v2(
        a, b.t(),
        [scale_a.t()], [row_tiles if tiles_a == 1 else square_tiles], [no_swizzle],
        [scale_b.t()], [row_tiles if tiles_b == 1 else square_tiles], [no_swizzle],
        bias, dtype, (), False,
    )  # fmt: skip
