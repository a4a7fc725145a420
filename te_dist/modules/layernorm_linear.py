"""LayerNormLinear: a norm whose output goes straight into a linear layer, quantized on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from te_dist.modules.base import QuantizedLayer
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
from te_dist.modules.split_parameters import SplitParameters
from te_dist.pipeline.config import NORM, LayerSpec, StageSpec
from te_dist.recipe import Recipe


class LayerNormLinear(SplitParameters, QuantizedLayer):
    """y = norm(x) W^T + b.

    The norm's output is quantized as it is made and never written in high precision, unless it is returned.

    Args:
        in_features, out_features, bias, device: as for nn.Linear.
        eps, zero_centered_gamma: of the norm; with the latter its gain is 1 + layer_norm_weight.
        normalization: "LayerNorm" or "RMSNorm".
        return_layernorm_output: return (y, norm(x)).
        return_layernorm_output_gathered: norm(x) with all ranks' rows, where sequence parallelism spreads them: for
            whoever would gather it again (a low-rank adapter beside the layer). Its gradient is summed over the ranks.
        recipe, params_dtype, init_method, return_bias, parameters_split, fuse_wgrad_accumulation,
            delay_wgrad_compute, name: as for ``te_dist.Linear``.
    """

    layer_norm_weight: Parameter
    layer_norm_bias: Parameter | None
    weight: Parameter
    bias: Parameter | None
    _WEIGHT_SLOT = 2

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        recipe: Recipe | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        check_normalization("LayerNormLinear", normalization)
        self.in_features, self.out_features = in_features, out_features
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.use_bias, self.return_bias, self.return_layernorm_output = bias, return_bias, return_layernorm_output
        self._init_method = init_method
        dtype = dtype or params_dtype
        make_norm(self, "layer_norm", in_features, normalization == "LayerNorm", device, dtype)
        make_weight(self, "weight", out_features, in_features, device, dtype)
        make_bias(self, "bias", out_features if bias else None, device, dtype)
        self.reset_parameters()
        self._split_parameters(parameters_split, out_features, fuse_wgrad_accumulation)
        stage = StageSpec(
            produce=NORM,
            layer_norm=normalization == "LayerNorm",
            eps=eps,
            zero_centered=zero_centered_gamma,
            has_bias=bias and not return_bias,
        )
        spec = LayerSpec(
            (stage,),
            "layernorm_linear",
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

    def reset_parameters(self) -> None:
        self._reset_delayed()
        reset_norm(self, "layer_norm", self.zero_centered_gamma)
        if getattr(self, "parameter_splits", None):
            self._reset_parts(self._init_method)
            return
        reset_linear(self.weight, self.bias)
        if self._init_method is not None and self.weight.device.type != "meta":
            with torch.no_grad():
                self._init_method(self.weight)

    def _slots(self) -> list[Tensor | None]:
        weight, bias = self._weight_and_bias()
        return [self.layer_norm_weight, self.layer_norm_bias, weight, None if self.return_bias else bias]

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, skip_weight_update: Tensor | None = None
    ) -> Any:
        """y, or the tuple of y, bias and norm output of which the latter two were asked for."""
        result = self._run(inp, is_first_microbatch, skip_weight_update)
        if not self.return_bias:
            return result
        bias = local_part(self._weight_and_bias()[1])
        return (result[0], bias, result[1]) if self.return_layernorm_output else (result, bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"normalization={self.normalization}, recipe={self.recipe!r}"
        )
