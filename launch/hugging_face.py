"""A trained Llama under the names and in the order that transformers, and every engine that reads its files, expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from te_dist.launch.presets import ModelSize


def llama_state(state: Mapping[str, Tensor], size: ModelSize) -> dict[str, Tensor]:
    """From the state dict of ``te_dist.launch.llama.Llama``, with the gate held apart or not."""
    named = {"model.embed_tokens.weight": state["embed.weight"], "model.norm.weight": state["norm.weight"]}
    if not size.tied_embeddings:
        named["lm_head.weight"] = state["head.weight"]
    for index in range(size.layers):
        attention, mlp = f"layers.{index}.self_attention.", f"layers.{index}.layernorm_mlp."
        to = f"model.layers.{index}."
        named[to + "input_layernorm.weight"] = state[attention + "layernorm_qkv.layer_norm_weight"]
        named |= _attention(state[attention + "layernorm_qkv.weight"], size, to + "self_attn.")
        named[to + "self_attn.o_proj.weight"] = state[attention + "proj.weight"]
        named[to + "post_attention_layernorm.weight"] = state[mlp + "layer_norm_weight"]
        if mlp + "fc1_weight" in state:
            gate, up = state[mlp + "fc1_weight"].chunk(2)
        else:
            gate, up = state[mlp + "fc1_gate_weight"], state[mlp + "fc1_up_weight"]
        named |= {to + "mlp.gate_proj.weight": gate, to + "mlp.up_proj.weight": up}
        named[to + "mlp.down_proj.weight"] = state[mlp + "fc2_weight"]
    return named


def _attention(qkv: Tensor, size: ModelSize, to: str) -> dict[str, Tensor]:
    """A key head's rows are its query heads, itself and its value head, one after the other."""
    queries = size.heads // size.kv_heads
    groups = qkv.view(size.kv_heads, queries + 2, size.head_size, size.hidden)
    parts = {"q": groups[:, :queries], "k": groups[:, queries : queries + 1], "v": groups[:, queries + 1 :]}
    return {f"{to}{name}_proj.weight": part.reshape(-1, size.hidden) for name, part in parts.items()}


# A layer of ours -> the linear layers of transformers that it is.
_PARTS = {
    "self_attention.layernorm_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.proj": ("self_attn.o_proj",),
    "layernorm_mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


def llama_layers(name: str) -> list[str]:
    """What a layer's name becomes: "layers.0.layernorm_mlp" is three of them."""
    if name == "head":
        return ["lm_head"]
    _, index, part = name.split(".", 2)
    return [f"model.layers.{index}.{name}" for name in _PARTS[part]]


def llama_config(size: ModelSize, seq_len: int) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_size,
        "vocab_size": size.vocab_size,
        "max_position_embeddings": seq_len,
        "rope_theta": size.rope_base,
        "rms_norm_eps": size.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": size.tied_embeddings,
    }
