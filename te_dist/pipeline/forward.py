"""The forward pass of a chain of stages. No autograd, no module, no global state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from te_dist import kernels, transport
from te_dist.comm import Product
from te_dist.gemm import gemm
from te_dist.pipeline import device_groups
from te_dist.pipeline.args import FwdArgs, FwdResult, StageSaved, TensorOrQuantized
from te_dist.pipeline.config import ACTIVATION, NORM, StageConfig
from te_dist.pipeline.operands import first_rows, quantize_operand, split_rows
from te_dist.pipeline.shards import GroupRows, by_rank, laid_out, laid_out_rows, of_groups, stage_rows
from te_dist.plan import Move
from te_dist.producers import ActivationOutput, NormOutput, Plain, Producer
from te_dist.tensors.quantized_tensor import QuantizedTensor
from te_dist.tensors.storage import QuantizedStorage
from te_dist.transport import Done, Pending


def layer_forward(args: FwdArgs) -> FwdResult:
    config = args.config
    if not config.communicates:
        return _stages_forward(args, [None] * len(config.stages))
    with transport.layer_scope(config.spec.name or config.spec.module_type, "forward", config.spec.group_name):
        return _stages_forward(args, stage_rows(config, args.x.shape[0], args.splits, args.unit))


def _stages_forward(args: FwdArgs, rows: list[list[GroupRows] | None]) -> FwdResult:
    x = args.x
    norm_output: Tensor | None = None
    saved: list[StageSaved] = []
    for index, stage in enumerate(args.config.stages):
        kept = StageSaved()
        spread = rows[index]
        operands: Sequence[TensorOrQuantized]
        if isinstance(x, QuantizedStorage):
            operands = [_whole_blocks(args, stage, x, spread)]
            if stage.needs_wgrad and stage.x_saved is not None and not args.config.spec.save_original_input:
                kept.x = [x.with_usage(rowwise=stage.x_saved.rowwise, columnwise=stage.x_saved.columnwise)]
        else:
            source = _produce(args, stage, x, kept, first=index == 0)
            if stage.spec.produce == NORM and args.config.spec.return_norm_output:
                norm_output = kernels.materialize(source)
            operands = _operands(args, stage, source, kept, index == 0, spread)
        is_gathered = index == 0 and args.config.spec.gathers_norm and norm_output is not None and spread is not None
        if is_gathered:
            assert norm_output is not None and spread is not None
            operands, norm_output = _gathered_with_norm(stage, operands, spread, kept, norm_output)
        if stage.spec.comm.is_local:
            x = _multiply(args, stage, operands, args.weights[index], x.shape[0])
        else:
            weights = args.weights[index]
            x = _multiply_and_exchange(args, stage, operands, weights, x.shape[0], spread, kept, is_gathered)
        saved.append(kept)
    assert isinstance(x, Tensor)
    return FwdResult(x, norm_output, saved)


def _whole_blocks(
    args: FwdArgs, stage: StageConfig, x: QuantizedStorage, spread: list[GroupRows] | None
) -> QuantizedStorage:
    """A quantized input, which cannot be padded any more."""
    if spread is not None and not spread[0].is_even:
        raise ValueError(
            f"{args.config.spec.name or args.config.spec.module_type} expects a quantized input whose rows are a "
            f"multiple of {stage.shard_block} and equal on all ranks but got {spread[0].rows} rows"
        )
    return x


def _produce(args: FwdArgs, stage: StageConfig, x: Tensor, kept: StageSaved, first: bool) -> Producer:
    """What the stage's GEMM will consume, not yet made."""
    spec = stage.spec
    if spec.produce == NORM:
        weight, bias = args.params[stage.first_param], args.params[stage.first_param + 1]
        assert weight is not None
        rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        mean = torch.empty_like(rstd) if spec.layer_norm else None
        if stage.needs_dgrad:
            kept.produced_from, kept.mean, kept.rstd = (None if first else x), mean, rstd
        return NormOutput(x, weight, bias, mean, rstd, eps=spec.eps, zero_centered=spec.zero_centered)
    if spec.produce == ACTIVATION:
        if stage.needs_dgrad and not first:
            kept.produced_from = x
        return ActivationOutput(x, spec.activation)
    return Plain(x)


def _operands(
    args: FwdArgs,
    stage: StageConfig,
    source: Producer,
    kept: StageSaved,
    first: bool,
    spread: list[GroupRows] | None = None,
) -> list[TensorOrQuantized]:
    """fprop's operand of every group; what wgrad will need of them goes to `kept`."""
    is_input = first and isinstance(source, Plain)
    keep_original = args.config.spec.save_original_input and is_input
    quantizer = stage.x
    if quantizer is not None and quantizer.columnwise and keep_original:  # backward quantizes again
        quantizer = quantizer.with_usage(rowwise=True, columnwise=False) if stage.fprop else None
    sources = split_rows(source, args.splits) if stage.spec.groups and args.offsets is None else [source]
    quantized: list[QuantizedStorage] = []
    if quantizer is not None:
        padded, padded_to = sources, cast("list[int | None]", [None] * len(sources))
        is_whole = stage.spec.comm.plan.x is not Move.ALL_GATHER
        if spread is not None and not (is_whole and args.offsets is not None):
            padded = [laid_out(part, spread, group, is_whole) for group, part in enumerate(sources)]
            padded_to = [laid_out_rows(spread, group, is_whole) for group in range(len(sources))]
        quantized = [
            quantize_operand(
                args.config, stage, "input", quantizer, part, args.scales, args.amaxes, group=group, padded_to=rows
            )
            for group, (part, rows) in enumerate(zip(padded, padded_to, strict=True))
        ]
    if stage.needs_wgrad and not keep_original:
        if quantized and stage.x_saved is not None:
            saved_plane = stage.x_saved
            kept.x = [operand._planes_of(saved_plane) for operand in quantized]
        elif not is_input:
            kept.x = [kernels.materialize(source)]
    if stage.fprop and quantized:
        return list(quantized)
    return [kernels.materialize(part) for part in sources]


def _unquantized(param: Tensor | None, weight: QuantizedStorage, dtype: torch.dtype) -> TensorOrQuantized:
    """The weight as it was before it was quantized, where the parameter is not quantized itself."""
    if param is None or isinstance(param, QuantizedTensor):
        return weight
    return param.detach().to(dtype)


def _multiply(
    args: FwdArgs,
    stage: StageConfig,
    operands: Sequence[TensorOrQuantized],
    weights: list[TensorOrQuantized],
    rows: int,
) -> Tensor:
    if args.offsets is not None:
        return device_groups.fprop(args, stage, operands[0], weights, args.offsets, with_bias=stage.spec.has_bias)
    spec = stage.spec
    sizes = args.splits if spec.groups and args.splits is not None else [rows]
    products = _products(args, stage, operands, _fprop_weights(args, stage, weights), spec.has_bias)
    results = [first_rows(result, size) for result, size in zip(products, sizes, strict=True)]
    return results[0] if len(results) == 1 else torch.cat(results)


def _fprop_weights(
    args: FwdArgs, stage: StageConfig, weights: Sequence[TensorOrQuantized]
) -> list[TensorOrQuantized]:
    """The weights as fprop reads them."""
    made: list[TensorOrQuantized] = []
    for group, weight in enumerate(weights):
        if not stage.fprop and isinstance(weight, QuantizedStorage):  # quantized for dgrad alone
            made.append(_unquantized(args.params[stage.weight_slot + group], weight, args.out_dtype))
        else:
            made.append(weight.detach().to(args.out_dtype) if isinstance(weight, Tensor) else weight)
    return made


def _products(
    args: FwdArgs,
    stage: StageConfig,
    operands: Sequence[TensorOrQuantized],
    weights: Sequence[TensorOrQuantized],
    with_bias: bool,
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    return [
        gemm(
            operand,
            weight,
            kind="fprop",
            out_dtype=out_dtype or args.out_dtype,
            bias=args.params[stage.bias_slot + group] if with_bias else None,
            use_split_accumulator=stage.split_accumulator[0],
        )
        for group, (operand, weight) in enumerate(zip(operands, weights, strict=True))
    ]


def _multiply_and_exchange(
    args: FwdArgs,
    stage: StageConfig,
    operands: Sequence[TensorOrQuantized],
    weights: list[TensorOrQuantized],
    rows: int,
    spread: list[GroupRows] | None,
    kept: StageSaved,
    is_gathered: bool,
) -> Tensor:
    """``_multiply`` with other ranks: x is gathered before, unless it is already, or y reduced after the product."""
    spec, comm, plan = stage.spec, stage.spec.comm, stage.spec.comm.plan
    reduced = plan.y is not Move.NONE  # a bias is added once, not by every rank
    if args.offsets is not None:
        return device_groups.fprop_exchanged(args, stage, operands[0], weights, spread, kept)
    sizes = list(args.splits) if spec.groups and args.splits is not None else [rows]
    weights = _fprop_weights(args, stage, weights)
    gathers = plan.x is Move.ALL_GATHER and not is_gathered
    if gathers:
        assert spread is not None
        operands = _shards(stage, operands, spread)
    elif spread is not None and not is_gathered:
        operands = [
            g.pad_whole(operand) if isinstance(operand, Tensor) else operand
            for operand, g in zip(operands, spread, strict=True)
        ]
    if not reduced:
        if gathers:
            pending, results = comm.gather_and_multiply(
                "fprop",
                list(operands),
                lambda some: _products(args, stage, some, weights, spec.has_bias),
                comm.keeps_gathered and kept.x is not None,
            )
            _keep_gathered(stage, kept, pending)
        else:
            results = _products(args, stage, operands, weights, spec.has_bias)
        if spread is not None:
            results = [g.drop_whole(result) for g, result in zip(spread, results, strict=True)]
        else:
            results = [first_rows(result, size) for result, size in zip(results, sizes, strict=True)]
        return (results[0] if len(results) == 1 else torch.cat(results)).to(args.out_dtype)
    if gathers:
        whole = comm.start_gather(list(operands))
        _keep_gathered(stage, kept, whole)
        operands = whole.wait()

    def arrange(results: list[Tensor]) -> Tensor:
        if spread is not None:
            return by_rank(results, spread)
        results = [first_rows(result, size) for result, size in zip(results, sizes, strict=True)]
        return results[0] if len(results) == 1 else torch.cat(results)

    product = Product(
        "fprop",
        list(operands),
        weights,
        lambda some, features: _products(args, stage, some, features, False, comm.wire_dtype),
        arrange,
    )
    y = comm.multiply_and_reduce(plan.y, product).wait()
    if spread is not None and plan.y is Move.REDUCE_SCATTER:
        y, sizes = of_groups(y, spread), [g.mine for g in spread]
    if spec.has_bias:
        y = _add_biases(args, stage, y, sizes)
    return y.to(args.out_dtype)


def _gathered_with_norm(
    stage: StageConfig,
    operands: Sequence[TensorOrQuantized],
    spread: list[GroupRows],
    kept: StageSaved,
    norm_output: Tensor,
) -> tuple[list[TensorOrQuantized], Tensor]:
    """All ranks' rows of x and of the norm's output, which a layer returns whole; they travel together."""
    mine = _shards(stage, operands, spread)
    travels_apart = isinstance(mine[0], QuantizedStorage)
    if travels_apart:
        mine.append(spread[0].pad_mine(norm_output))
    gathered = stage.spec.comm.start_gather(mine).wait()
    whole = gathered.pop() if travels_apart else gathered[0]
    assert isinstance(whole, Tensor)
    _keep_gathered(stage, kept, Done(gathered))
    return gathered, spread[0].drop_whole(whole)


def _shards(
    stage: StageConfig, operands: Sequence[TensorOrQuantized], spread: list[GroupRows]
) -> list[TensorOrQuantized]:
    """What is gathered of x: the plane that fprop reads; with wgrad's too if that is to be kept."""
    mine: list[TensorOrQuantized] = []
    for operand, g in zip(operands, spread, strict=True):
        if isinstance(operand, Tensor):
            mine.append(g.pad_mine(operand))
        elif stage.x_row is None or stage.spec.comm.keeps_gathered:
            mine.append(operand)
        else:
            mine.append(operand._planes_of(stage.x_row))
    return mine


def _keep_gathered(stage: StageConfig, kept: StageSaved, gathered: Pending[list[TensorOrQuantized]]) -> None:
    """Keep wgrad's plane of the gathered x, in place of the shard's, where that is wanted."""
    if stage.spec.comm.keeps_gathered and kept.x is not None and stage.x_saved is not None:
        plane = stage.x_saved
        kept.x = [whole._planes_of(plane) for whole in gathered.wait() if isinstance(whole, QuantizedStorage)]


def _add_biases(args: FwdArgs, stage: StageConfig, y: Tensor, sizes: list[int]) -> Tensor:
    biases = [args.params[stage.bias_slot + group] for group in range(stage.spec.weights)]
    parts = [y] if len(biases) == 1 else y.split(sizes)
    made = [part if bias is None else part + bias.to(y.dtype) for part, bias in zip(parts, biases, strict=True)]
    return made[0] if len(made) == 1 else torch.cat(made)
