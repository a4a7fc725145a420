"""export: a trained model's weights as plain tensors, in the formats that inference engines read.

    format       a quantized weight W [N, K]                                   everything else
    bf16 ...     W                                                             bf16 (fp16, fp32)
    fp8          W e4m3, W_scale fp32 [1]: W * W_scale                         bf16
    fp8_block    W e4m3, W_scale_inv fp32 [N/128, K/128]: a factor a block     bf16

The last one is what DeepSeek-V3 was published in. What a layer trained in is what is written: where its recipe
quantizes weights in the same format the bytes are those of its last forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_dist import torch_compat
from te_dist.formats import DType
from te_dist.modules.base import DELAYED_BUFFERS, QuantizedLayer
from te_dist.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Quantizer
from te_dist.recipe import QuantizerRole

HIGH_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QUANTIZED: dict[str, Quantizer] = {
    "fp8": Float8CurrentScalingQuantizer("e4m3", columnwise=False),
    "fp8_block": Float8BlockQuantizer("e4m3", columnwise=False, block_scaling_dim=2, force_pow_2_scales=False),
}
SUFFIXES = {"fp8": "_scale", "fp8_block": "_scale_inv"}
BLOCK = 128


def export(
    model: nn.Module, format: str = "bf16", folder: str | Path | None = None, config: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """The weights of `model` on the CPU, under their own names, and with `folder` in a file that others read.

    Over several ranks all of them call it, since shards are gathered; rank 0 gives the folder.

    Args:
        format: "bf16", "fp16", "fp32", or for the layers that have a recipe "fp8" or "fp8_block".
        folder: write ``model.safetensors`` and ``config.json`` here.
        config: what config.json holds; None: the model's own ``config``, as those of transformers have one.

    Example:
        >>> import torch, te_dist
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.Linear(128, 8))
        >>> _ = te_dist.convert(model, {"0": te_dist.recipe.Float8BlockScaling()}, verbose=False)
        >>> {name: str(tensor.dtype)[6:] for name, tensor in te_dist.export(model, "fp8_block").items()}
        ... # doctest: +NORMALIZE_WHITESPACE
        {'0.weight': 'float8_e4m3fn', '0.weight_scale_inv': 'float32', '0.bias': 'bfloat16', '1.weight': 'bfloat16',
         '1.bias': 'bfloat16'}
    """
    check_format(format)
    quantizers = weight_quantizers(model, format) if format in QUANTIZED else {}
    if format in QUANTIZED and not quantizers:
        raise ValueError(f"export in {format!r} expects a model with quantized layers, but no layer has a recipe")
    state = {
        name: value for name, value in model.state_dict().items() if name.rpartition(".")[2] not in DELAYED_BUFFERS
    }
    tensors = encode(state, quantizers, format)
    if folder is not None:
        own: dict[str, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
        save(folder, tensors, dict(own if config is None else config), format, unquantized(model, quantizers))
    return tensors


def check_format(format: str) -> None:
    known = (*HIGH_PRECISION, *QUANTIZED)
    if format not in known:
        raise ValueError(f"export expects format in {known} but got {format!r}")


def weight_quantizers(model: nn.Module, format: str) -> dict[str, Quantizer]:
    """A quantizer for each weight of a layer with a recipe: the layer's own where it is of this format."""
    found: dict[str, Quantizer] = {}
    for prefix, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer) or layer.recipe is None:
            continue
        own = layer.recipe.quantizer_for(QuantizerRole(layer.spec.module_type, "weight", layer.spec.name))
        chosen = own.with_usage(rowwise=True, columnwise=False) if _is_of(own, format) else QUANTIZED[format]
        for name, param in layer.named_parameters(recurse=False):
            if param.dim() == 2:  # neither a bias nor a norm
                found[f"{prefix}.{name}" if prefix else name] = chosen
    return found


def _is_of(quantizer: Quantizer, format: str) -> bool:
    """Whether what it makes of a weight can be written as it is."""
    if type(quantizer) is not type(QUANTIZED[format]) or getattr(quantizer, "block_scaling_dim", 2) != 2:
        return False
    return getattr(quantizer, "fp8_dtype", None) == DType.kFloat8E4M3


def unquantized(model: nn.Module, quantizers: Mapping[str, Quantizer]) -> list[str]:
    """The linear layers that an engine must leave alone."""
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return [name for name in linear if f"{name}.weight" not in quantizers]


def encode(state: Mapping[str, Tensor], quantizers: Mapping[str, Quantizer], format: str) -> dict[str, Tensor]:
    """Every tensor whole, on the CPU and in its format; a quantized one is followed by its scales."""
    dtype = HIGH_PRECISION.get(format, torch.bfloat16)
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        whole = torch_compat.whole_tensor(value).detach().cpu()
        if name in quantizers:
            tensors[name], tensors[name + SUFFIXES[format]] = _quantized(whole, quantizers[name], format)
        else:
            tensors[name] = (whole.to(dtype) if whole.is_floating_point() else whole).clone().contiguous()
    return tensors


def _quantized(weight: Tensor, quantizer: Quantizer, format: str) -> tuple[Tensor, Tensor]:
    storage: Any = quantizer.quantize(weight)
    if format == "fp8":
        return storage._data.view(torch.float8_e4m3fn), storage._scale_inv.clone()
    rows, cols = (-(-size // BLOCK) for size in weight.shape)
    scales = storage._rowwise_scale_inv[:rows, :cols].contiguous()  # the buffer's columns are padded
    return storage._rowwise_data.view(torch.float8_e4m3fn), scales


def decode(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What ``export`` made as a state dict without scales: what its numbers mean."""
    state: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.dtype != torch.float8_e4m3fn:
            state[name] = value.to(dtype) if value.is_floating_point() else value
        elif (scales := tensors.get(name + SUFFIXES["fp8_block"])) is not None:
            factors = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            state[name] = (value.float() * factors[: value.shape[0], : value.shape[1]]).to(dtype)
        elif (scale := tensors.get(name + SUFFIXES["fp8"])) is not None:
            state[name] = (value.float() * scale).to(dtype)
        else:
            raise ValueError(f"decode expects scales beside {name!r}, under {name}_scale or {name}_scale_inv")
    scales_of = {name + suffix for name, v in tensors.items() if v.dtype == torch.float8_e4m3fn
                 for suffix in SUFFIXES.values()}  # fmt: skip
    return {name: value for name, value in state.items() if name not in scales_of}


def quantization_config(format: str, left_alone: list[str]) -> dict[str, Any] | None:
    """What config.json says of a quantized format, as transformers and vLLM read it."""
    if format not in QUANTIZED:
        return None
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if format == "fp8_block":
        config["weight_block_size"] = [BLOCK, BLOCK]
    return config | {"modules_to_not_convert": left_alone}


def save(
    folder: str | Path, tensors: dict[str, Tensor], config: dict[str, Any], format: str, left_alone: list[str]
) -> None:
    """``model.safetensors`` and ``config.json``."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ImportError("export into a folder needs safetensors: pip install safetensors") from None
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    config["dtype"] = str(HIGH_PRECISION.get(format, torch.bfloat16)).removeprefix("torch.")
    if (quantization := quantization_config(format, left_alone)) is not None:
        config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
