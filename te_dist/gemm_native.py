"""Products of two quantized planes through torch's scaled_mm.

Letters: R rows and C columns of the result, D the dimension summed over. Every product is brought into one form,
``result[R, C] = A[R, D] . B[C, D]^T`` with D contiguous in both. That is the one layout that Ada, Hopper and the
consumer Blackwells have FP8 kernels for. Sizes are padded with zero codes, which add exactly nothing, and what was
padded is cut off again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.capability import cuda_version
from te_dist.formats import E2M1_MAX, FP8_MAX, TORCH_FP8, DType, matrix_size, round_up, short_name
from te_dist.quantizers.blockwise import Float8BlockQuantizer
from te_dist.quantizers.nvfp4 import NVFP4Quantizer
from te_dist.tensors import (
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
    QuantizedStorage,
)

# The result is [R, C] with C contiguous, and cuBLASLt wants leading dimensions in multiples of 16.
COLUMN_MULTIPLE = 16
# Planes and scales must begin at multiples of so many bytes. torch's allocations do; a part of one may not.
BYTE_ALIGNMENT = 16
HIGH_PRECISION = "high precision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Native:
    """What one implementation asks of its operands."""

    scaling: tuple[str, str]  # of A and of B, as torch.nn.functional.ScalingType names them
    row_multiple: int  # R is padded to it
    depth_multiple: int  # D is padded to it
    fast_accumulation: bool = False  # whether there is such a kernel


_MX = ("BlockWise1x32", "BlockWise1x32")
_NV = ("BlockWise1x16", "BlockWise1x16")
_ROWS, _TILES = "BlockWise1x128", "BlockWise128x128"
NATIVE = {
    "scaled_mm_tensorwise": Native(
        scaling=("TensorWise", "TensorWise"), row_multiple=1, depth_multiple=16, fast_accumulation=True
    ),
    # The scales of 1x128 tiles have stride R between k blocks, and that has to be a multiple of 16 bytes.
    "scaled_mm_1x128_128x128": Native(scaling=(_ROWS, _TILES), row_multiple=4, depth_multiple=16),
    "scaled_mm_128x128_1x128": Native(scaling=(_TILES, _ROWS), row_multiple=4, depth_multiple=16),
    "scaled_mm_1x128_1x128": Native(scaling=(_ROWS, _ROWS), row_multiple=4, depth_multiple=16),
    "scaled_mm_mxfp8": Native(scaling=_MX, row_multiple=16, depth_multiple=32),
    "scaled_mm_nvfp4": Native(scaling=_NV, row_multiple=16, depth_multiple=32),
}


@functools.cache
def scaled_mm_api() -> Any:
    """The namespace with torch's scaled_mm, ScalingType and SwizzleType (torch 2.10 and later), or None."""
    functional = torch.nn.functional
    there = all(hasattr(functional, name) for name in ("scaled_mm", "ScalingType", "SwizzleType"))
    return functional if there else None


Machine = tuple[str, tuple[int, int], tuple[int, int]]


@functools.cache
def machine(device: torch.device) -> Machine:
    """Device type, compute capability and CUDA version; zeros where there is none."""
    if device.type != "cuda":
        return device.type, (0, 0), (0, 0)
    return device.type, torch.cuda.get_device_capability(device), cuda_version()


# ------------------------------------------------------------------------------------------------- operands
@dataclasses.dataclass(frozen=True)
class Factor:
    """One operand of a product: which tensor, and which of its planes is read."""

    role: str  # x, w or dy
    operand: Tensor | QuantizedStorage
    column: bool

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """(R or C, D): the dimension that survives, and the one summed over."""
        rows, cols = matrix_size(self.operand.shape)
        return (cols, rows) if self.column else (rows, cols)

    @functools.cached_property
    def device(self) -> torch.device:
        return self.operand.device

    @functools.cached_property
    def format(self) -> str:
        """The name under which the dispatch table knows this plane."""
        operand = self.operand
        if isinstance(operand, Tensor):
            return HIGH_PRECISION
        if isinstance(operand, Float8BlockwiseQTensorStorage):
            return "1x128" if cast(Float8BlockQuantizer, operand.quantizer).block_scaling_dim == 1 else "128x128"
        if isinstance(operand, NVFP4TensorStorage) and self.column:
            quantizer = cast(NVFP4Quantizer, operand.quantizer)
            if quantizer.with_rht:  # it cancels only against the same transform
                return "nvfp4 rht" if quantizer.with_random_sign_mask else "nvfp4 rht, no signs"
        return operand.FORMAT

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The plane in high precision, [R or C, D]; a quantized one dequantized to `dtype`."""
        operand = self.operand
        if isinstance(operand, Tensor):
            matrix = operand.reshape(self.size[::-1] if self.column else self.size)
        else:
            if self.column and operand.has_rowwise:
                operand = operand.with_usage(rowwise=False, columnwise=True)
            rows_cols = self.size[::-1] if self.column else self.size
            matrix = operand.dequantize(dtype=dtype).view(rows_cols)
        return matrix.t() if self.column else matrix


def padded(matrix: Tensor, rows: int, cols: int) -> Tensor:
    """`matrix` with zeros up to [rows, cols]; itself if it has that size."""
    if matrix.shape == (rows, cols):
        return matrix
    return torch.nn.functional.pad(matrix, (0, cols - matrix.shape[1], 0, rows - matrix.shape[0]))


def aligned(tensor: Tensor) -> Tensor:
    """`tensor` as cuBLASLt can read it: itself, or a copy if it begins in the middle of an allocation."""
    return tensor if tensor.storage_offset() * tensor.element_size() % BYTE_ALIGNMENT == 0 else tensor.clone()


Arguments = tuple[Tensor, list[Tensor]]


def _tensorwise(factor: Factor, rows: int, depth: int) -> Arguments:
    storage = cast(Float8TensorStorage, factor.operand)
    data = storage._transpose if factor.column else storage._data
    return _fp8(factor, data, rows, depth), [storage._scale_inv]


def _blockwise(factor: Factor, rows: int, depth: int) -> Arguments:
    storage = cast(Float8BlockwiseQTensorStorage, factor.operand)
    data, scale = _plane(storage, factor.column)
    if factor.format == "1x128":
        scale = padded(scale, scale.shape[0], rows)
    return _fp8(factor, data, rows, depth), [scale.t()]


def _mxfp8(factor: Factor, rows: int, depth: int) -> Arguments:
    storage = cast(MXFP8TensorStorage, factor.operand)
    data, scale = _plane(storage, factor.column)
    if factor.column:  # the one format whose column plane is not stored transposed
        data, scale = kernels.transpose_bytes(data.view(storage.matrix_shape)), scale.t().contiguous()
    swizzled = kernels.swizzle_scales(scale).view(torch.float8_e8m0fnu)
    return _fp8(factor, data, rows, depth), [swizzled]


def _nvfp4(factor: Factor, rows: int, depth: int) -> Arguments:
    storage = cast(NVFP4TensorStorage, factor.operand)
    data, scale = _plane(storage, factor.column)
    amax = storage._amax_columnwise if factor.column else storage._amax_rowwise
    assert amax is not None
    outer, inner = factor.size
    packed = padded(data.view(outer, inner // 2), rows, depth // 2).view(torch.float4_e2m1fn_x2)
    swizzled = kernels.swizzle_scales(scale).view(torch.float8_e4m3fn)
    return packed, [swizzled, amax * (1.0 / (E2M1_MAX * FP8_MAX[DType.kFloat8E4M3]))]


_ARGUMENTS: dict[type, Callable[[Factor, int, int], Arguments]] = {
    Float8TensorStorage: _tensorwise,
    Float8BlockwiseQTensorStorage: _blockwise,
    MXFP8TensorStorage: _mxfp8,
    NVFP4TensorStorage: _nvfp4,
}


def _plane(storage: Any, column: bool) -> tuple[Tensor, Tensor]:
    if column:
        return storage._columnwise_data, storage._columnwise_scale_inv
    return storage._rowwise_data, storage._rowwise_scale_inv


def _fp8(factor: Factor, data: Tensor | None, rows: int, depth: int) -> Tensor:
    dtype = fp8_dtype(factor)
    assert data is not None and dtype is not None
    return padded(data.view(factor.size), rows, depth).view(TORCH_FP8[dtype])


def needs_e4m3(implementation: str) -> bool:
    """Whether a kernel takes no E5M2 operand (seen on an H200: "Invalid scaling configuration")."""
    native = NATIVE.get(implementation)
    return native is not None and bool({_ROWS, _TILES} & {native.scaling[0], native.scaling[1]})


def fp8_dtype(factor: Factor) -> DType | None:
    """E4M3 or E5M2; None if the operand is something else."""
    operand = factor.operand
    return None if isinstance(operand, Tensor) else getattr(operand.quantizer, "fp8_dtype", None)


# ------------------------------------------------------------------------------------------------- the product
def scaled_product(
    name: str, a: Factor, b: Factor, *, bias: Tensor | None, dtype: torch.dtype, fast_accumulation: bool
) -> Tensor:
    """A . B^T (+ bias) by the implementation of that name; in `dtype`, or in float32 if a bias had to be added after.

    Args:
        fast_accumulation: keep sums in the tensor core's short accumulator. Only the per-tensor kernels have it.
    """
    if fp8_dtype(a) == fp8_dtype(b) == DType.kFloat8E5M2:
        raise ValueError(
            f"GEMM of {a.role} in {short_name(DType.kFloat8E5M2)} with {b.role} in {short_name(DType.kFloat8E5M2)}: "
            f"cuBLASLt has no E5M2 x E5M2 kernel; quantize one of them to e4m3, or pass backend='emulate'"
        )
    rows, columns, depth = a.size[0], b.size[0], a.size[1]
    if rows == 0 or columns == 0 or depth == 0:
        empty = torch.zeros((rows, columns), dtype=torch.float32, device=a.device)
        return empty if bias is None else empty + bias.float()
    # The kernels add a bias of the result's own 16-bit type in fp32. Any other is added to an fp32 result.
    fused = bias is not None and bias.dtype == dtype and dtype != torch.float32
    kernel_dtype = dtype if bias is None or fused else torch.float32
    result = _call(name, a, b, bias if fused else None, kernel_dtype, fast_accumulation)
    result = result[:rows, :columns]
    return result if bias is None or fused else result + bias.float()


def _call(name: str, a: Factor, b: Factor, bias: Tensor | None, dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    api, native = scaled_mm_api(), NATIVE[name]
    depth = round_up(a.size[1], native.depth_multiple)
    columns = round_up(b.size[0], COLUMN_MULTIPLE)
    data_a, scale_a = _ARGUMENTS[type(a.operand)](a, round_up(a.size[0], native.row_multiple), depth)
    data_b, scale_b = _ARGUMENTS[type(b.operand)](b, columns, depth)
    recipes = [[getattr(api.ScalingType, scaling)] for scaling in native.scaling]
    swizzle = [api.SwizzleType.NO_SWIZZLE]
    if native.scaling in (_MX, _NV):
        swizzle = [api.SwizzleType.SWIZZLE_32_4_4]
    if native.scaling == _NV:  # the second level, one float for the tensor
        recipes = [[*recipe, api.ScalingType.TensorWise] for recipe in recipes]
        swizzle = [*swizzle, api.SwizzleType.NO_SWIZZLE]
    if bias is not None and bias.numel() != columns:
        bias = torch.nn.functional.pad(bias, (0, columns - bias.numel()))
    return api.scaled_mm(
        aligned(data_a),
        aligned(data_b).t(),
        [aligned(scale) for scale in scale_a],
        recipes[0],
        [aligned(scale) for scale in scale_b],
        recipes[1],
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        bias=bias,
        output_dtype=dtype,
        use_fast_accum=fast_accumulation and native.fast_accumulation,
    )
