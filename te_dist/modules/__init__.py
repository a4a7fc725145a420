"""The modules that users train with; all of them run on te_dist.pipeline."""

from te_dist.modules.attention import MultiheadAttention
from te_dist.modules.convert import ConversionReport, convert
from te_dist.modules.grouped_linear import GroupedLinear
from te_dist.modules.layernorm_linear import LayerNormLinear
from te_dist.modules.layernorm_mlp import LayerNormMLP
from te_dist.modules.linear import Linear
from te_dist.modules.norm import LayerNorm, RMSNorm
from te_dist.modules.rotary import RotaryPositionEmbedding
from te_dist.modules.scopes import frozen_weights
from te_dist.modules.transformer_layer import TransformerLayer

__all__ = [
    "ConversionReport",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "convert",
    "frozen_weights",
]
