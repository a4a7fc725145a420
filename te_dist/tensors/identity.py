"""Storage of IdentityQuantizer: high-precision data behind the interface of a quantized tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist.tensors.storage import QuantizedStorage


class IdentityTensorStorage(QuantizedStorage):
    """One buffer that serves as row plane and as column plane."""

    BUFFERS = ("_hp_data",)
    FORMAT = "high precision"

    __slots__ = BUFFERS

    _hp_data: Tensor  # the logical shape and dtype

    @property
    def has_rowwise(self) -> bool:
        return self.quantizer.rowwise

    @property
    def has_columnwise(self) -> bool:
        return self.quantizer.columnwise

    def _derive_rowwise(self) -> dict[str, Tensor]:
        return {}

    def _derive_columnwise(self) -> dict[str, Tensor]:
        return {}

    def to(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> QuantizedStorage:
        moved = super().to(device=device, dtype=dtype, non_blocking=non_blocking)
        assert isinstance(moved, IdentityTensorStorage)
        # Without a dtype of its own the quantizer keeps data in the nominal one.
        (_, buffer_dtype) = self.quantizer._describe_buffers(moved.shape, moved.dtype)["_hp_data"]
        moved._hp_data = moved._hp_data.to(buffer_dtype)
        return moved

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        # A copy, as from every other format: the caller may write into it.
        return self._hp_data.to(dtype, copy=True)
