"""A Llama small enough to train on a CPU in seconds, made of te_dist modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import te_dist


class RotaryEmbedding(nn.Module):
    """Rotates pairs of channels by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_size: int, length: int, base: float = 10000.0) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_size, 2) / head_size)
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, heads, length, head_size]."""
        length = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat([-second, first], dim=-1)
        return x * self.cos[:length].to(x.dtype) + rotated * self.sin[:length].to(x.dtype)


class Block(nn.Module):
    """Attention and MLP with their norms and residuals."""

    def __init__(self, hidden: int, ffn: int, heads: int, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        options = {"normalization": "RMSNorm", "bias": False, "dtype": dtype}
        self.qkv = te_dist.LayerNormLinear(hidden, 3 * hidden, **options)  # type: ignore[arg-type]
        self.proj = te_dist.Linear(hidden, hidden, bias=False, dtype=dtype)
        self.mlp = te_dist.LayerNormMLP(hidden, ffn, activation="swiglu", **options)  # type: ignore[arg-type]
        self.rotary = RotaryEmbedding(hidden // heads, length)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.mlp(x)


class TinyLlama(nn.Module):
    """Tokens [batch, length] -> logits. The embedding and the head stay in high precision, as they should."""

    def __init__(
        self,
        vocabulary: int = 128,
        hidden: int = 128,
        ffn: int = 256,
        heads: int = 4,
        layers: int = 2,
        length: int = 64,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden, dtype=dtype)
        self.layers = nn.ModuleList(Block(hidden, ffn, heads, length, dtype) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, dtype=dtype)
        self.head = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
