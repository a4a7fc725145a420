"""IdentityQuantizer: high precision where an interface asks for a quantizer, for mixed setups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats import DType, short_name
from te_dist.groups import GroupLike, resolve_group
from te_dist.producers import Producer
from te_dist.quantizers.base import BufferSpecs, Quantizer, register_value_quantizer
from te_dist.tensors.identity import IdentityTensorStorage
from te_dist.tensors.storage import QuantizedStorage

_TORCH_DTYPES = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


@register_value_quantizer
class IdentityQuantizer(Quantizer):
    """Copies the data as it is, or casts it to `dtype`. One buffer serves both planes."""

    _value_fields = ("dtype", "rowwise", "columnwise")
    storage_cls = IdentityTensorStorage
    column_from_row = True

    dtype: DType | None  # None: the input's own

    def __init__(
        self,
        *,
        dtype: DType | torch.dtype | str | None = None,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        self.dtype = None if dtype is None else DType.cast(dtype)
        if self.dtype is not None and self.dtype not in _TORCH_DTYPES:
            raise ValueError(
                f"{type(self).__name__} expects dtype float32, float16, bfloat16 or None but got {dtype!r}"
            )
        self.rowwise = bool(rowwise)
        self.columnwise = bool(columnwise)
        self._check_usage()

    def describe(self) -> str:
        return "high precision" if self.dtype is None else short_name(self.dtype)

    def _describe_buffers(self, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> BufferSpecs:
        return {"_hp_data": (tuple(shape), self._target_dtype(dtype))}

    def _target_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.dtype is None else _TORCH_DTYPES[self.dtype]

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
        # A copy: a storage owns its data, so that writing into one never reaches the tensor it was made from.
        data = cast(IdentityTensorStorage, out)._hp_data
        value = (kernels.materialize(x) if isinstance(x, Producer) else x).view(data.shape)
        data.copy_(value if noop is None else torch.where(noop != 0, data, value.to(data.dtype)))
