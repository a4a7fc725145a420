"""te_dist: quantized training (FP8, MXFP8, blockwise FP8, NVFP4) for PyTorch under TP, SP and FSDP2."""

from pathlib import Path as _Path

# parallel/ and launch/ are top-level folders that are installed inside this package. In a bare checkout they lie
# beside it, and this makes them importable under the same names.
_here = _Path(__file__).resolve().parent
if not (_here / "parallel").is_dir() and (_here.parent / "parallel").is_dir():
    __path__.append(str(_here.parent))

from te_dist import delayed_scaling as delayed_scaling
from te_dist import dynamo as dynamo
from te_dist import ops as ops
from te_dist import recipe as recipe
from te_dist.exporting import export
from te_dist.formats import DType
from te_dist.kernels import use_backend
from te_dist.modules import (
    ConversionReport,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    convert,
    frozen_weights,
)
from te_dist.monitoring import Monitor, monitor
from te_dist.proto import TensorOrQuantized, TensorProto, to_tensor_proto
from te_dist.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    is_value_opaque_quantizer,
    register_value_quantizer,
)
from te_dist.recipe import QuantizerRole, Recipe, RecipeState, autocast
from te_dist.tensors import (
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8Tensor,
    Float8TensorStorage,
    IdentityTensor,
    IdentityTensorStorage,
    MXFP8Tensor,
    MXFP8TensorStorage,
    NVFP4Tensor,
    NVFP4TensorStorage,
    QuantizedOpError,
    QuantizedStorage,
    QuantizedTensor,
    implicit_dequantization,
    implicit_dequantizations,
    prepare_for_saving,
    reset_implicit_dequantizations,
    restore_from_saved,
)
from te_dist.version import __version__

__all__ = [
    "ConversionReport",
    "DType",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "GroupedLinear",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "Monitor",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedOpError",
    "QuantizedStorage",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRole",
    "RMSNorm",
    "Recipe",
    "RecipeState",
    "RotaryPositionEmbedding",
    "TensorOrQuantized",
    "TensorProto",
    "TransformerLayer",
    "__version__",
    "autocast",
    "convert",
    "export",
    "frozen_weights",
    "implicit_dequantization",
    "implicit_dequantizations",
    "is_value_opaque_quantizer",
    "monitor",
    "prepare_for_saving",
    "register_value_quantizer",
    "reset_implicit_dequantizations",
    "restore_from_saved",
    "to_tensor_proto",
    "use_backend",
]
