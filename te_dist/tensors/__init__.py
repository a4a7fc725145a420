"""Quantized data: storages (plain objects) and the QuantizedTensor wrapper that PyTorch knows."""

from te_dist.tensors.blockwise import Float8BlockwiseQTensorStorage
from te_dist.tensors.float8 import Float8TensorStorage
from te_dist.tensors.identity import IdentityTensorStorage
from te_dist.tensors.mxfp8 import MXFP8TensorStorage
from te_dist.tensors.nvfp4 import NVFP4TensorStorage
from te_dist.tensors.quantized_tensor import (
    Float8BlockwiseQTensor,
    Float8Tensor,
    IdentityTensor,
    MXFP8Tensor,
    NVFP4Tensor,
    QuantizedOpError,
    QuantizedTensor,
    implicit_dequantization,
    implicit_dequantizations,
    reset_implicit_dequantizations,
)
from te_dist.tensors.storage import QuantizedStorage, prepare_for_saving, restore_from_saved

__all__ = [
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8Tensor",
    "Float8TensorStorage",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedOpError",
    "QuantizedStorage",
    "QuantizedTensor",
    "implicit_dequantization",
    "implicit_dequantizations",
    "prepare_for_saving",
    "reset_implicit_dequantizations",
    "restore_from_saved",
]
