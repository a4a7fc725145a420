"""LayerNorm and RMSNorm: the computation, and the two ops that stand for it in a compiled graph.

    te_dist::norm_forward    x -> y, mean (LayerNorm only), rstd   (pure)
    te_dist::norm_backward   dy, x, ... -> dx, dweight, dbias      (pure)

A fake is the same Python function with kernels switched off.

No ``from __future__ import annotations``: the annotations become op schemas.
"""

import dataclasses
from typing import Any, Optional

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.dynamo.define import pure_op
from te_dist.producers import NormOutput
from te_dist.values import Value, value_type


@value_type
@dataclasses.dataclass(frozen=True)
class NormSpec(Value):
    """A norm as it was constructed. A value, because a bare float in a module may become an input of the graph."""

    layer_norm: bool  # RMSNorm if False
    eps: float
    zero_centered: bool


def forward(x: Tensor, weight: Tensor, bias: Optional[Tensor], spec: NormSpec) -> list[Tensor]:
    """x [M, K] -> y [M, K], the mean of each row unless it is an RMSNorm, and 1 / its deviation (float32 [M])."""
    x = kernels.as_rows(x)
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if spec.layer_norm else None
    y = kernels.materialize(NormOutput(x, weight, bias, mean, rstd, eps=spec.eps, zero_centered=spec.zero_centered))
    return [y, rstd] if mean is None else [y, mean, rstd]


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Optional[Tensor],
    rstd: Tensor,
    spec: NormSpec,
    weight_grad: bool,
    bias_grad: bool,
) -> list[Tensor]:
    """dx [M, K], then the gradients of weight and bias [K] of which are wanted."""
    x, dy = kernels.as_rows(x), kernels.as_rows(dy.to(x.dtype))
    gradients = kernels.norm_backward(
        dy, x, weight, mean, rstd, zero_centered=spec.zero_centered, weight_grad=weight_grad, bias_grad=bias_grad
    )
    return [gradient for gradient in gradients if gradient is not None]


@pure_op("norm_forward")
def norm_forward(x: Tensor, weight: Tensor, bias: Optional[Tensor], spec: NormSpec) -> list[Tensor]:
    return forward(x, weight, bias, spec)


@pure_op("norm_backward")
def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Optional[Tensor],
    rstd: Tensor,
    spec: NormSpec,
    weight_grad: bool,
    bias_grad: bool,
) -> list[Tensor]:
    return backward(dy, x, weight, mean, rstd, spec, weight_grad, bias_grad)


class Norm(torch.autograd.Function):
    """The norm of the rows of a matrix. Eager code calls the functions, compiled code the ops."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        spec: NormSpec,
        weight_grad: bool,
        bias_grad: bool,
    ) -> Tensor:
        compute = torch.ops.te_dist.norm_forward if torch.compiler.is_compiling() else forward
        made = compute(x, weight, bias, spec)
        ctx.save_for_backward(x, weight, made[1] if spec.layer_norm else None, made[-1])
        ctx.flags = (spec, weight_grad, bias_grad)
        return made[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        compute = torch.ops.te_dist.norm_backward if torch.compiler.is_compiling() else backward
        made = compute(dy, x, weight, mean, rstd, *ctx.flags)
        _, weight_grad, bias_grad = ctx.flags
        dweight = made[1] if weight_grad else None
        dbias = made[-1] if bias_grad else None
        return made[0], dweight, dbias, None, None, None
