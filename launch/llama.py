"""A Llama made of te_dist.TransformerLayer: grouped-query attention, rotary positions, SwiGLU, RMSNorm."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import te_dist
from te_dist.launch.presets import ModelSize

Loss = Callable[[Tensor, Tensor], Tensor]  # logits [n, vocabulary], targets [n] -> mean loss


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), targets)


class Llama(nn.Module):
    """Tokens [batch, length] -> logits, or with targets -> the mean loss.

    Inside, activations are [length, batch, hidden]: sequence parallelism splits the first dimension. The embedding and
    the head stay in high precision.

    Args:
        size: the dimensions.
        compute_dtype: of activations; parameters keep theirs and are cast, or quantized, where they are used.
        split_gate: hold the gate and up weights of the MLPs apart, under the names that tensor parallelism gives them.

    Example:
        >>> import torch
        >>> from te_dist.launch.llama import Llama
        >>> from te_dist.launch.presets import PRESETS
        >>> Llama(PRESETS["1m"])(torch.zeros(1, 8, dtype=torch.int64)).shape
        torch.Size([1, 8, 384])
    """

    def __init__(
        self,
        size: ModelSize,
        *,
        compute_dtype: torch.dtype = torch.bfloat16,
        param_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        activation_checkpointing: bool = False,
        split_gate: bool = False,
    ) -> None:
        super().__init__()
        size.check()
        self.size, self.compute_dtype = size, compute_dtype
        self.activation_checkpointing = activation_checkpointing
        self.loss: Loss = cross_entropy
        self.embed = nn.Embedding(size.vocab_size, size.hidden, device=device, dtype=param_dtype)
        self.rotary = te_dist.RotaryPositionEmbedding(size.head_size, rotary_base=size.rope_base)
        self.layers = nn.ModuleList(
            te_dist.TransformerLayer(
                size.hidden,
                size.ffn,
                size.heads,
                num_gqa_groups=size.kv_heads,
                layernorm_epsilon=size.norm_eps,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                fuse_qkv_params=True,
                params_dtype=param_dtype,
                device=device,
                name=f"layers.{index}",
            )
            for index in range(size.layers)
        )
        self.norm = te_dist.RMSNorm(size.hidden, size.norm_eps, device=device, params_dtype=param_dtype)
        self.head = te_dist.Linear(size.hidden, size.vocab_size, bias=False, device=device, dtype=param_dtype)
        self.tie()
        if split_gate:
            for layer in self.layers:
                layer.layernorm_mlp._split_gate()  # type: ignore[union-attr, operator]
        if device is not None and torch.device(device).type != "cpu":
            self.rotary.to(device)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens.t()).to(self.compute_dtype)
        angles = self.rotary(tokens.shape[1])
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                call = functools.partial(layer, rotary_pos_emb=angles)
                x = checkpoint(call, x, use_reentrant=False)
            else:
                x = layer(x, rotary_pos_emb=angles)
        x = self.norm(x)
        logits = self.head(x)
        if targets is None:
            return logits.transpose(0, 1)
        return self.loss(logits.flatten(0, 1), targets.t().flatten())

    def tie(self) -> None:
        """Let the head use the embedding's weight, where the size says so; again after either was replaced."""
        if self.size.tied_embeddings:
            self.head.weight = self.embed.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter from `seed` and its own name: the same values however many layers come before it, and
        however the parameter is laid out over ranks."""
        for name, param in self.named_parameters():
            if not isinstance(param, DTensor):
                param.copy_(self._initial(name, param, seed))
                continue
            whole = torch.empty(param.shape, dtype=param.dtype, device=param.to_local().device)
            values: dict[str, Any] = {name: self._initial(name, whole, seed)}
            # Each rank makes one whole parameter at a time, and keeps its part.
            set_model_state_dict(self, values, options=StateDictOptions(full_state_dict=True, strict=False))

    def _initial(self, name: str, param: Tensor, seed: int) -> Tensor:
        for half, part in enumerate(("fc1_gate_weight", "fc1_up_weight")):
            if name.endswith(part):  # as rows of the whole, so that splitting changes no value
                whole = param.new_empty((2 * param.shape[0], param.shape[1]))
                name = name.removesuffix(part) + "fc1_weight"
                return initial_value(name, whole, self.size.layers, seed).chunk(2)[half]
        return initial_value(name, param, self.size.layers, seed)


def initial_value(name: str, like: Tensor, layers: int, seed: int) -> Tensor:
    """Norms are 1; matrices are normal, those that write into the residual stream smaller the more blocks there are."""
    if like.dim() == 1:
        return torch.ones(like.shape, dtype=like.dtype, device=like.device)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device=like.device).manual_seed(int.from_bytes(digest, "big"))
    writes_residual = name.endswith(("proj.weight", "fc2_weight"))
    spread = 0.02 / (2 * layers) ** 0.5 if writes_residual else 0.02
    values = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    return values.normal_(0.0, spread, generator=generator).to(like.dtype)
