"""LayerNorm and RMSNorm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from te_dist import kernels
from te_dist.dynamo import norm as ops
from te_dist.formats import INPUT_DTYPES
from te_dist.modules.te_options import ANYTHING, refuse_unbuilt
from te_dist.ops.basic.producing import quantized_output
from te_dist.ops.context import OperationContext
from te_dist.ops.op import BasicOperation, Gradients, Saved
from te_dist.producers import NormOutput
from te_dist.proto import TensorOrQuantized
from te_dist.quantizers import Quantizer
from te_dist.values import interned


class Norm(BasicOperation):
    """What the two norms share.

    Args:
        normalized_shape: a size, or the sizes of the last dimensions.
        eps: added to the variance.
        zero_centered_gamma: the gain is 1 + weight, and weight starts at 0.
        device, dtype: of the parameters; device may be "meta".
        hints: sm_margin of Transformer Engine, which changes nothing.
    """

    is_layer_norm = True
    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        **hints: Any,
    ) -> None:
        super().__init__()
        refuse_unbuilt(type(self).__name__, hints, {"sm_margin": ANYTHING})
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or min(shape) < 1:
            raise ValueError(f"{type(self).__name__} expects positive sizes but got {normalized_shape!r}")
        self.normalized_shape, self.size = shape, math.prod(shape)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.spec = interned(ops.NormSpec(self.is_layer_norm, eps, zero_centered_gamma))
        self.weight = Parameter(torch.empty(shape, device=device, dtype=dtype))
        made = Parameter(torch.empty(shape, device=device, dtype=dtype)) if self.is_layer_norm else None
        self.register_parameter("bias", made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.bias is not None:
                self.bias.zero_()

    def width_after(self, width: int | None, before: str) -> int | None:
        self._expects(width, self.normalized_shape[-1], before)
        return self.normalized_shape[-1]

    def check_input(self, x: Any) -> None:
        if x.dtype not in INPUT_DTYPES:
            raise TypeError(
                f"{self.label()} expects an input of float32, float16 or bfloat16 but got "
                f"{str(x.dtype).removeprefix('torch.')}"
            )
        dims = len(self.normalized_shape)
        if len(x.shape) < dims or tuple(x.shape[-dims:]) != self.normalized_shape:
            raise ValueError(
                f"{self.label()} expects the input's last dimensions to be {list(self.normalized_shape)} but got "
                f"shape {list(x.shape)}"
            )

    def op_forward_compute(
        self,
        input_: Tensor,
        *,
        requires_grad: bool,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
        **kwargs: Any,
    ) -> tuple[TensorOrQuantized, Saved]:
        self.check_input(input_)
        x = input_.detach().reshape(-1, self.size)
        weight, bias = self.weight.detach().view(-1), None if self.bias is None else self.bias.detach().view(-1)
        saved: list[Tensor]
        if torch.compiler.is_compiling():
            out, *saved = torch.ops.te_dist.norm_forward(x, weight, bias, self.spec)
            return out.view(input_.shape), (input_, self.weight, *saved) if requires_grad else ()
        quantized = None
        if next_op_input_quantizer is not None and len(self.normalized_shape) == 1:
            rows = kernels.as_rows(x)
            rstd = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
            mean = torch.empty_like(rstd) if self.is_layer_norm else None
            source = NormOutput(rows, weight, bias, mean, rstd, eps=self.eps, zero_centered=self.zero_centered_gamma)
            quantized = quantized_output(source, next_op_input_quantizer, input_.shape)
            saved = [rstd] if mean is None else [mean, rstd]
        if quantized is None:
            made, *saved = ops.forward(x, weight, bias, self.spec)
        output = made.view(input_.shape) if quantized is None else quantized
        return output, (input_, self.weight, *saved) if requires_grad else ()

    def op_forward_save_ctx(self, ctx: OperationContext, input_: Tensor, tensors_to_save: Saved, **kwargs: Any) -> None:
        ctx.save_for_backward(*tensors_to_save)
        ctx.weight_grad = self.weight.requires_grad  # type: ignore[attr-defined]
        ctx.bias_grad = self.bias is not None and self.bias.requires_grad  # type: ignore[attr-defined]

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        x, weight, *stats = ctx.saved_tensors
        compute = torch.ops.te_dist.norm_backward if torch.compiler.is_compiling() else ops.backward
        made = compute(
            grad_output.reshape(-1, self.size), x.reshape(-1, self.size), weight.view(-1),
            stats[0] if self.is_layer_norm else None, stats[-1], self.spec, ctx.weight_grad, ctx.bias_grad,
        )  # fmt: skip
        dweight = made[1].view(self.normalized_shape) if ctx.weight_grad else None
        dbias = made[-1].view(self.normalized_shape) if ctx.bias_grad else None
        return made[0].view(x.shape), (dweight, dbias) if self.is_layer_norm else (dweight,)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(Norm):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias."""


class RMSNorm(Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight."""

    is_layer_norm = False
