"""The computations of te_dist.ops that are not products: Python functions, and the ops that stand for them in a
compiled graph.

    te_dist::activation_forward, activation_backward, activation_bias_backward
    te_dist::column_sums                             a bias' gradient
    te_dist::rounded                                 to what a quantized form holds
    te_dist::l2norm_forward, l2norm_backward
    te_dist::dropout_forward                         draws from torch's generator
    te_dist::collective                              what a Comm moves

Each is its own fake. No ``from __future__ import annotations``: the annotations become op schemas.
"""

import dataclasses
from typing import Optional

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.comm import Comm
from te_dist.dynamo.define import pure_op
from te_dist.plan import Move
from te_dist.producers import ActivationGradient, ActivationOutput, Plain
from te_dist.quantizers import IdentityQuantizer, Quantizer
from te_dist.recipe import QuantizerRole, Recipe
from te_dist.values import Value, value_type


# ------------------------------------------------------------------------------------------------- activations
@pure_op("activation_forward")
def activation_forward(x: Tensor, activation: str) -> Tensor:
    """x [..., K] -> [..., K], or half of it where the activation gates."""
    out = kernels.materialize(ActivationOutput(kernels.as_rows(x), activation))
    return out.view(*x.shape[:-1], out.shape[-1])


@pure_op("activation_backward")
def activation_backward(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    return kernels.materialize(activation_gradient(dy, x, activation)).view(x.shape)


def activation_gradient(dy: Tensor, x: Tensor, activation: str) -> ActivationGradient:
    """The gradient with respect to x, not yet made: for a quantize that makes it."""
    return ActivationGradient(kernels.as_rows(dy.to(x.dtype)), kernels.as_rows(x), activation)


@pure_op("activation_bias_backward")
def activation_bias_backward(dy: Tensor, x: Tensor, activation: str, bias_dtype: torch.dtype) -> list[Tensor]:
    """dx, and its column sums: the gradient of a bias that was added to make x. One pass over memory."""
    gradient = activation_gradient(dy, x, activation)
    gradient.want_column_sums()
    dx = kernels.materialize(gradient)
    return [dx.view(x.shape), kernels.column_sums(gradient, bias_dtype)]


@pure_op("column_sums")
def column_sums(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., N] -> [N], in the order of sums that the linear layers use."""
    source = Plain(kernels.as_rows(dy))
    source.want_column_sums()
    return kernels.column_sums(source, dtype)


# ------------------------------------------------------------------------------------------------- quantize
def quantizer_of(recipe: Recipe, operand: str, name: str) -> Optional[Quantizer]:
    """What a recipe quantizes "input" or "grad_output" of a Quantize by, one plane of it; None is nothing."""
    made = recipe.quantizer_for(QuantizerRole("quantize", operand, name))
    return None if isinstance(made, IdentityQuantizer) else made.with_usage(rowwise=True, columnwise=False)


# Seeded, because a gradient may be rounded stochastically.
@pure_op("rounded", tags=(torch.Tag.nondeterministic_seeded,))
def rounded(x: Tensor, recipe: Recipe, operand: str, name: str) -> Tensor:
    """The values that the quantized form of x holds."""
    quantizer = quantizer_of(recipe, operand, name)
    if kernels.is_shapes_only() or quantizer is None:
        return torch.empty_like(x) if quantizer is not None else x.clone()
    return quantizer.quantize(x).dequantize()


# ------------------------------------------------------------------------------------------------- l2 norm
@pure_op("l2norm_forward")
def l2norm_forward(x: Tensor, eps: float) -> list[Tensor]:
    """x / sqrt(sum(x^2) + eps) over the last dimension, and 1 / that root (float32 [..., 1])."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return [(wide * scale).to(x.dtype), scale]


@pure_op("l2norm_backward")
def l2norm_backward(dy: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    wide, grad = x.float(), dy.float()
    along = (wide * grad).sum(-1, keepdim=True) * scale.square()
    return (scale * (grad - wide * along)).to(x.dtype)


# ------------------------------------------------------------------------------------------------- dropout
@pure_op("dropout_forward", tags=(torch.Tag.nondeterministic_seeded,))
def dropout_forward(x: Tensor, p: float) -> list[Tensor]:
    """What survives, scaled by 1 / (1 - p), and the mask (bool)."""
    mask = torch.empty_like(x, dtype=torch.bool, memory_format=torch.contiguous_format)
    if not kernels.is_shapes_only():
        mask.bernoulli_(1.0 - p)
    return [dropout_apply(x, mask, p), mask]


def dropout_apply(x: Tensor, mask: Tensor, p: float) -> Tensor:
    return torch.where(mask, x * (1.0 / (1.0 - p) if p < 1.0 else 0.0), torch.zeros((), dtype=x.dtype, device=x.device))


# ------------------------------------------------------------------------------------------------- collectives
@value_type
@dataclasses.dataclass(frozen=True)
class Collective(Value):
    """One movement of a tensor over the ranks of a Comm."""

    comm: Comm
    move: Move


def collective_now(x: Tensor, spec: Collective) -> Tensor:
    """The moved tensor: always a new one, and `x` stays as it was."""
    comm, move = spec.comm, spec.move
    if kernels.is_shapes_only():
        return x.new_empty((move.rows(x.shape[0], comm.size, "the tensor"), *x.shape[1:]))
    if comm.is_local:
        return x.clone()
    if move is Move.ALL_GATHER:
        moved = comm.start_gather([x.contiguous()]).wait()[0]
        assert isinstance(moved, Tensor)
        return moved
    return comm.start_reduce(move, x.clone(memory_format=torch.contiguous_format)).wait()  # it may work in place


@pure_op("collective")
def collective(x: Tensor, spec: Collective) -> Tensor:
    return collective_now(x, spec)


# A collective that one rank drops as dead code would hang the others.
torch.fx.node.has_side_effect(torch.ops.te_dist.collective.default)
