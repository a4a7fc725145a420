"""Storage of per-tensor FP8 (delayed and current scaling)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from te_dist import kernels
from te_dist.tensors.storage import QuantizedStorage

if TYPE_CHECKING:
    from te_dist.quantizers.float8 import Float8QuantizerBase


class Float8TensorStorage(QuantizedStorage):
    """One scale for the whole tensor; the column plane is the transpose that a TN-only GEMM needs."""

    BUFFERS = ("_data", "_transpose", "_scale_inv")
    ROW_BUFFERS = ("_data",)
    COLUMN_BUFFERS = ("_transpose",)
    FORMAT = "per-tensor"

    __slots__ = BUFFERS

    _data: Tensor | None  # u8, the logical shape
    _transpose: Tensor | None  # u8 [K, M]
    _scale_inv: Tensor  # f32 [1]

    def _derive_rowwise(self) -> dict[str, Tensor]:
        assert self._transpose is not None
        return {"_data": kernels.transpose_bytes(self._transpose).view(self.shape)}

    def _derive_columnwise(self) -> dict[str, Tensor]:
        assert self._data is not None
        return {"_transpose": kernels.transpose_bytes(self._data.view(self.matrix_shape))}

    def _dequantize_into(self, out: Tensor) -> None:
        quantizer = cast("Float8QuantizerBase", self.quantizer)
        columnwise = self._data is None
        data = self._transpose if self._data is None else self._data.view(self.matrix_shape)
        assert data is not None
        kernels.dequantize_tensor(data, self._scale_inv, out, fp8=quantizer.fp8_dtype, columnwise=columnwise)
