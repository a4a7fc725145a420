"""Sizes of Llama-style models, from one that a laptop trains in a minute to 70B."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """A Llama's dimensions.

    Attributes:
        kv_heads: key and value heads; fewer than `heads` is grouped-query attention.
        vocab_size: of the published model; a run's own tokenizer decides unless it is asked for.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab_size: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False

    def check(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} expects at least 1 but got {getattr(self, name)}")
        if self.hidden % self.heads:
            raise ValueError(f"heads expects a divisor of hidden {self.hidden} but got {self.heads}")
        if (self.hidden // self.heads) % 2:
            raise ValueError(f"hidden / heads is {self.hidden // self.heads}, and rotary embeddings expect it even")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads expects a divisor of heads {self.heads} but got {self.kv_heads}")

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_matmul_parameters(self) -> int:
        """Of one block: what every token is multiplied with."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_heads * self.head_size)
        return attention + 3 * self.hidden * self.ffn

    @property
    def matmul_parameters(self) -> int:
        """Blocks and head; looking up an embedding multiplies nothing."""
        return self.layers * self.layer_matmul_parameters + self.hidden * self.vocab_size

    @property
    def parameters(self) -> int:
        embeddings = 0 if self.tied_embeddings else self.hidden * self.vocab_size
        return self.matmul_parameters + embeddings + self.hidden * (2 * self.layers + 1)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward, recomputation not counted; a causal attention sees half of seq_len on average."""
        return 6.0 * self.matmul_parameters + 6.0 * self.layers * self.hidden * seq_len


PRESETS: dict[str, ModelSize] = {
    "1m": ModelSize(4, 128, 384, 4, 2, 384),
    "10m": ModelSize(6, 320, 896, 5, 5, 8192),
    "50m": ModelSize(8, 512, 1408, 8, 4, 32000),
    "150m": ModelSize(12, 768, 2048, 12, 4, 32000),
    "300m": ModelSize(24, 896, 2432, 14, 2, 32000),
    "1b": ModelSize(16, 2048, 8192, 32, 8, 128256, 500000.0, tied_embeddings=True),
    "3b": ModelSize(28, 3072, 8192, 24, 8, 128256, 500000.0, tied_embeddings=True),
    "8b": ModelSize(32, 4096, 14336, 32, 8, 128256, 500000.0),
    "13b": ModelSize(40, 5120, 13824, 40, 40, 32000),
    "34b": ModelSize(48, 8192, 22016, 64, 8, 32000, 1000000.0),
    "70b": ModelSize(80, 8192, 28672, 64, 8, 128256, 500000.0),
}
