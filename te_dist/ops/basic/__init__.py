"""The basic operations."""

from te_dist.ops.basic.activations import (
    GEGLU,
    GELU,
    QGEGLU,
    QGELU,
    Activation,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
    activation,
)
from te_dist.ops.basic.basic_linear import BasicLinear
from te_dist.ops.basic.bias import Bias
from te_dist.ops.basic.collectives import AllGather, AllReduce, ReduceScatter
from te_dist.ops.basic.dropout import Dropout
from te_dist.ops.basic.extra import AddExtraInput, MakeExtraOutput
from te_dist.ops.basic.grouped_linear import GroupedLinear
from te_dist.ops.basic.l2_normalization import L2Normalization
from te_dist.ops.basic.norm import LayerNorm, RMSNorm
from te_dist.ops.basic.quantize import Quantize
from te_dist.ops.basic.simple import ConstantScale, Identity, Reshape

__all__ = [
    "GEGLU",
    "GELU",
    "QGEGLU",
    "QGELU",
    "Activation",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ConstantScale",
    "Dropout",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "SiLU",
    "SwiGLU",
    "activation",
]
