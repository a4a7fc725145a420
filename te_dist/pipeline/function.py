"""The autograd boundary: one Function for eager code, one for compiled code, around the same forward and backward.

Eager code calls the Python functions; a dispatcher round trip per layer would cost more host time than a small GEMM.
Compiled code calls ops whose arguments are tensors and values, and whose fakes are the same Python functions with
kernels and products switched off, so that they cannot drift apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist.kernels import as_rows, is_shapes_only
from te_dist.pipeline.args import BwdArgs, BwdResult, FwdArgs, FwdResult, TensorOrQuantized
from te_dist.pipeline.backward import layer_backward
from te_dist.pipeline.config import NORM, CallFlags, LayerConfig, LayerSpec, resolve
from te_dist.pipeline.forward import layer_forward
from te_dist.pipeline.saved import (
    assemble,
    fill_in,
    flatten_operand,
    flatten_saved,
    hollow_out,
    needs_input,
    rebuild_saved,
)
from te_dist.pipeline.shards import norm_lead, out_lead, stage_rows
from te_dist.pipeline.weights import dgrad_operand
from te_dist.producers import Producer
from te_dist.recipe import NoRecipe, Recipe
from te_dist.tensors.storage import QuantizedStorage
from te_dist.torch_compat import release_saved_tensors


@dataclasses.dataclass(slots=True)
class LayerCall:
    """Everything about one eager call that autograd does not need to see."""

    config: LayerConfig
    weights: list[list[TensorOrQuantized]]
    out_dtype: torch.dtype
    x: TensorOrQuantized  # the matrix, or the storage of a quantized input
    lead: torch.Size  # leading dimensions of the input
    scales: Tensor | None = None
    amaxes: Tensor | None = None
    grad_amaxes: Tensor | None = None
    seeds: Tensor | None = None
    splits: list[int] | None = None
    offsets: Tensor | None = None
    unit: int = 1  # rows per entry of the input's first dimension
    main_grads: list[Tensor | None] | None = None
    overwrite_main_grads: frozenset[int] = frozenset()
    placeholder_grads: frozenset[int] = frozenset()  # slots that get an uninitialised gradient beside their main_grad
    wgrad_store: list[object] | None = None


def forward_args(call: LayerCall, params: Sequence[Tensor | None]) -> FwdArgs:
    return FwdArgs(
        x=call.x,
        params=list(params),
        weights=call.weights,
        config=call.config,
        out_dtype=call.out_dtype,
        scales=call.scales,
        amaxes=call.amaxes,
        splits=call.splits,
        offsets=call.offsets,
        unit=call.unit,
    )


@dataclasses.dataclass(slots=True)
class CallFrame:
    """What backward must know of a forward call besides its tensors."""

    x_dtype: torch.dtype
    param_dtypes: list[torch.dtype | None]
    rows: int
    depths: list[int]  # K of every stage


def forward_call(
    call: LayerCall, x_dtype: torch.dtype, params: Sequence[Tensor | None]
) -> tuple[FwdResult, list[TensorOrQuantized | None], CallFrame]:
    """Run forward: its result, the operands that backward needs besides ``result.saved``, and the frame. The call
    lets go of its tensors: from here on it is up to autograd to hold them."""
    result = layer_forward(forward_args(call, params))
    config = call.config
    param_dtypes = [None if p is None else p.dtype for p in params]
    frame = CallFrame(x_dtype, param_dtypes, call.x.shape[0], _depths(config, params))
    operands: list[TensorOrQuantized | None] = [
        call.x if needs_input(config) else None,
        call.seeds,
        call.scales,
        call.offsets,
    ]
    for stage, weights in zip(config.stages, call.weights, strict=True):
        is_norm = stage.spec.produce == NORM and stage.needs_dgrad
        operands.append(params[stage.first_param] if is_norm else None)
        operands.extend(
            dgrad_operand(stage, weight, params[stage.weight_slot + group]) for group, weight in enumerate(weights)
        )
    call.x, call.weights = None, []  # type: ignore[assignment]
    call.scales = call.seeds = call.offsets = None
    return result, operands, frame


def backward_args(
    call: LayerCall, frame: CallFrame, operands: Iterator[Any], tensors: Iterator[Tensor], dy: Tensor | Producer
) -> BwdArgs:
    """The arguments of backward. `operands`: from ``forward_call``; `tensors`: its flattened ``result.saved``."""
    config = call.config
    x, seeds, scales, offsets = (next(operands) for _ in range(4))
    params: list[Tensor | None] = [None] * config.spec.param_count
    weights = []
    for stage in config.stages:
        params[stage.first_param] = next(operands)
        weights.append([next(operands) for _ in range(stage.spec.weights)])
    spread = stage_rows(config, frame.rows, call.splits, call.unit) if config.communicates else None
    return BwdArgs(
        dy=dy if isinstance(dy, Producer) else _matrix(dy, call.out_dtype),
        dnorm_output=None,
        x=x,
        params=params,
        weights=weights,
        saved=rebuild_saved(config, tensors, frame.rows, frame.depths, frame.x_dtype, call.splits, spread),
        config=config,
        x_dtype=frame.x_dtype,
        param_dtypes=frame.param_dtypes,
        scales=scales,
        amaxes=call.grad_amaxes,
        seeds=seeds,
        main_grads=call.main_grads,
        overwrite_main_grads=call.overwrite_main_grads,
        wgrad_store=call.wgrad_store,
        splits=call.splits,
        offsets=offsets,
        rows=spread,
    )


def backward_call(call: LayerCall, frame: CallFrame, args: BwdArgs) -> BwdResult:
    """Run backward; it consumes `args`."""
    result = layer_backward(args)
    for slot in call.placeholder_grads:
        main_grad = call.main_grads[slot] if call.main_grads is not None else None
        if main_grad is not None and result.dparams[slot] is None:
            result.dparams[slot] = torch.empty_like(main_grad, dtype=frame.param_dtypes[slot])
    return result


class EagerLayer(torch.autograd.Function):
    """y (and the norm's output) of x and the parameters; `call` holds what autograd need not see."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, x: Tensor, *params: Tensor | None) -> Any:
        result, operands, ctx.frame = forward_call(call, x.dtype, params)
        ctx.call, ctx.x_shape = call, x.shape
        tensors, ctx.shells = hollow_out(operands)
        ctx.save_for_backward(*tensors, *flatten_saved(result.saved))
        config = call.config
        lead = call.lead if not config.communicates else out_lead(config, call.lead, result.out.shape[0])
        out = result.out if len(lead) == 1 else result.out.view(*lead, result.out.shape[-1])
        if not config.spec.return_norm_output:
            return out
        assert result.norm_output is not None
        normed = result.norm_output
        return out, normed.view(*norm_lead(config, call.lead, normed.shape[0]), normed.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, dnorm_output: Tensor | None = None) -> Any:
        call: LayerCall = ctx.call
        tensors = iter(ctx.saved_tensors)
        operands: Any = iter(fill_in(ctx.shells, tensors))
        args = backward_args(call, ctx.frame, operands, tensors, dy)
        if dnorm_output is not None:
            args.dnorm_output = _matrix(dnorm_output, ctx.frame.x_dtype)
        # Unless the graph is retained, nobody else holds what was saved: each stage frees what it has used.
        release_saved_tensors(ctx)
        del tensors, operands, dy
        result = backward_call(call, ctx.frame, args)
        dx = result.dx
        if dx is not None and len(ctx.x_shape) != 2:
            dx = dx.view(ctx.x_shape)
        return None, dx, *result.dparams


def _depths(config: LayerConfig, params: Sequence[Tensor | None]) -> list[int]:
    """K of every stage."""
    depths = []
    for stage in config.stages:
        weight = params[stage.weight_slot]
        assert weight is not None
        depths.append(weight.shape[-1])
    return depths


def _matrix(t: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., N] -> [M, N], contiguous along N, in the dtype that the forward result had."""
    return as_rows(t if t.dtype == dtype else t.to(dtype))


# ------------------------------------------------------------------------------------------------- flat, for ops
def flatten_weights(weights: list[list[TensorOrQuantized]]) -> list[Tensor]:
    """The buffers of the quantized weights; parameters that are used as they are, are not repeated."""
    return [t for stage in weights for w in stage if isinstance(w, QuantizedStorage) for t in flatten_operand(w)]


def rebuild_weights(
    config: LayerConfig, params: Sequence[Tensor | None], flat: Sequence[Tensor]
) -> list[list[TensorOrQuantized]]:
    tensors = iter(flat)
    weights: list[list[TensorOrQuantized]] = []
    for stage in config.stages:
        group: list[TensorOrQuantized] = []
        for slot in range(stage.weight_slot, stage.bias_slot):
            param = params[slot]
            assert param is not None
            if stage.weight is None:
                group.append(param)
            else:
                group.append(assemble(tensors, stage.weight, (param.shape[0], param.shape[1]), param.dtype))
        weights.append(group)
    return weights


def config_of(spec: LayerSpec, recipe: Recipe, flags: CallFlags) -> LayerConfig:
    return resolve(spec, None if isinstance(recipe, NoRecipe) else recipe, flags)


def draw_seeds(spec: LayerSpec, like: Tensor) -> Tensor:
    """int64 [seed_count, 2] from torch's generator, which activation checkpointing restores before it recomputes."""
    seeds = torch.randint(0, 2**62, (spec.seed_count, 2), dtype=torch.int64, device=like.device)
    if not spec.communicates or is_shapes_only():
        return seeds
    parts = seeds.split([stage.weights for stage in spec.stages])
    return torch.cat([stage.comm.own_seeds(part) for stage, part in zip(spec.stages, parts, strict=True)])
