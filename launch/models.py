"""The model of a run: built, initialised, parallelized, quantized, compiled and sharded, in that order."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import Tensor, nn

import te_dist
from te_dist import torch_compat
from te_dist.launch import layout as layouts
from te_dist.launch.config import ConfigError, TrainConfig
from te_dist.launch.llama import Llama
from te_dist.launch.presets import ModelSize
from te_dist.launch.recipes import is_quantized, recipe_table
from te_dist.modules.base import QuantizedLayer
from te_dist.modules.convert import ConversionReport
from te_dist.modules.parameters import local_part

META_FROM = 1_000_000_000  # parameters from which on no rank should hold the whole model


@dataclasses.dataclass
class BuiltModel:
    """A model ready to train: ``model(tokens, targets)`` is the mean loss."""

    model: nn.Module
    conversion: ConversionReport
    parameters: int
    flops_per_token: float


class HuggingFaceLM(nn.Module):
    """A causal LM of transformers behind the same call: tokens, targets -> mean loss."""

    def __init__(self, path: str, compute_dtype: torch.dtype, param_dtype: torch.dtype, checkpointing: bool) -> None:
        super().__init__()
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError:
            raise ConfigError("hf_config needs transformers: pip install 'te-dist[accelerate]'") from None
        folder = os.path.dirname(path) if os.path.isfile(path) else path
        try:
            hf = AutoConfig.from_pretrained(folder or ".")
            self.lm: Any = AutoModelForCausalLM.from_config(hf, dtype=param_dtype)
        except Exception as error:
            raise ConfigError(f"hf_config {path!r} gives no causal LM: {error}") from None
        self.compute_dtype = compute_dtype
        if checkpointing:
            self.lm.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def vocab_size(self) -> int:
        return self.lm.get_input_embeddings().num_embeddings

    @property
    def blocks(self) -> list[nn.Module]:
        stacks = [list(m) for m in self.lm.modules() if isinstance(m, nn.ModuleList)]
        return max(stacks, key=len, default=[])

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        with torch.autocast(tokens.device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32):
            logits = self.lm(input_ids=tokens, use_cache=False).logits
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build_model(config: TrainConfig, vocab_size: int, layout: layouts.Layout, device: torch.device) -> BuiltModel:
    """`vocab_size` is what the data needs; a preset's own is used where the config says so."""
    compute, param = getattr(torch, config.compute_dtype), getattr(torch, config.param_dtype)
    checkpointing = config.activation_checkpointing == "full"
    torch.manual_seed(config.seed)
    model: nn.Module
    if config.hf_config is not None:
        if config.tp > 1:
            raise ConfigError("tp above 1 expects a preset: Hugging Face models are trained with dp_shard")
        hf = HuggingFaceLM(config.hf_config, compute, param, checkpointing)
        if hf.vocab_size < vocab_size:
            raise ConfigError(
                f"hf_config {config.hf_config!r} has a vocabulary of {hf.vocab_size}, but the tokenizer needs "
                f"{vocab_size}"
            )
        model, blocks = hf.to(device), hf.blocks
        matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        attention = 6.0 * getattr(hf.lm.config, "num_hidden_layers", 0) * getattr(hf.lm.config, "hidden_size", 0)
        flops = 6.0 * matrices + attention * config.seq_len
    else:
        size = dataclasses.replace(config.model_size, vocab_size=config.vocab_size or vocab_size)
        if size.vocab_size < vocab_size:
            raise ConfigError(f"vocab_size expects at least the tokenizer's {vocab_size} but got {size.vocab_size}")
        on_meta = _wants_meta(config, size, layout)
        llama = Llama(
            size,
            compute_dtype=compute,
            param_dtype=param,
            device="meta" if on_meta else device,
            activation_checkpointing=checkpointing,
            split_gate=bool(config.split_gate),
        )
        if not on_meta:
            llama.init_weights(config.seed)
        model, blocks, flops = llama, list(llama.layers), size.flops_per_token(config.seq_len)
    parameters = sum(p.numel() for p in model.parameters())
    conversion = quantize(model, config)
    layouts.apply_tensor_parallel(model, layout, config)
    check_shapes(model)
    if config.compile:
        compile_blocks(blocks)
    layouts.shard_model(model, blocks, layout, config)
    if isinstance(model, Llama) and next(model.parameters()).is_meta:
        _materialize(model, config.seed, device)
    return BuiltModel(model, conversion, parameters, flops)


@torch.no_grad()
def check_shapes(model: nn.Module) -> None:
    """Refuse now what a layer would refuse in its first forward pass: a weight that its recipe's format cannot hold."""
    for layer in (layer for layer in model.modules() if isinstance(layer, QuantizedLayer)):
        try:
            layer._check_recipe(layer.recipe, [local_part(p) for p in layer._slots()])
        except ValueError as error:
            raise ConfigError(str(error)) from None


def compile_blocks(blocks: list[nn.Module]) -> None:
    """torch.compile every block; blocks that are alike share one graph, however many there are."""
    torch_compat.allow_graphs(4 * len(blocks))  # where recipes differ; in training and evaluation
    for block in blocks:
        block.compile(fullgraph=True)


def _wants_meta(config: TrainConfig, size: ModelSize, layout: layouts.Layout) -> bool:
    if layout.mesh is None:
        return False
    return size.parameters > META_FROM if config.meta_init is None else config.meta_init


def _materialize(model: Llama, seed: int, device: torch.device) -> None:
    """Memory and values for a model that was built and laid out on the meta device."""
    model.to_empty(device=device)
    model.tie()
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer):
            layer._reset_delayed()
    model.init_weights(seed)


def quantize(model: nn.Module, config: TrainConfig) -> ConversionReport:
    """Give the layers their recipes. The table says of each layer which, or why none."""
    if not is_quantized(config.recipe):
        none: dict[str, te_dist.Recipe | None] = {"*": None}
        return te_dist.convert(model, none, verbose=False)
    report = te_dist.convert(
        model,
        recipe_table(config.recipe),
        min_size="auto" if config.min_layer_size is None else config.min_layer_size,
        first_last_layers_bf16=config.first_last_layers_bf16,
        verbose=False,
    )
    if not report.converted:
        raise ConfigError(
            f"recipe {config.recipe} quantizes no layer of this model, it would train in {config.compute_dtype}:\n"
            f"{report}"
        )
    return report
