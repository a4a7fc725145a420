"""What a linear layer returns, without computing it: the basis of its fake kernels.

Letters: M local rows of x (all leading dimensions), K in features, N out features, both of this rank's weight, R ranks,
G groups. Shapes with sequence parallelism follow from the Plan; nothing here knows a process group.
"""

from __future__ import annotations

import dataclasses

import torch

from te_dist.plan import PLANS, Move, Plan
from te_dist.proto import TensorProto
from te_dist.quantizers.base import Quantizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """Everything about a linear layer that its results' shapes and layouts depend on, besides its tensors.

    Attributes:
        input_quantizer, weight_quantizer, grad_output_quantizer: None runs that operand in high precision.
        plan, ranks: the parallel mode, and over how many ranks.
        cache_weight: the quantized weight is returned as a workspace for later microbatches.
        saves_input: the input is needed again for the weight gradient.
    """

    input_quantizer: Quantizer | None = None
    weight_quantizer: Quantizer | None = None
    grad_output_quantizer: Quantizer | None = None
    out_dtype: torch.dtype = torch.bfloat16
    plan: Plan = PLANS[None, False]
    ranks: int = 1
    cache_weight: bool = False
    saves_input: bool = True
    # The input quantizer for the one plane that wgrad reads; made here, once, and not inside a compiled graph.
    saved_input_quantizer: Quantizer | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"LinearSpec expects at least one rank but got {self.ranks}")
        if self.input_quantizer is not None:
            saved = self.input_quantizer.with_usage(rowwise=False, columnwise=True)
            object.__setattr__(self, "saved_input_quantizer", saved)


@dataclasses.dataclass(frozen=True)
class ForwardProtos:
    """Results of the forward op. None: the op returns nothing there."""

    out: TensorProto  # [.., N]
    saved_input: TensorProto | None  # this rank's shard, in the plane that wgrad reads
    weight_workspaces: tuple[TensorProto, ...]  # one per group, empty unless the weight is cached


@dataclasses.dataclass(frozen=True)
class BackwardProtos:
    """Results of the backward op; gradients that nobody asked for are None."""

    dx: TensorProto | None
    dweights: tuple[TensorProto, ...]
    dbiases: tuple[TensorProto, ...]


def _moved(shape: tuple[int, ...], move: Move, ranks: int, what: str) -> tuple[int, ...]:
    return (move.rows(shape[0], ranks, what), *shape[1:])


def _check(spec: LinearSpec, x: TensorProto, weights: tuple[TensorProto, ...]) -> None:
    if not weights:
        raise ValueError("a linear layer expects at least one weight")
    moves = (spec.plan.x, spec.plan.y, spec.plan.dy, spec.plan.dx)
    if len(x.shape) < 2 and any(move in (Move.ALL_GATHER, Move.REDUCE_SCATTER) for move in moves):
        raise ValueError(f"sequence parallelism expects an input of at least two dimensions but got {x.shape}")
    for index, weight in enumerate(weights):
        if len(weight.shape) != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"weight {index} expects shape [N, {x.shape[-1]}] for an input of shape {list(x.shape)} "
                f"but has {list(weight.shape)}"
            )
        if weight.shape[0] != weights[0].shape[0]:
            raise ValueError(f"weight {index} has {weight.shape[0]} rows but weight 0 has {weights[0].shape[0]}")


def linear_forward_protos(spec: LinearSpec, x: TensorProto, weights: tuple[TensorProto, ...]) -> ForwardProtos:
    """Protos of a (grouped) linear layer's forward results; `weights` has one entry per group."""
    _check(spec, x, weights)
    gathered = _moved(x.shape, spec.plan.x, spec.ranks, "the input")
    out_shape = _moved((*gathered[:-1], weights[0].shape[0]), spec.plan.y, spec.ranks, "the output")
    saved = None
    if spec.saves_input:
        saved = TensorProto(x.shape, x.dtype, spec.saved_input_quantizer, device=x.device)
    workspaces: tuple[TensorProto, ...] = ()
    if spec.cache_weight and spec.weight_quantizer is not None:
        # A weight that is quantized already is its own workspace.
        workspaces = tuple(
            TensorProto(w.shape, w.dtype, spec.weight_quantizer, device=w.device) for w in weights if not w.is_quantized
        )
    return ForwardProtos(TensorProto(out_shape, spec.out_dtype, None, x.requires_grad, x.device), saved, workspaces)


def linear_backward_protos(
    spec: LinearSpec,
    x: TensorProto,
    weights: tuple[TensorProto, ...],
    *,
    needs_dx: bool = True,
    needs_dweight: bool = True,
    needs_dbias: bool = False,
) -> BackwardProtos:
    """Protos of the gradients: dx like this rank's x, dw like the weights, the bias gradients [N]."""
    _check(spec, x, weights)
    rows = linear_forward_protos(spec, x, weights).out.shape[0]
    dx = None
    if needs_dx:
        # dy has y's shape; following it through the plan must lead back to x's.
        back = spec.plan.dx.rows(spec.plan.dy.rows(rows, spec.ranks), spec.ranks, "the input gradient")
        dx = TensorProto((back, *x.shape[1:]), x.dtype, None, device=x.device)
    dweights = tuple(TensorProto(w.shape, w.dtype, None, device=w.device) for w in weights)
    dbiases = tuple(TensorProto((w.shape[0],), spec.out_dtype, None, device=w.device) for w in weights)
    return BackwardProtos(dx, dweights if needs_dweight else (), dbiases if needs_dbias else ())
