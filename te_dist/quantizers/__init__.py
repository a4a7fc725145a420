"""Quantizers: immutable values that say how a tensor is quantized."""

from te_dist.quantizers.base import (
    Quantizer,
    is_value_opaque_quantizer,
    register_value_quantizer,
)
from te_dist.quantizers.blockwise import Float8BlockQuantizer
from te_dist.quantizers.float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from te_dist.quantizers.identity import IdentityQuantizer
from te_dist.quantizers.mxfp8 import MXFP8Quantizer
from te_dist.quantizers.nvfp4 import NVFP4Quantizer

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "is_value_opaque_quantizer",
    "register_value_quantizer",
]
