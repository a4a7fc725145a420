"""MultiheadAttention: quantized projections around torch's own scaled_dot_product_attention."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from te_dist.modules.layernorm_linear import LayerNormLinear
from te_dist.modules.linear import InitMethod, Linear
from te_dist.modules.rotary import apply_rotary_pos_emb
from te_dist.modules.te_options import ANYTHING, EITHER, refuse_unbuilt
from te_dist.recipe import Recipe
from te_dist.torch_compat import SLOW_CPU_DTYPES

FORMATS = ("sbhd", "bshd")
# Whether a mask is causal, and whether it comes with an attention_mask.
MASK_TYPES = {
    "no_mask": (False, False),
    "causal": (True, False),
    "padding": (False, True),
    "padding_causal": (True, True),
    "arbitrary": (False, True),
}
CONSTRUCTOR_OPTIONS = {
    "window_size": (None, (-1, -1)), "bottom_right_diagonal": None, "tp_group": None, "tp_size": 1,
    "get_rng_state_tracker": None, "sequence_parallel": False, "attention_type": "self", "set_parallel_mode": EITHER,
    "ub_overlap_ag": False, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False, "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False, "qk_norm_type": None, "qk_norm_eps": ANYTHING, "qk_norm_before_rope": EITHER,
    "seq_length": ANYTHING, "micro_batch_size": ANYTHING, "softmax_type": "vanilla",
}  # fmt: skip
FORWARD_OPTIONS = {
    "encoder_output": None, "window_size": (None, (-1, -1)), "bottom_right_diagonal": None,
    "checkpoint_core_attention": False, "inference_params": None, "core_attention_bias_type": "no_bias",
    "core_attention_bias": None, "alibi_slopes": None, "cu_seqlens_q": None, "cu_seqlens_kv": None,
    "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None, "max_seqlen_q": None, "max_seqlen_kv": None,
    "fast_zero_fill": EITHER, "pad_between_seqs": (None, False),
}  # fmt: skip


class MultiheadAttention(torch.nn.Module):
    """Self attention: (norm,) one projection to queries, keys and values, attention, output projection.

    The projections are quantized as the recipe says; the attention itself runs in the input's dtype.

    Args:
        hidden_size, num_attention_heads: the width of input and output, and the number of query heads.
        kv_channels: size of a head; hidden_size / num_attention_heads by default.
        num_gqa_groups: number of key and value heads; as many as query heads by default.
        attention_dropout: of the attention weights, while training.
        attn_mask_type: "causal", "no_mask", or with an attention_mask "padding", "padding_causal" or "arbitrary".
        input_layernorm: normalize the input first, fused with the projection; parameters ``layernorm_qkv.*``, else
            ``qkv.*``. normalization, layernorm_epsilon and zero_centered_gamma describe the norm.
        fuse_qkv_params: hold one ``weight``, not ``query_weight``, ``key_weight`` and ``value_weight``. Its rows are
            interleaved by group (the group's query heads, its key, its value) unless qkv_weight_interleaved is False.
        init_method, output_layer_init_method: fill the weights of the two projections in place.
        return_bias: do not add the output projection's bias; return (y, bias).
        return_layernorm_output: return the norm's output too, last.
        qkv_format: "sbhd": input [sequence, batch, hidden_size]; "bshd": [batch, sequence, hidden_size].
        layer_number: kept for the user; nothing depends on it.
        recipe, params_dtype, device, bias, fuse_wgrad_accumulation, name: as for ``te_dist.Linear``.
        te_options: arguments of Transformer Engine that are not built; ValueError if one asks for something.

    Example:
        >>> import torch, te_dist
        >>> attention = te_dist.MultiheadAttention(64, 4, num_gqa_groups=2, recipe=te_dist.recipe.MXFP8BlockScaling())
        >>> attention(torch.ones(8, 2, 64)).shape
        torch.Size([8, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        *,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        recipe: Recipe | None = None,
        name: str | None = None,
        **te_options: Any,
    ) -> None:
        super().__init__()
        self._label = f"MultiheadAttention {name!r}" if name else "MultiheadAttention"
        refuse_unbuilt(self._label, te_options, CONSTRUCTOR_OPTIONS)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if num_attention_heads % groups:
            raise ValueError(
                f"{self._label} expects num_gqa_groups to divide num_attention_heads {num_attention_heads} but got "
                f"{groups}"
            )
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"{self._label} expects num_attention_heads to divide hidden_size {hidden_size}, or kv_channels, but "
                f"got {num_attention_heads}"
            )
        if qkv_format not in FORMATS:
            raise ValueError(f"{self._label} expects qkv_format in {FORMATS} but got {qkv_format!r}")
        if return_layernorm_output and not input_layernorm:
            raise ValueError(f"{self._label}: return_layernorm_output expects input_layernorm=True")
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError(
                f"{self._label}: fuse_wgrad_accumulation expects fuse_qkv_params=True, one weight with one main_grad"
            )
        self.hidden_size, self.num_attention_heads, self.num_gqa_groups = hidden_size, num_attention_heads, groups
        self.fuse_qkv_params = fuse_qkv_params
        self.kv_channels = kv_channels or hidden_size // num_attention_heads
        self.attention_dropout, self.layer_number = attention_dropout, layer_number
        self.attn_mask_type, self.qkv_format = self._mask_type(attn_mask_type), qkv_format
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params  # separate weights are not
        query_rows, key_rows = self.kv_channels * num_attention_heads, self.kv_channels * groups
        split = None if fuse_qkv_params else {"query": query_rows, "key": key_rows, "value": key_rows}
        common: dict[str, Any] = {
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            "recipe": recipe,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        }
        inner = name or ""
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size,
                query_rows + 2 * key_rows,
                layernorm_epsilon,
                normalization=normalization,
                zero_centered_gamma=zero_centered_gamma,
                return_layernorm_output=return_layernorm_output,
                parameters_split=split,
                init_method=init_method,
                name=f"{inner}.layernorm_qkv".lstrip("."),
                **common,
            )
        else:
            self.qkv = Linear(
                hidden_size,
                query_rows + 2 * key_rows,
                parameters_split=split,
                init_method=init_method,
                name=f"{inner}.qkv".lstrip("."),
                **common,
            )
        self.proj = Linear(
            query_rows,
            hidden_size,
            return_bias=return_bias,
            init_method=output_layer_init_method,
            name=f"{inner}.proj".lstrip("."),
            **common,
        )

    def _mask_type(self, value: str) -> str:
        if value not in MASK_TYPES:
            raise ValueError(f"{self._label} expects attn_mask_type in {tuple(MASK_TYPES)} but got {value!r}")
        return value

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_weight_update: Tensor | None = None,
        **te_options: Any,
    ) -> Any:
        """
        Args:
            hidden_states: [s, b, hidden_size], or [b, s, hidden_size] for "bshd".
            attention_mask: bool, True where a query must NOT look: broadcastable to [b, heads, s, s].
            attn_mask_type: in place of the constructor's.
            rotary_pos_emb: angles from ``te_dist.RotaryPositionEmbedding``, or a pair of them for queries and keys.
            is_first_microbatch, skip_weight_update: as for ``te_dist.Linear``.

        Returns:
            y, followed by bias and norm output as far as they were asked for.
        """
        refuse_unbuilt(self._label, te_options, FORWARD_OPTIONS)
        if hidden_states.dim() != 3:
            raise ValueError(
                f"{self._label} expects hidden_states of 3 dimensions ({self.qkv_format}) but got shape "
                f"{list(hidden_states.shape)}"
            )
        mask_type = self.attn_mask_type if attn_mask_type is None else self._mask_type(attn_mask_type)
        norm_output = None
        projection = self.layernorm_qkv if self.input_layernorm else self.qkv
        mixed = projection(hidden_states, is_first_microbatch, skip_weight_update)
        if self.return_layernorm_output:
            mixed, norm_output = mixed
        query, key, value = self._heads(mixed)
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            query, key = (
                apply_rotary_pos_emb(t, a, self.qkv_format, self.rotary_pos_interleaved)
                for t, a in zip((query, key), angles, strict=True)
            )
        context = self._attend(query, key, value, mask_type, attention_mask)
        out = self.proj(context, is_first_microbatch, skip_weight_update)
        if norm_output is None:
            return out
        return (*out, norm_output) if self.return_bias else (out, norm_output)

    _ranks = 1  # over which the heads are spread

    def _random_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Where attention dropout takes its random numbers from; te_dist.parallel has one for each rank."""
        return contextlib.nullcontext()

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The projection's result as queries, keys and values [., ., heads, channels]."""
        lead, size = mixed.shape[:-1], self.kv_channels
        per_group = self.num_attention_heads // self.num_gqa_groups
        groups = self.num_gqa_groups // self._ranks
        if self.qkv_weight_interleaved:
            parts = mixed.view(*lead, groups, per_group + 2, size).split((per_group, 1, 1), -2)
        else:
            parts = mixed.split((groups * per_group * size, groups * size, groups * size), -1)
        query, key, value = (part.reshape(*lead, -1, size) for part in parts)
        return query, key, value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask_type: str, mask: Tensor | None) -> Tensor:
        sequence_first = self.qkv_format == "sbhd"
        order = (1, 2, 0, 3) if sequence_first else (0, 2, 1, 3)
        q, k, v = (t.permute(order) for t in (query, key, value))  # [b, h, s, d]
        causal, masked = MASK_TYPES[mask_type]
        if masked != (mask is not None):
            needs = "expects an attention_mask" if masked else "has no use for an attention_mask"
            raise ValueError(f"{self._label}: attn_mask_type {mask_type!r} {needs}")
        allowed = None
        if mask is not None:
            if mask.dtype != torch.bool:
                raise TypeError(f"{self._label} expects a bool attention_mask, True where masked, but got {mask.dtype}")
            allowed = ~mask
            if causal:
                allowed = allowed & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=mask.device).tril()
        widened = q.device.type == "cpu" and q.dtype in SLOW_CPU_DTYPES
        if widened:
            q, k, v = q.float(), k.float(), v.float()
        with self._random_stream():
            context = torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=allowed,
                dropout_p=self.attention_dropout if self.training else 0.0,
                is_causal=causal and allowed is None,
                enable_gqa=self.num_gqa_groups != self.num_attention_heads,
            )
        if widened:
            context = context.to(query.dtype)
        context = context.permute((2, 0, 1, 3) if sequence_first else (0, 2, 1, 3))
        return context.flatten(-2)

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}, channels={self.kv_channels}, "
            f"mask={self.attn_mask_type}, format={self.qkv_format}"
        )
