"""Storage of NVFP4: packed E2M1 with an E4M3 scale per 16 values and an fp32 amax per plane."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from te_dist import kernels
from te_dist.formats import NVFP4_BLOCK_SIZE, ceil_div, round_up
from te_dist.tensors.storage import QuantizedStorage

if TYPE_CHECKING:
    from te_dist.quantizers.nvfp4 import NVFP4Quantizer


class NVFP4TensorStorage(QuantizedStorage):
    """The column plane is transposed, and Hadamard-transformed along M if the quantizer says so."""

    BUFFERS = (
        "_rowwise_data",
        "_rowwise_scale_inv",
        "_columnwise_data",
        "_columnwise_scale_inv",
        "_amax_rowwise",
        "_amax_columnwise",
    )
    ROW_BUFFERS = ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise")
    COLUMN_BUFFERS = ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise")
    FORMAT = "nvfp4"

    __slots__ = BUFFERS

    _rowwise_data: Tensor | None  # u8 [..., K/2]
    _rowwise_scale_inv: Tensor | None  # u8 E4M3 [rup(M,128), rup(ceil(K/16),4)]
    _columnwise_data: Tensor | None  # u8 [K, M/2]
    _columnwise_scale_inv: Tensor | None  # u8 E4M3 [rup(K,128), rup(ceil(M/16),4)]
    _amax_rowwise: Tensor | None  # f32 [1]
    _amax_columnwise: Tensor | None  # f32 [1]

    def _derive_rowwise(self) -> dict[str, Tensor]:
        if not self._planes_are_transposes:
            return super()._derive_rowwise()
        assert self._columnwise_data is not None and self._columnwise_scale_inv is not None
        assert self._amax_columnwise is not None
        rows, cols = self.matrix_shape
        data = kernels.transpose_nibbles(self._columnwise_data)
        return {
            "_rowwise_data": data.view(*self.shape[:-1], cols // 2),
            "_rowwise_scale_inv": _transposed_scale(self._columnwise_scale_inv, cols, rows),
            "_amax_rowwise": self._amax_columnwise.clone(),
        }

    def _derive_columnwise(self) -> dict[str, Tensor]:
        if not self._planes_are_transposes:
            return super()._derive_columnwise()
        assert self._rowwise_data is not None and self._rowwise_scale_inv is not None
        assert self._amax_rowwise is not None
        rows, cols = self.matrix_shape
        return {
            "_columnwise_data": kernels.transpose_nibbles(self._rowwise_data.view(rows, cols // 2)),
            "_columnwise_scale_inv": _transposed_scale(self._rowwise_scale_inv, rows, cols),
            "_amax_columnwise": self._amax_rowwise.clone(),
        }

    def _dequantize_into(self, out: Tensor) -> None:
        columnwise = self._rowwise_data is None
        if self._rowwise_data is None:
            data, scale, amax = (
                self._columnwise_data,
                self._columnwise_scale_inv,
                self._amax_columnwise,
            )
        else:
            rows, cols = self.matrix_shape
            data, scale, amax = (
                self._rowwise_data.view(rows, cols // 2),
                self._rowwise_scale_inv,
                self._amax_rowwise,
            )
        assert data is not None and scale is not None and amax is not None
        kernels.dequantize_nvfp4(
            data,
            scale,
            amax,
            out,
            columnwise=columnwise,
            with_rht=self._quantizer.with_rht,
            random_signs=self._quantizer.with_random_sign_mask,
        )

    @property
    def _quantizer(self) -> NVFP4Quantizer:
        return cast("NVFP4Quantizer", self.quantizer)

    @property
    def _planes_are_transposes(self) -> bool:
        """With 16x16 scales, no transform and no random bits the two planes hold the same numbers."""
        quantizer = self._quantizer
        return quantizer.with_2d_quantization and not quantizer.with_rht and not quantizer.stochastic_rounding


def _transposed_scale(scale: Tensor, rows: int, cols: int) -> Tensor:
    """Scales of 16x16 tiles, repeated per row of a [rows, cols] tensor -> those of its transpose."""
    tiles = scale[:rows:NVFP4_BLOCK_SIZE, : ceil_div(cols, NVFP4_BLOCK_SIZE)].t()
    out = scale.new_zeros((round_up(cols, 128), round_up(ceil_div(rows, NVFP4_BLOCK_SIZE), 4)))
    out[:cols, : tiles.shape[1]] = tiles.repeat_interleave(NVFP4_BLOCK_SIZE, 0)[:cols]
    return out
