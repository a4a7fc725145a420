"""Storage of blockwise FP8: 1x128 and 128x128 blocks with fp32 scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from te_dist import kernels
from te_dist.formats import BLOCK_SIZE, ceil_div, round_up
from te_dist.tensors.storage import QuantizedStorage

if TYPE_CHECKING:
    from te_dist.quantizers.blockwise import Float8BlockQuantizer


class Float8BlockwiseQTensorStorage(QuantizedStorage):
    """Scales: 1-D [ceil(K/128), rup(M,4)], 2-D [ceil(M/128), rup(ceil(K/128),4)]; columns with M and K swapped."""

    BUFFERS = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    ROW_BUFFERS = BUFFERS[:2]
    COLUMN_BUFFERS = BUFFERS[2:]
    FORMAT = "blockwise"

    __slots__ = BUFFERS

    _rowwise_data: Tensor | None  # u8, the logical shape
    _rowwise_scale_inv: Tensor | None  # f32
    _columnwise_data: Tensor | None  # u8 [K, M]
    _columnwise_scale_inv: Tensor | None  # f32

    def _derive_rowwise(self) -> dict[str, Tensor]:
        if self._quantizer.block_scaling_dim != 2:
            return super()._derive_rowwise()
        assert self._columnwise_data is not None and self._columnwise_scale_inv is not None
        rows, cols = self.matrix_shape
        return {
            "_rowwise_data": kernels.transpose_bytes(self._columnwise_data).view(self.shape),
            "_rowwise_scale_inv": _transposed_scale(self._columnwise_scale_inv, cols, rows),
        }

    def _derive_columnwise(self) -> dict[str, Tensor]:
        if self._quantizer.block_scaling_dim != 2:
            return super()._derive_columnwise()
        assert self._rowwise_data is not None and self._rowwise_scale_inv is not None
        rows, cols = self.matrix_shape
        return {
            "_columnwise_data": kernels.transpose_bytes(self._rowwise_data.view(rows, cols)),
            "_columnwise_scale_inv": _transposed_scale(self._rowwise_scale_inv, rows, cols),
        }

    def _dequantize_into(self, out: Tensor) -> None:
        columnwise = self._rowwise_data is None
        if self._rowwise_data is None:
            data, scale = self._columnwise_data, self._columnwise_scale_inv
        else:
            data, scale = self._rowwise_data.view(self.matrix_shape), self._rowwise_scale_inv
        assert data is not None and scale is not None
        kernels.dequantize_block(
            data,
            scale,
            out,
            fp8=self._quantizer.fp8_dtype,
            block_dim=self._quantizer.block_scaling_dim,
            columnwise=columnwise,
        )

    @property
    def _quantizer(self) -> Float8BlockQuantizer:
        return cast("Float8BlockQuantizer", self.quantizer)


def _transposed_scale(scale: Tensor, rows: int, cols: int) -> Tensor:
    """128x128 scales of a [rows, cols] tensor -> those of its transpose, padding redone."""
    row_blocks, col_blocks = ceil_div(rows, BLOCK_SIZE), ceil_div(cols, BLOCK_SIZE)
    out = scale.new_zeros((col_blocks, round_up(row_blocks, 4)))
    out[:, :row_blocks] = scale[:, :col_blocks].t()
    return out
