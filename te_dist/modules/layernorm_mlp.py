"""LayerNormMLP: norm, first linear layer, activation, second linear layer, as one chain of two stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Parameter

from te_dist.modules.base import QuantizedLayer
from te_dist.modules.delayed import Recomputed
from te_dist.modules.linear import InitMethod
from te_dist.modules.parameters import (
    check_normalization,
    local_part,
    make_bias,
    make_norm,
    make_weight,
    reset_linear,
    reset_norm,
)
from te_dist.pipeline.config import ACTIVATION, NORM, LayerSpec, StageSpec
from te_dist.producers import split_activation
from te_dist.recipe import Recipe, recipe_in_force

GATE_HALVES = ("gate", "up")  # the half that is activated, the half that multiplies it


class LayerNormMLP(QuantizedLayer):
    """y = act(norm(x) W1^T + b1) W2^T + b2.

    Norm and activation are quantized as they are made. Gated activations (swiglu, geglu, reglu, qgeglu, sreglu) double
    fc1's rows; the first half is activated, the second multiplies it.

    Args:
        hidden_size, ffn_hidden_size: x and y have the former, the activation the latter.
        activation: one of gelu, qgelu, relu, srelu, silu and the gated ones.
        init_method, output_layer_init_method: fill fc1_weight and fc2_weight in place.
        checkpoint: keep only the input, and compute forward again during backward.
        split_gate: hold fc1 of a gated activation as ``fc1_gate_weight`` and ``fc1_up_weight`` (and biases), not as
            one parameter: so that each can be spread over ranks. A state dict of either form loads into either.
        others: as for ``LayerNormLinear``.
    """

    layer_norm_weight: Parameter
    layer_norm_bias: Parameter | None
    fc1_weight: Parameter
    fc1_bias: Parameter | None
    fc2_weight: Parameter
    fc2_bias: Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        recipe: Recipe | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        checkpoint: bool = False,
        split_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        check_normalization("LayerNormMLP", normalization)
        try:
            _, gated = split_activation(activation)
        except ValueError as error:
            raise ValueError(f"LayerNormMLP: {error}") from None
        self.hidden_size, self.ffn_hidden_size, self.activation = hidden_size, ffn_hidden_size, activation
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.checkpoint = checkpoint
        self._init_methods = (init_method, output_layer_init_method)
        dtype = dtype or params_dtype
        fc1_rows = 2 * ffn_hidden_size if gated else ffn_hidden_size
        make_norm(self, "layer_norm", hidden_size, normalization == "LayerNorm", device, dtype)
        make_weight(self, "fc1_weight", fc1_rows, hidden_size, device, dtype)
        make_bias(self, "fc1_bias", fc1_rows if bias else None, device, dtype)
        make_weight(self, "fc2_weight", hidden_size, ffn_hidden_size, device, dtype)
        make_bias(self, "fc2_bias", hidden_size if bias else None, device, dtype)
        self.reset_parameters()
        self.is_gated, self.fc1_is_split = gated, False
        if split_gate:
            self._split_gate()
        first = StageSpec(
            name="fc1",
            produce=NORM,
            layer_norm=normalization == "LayerNorm",
            eps=eps,
            zero_centered=zero_centered_gamma,
            has_bias=bias,
        )
        second = StageSpec(name="fc2", produce=ACTIVATION, activation=activation, has_bias=bias and not return_bias)
        spec = LayerSpec(
            (first, second),
            "layernorm_mlp",
            name or "",
            return_norm_output=return_layernorm_output,
            norm_output_gathered=return_layernorm_output_gathered,
        )
        self._init_layer(
            spec,
            recipe,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
        )

    def _split_gate(self) -> None:
        """Two parameters for fc1's weight, and for its bias, where the activation is gated."""
        if not self.is_gated or self.fc1_is_split:
            return
        self.fc1_is_split = True
        for kind in ("weight", "bias"):
            whole = getattr(self, f"fc1_{kind}")
            self.register_parameter(f"fc1_{kind}", None)
            for half, part in zip(GATE_HALVES, (None, None) if whole is None else whole.detach().chunk(2), strict=True):
                made = None if part is None else Parameter(part.clone(), requires_grad=whole.requires_grad)
                self.register_parameter(f"fc1_{half}_{kind}", made)
        self._first_parts = ((2, self._weight_names()[0][0]),)

    def _weight_names(self) -> list[list[str]]:
        halves = [f"fc1_{half}_weight" for half in GATE_HALVES]
        return [halves if self.fc1_is_split else ["fc1_weight"], ["fc2_weight"]]

    def _fc1(self, kind: str) -> Tensor | None:
        """fc1's weight or bias, as its product reads it."""
        if not self.fc1_is_split:
            return getattr(self, f"fc1_{kind}")
        halves = [local_part(getattr(self, f"fc1_{half}_{kind}")) for half in GATE_HALVES]
        return None if halves[0] is None else torch.cat(halves)

    def reset_parameters(self) -> None:
        self._reset_delayed()
        if getattr(self, "fc1_is_split", False):
            self._reset_split()
            return
        reset_norm(self, "layer_norm", self.zero_centered_gamma)
        for weight, bias, method in zip(
            (self.fc1_weight, self.fc2_weight), (self.fc1_bias, self.fc2_bias), self._init_methods, strict=True
        ):
            reset_linear(weight, bias)
            if method is not None and weight.device.type != "meta":
                with torch.no_grad():
                    method(weight)

    def _reset_split(self) -> None:
        """As one parameter would be initialised, whatever its halves are called."""
        with torch.no_grad():
            parts = {k: [getattr(self, f"fc1_{half}_{k}") for half in GATE_HALVES] for k in ("weight", "bias")}
            for kind, halves in parts.items():
                whole = None if halves[0] is None else Parameter(torch.cat([torch.empty_like(h) for h in halves]))
                self.register_parameter(f"fc1_{kind}", whole)
            self.fc1_is_split = False
            self.reset_parameters()
            self.fc1_is_split = True
            for kind, halves in parts.items():
                whole = getattr(self, f"fc1_{kind}")
                self.register_parameter(f"fc1_{kind}", None)
                for half, made in zip(halves, (None, None) if whole is None else whole.chunk(2), strict=True):
                    if half is not None and made is not None:
                        half.copy_(made)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for kind in ("weight", "bias"):
            whole, halves = f"{prefix}fc1_{kind}", [f"{prefix}fc1_{half}_{kind}" for half in GATE_HALVES]
            if self.fc1_is_split and whole in state_dict:
                given = state_dict.pop(whole)
                state_dict.update(zip(halves, given.chunk(2), strict=True))
            elif not self.fc1_is_split and all(half in state_dict for half in halves):
                state_dict[whole] = torch.cat([state_dict.pop(half) for half in halves])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _add_gradient(self, param: Tensor, slot: int, gradient: Tensor) -> None:
        if slot != 2 or not self.fc1_is_split:
            super()._add_gradient(param, slot, gradient)
            return
        for half, rows in zip(GATE_HALVES, gradient.chunk(2), strict=True):
            super()._add_gradient(getattr(self, f"fc1_{half}_weight"), slot, rows.clone())

    def _slots(self) -> list[Tensor | None]:
        return [
            self.layer_norm_weight,
            self.layer_norm_bias,
            self._fc1("weight"),
            self._fc1("bias"),
            self.fc2_weight,
            None if self.return_bias else self.fc2_bias,
        ]

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, skip_weight_update: Tensor | None = None
    ) -> Any:
        """y, or the tuple of y, fc2_bias and norm output of which the latter two were asked for."""
        if self.checkpoint and torch.is_grad_enabled():
            recomputed = None if torch.compiler.is_compiling() else Recomputed(recipe_in_force(self.recipe))
            result = torch.utils.checkpoint.checkpoint(
                self._run, inp, is_first_microbatch, skip_weight_update, None, recomputed, use_reentrant=False
            )
        else:
            result = self._run(inp, is_first_microbatch, skip_weight_update)
        if not self.return_bias:
            return result
        bias = local_part(self.fc2_bias)
        return (result[0], bias, result[1]) if self.return_layernorm_output else (result, bias)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"activation={self.activation}, normalization={self.normalization}, recipe={self.recipe!r}"
        )
