"""Blockwise FP8: 1x128 for activations and gradients, 128x128 for weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats import BLOCK_SIZE, DType, ceil_div, matrix_size, round_up, short_name
from te_dist.groups import GroupLike, resolve_group
from te_dist.producers import Producer
from te_dist.quantizers.base import BufferSpecs, Quantizer, register_value_quantizer
from te_dist.quantizers.checks import check_eps, check_fp8_dtype
from te_dist.tensors.blockwise import Float8BlockwiseQTensorStorage
from te_dist.tensors.storage import QuantizedStorage


@register_value_quantizer
class Float8BlockQuantizer(Quantizer):
    """An fp32 scale for each 1x128 tile (``block_scaling_dim=1``) or 128x128 block (2).

    Column tiles are computed from the high-precision input, not from the row plane; with 128x128 blocks both planes
    hold the same bytes.
    """

    _value_fields = (
        "fp8_dtype",
        "rowwise",
        "columnwise",
        "amax_epsilon",
        "force_pow_2_scales",
        "block_scaling_dim",
    )
    storage_cls = Float8BlockwiseQTensorStorage

    fp8_dtype: DType
    amax_epsilon: float
    force_pow_2_scales: bool
    block_scaling_dim: int

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype | str,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        self.fp8_dtype = check_fp8_dtype(fp8_dtype, type(self).__name__)
        self.rowwise = bool(rowwise)
        self.columnwise = bool(columnwise)
        self.amax_epsilon = check_eps(amax_epsilon, type(self).__name__)
        self.force_pow_2_scales = bool(force_pow_2_scales)
        if type(block_scaling_dim) is not int or block_scaling_dim not in (1, 2):
            raise ValueError(
                f"{type(self).__name__} expects block_scaling_dim 1 (1x128) or 2 (128x128) but got "
                f"{block_scaling_dim!r}"
            )
        self.block_scaling_dim = block_scaling_dim
        self._check_usage()

    @property
    def column_from_row(self) -> bool:  # type: ignore[override]
        return self.block_scaling_dim == 2

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return BLOCK_SIZE if self.columnwise or self.block_scaling_dim == 2 else 1

    def describe(self) -> str:
        blocks = "128x128" if self.block_scaling_dim == 2 else "1x128"
        return f"{short_name(self.fp8_dtype)} {blocks} blocks"

    def _scale_shape(self, rows: int, cols: int) -> tuple[int, int]:
        if self.block_scaling_dim == 2:
            return ceil_div(rows, BLOCK_SIZE), round_up(ceil_div(cols, BLOCK_SIZE), 4)
        return ceil_div(cols, BLOCK_SIZE), round_up(rows, 4)

    def _describe_buffers(self, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> BufferSpecs:
        rows, cols = matrix_size(shape)
        specs: BufferSpecs = {}
        if self.rowwise:
            specs["_rowwise_data"] = (tuple(shape), torch.uint8)
            specs["_rowwise_scale_inv"] = (self._scale_shape(rows, cols), torch.float32)
        if self.columnwise:
            specs["_columnwise_data"] = ((cols, rows), torch.uint8)
            specs["_columnwise_scale_inv"] = (self._scale_shape(cols, rows), torch.float32)
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
        out = cast(Float8BlockwiseQTensorStorage, out)
        kernels.quantize_block(
            x,
            out._rowwise_data,
            out._rowwise_scale_inv,
            out._columnwise_data,
            out._columnwise_scale_inv,
            fp8=self.fp8_dtype,
            block_dim=self.block_scaling_dim,
            eps=self.amax_epsilon,
            power_of_2=self.force_pow_2_scales,
            noop=noop,
        )
