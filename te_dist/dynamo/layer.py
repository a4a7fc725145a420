"""A layer inside a compiled graph: five ops, and the autograd Function around them.

    te_dist::quantize_weights   weights -> buffers                       (pure)
    te_dist::update_weights     weights -> existing buffers              (mutates them)
    te_dist::layer_forward      x, weights -> y, what backward needs     (pure)
    te_dist::layer_backward     dy, ... -> gradients                     (pure)
    te_dist::layer_forward_seeded  the same, and seeds for stochastic rounding

and for delayed scaling te_dist::advance_scales and te_dist::record_amaxes, which mutate its buffers.

No ``from __future__ import annotations``: the annotations become op schemas.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.delayed_scaling import advance, record
from te_dist.dynamo.define import mutating_op, pure_op
from te_dist.pipeline.args import BwdArgs, FwdArgs, TensorOrQuantized
from te_dist.pipeline.backward import layer_backward as backward_impl
from te_dist.pipeline.config import CallFlags, LayerConfig, LayerSpec
from te_dist.pipeline.forward import layer_forward as forward_impl
from te_dist.pipeline.function import config_of, draw_seeds, flatten_weights, rebuild_weights
from te_dist.pipeline.saved import assemble, flatten_saved, needs_input, rebuild_saved, saves_norm_output
from te_dist.pipeline.shards import norm_lead, out_lead, rows_per_entry, stage_rows
from te_dist.pipeline.weights import quantize_weight_part, weight_quantizer
from te_dist.recipe import Recipe
from te_dist.tensors.gathered import stand_in
from te_dist.tensors.storage import QuantizedStorage
from te_dist.torch_compat import in_backward


# ------------------------------------------------------------------------------------------------- weights
def _amaxes(config: LayerConfig, scales: Optional[Tensor]) -> Optional[Tensor]:
    return torch.zeros_like(scales) if config.delayed and scales is not None else None


def _quantize_weights(
    params: Sequence[Optional[Tensor]], scales: Optional[Tensor], config: LayerConfig
) -> list[Tensor]:
    """The buffers of all weights, then the amaxes under delayed scaling."""
    amaxes = _amaxes(config, scales)
    weights: list[list[TensorOrQuantized]] = []
    for stage in config.stages:
        group = []
        for g in range(stage.spec.weights):
            param = params[stage.weight_slot + g]
            assert param is not None
            quantizer = weight_quantizer(config, stage, scales, amaxes, g)
            amax_group = stage.spec.comm.amax_group("weight")
            group.append(quantize_weight_part(param, quantizer, None, True, None, False, amax_group)[0])
        weights.append(group)
    return flatten_weights(weights) + ([] if amaxes is None else [amaxes])


@pure_op("quantize_weights")
def quantize_weights(
    params: Sequence[Optional[Tensor]], scales: Optional[Tensor], spec: LayerSpec, recipe: Recipe, flags: CallFlags
) -> list[Tensor]:
    return _quantize_weights(params, scales, config_of(spec, recipe, flags))


@mutating_op("update_weights", ("workspaces", "amaxes"))
def update_weights(
    params: Sequence[Optional[Tensor]],
    workspaces: Sequence[Tensor],
    amaxes: Tensor,
    scales: Optional[Tensor],
    skip: Optional[Tensor],
    spec: LayerSpec,
    recipe: Recipe,
    flags: CallFlags,
) -> None:
    """Quantize the weights into their workspaces, unless the flag `skip` is set."""
    config = config_of(spec, recipe, flags)
    for stage, storages in zip(config.stages, rebuild_weights(config, params, workspaces), strict=True):
        for g, storage in enumerate(storages):
            param = params[stage.weight_slot + g]
            if isinstance(storage, QuantizedStorage) and param is not None:
                quantizer = weight_quantizer(config, stage, scales, amaxes, g)
                amax_group = stage.spec.comm.amax_group("weight")
                quantize_weight_part(param, quantizer, storage, True, skip, False, amax_group)


# ------------------------------------------------------------------------------------------------- forward
def shape_alone(x: Tensor) -> Tensor:
    """Shape, dtype and device of a tensor, and none of its data: a graph that reads no more never makes it."""
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)


def _input_and_weights(
    x: Tensor, weights: Sequence[Tensor], config: LayerConfig
) -> tuple[TensorOrQuantized, Sequence[Tensor]]:
    """The matrix that the layer gets, and the weights' buffers. Those of an input that was quantized before come in
    front of them; `x` says no more than its shape then."""
    given = config.flags.given
    if given is None:
        return kernels.as_rows(x), weights
    shape = (x.shape[:-1].numel(), x.shape[-1])
    count = len(given._describe_buffers((32, 32)))
    return assemble(iter(weights[:count]), given, shape, x.dtype), weights[count:]


def _forward(
    x: Tensor,
    params: Sequence[Optional[Tensor]],
    weights: Sequence[Tensor],
    scales: Optional[Tensor],
    splits: Sequence[int],
    offsets: Optional[Tensor],
    config: LayerConfig,
    out_dtype: torch.dtype,
) -> list[Tensor]:
    """y, the norm's output if it is returned, the amaxes under delayed scaling, what backward needs."""
    amaxes = _amaxes(config, scales)
    matrix, weights = _input_and_weights(x, weights, config)
    result = forward_impl(
        FwdArgs(
            x=matrix,
            params=list(params),
            # Unquantized weights are multiplied in the result's dtype, as in eager code.
            weights=[
                [w.to(out_dtype) if isinstance(w, Tensor) else w for w in stage]
                for stage in rebuild_weights(config, params, weights)
            ],
            config=config,
            out_dtype=out_dtype,
            scales=scales,
            amaxes=amaxes,
            splits=list(splits) or None,
            offsets=offsets,
            unit=rows_per_entry(x.shape),
        )
    )
    lead: Sequence[int] = x.shape[:-1]
    normed = result.norm_output
    results = [] if normed is None else [normed.view(*norm_lead(config, lead, normed.shape[0]), normed.shape[-1])]
    if config.communicates:
        lead = out_lead(config, lead, result.out.shape[0])
    out = [result.out.view(*lead, result.out.shape[-1]), *results]
    if amaxes is not None:
        out.append(amaxes)
    if config.flags.given is not None:
        result.saved[0].x = None  # a result must not be an argument: whoever has the buffers saves them
    saved = flatten_saved(result.saved)
    return out + (saved[1:] if saves_norm_output(config) else saved)


@pure_op("layer_forward")
def layer_forward(
    x: Tensor,
    params: Sequence[Optional[Tensor]],
    weights: Sequence[Tensor],
    scales: Optional[Tensor],
    splits: Sequence[int],
    offsets: Optional[Tensor],
    spec: LayerSpec,
    recipe: Recipe,
    flags: CallFlags,
    out_dtype: torch.dtype,
) -> list[Tensor]:
    return _forward(x, params, weights, scales, splits, offsets, config_of(spec, recipe, flags), out_dtype)


# A layer whose gradients are rounded stochastically draws their seeds in forward, so that a second backward and a
# recomputed forward see the same ones. In an op of its own, a partitioner would move the draw into backward.
@pure_op("layer_forward_seeded", tags=(torch.Tag.nondeterministic_seeded,))
def layer_forward_seeded(
    x: Tensor,
    params: Sequence[Optional[Tensor]],
    weights: Sequence[Tensor],
    scales: Optional[Tensor],
    splits: Sequence[int],
    offsets: Optional[Tensor],
    spec: LayerSpec,
    recipe: Recipe,
    flags: CallFlags,
    out_dtype: torch.dtype,
) -> list[Tensor]:
    """layer_forward, and the seeds at the end."""
    made = _forward(x, params, weights, scales, splits, offsets, config_of(spec, recipe, flags), out_dtype)
    return [*made, draw_seeds(spec, x)]


# ------------------------------------------------------------------------------------------------- backward
def _backward(
    dy: Tensor,
    dnorm_output: Optional[Tensor],
    x: Optional[Tensor],
    params: Sequence[Optional[Tensor]],
    weights: Sequence[Tensor],
    saved: Sequence[Tensor],
    scales: Optional[Tensor],
    seeds: Optional[Tensor],
    splits: Sequence[int],
    offsets: Optional[Tensor],
    config: LayerConfig,
    x_dtype: torch.dtype,
    rows: int,
) -> list[Tensor]:
    """dx if it is wanted, the wanted gradients in the order of the slots, the amaxes under delayed scaling."""
    amaxes = _amaxes(config, scales)
    depths = [_param(params, stage.weight_slot).shape[-1] for stage in config.stages]
    split_list = list(splits) or None
    spread = stage_rows(config, rows, split_list, rows_per_entry(dy.shape)) if config.communicates else None
    result = backward_impl(
        BwdArgs(
            dy=kernels.as_rows(dy),
            dnorm_output=None if dnorm_output is None else kernels.as_rows(dnorm_output),
            x=None if x is None else kernels.as_rows(x),
            params=list(params),
            weights=_dgrad_weights(config, params, weights),
            saved=rebuild_saved(config, iter(saved), rows, depths, x_dtype, split_list, spread),
            config=config,
            x_dtype=x_dtype,
            param_dtypes=[
                None if p is None else (config.flags.weight_grad_dtype or p.dtype) if is_weight else p.dtype
                for p, is_weight in zip(params, _weight_slots(config), strict=True)
            ],
            scales=scales,
            amaxes=amaxes,
            seeds=seeds,
            splits=split_list,
            offsets=offsets,
            rows=spread,
        )
    )
    gradients = [result.dx] if config.flags.input_grad else []
    gradients += [g for g, wanted in zip(result.dparams, config.flags.param_grads, strict=True) if wanted]
    missing = next((i for i, g in enumerate(gradients) if g is None), None)
    assert missing is None, f"gradient {missing} was not computed"
    return [g for g in gradients if g is not None] + ([] if amaxes is None else [amaxes])


def _param(params: Sequence[Optional[Tensor]], slot: int) -> Tensor:
    param = params[slot]
    assert param is not None
    return param


def _weight_slots(config: LayerConfig) -> list[bool]:
    slots = [False] * config.spec.param_count
    for stage in config.stages:
        for slot in range(stage.weight_slot, stage.bias_slot):
            slots[slot] = True
    return slots


def _dgrad_weights(
    config: LayerConfig, params: Sequence[Optional[Tensor]], flat: Sequence[Tensor]
) -> list[list[TensorOrQuantized]]:
    """What dgrad reads: the plane that ``dgrad_planes`` kept of each weight, or the parameter."""
    tensors = iter(flat)
    weights: list[list[TensorOrQuantized]] = []
    for stage in config.stages:
        group: list[TensorOrQuantized] = []
        for slot in range(stage.weight_slot, stage.bias_slot):
            param = _param(params, slot)
            plane = stage.dgrad_plane
            if plane is None:
                group.append(param)
            else:
                group.append(assemble(tensors, plane, (param.shape[0], param.shape[1]), param.dtype))
        weights.append(group)
    return weights


@pure_op("layer_backward")
def layer_backward(
    dy: Tensor,
    dnorm_output: Optional[Tensor],
    x: Optional[Tensor],
    params: Sequence[Optional[Tensor]],
    weights: Sequence[Tensor],
    saved: Sequence[Tensor],
    scales: Optional[Tensor],
    seeds: Optional[Tensor],
    splits: Sequence[int],
    offsets: Optional[Tensor],
    spec: LayerSpec,
    recipe: Recipe,
    flags: CallFlags,
    x_dtype: torch.dtype,
    rows: int,
) -> list[Tensor]:
    config = config_of(spec, recipe, flags)
    return _backward(dy, dnorm_output, x, params, weights, saved, scales, seeds, splits, offsets, config, x_dtype, rows)


# ------------------------------------------------------------------------------------------------- with other ranks
# The same ops under names that no graph may drop or move: a collective that one rank leaves out hangs the others.
for _function in (quantize_weights, layer_forward, layer_forward_seeded, layer_backward):
    _name = f"{_function.__name__}_exchanged"
    _tags = (torch.Tag.nondeterministic_seeded,) if _function is layer_forward_seeded else ()
    pure_op(_name, tags=_tags)(_function)
    torch.fx.node.has_side_effect(getattr(torch.ops.te_dist, _name).default)

# A single product with its collective goes by a name that says so (``LayerSpec.fused_op``). How the two overlap is
# up to the Comm in the spec.
for _fused in ("all_gather_linear", "linear_reduce_scatter"):
    for _function, _name in ((layer_forward, _fused), (layer_forward_seeded, f"{_fused}_seeded")):
        _tags = (torch.Tag.nondeterministic_seeded,) if _function is layer_forward_seeded else ()
        pure_op(_name, tags=_tags)(_function)
        torch.fx.node.has_side_effect(getattr(torch.ops.te_dist, _name).default)


# ------------------------------------------------------------------------------------------------- small ones
@mutating_op("advance_scales", ("history", "scales"))
def advance_scales(history: Tensor, scales: Tensor, largest: Tensor, margin: int, algorithm: str) -> None:
    if not in_backward():  # a recomputed forward uses the scales that the first one had
        advance(history, scales, largest, margin, algorithm)


@mutating_op("record_amaxes", ("history",))
def record_amaxes(history: Tensor, amaxes: Tensor, of_forward: bool) -> None:
    if not (of_forward and in_backward()):
        record(history, amaxes)


# ------------------------------------------------------------------------------------------------- autograd
def forward_op(exchange: str, draws_seeds: bool) -> Any:
    """`exchange`: as in ``shapes_of``."""
    if exchange == "all_gather_linear":
        return torch.ops.te_dist.all_gather_linear_seeded if draws_seeds else torch.ops.te_dist.all_gather_linear
    if exchange == "linear_reduce_scatter":
        if draws_seeds:
            return torch.ops.te_dist.linear_reduce_scatter_seeded
        return torch.ops.te_dist.linear_reduce_scatter
    if exchange:
        if draws_seeds:
            return torch.ops.te_dist.layer_forward_seeded_exchanged
        return torch.ops.te_dist.layer_forward_exchanged
    return torch.ops.te_dist.layer_forward_seeded if draws_seeds else torch.ops.te_dist.layer_forward


def backward_op(communicates: bool) -> Any:
    return torch.ops.te_dist.layer_backward_exchanged if communicates else torch.ops.te_dist.layer_backward


class CompiledLayer(torch.autograd.Function):
    """The compiled twin of ``EagerLayer``. `weights` are the quantized buffers, made outside."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        spec: LayerSpec,
        recipe: Recipe,
        flags: CallFlags,
        out_dtype: torch.dtype,
        splits: list[int],
        weight_count: int,
        kept_weights: list[int],
        saves: tuple[bool, bool, str, tuple[int, ...]],
        delayed: bool,
        draws_seeds: bool,
        offsets: Optional[Tensor],
        scales: Optional[Tensor],
        history: Optional[Tensor],
        *tensors: Optional[Tensor],
    ) -> Any:
        weights, params = tensors[:weight_count], tensors[weight_count:]
        if flags.gathered:
            params = tuple([stand_in(p) for p in params])
        saves_input, saves_norm, exchange, input_planes = saves
        op = forward_op(exchange, draws_seeds)
        read = x if flags.given is None else shape_alone(x)
        made = op(read, list(params), list(weights), scales, splits, offsets, spec, recipe, flags, out_dtype)
        seeds = None
        if draws_seeds:
            made, seeds = made[:-1], made[-1]
        results = 2 if spec.return_norm_output else 1
        first_saved = results
        if delayed:
            torch.ops.te_dist.record_amaxes(history, made[results], True)
            first_saved += 1
        kept = [weights[i] for i in kept_weights]
        ctx.counts = (len(kept), len(params))
        ctx.no_gradients = (None,) * (13 + weight_count)
        ctx.constants = (spec, recipe, flags, splits, delayed, x.dtype, bool(exchange))
        first_operand = [made[1]] if saves_norm else [weights[i] for i in input_planes]
        ctx.x_shape = x.shape
        ctx.save_for_backward(
            x if saves_input else None,
            seeds,
            scales,
            history,
            offsets,
            *kept,
            *params,
            *first_operand,
            *made[first_saved:],
        )
        if results == 2:
            return made[0], made[1]
        return made[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, dnorm_output: Optional[Tensor] = None) -> Any:
        x, seeds, scales, history, offsets, *rest = ctx.saved_tensors
        kept_count, param_count = ctx.counts
        kept, params = rest[:kept_count], rest[kept_count : kept_count + param_count]
        saved = rest[kept_count + param_count :]
        spec, recipe, flags, splits, delayed, x_dtype, exchanges = ctx.constants
        rows = 1
        for size in ctx.x_shape[:-1]:
            rows = rows * size
        op = backward_op(exchanges)
        made = op(
            dy, dnorm_output, x, list(params), list(kept), list(saved), scales, seeds, splits,
            offsets, spec, recipe, flags, x_dtype, rows,
        )  # fmt: skip
        if delayed:
            torch.ops.te_dist.record_amaxes(history, made[-1], False)
        at = 0
        dx = None
        if flags.input_grad:
            dx = made[0].view(ctx.x_shape)
            at = 1
        dparams = []
        for wanted in flags.param_grads:
            if wanted:
                dparams.append(made[at])
                at += 1
            else:
                dparams.append(None)
        return dx, *ctx.no_gradients, *dparams


def shapes_of(config: LayerConfig) -> tuple[list[int], tuple[bool, bool, str, tuple[int, ...]]]:
    """Constants of a compiled call: which of the weight buffers backward keeps; whether it needs the input and the
    returned norm's output, what other ranks take part in ("" if in nothing), and which buffers it keeps of an input
    that was quantized before. Such an input's buffers come before the weights'."""
    given = config.flags.given
    names = [] if given is None else list(given._describe_buffers((32, 32)))
    first = config.stages[0]
    planes: tuple[int, ...] = ()
    if names and first.needs_wgrad and first.x_saved is not None and not config.spec.save_original_input:
        planes = tuple(names.index(name) for name in first.x_saved._describe_buffers((32, 32)))
    kept: list[int] = []
    at = len(names)
    for stage in config.stages:
        for _ in range(stage.spec.weights):
            if stage.weight is None:
                continue
            names = list(stage.weight._describe_buffers((32, 32)))
            plane = stage.dgrad_plane
            wanted = [] if plane is None else list(plane._describe_buffers((32, 32)))
            kept.extend(at + i for i, name in enumerate(names) if name in wanted)
            at += len(names)
    exchange = (config.spec.fused_op or "layer") if config.communicates else ""
    return kept, (needs_input(config), saves_norm_output(config), exchange, planes)
