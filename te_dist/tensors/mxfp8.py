"""Storage of MXFP8: 1x32 (or 32x32) blocks with E8M0 scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from te_dist import kernels
from te_dist.formats import MXFP8_BLOCK_SIZE, ceil_div, round_up
from te_dist.tensors.storage import QuantizedStorage

if TYPE_CHECKING:
    from te_dist.quantizers.mxfp8 import MXFP8Quantizer


class MXFP8TensorStorage(QuantizedStorage):
    """Both planes have the logical shape: the column plane is scaled along M but not transposed."""

    BUFFERS = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    ROW_BUFFERS = BUFFERS[:2]
    COLUMN_BUFFERS = BUFFERS[2:]
    FORMAT = "mxfp8"

    __slots__ = BUFFERS

    _rowwise_data: Tensor | None  # u8, the logical shape
    _rowwise_scale_inv: Tensor | None  # u8 E8M0 [rup(M,128), rup(ceil(K/32),4)]
    _columnwise_data: Tensor | None  # u8, the logical shape
    _columnwise_scale_inv: Tensor | None  # u8 E8M0 [rup(ceil(M/32),4), rup(K,128)]

    def _derive_rowwise(self) -> dict[str, Tensor]:
        if not self._quantizer.with_2d_quantization:
            return super()._derive_rowwise()
        assert self._columnwise_data is not None and self._columnwise_scale_inv is not None
        rows, cols = self.matrix_shape
        tiles = self._columnwise_scale_inv[: ceil_div(rows, MXFP8_BLOCK_SIZE), :cols:MXFP8_BLOCK_SIZE]
        scale = tiles.new_zeros((round_up(rows, 128), round_up(tiles.shape[1], 4)))
        scale[:rows, : tiles.shape[1]] = tiles.repeat_interleave(MXFP8_BLOCK_SIZE, 0)[:rows]
        return {"_rowwise_data": self._columnwise_data.clone(), "_rowwise_scale_inv": scale}

    def _derive_columnwise(self) -> dict[str, Tensor]:
        if not self._quantizer.with_2d_quantization:
            return super()._derive_columnwise()
        assert self._rowwise_data is not None and self._rowwise_scale_inv is not None
        rows, cols = self.matrix_shape
        tiles = self._rowwise_scale_inv[:rows:MXFP8_BLOCK_SIZE, : ceil_div(cols, MXFP8_BLOCK_SIZE)]
        scale = tiles.new_zeros((round_up(tiles.shape[0], 4), round_up(cols, 128)))
        scale[: tiles.shape[0], :cols] = tiles.repeat_interleave(MXFP8_BLOCK_SIZE, 1)[:, :cols]
        return {"_columnwise_data": self._rowwise_data.clone(), "_columnwise_scale_inv": scale}

    def _dequantize_into(self, out: Tensor) -> None:
        columnwise = self._rowwise_data is None
        if self._rowwise_data is None:
            data, scale = self._columnwise_data, self._columnwise_scale_inv
        else:
            data, scale = self._rowwise_data, self._rowwise_scale_inv
        assert data is not None and scale is not None
        kernels.dequantize_mxfp8(
            data.view(self.matrix_shape),
            scale,
            out,
            fp8=self._quantizer.fp8_dtype,
            columnwise=columnwise,
        )

    @property
    def _quantizer(self) -> MXFP8Quantizer:
        return cast("MXFP8Quantizer", self.quantizer)
