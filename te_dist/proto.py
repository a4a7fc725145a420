"""TensorProto: a tensor without data, plain or quantized. Every fake kernel and every workspace is made from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from te_dist.quantizers.base import Quantizer
from te_dist.tensors.quantized_tensor import QuantizedTensor, wrap
from te_dist.tensors.storage import QuantizedStorage

TensorOrQuantized = Tensor | QuantizedStorage


@dataclasses.dataclass(frozen=True)
class TensorProto:
    """Shape, dtype and layout of a tensor.

    Attributes:
        shape: the logical shape; may hold symbolic sizes.
        dtype: the dtype of a plain tensor, the nominal dtype of a quantized one.
        quantizer: None for a plain tensor.
        requires_grad: honoured for plain tensors and by ``create_wrapper``.
        device: None is torch's current default device.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizer: Quantizer | None = None
    requires_grad: bool = False
    device: torch.device | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.quantizer is not None and not isinstance(self.quantizer, Quantizer):
            raise TypeError(f"TensorProto expects a Quantizer or None but got {type(self.quantizer).__name__}")
        if self.device is not None:
            object.__setattr__(self, "device", torch.device(self.device))

    @property
    def is_quantized(self) -> bool:
        return self.quantizer is not None

    def inner_names(self) -> list[str]:
        """Names of the buffers, in the order in which the storage declares them."""
        quantizer = self._quantizer()
        quantizer._check_shape(self.shape)
        described = list(quantizer._describe_buffers(self.shape, self.dtype))
        declared = quantizer.storage_cls.BUFFERS
        ordered = [name for name in declared if name in described]
        if described != ordered:
            raise ValueError(
                f"{type(quantizer).__name__} describes the buffers {described}, but "
                f"{quantizer.storage_cls.__name__} declares {list(declared)}: names and order must agree"
            )
        return ordered

    def create_metadata(self) -> dict[str, Any]:
        """Everything of a quantized tensor but its buffers."""
        return self._quantizer().create_metadata(self.shape, dtype=self.dtype, requires_grad=self.requires_grad)

    def create_inner_tensors(self) -> dict[str, Tensor]:
        """Uninitialised buffers by name."""
        names = self.inner_names()
        buffers = self._quantizer().alloc_tensors(self.shape, device=self.device, dtype=self.dtype)
        return {name: buffers[name] for name in names}

    def assemble(self, inner: Mapping[str, Tensor]) -> QuantizedStorage:
        """The storage around given buffers."""
        return QuantizedStorage.__tensor_unflatten__(inner, self.create_metadata())

    def create_tensor(self) -> TensorOrQuantized:
        """An uninitialised plain tensor, or a storage if there is a quantizer. Traces under torch.compile."""
        if self.quantizer is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)
        return self.assemble(self.create_inner_tensors())

    def create_wrapper(self) -> QuantizedTensor:
        """As create_tensor, for a quantized proto, as a tensor that PyTorch knows."""
        return wrap(self.assemble(self.create_inner_tensors()), requires_grad=self.requires_grad)

    def _quantizer(self) -> Quantizer:
        if self.quantizer is None:
            raise ValueError(f"a plain TensorProto has no inner tensors: {self}")
        return self.quantizer


def to_tensor_proto(tensor: TensorOrQuantized) -> TensorProto:
    """The proto of a plain tensor, a storage or a QuantizedTensor."""
    if isinstance(tensor, QuantizedStorage):
        return TensorProto(tuple(tensor.shape), tensor.dtype, tensor.quantizer, False, tensor.device)
    if isinstance(tensor, QuantizedTensor):
        storage = tensor.quantized_storage
        return TensorProto(
            tuple(storage.shape),
            storage.dtype,
            storage.quantizer,
            tensor.requires_grad,
            storage.device,
        )
    if isinstance(tensor, Tensor):
        return TensorProto(tuple(tensor.shape), tensor.dtype, None, tensor.requires_grad, tensor.device)
    raise TypeError(f"to_tensor_proto expects a tensor or a QuantizedStorage but got {type(tensor).__name__}")
