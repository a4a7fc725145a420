"""TransformerLayer: attention and MLP with their norms, residuals and dropout."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from te_dist.modules.attention import MultiheadAttention
from te_dist.modules.layernorm_mlp import LayerNormMLP
from te_dist.modules.linear import InitMethod
from te_dist.modules.norm import LayerNorm, RMSNorm
from te_dist.modules.te_options import ANYTHING, EITHER, refuse_unbuilt
from te_dist.recipe import Recipe

CONSTRUCTOR_OPTIONS = {
    "window_size": (None, (-1, -1)), "bottom_right_diagonal": None, "enc_dec_attn_mask_type": ANYTHING,
    "enc_dec_bottom_right_diagonal": None, "enc_dec_window_size": None, "tp_group": None, "tp_size": 1,
    "get_rng_state_tracker": None, "seq_length": ANYTHING, "micro_batch_size": ANYTHING, "sequence_parallel": False,
    "layer_type": "encoder", "drop_path_rate": (0.0, 0), "set_parallel_mode": EITHER,
    # Without ub_tp_comm_overlap the others mean nothing, there as here.
    "ub_tp_comm_overlap": False, "ub_overlap_ag": EITHER, "ub_overlap_rs": EITHER, "ub_overlap_rs_dgrad": EITHER,
    "ub_bulk_dgrad": EITHER, "ub_bulk_wgrad": EITHER, "activation_params": None, "qk_norm_type": None,
    "qk_norm_eps": ANYTHING, "qk_norm_before_rope": EITHER, "softmax_type": "vanilla",
}  # fmt: skip
FORWARD_OPTIONS = {
    "enc_dec_attn_mask": None, "enc_dec_attn_mask_type": ANYTHING, "enc_dec_window_size": None,
    "enc_dec_bottom_right_diagonal": None,
}  # fmt: skip


class TransformerLayer(torch.nn.Module):
    """h = x + dropout(attention(norm(x))); y = h + dropout(mlp(norm(h))).

    Parameters are ``self_attention.layernorm_qkv.*``, ``self_attention.proj.*`` and ``layernorm_mlp.*``.

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads: the sizes of the layer.
        hidden_dropout: of what is added to the residual stream, while training.
        init_method: fills the weights of qkv and fc1; output_layer_init_method those of proj and fc2.
        self_attn_mask_type, num_gqa_groups, kv_channels, attention_dropout, fuse_qkv_params, qkv_weight_interleaved,
            rotary_pos_interleaved, layer_number: as for ``te_dist.MultiheadAttention``.
        attn_input_format: its qkv_format.
        normalization, layernorm_epsilon, zero_centered_gamma: of both norms.
        activation: as for ``te_dist.LayerNormMLP``.
        apply_residual_connection_post_layernorm: add to the norms' outputs, not to their inputs.
        output_layernorm: normalize y (parameters ``layernorm.*``) in place of the attention's input.
        parallel_attention_mlp: y = x + dropout(attention(norm(x)) + mlp(norm(x))).
        recipe, params_dtype, device, bias, fuse_wgrad_accumulation, name: as for ``te_dist.Linear``.
        te_options: arguments of Transformer Engine that are not built; ValueError if one asks for something.

    Example:
        >>> import torch, te_dist
        >>> layer = te_dist.TransformerLayer(64, 128, 4, recipe=te_dist.recipe.Float8CurrentScaling())
        >>> layer(torch.ones(8, 2, 64)).shape
        torch.Size([8, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        *,
        params_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        recipe: Recipe | None = None,
        name: str | None = None,
        **te_options: Any,
    ) -> None:
        super().__init__()
        self._label = f"TransformerLayer {name!r}" if name else "TransformerLayer"
        refuse_unbuilt(self._label, te_options, CONSTRUCTOR_OPTIONS)
        self.post_norm_residual = apply_residual_connection_post_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        if self.post_norm_residual and (output_layernorm or parallel_attention_mlp):
            raise ValueError(
                f"{self._label}: apply_residual_connection_post_layernorm expects output_layernorm and "
                f"parallel_attention_mlp to be False"
            )
        self.hidden_dropout, self.layer_number = hidden_dropout, layer_number
        inner = f"{name}." if name else ""
        common: dict[str, Any] = {
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "params_dtype": params_dtype,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "bias": bias,
            "device": device,
            "recipe": recipe,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            layer_number=layer_number,
            attn_mask_type=self_attn_mask_type,
            num_gqa_groups=num_gqa_groups,
            input_layernorm=not output_layernorm,
            return_layernorm_output=self.post_norm_residual,
            fuse_qkv_params=fuse_qkv_params,
            qkv_weight_interleaved=qkv_weight_interleaved,
            rotary_pos_interleaved=rotary_pos_interleaved,
            qkv_format=attn_input_format,
            name=f"{inner}self_attention",
            **common,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            return_layernorm_output=self.post_norm_residual,
            name=f"{inner}layernorm_mlp",
            **common,
        )
        self.layernorm: LayerNorm | RMSNorm | None = None
        if output_layernorm:
            make = LayerNorm if normalization == "LayerNorm" else RMSNorm
            self.layernorm = make(
                hidden_size,
                layernorm_epsilon,
                zero_centered_gamma=zero_centered_gamma,
                device=device,
                params_dtype=params_dtype,
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        self_attn_mask_type: str | None = None,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_weight_update: Tensor | None = None,
        **te_options: Any,
    ) -> Tensor:
        """
        Args:
            hidden_states: [s, b, hidden_size], or [b, s, hidden_size] for "bshd".
            attention_mask, self_attn_mask_type, rotary_pos_emb: as for ``te_dist.MultiheadAttention``.
            is_first_microbatch, skip_weight_update: as for ``te_dist.Linear``.
        """
        refuse_unbuilt(self._label, {k: v for k, v in te_options.items() if k in FORWARD_OPTIONS}, FORWARD_OPTIONS)
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            is_first_microbatch=is_first_microbatch,
            rotary_pos_emb=rotary_pos_emb,
            skip_weight_update=skip_weight_update,
            **{k: v for k, v in te_options.items() if k not in FORWARD_OPTIONS},
        )
        residual = hidden_states
        if self.post_norm_residual:
            attended, residual = attended
        if self.parallel_attention_mlp:
            out = residual + self._dropout(
                attended + self.layernorm_mlp(hidden_states, is_first_microbatch, skip_weight_update)
            )
        else:
            between = residual + self._dropout(attended)
            made, residual = self.layernorm_mlp(between, is_first_microbatch, skip_weight_update), between
            if self.post_norm_residual:
                made, residual = made
            out = residual + self._dropout(made)
        return out if self.layernorm is None else self.layernorm(out)

    def _dropout(self, t: Tensor) -> Tensor:
        with self._random_stream():
            return torch.nn.functional.dropout(t, self.hidden_dropout, self.training)

    def _random_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Where hidden dropout takes its random numbers from; see te_dist.parallel."""
        return contextlib.nullcontext()
