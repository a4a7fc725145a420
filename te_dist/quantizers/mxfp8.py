"""MXFP8: 1x32 blocks (32x32 for weights) with power-of-two E8M0 scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats import MXFP8_BLOCK_SIZE, DType, ceil_div, matrix_size, round_up, short_name
from te_dist.groups import GroupLike, resolve_group
from te_dist.producers import Producer
from te_dist.quantizers.base import BufferSpecs, Quantizer, register_value_quantizer
from te_dist.quantizers.checks import check_fp8_dtype
from te_dist.tensors.mxfp8 import MXFP8TensorStorage
from te_dist.tensors.storage import QuantizedStorage


@register_value_quantizer
class MXFP8Quantizer(Quantizer):
    """An E8M0 scale for each 32 values along K (row plane) and along M (column plane, not transposed).

    ``with_2d_quantization`` shares one scale among 32x32 values; it is stored repeated, in the same layout.
    """

    _value_fields = ("fp8_dtype", "rowwise", "columnwise", "with_2d_quantization")
    storage_cls = MXFP8TensorStorage

    fp8_dtype: DType
    with_2d_quantization: bool

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype | str,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        self.fp8_dtype = check_fp8_dtype(fp8_dtype, type(self).__name__)
        self.rowwise = bool(rowwise)
        self.columnwise = bool(columnwise)
        self.with_2d_quantization = bool(with_2d_quantization)
        self._check_usage()

    @property
    def column_from_row(self) -> bool:  # type: ignore[override]
        return self.with_2d_quantization

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return MXFP8_BLOCK_SIZE if self.columnwise or self.with_2d_quantization else 1

    def describe(self) -> str:
        blocks = "32x32" if self.with_2d_quantization else "1x32"
        return f"MX {short_name(self.fp8_dtype)} {blocks} blocks"

    def _describe_buffers(self, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> BufferSpecs:
        rows, cols = matrix_size(shape)
        size = MXFP8_BLOCK_SIZE
        specs: BufferSpecs = {}
        if self.rowwise:
            specs["_rowwise_data"] = (tuple(shape), torch.uint8)
            scale = (round_up(rows, 128), round_up(ceil_div(cols, size), 4))
            specs["_rowwise_scale_inv"] = (scale, torch.uint8)
        if self.columnwise:
            specs["_columnwise_data"] = (tuple(shape), torch.uint8)
            scale = (round_up(ceil_div(rows, size), 4), round_up(cols, 128))
            specs["_columnwise_scale_inv"] = (scale, torch.uint8)
        return specs

    def _quantize_into(
        self,
        x: Tensor | Producer,
        out: QuantizedStorage,
        group: GroupLike | None,
        noop: Tensor | None,
        rng_state: Tensor | None,
    ) -> None:
        if group is not None:
            resolve_group(group)
        out = cast(MXFP8TensorStorage, out)
        kernels.quantize_mxfp8(
            x,
            out._rowwise_data,
            out._rowwise_scale_inv,
            out._columnwise_data,
            out._columnwise_scale_inv,
            fp8=self.fp8_dtype,
            two_d=self.with_2d_quantization,
            noop=noop,
        )
