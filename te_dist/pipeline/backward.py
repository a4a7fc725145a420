"""The backward pass: the stages in reverse. Each hands the gradient of its input to the one below as a producer, so
that an activation's gradient is made by the quantize that reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist import kernels, transport
from te_dist.comm import Comm, Product
from te_dist.gemm import gemm
from te_dist.pipeline import device_groups
from te_dist.pipeline.args import BwdArgs, BwdResult, StageSaved, TensorOrQuantized
from te_dist.pipeline.config import ACTIVATION, NORM, StageConfig
from te_dist.pipeline.operands import first_rows, high_precision, quantize_operand, split_rows
from te_dist.pipeline.shards import GroupRows, by_rank, laid_out, laid_out_rows, of_groups
from te_dist.pipeline.weights import column_of_weight
from te_dist.plan import Move
from te_dist.producers import ActivationGradient, Plain, Producer
from te_dist.tensors.storage import QuantizedStorage
from te_dist.transport import Done, Pending


@dataclasses.dataclass(slots=True)
class WeightGradient:
    """One weight's gradient, computed now or later."""

    dy: TensorOrQuantized
    x: TensorOrQuantized
    dtype: torch.dtype
    split_accumulator: bool | None
    out: Tensor | None  # main_grad
    accumulate: bool

    def run(self) -> Tensor:
        return gemm(
            self.dy,
            self.x,
            kind="wgrad",
            out_dtype=self.dtype if self.out is None else self.out.dtype,
            out=self.out,
            accumulate=self.accumulate,
            use_split_accumulator=self.split_accumulator,
        )


def layer_backward(args: BwdArgs) -> BwdResult:
    """Consumes `args`: what a stage has used is let go of at once, because gradients take the memory next."""
    config = args.config
    if not config.communicates:
        return _stages_backward(args)
    with transport.layer_scope(config.spec.name or config.spec.module_type, "backward", config.spec.group_name):
        return _stages_backward(args)


def _stages_backward(args: BwdArgs) -> BwdResult:
    config = args.config
    result = BwdResult(None, [None] * config.spec.param_count)
    sources: list[Producer] = [args.dy if isinstance(args.dy, Producer) else Plain(args.dy)]
    args.dy = None  # type: ignore[assignment]
    for index in reversed(range(len(config.stages))):
        stage, saved = config.stages[index], args.saved[index]
        da = _stage_products(args, index, stage, saved, sources, result)
        if da is None:
            return result
        sources.append(_through_producer(args, stage, saved, da, result, first=index == 0))
        del da, saved
        args.saved[index] = StageSaved()
        args.weights[index] = []
    if config.flags.input_grad:
        result.dx = kernels.materialize(sources.pop())
    return result


def _stage_products(
    args: BwdArgs, index: int, stage: StageConfig, saved: StageSaved, sources: list[Producer], result: BwdResult
) -> Tensor | None:
    """The gradients of weight and bias, and of the operand that the stage consumed. Takes the one source."""
    source = sources.pop()
    if args.offsets is not None:
        return device_groups.backward_products(args, index, stage, saved, source, result)
    if not stage.spec.comm.is_local:
        return _exchanged_products(args, index, stage, saved, source, result)
    if not stage.spec.groups:
        sources.append(source)
        del source
        return _group_products(args, index, stage, saved, sources, 0, result)
    parts = split_rows(source, args.splits)
    das = [_group_products(args, index, stage, saved, [part], group, result) for group, part in enumerate(parts)]
    present = [da for da in das if da is not None]
    return torch.cat(present) if present else None


def _group_products(
    args: BwdArgs,
    index: int,
    stage: StageConfig,
    saved: StageSaved,
    sources: list[Producer],
    group: int,
    result: BwdResult,
) -> Tensor | None:
    source = sources.pop()
    rows = source.shape[0]
    if stage.needs_bias_grad:
        source.want_column_sums()
    quantized: QuantizedStorage | None = None
    if stage.dy is not None:
        seed = None if args.seeds is None else args.seeds[stage.seed_index(group)]
        quantized = quantize_operand(
            args.config, stage, "grad_output", stage.dy, source, args.scales, args.amaxes, seed, group
        )
    plain = _plain_gradient(stage, source, quantized)
    if stage.needs_bias_grad:
        slot = stage.bias_slot + group
        dtype = args.param_dtypes[slot]
        assert dtype is not None
        result.dparams[slot] = kernels.column_sums(source, dtype)
    del source
    da: Tensor | None = None
    if stage.needs_dgrad:
        dy = quantized if stage.dgrad and quantized is not None else plain
        assert dy is not None
        da = first_rows(_dgrad(args, stage, dy, _dgrad_weight(args, stage, dy, args.weights[index][group])), rows)
        del dy
    if stage.needs_wgrad:
        if stage.wgrad and quantized is not None:
            assert stage.dy_column is not None
            quantized = quantized._planes_of(stage.dy_column)  # the row plane has been used
        dy = quantized if stage.wgrad and quantized is not None else plain
        assert dy is not None
        _wgrad(args, stage, dy, _wgrad_input(args, stage, saved, group), stage.weight_slot + group, result)
    return da


def _exchanged_products(
    args: BwdArgs, index: int, stage: StageConfig, saved: StageSaved, source: Producer, result: BwdResult
) -> Tensor | None:
    """``_group_products`` of all groups, with other ranks. In time, on the compute stream and on the wire:

    quantize dy   [gather dy]   dgrad             wgrad
    gather x ...............................      reduce dx .....   (both while products run)

    A Comm that overlaps computes dgrad in parts while dy arrives, or while parts of dx are on their way.
    """
    comm, plan, spec = stage.spec.comm, stage.spec.comm.plan, stage.spec
    spread = None if args.rows is None else args.rows[index]
    # Only a quantized x is kept gathered, see forward._gathered.
    has_whole = comm.keeps_gathered and saved.x is not None and stage.x_saved is not None
    gathers_x = stage.needs_wgrad and plan.x is Move.ALL_GATHER and not has_whole
    groups = range(spec.weights)
    xs: list[TensorOrQuantized] = []
    pending_x: Pending[list[TensorOrQuantized]] = Done(xs)
    if stage.needs_wgrad:
        xs = [_kept_input(args, stage, saved, group, spread) for group in groups]
        pending_x = comm.start_gather(xs, "dgrad") if gathers_x else Done(xs)
    dy, rows = _exchanged_gradients(args, stage, source, spread, result)
    del source
    quantized = 0 if stage.dy is None else spec.weights  # what is in high precision comes behind as many
    pending_dy: Pending[list[TensorOrQuantized]] = Done(dy)
    pending_dx: Pending[Tensor] | None = None
    if stage.needs_dgrad:
        is_reduced = plan.dx is not Move.NONE
        wire_dtype = comm.wire_dtype if is_reduced else None
        read = slice(0, spec.weights) if stage.dgrad else slice(quantized, quantized + spec.weights)
        weights = [
            _dgrad_weight(args, stage, mine, weight)
            for mine, weight in zip(dy[read], args.weights[index], strict=True)
        ]

        def multiply(some: list[TensorOrQuantized], features: list[TensorOrQuantized]) -> list[Tensor]:
            return [_dgrad(args, stage, some[g], features[g], wire_dtype) for g in groups]

        if plan.dy is Move.ALL_GATHER and not is_reduced:
            pending_dy, das = comm.gather_and_multiply(
                "dgrad", dy, lambda some: multiply(some[read], weights), stage.needs_wgrad
            )
            assert spread is not None
            das = [g.drop_whole(da) for g, da in zip(spread, das, strict=True)]
            pending_dx = Done(das[0] if len(das) == 1 else torch.cat(das))
            del das
        else:
            if plan.dy is Move.ALL_GATHER:
                pending_dy = Done(comm.start_gather(dy).wait())

            def arrange(das: list[Tensor]) -> Tensor:
                if spread is not None and plan.dx is Move.REDUCE_SCATTER:
                    return by_rank(das, spread)
                if spread is not None:
                    das = [g.drop_whole(da) for g, da in zip(spread, das, strict=True)]
                else:
                    das = [first_rows(da, size) for da, size in zip(das, rows, strict=True)]
                return das[0] if len(das) == 1 else torch.cat(das)

            if args.dnorm_output is not None and index == 0 and args.config.spec.gathers_norm:
                # Every rank has a part of the gradient of what they all got: summed together with dx.
                assert spread is not None
                da = arrange(multiply(pending_dy.wait(), weights))
                da = da + spread[0].pad_whole(args.dnorm_output).to(da.dtype)
                pending_dx = comm.start_reduce(plan.dx, da)
                del da
            else:
                product = Product("dgrad", pending_dy.wait()[read], weights, multiply, arrange)
                pending_dx = comm.multiply_and_reduce(plan.dx, product, "wgrad" if stage.needs_wgrad else "")
                del product
    elif stage.needs_wgrad and plan.dy is Move.ALL_GATHER:
        pending_dy = comm.start_gather(dy)
    if stage.needs_wgrad:
        whole = pending_dy.wait()
        first = 0 if stage.wgrad else quantized
        for group, x in enumerate(pending_x.wait()):
            operand = whole[first + group]
            if stage.wgrad and isinstance(operand, QuantizedStorage):
                assert stage.dy_column is not None
                operand = operand._planes_of(stage.dy_column)
            if stage.dequantized_backward or not stage.wgrad:
                x = high_precision(x, args.x_dtype)
            _wgrad(args, stage, operand, x, stage.weight_slot + group, result)
    if pending_dx is None:
        return None
    da = pending_dx.wait()
    if plan.dx is Move.REDUCE_SCATTER and spread is not None:
        da = of_groups(da, spread)
    return da.to(args.x_dtype)


def _exchanged_gradients(
    args: BwdArgs, stage: StageConfig, source: Producer, spread: list[GroupRows] | None, result: BwdResult
) -> tuple[list[TensorOrQuantized], list[int]]:
    """dy of every group as the products read it, before it is gathered: quantized, in high precision, or first all
    quantized and then all in high precision. And its rows."""
    comm, plan, spec = stage.spec.comm, stage.spec.comm.plan, stage.spec
    gathers = plan.dy is Move.ALL_GATHER
    sizes = [source.shape[0]]
    if spec.groups:
        assert args.splits is not None
        sizes = list(args.splits) if spread is None else [g.mine if gathers else g.whole for g in spread]
    parts = split_rows(source, sizes) if spec.groups else [source]
    quantized: list[QuantizedStorage] = []
    plain: list[Tensor] = []
    for group, part in enumerate(parts):
        if stage.needs_bias_grad:
            part.want_column_sums()
        if stage.dy is not None:
            seed = None if args.seeds is None else args.seeds[stage.seed_index(group)]
            quantized.append(
                quantize_operand(
                    args.config, stage, "grad_output", stage.dy, laid_out(part, spread, group, not gathers),
                    args.scales, args.amaxes, seed, group, laid_out_rows(spread, group, not gathers),
                )
            )  # fmt: skip
        made = _plain_gradient(stage, part, quantized[-1] if quantized else None)
        if made is not None and spread is not None:
            made = spread[group].pad_mine(made) if gathers else spread[group].pad_whole(made)
        if made is not None:
            plain.append(made)
        if stage.needs_bias_grad:
            slot = stage.bias_slot + group
            dtype = args.param_dtypes[slot]
            assert dtype is not None
            # A row-parallel layer's bias met this rank's rows only: the others' sums are missing.
            sums = _column_sums(part, torch.float32 if gathers else dtype)
            result.dparams[slot] = comm.sum_gradient(sums).to(dtype) if gathers else sums
    return [*quantized, *plain], sizes


def _column_sums(part: Producer, dtype: torch.dtype) -> Tensor:
    """Of a rank's part, which may be empty: no kernel for nothing."""
    if not kernels.is_shapes_only() and part.numel() == 0:
        return torch.zeros(part.shape[1], dtype=dtype, device=part.device)
    return kernels.column_sums(part, dtype)


def _kept_input(
    args: BwdArgs, stage: StageConfig, saved: StageSaved, group: int, spread: list[GroupRows] | None
) -> TensorOrQuantized:
    """x as wgrad will read it, still quantized where it was, and padded like what it is gathered with."""
    is_whole = stage.spec.comm.plan.x is not Move.ALL_GATHER
    x = _wgrad_input(args, stage, saved, group, laid_out_rows(spread, group, is_whole), spread)
    if spread is None or not isinstance(x, Tensor):
        return x
    x = x.to(args.x_dtype)
    return spread[group].pad_whole(x) if is_whole else spread[group].pad_mine(x)


def _plain_gradient(stage: StageConfig, source: Producer, quantized: QuantizedStorage | None) -> Tensor | None:
    """The gradient in high precision, where some product reads it like that."""
    for needed, is_quantized in ((stage.needs_dgrad, stage.dgrad), (stage.needs_wgrad, stage.wgrad)):
        if needed and not (is_quantized and quantized is not None):
            return kernels.materialize(source)
    return None


def _dgrad_weight(
    args: BwdArgs, stage: StageConfig, dy: TensorOrQuantized, weight: TensorOrQuantized
) -> TensorOrQuantized:
    """The weight as dgrad reads it."""
    if stage.dequantized_backward:
        return high_precision(weight, args.x_dtype)
    if args.config.flags.gathered:
        return column_of_weight(stage, weight)
    if not stage.dgrad and isinstance(weight, Tensor) and isinstance(dy, Tensor):
        return weight.to(dy.dtype)
    return weight


def _dgrad(
    args: BwdArgs,
    stage: StageConfig,
    dy: TensorOrQuantized,
    weight: TensorOrQuantized,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    out_dtype = out_dtype or args.x_dtype
    return gemm(dy, weight, kind="dgrad", out_dtype=out_dtype, use_split_accumulator=stage.split_accumulator[1])


def _wgrad_input(
    args: BwdArgs,
    stage: StageConfig,
    saved: StageSaved,
    group: int,
    padded_to: int | None = None,
    spread: list[GroupRows] | None = None,
) -> TensorOrQuantized:
    """x as wgrad reads it: the plane that was kept, or the layer's input again."""
    if saved.x is not None and (len(saved.x) == stage.spec.weights or not stage.spec.groups):
        x = saved.x[group]
    else:
        whole = args.x if saved.x is None else saved.x[0]
        assert whole is not None
        x = whole
        if stage.spec.groups:
            assert isinstance(whole, Tensor) and args.splits is not None
            x = whole.split(args.splits)[group]
    if stage.dequantized_backward or not stage.wgrad:
        # What other ranks need of it travels quantized.
        return x if spread is not None else high_precision(x, args.x_dtype)
    if stage.wgrad and isinstance(x, Tensor) and stage.x is not None:  # save_original_input
        column = stage.x.with_usage(rowwise=False, columnwise=True)
        scratch = None if args.amaxes is None else torch.zeros_like(args.amaxes)  # forward has recorded it
        is_whole = stage.spec.comm.plan.x is not Move.ALL_GATHER
        return quantize_operand(
            args.config, stage, "input", column, laid_out(Plain(x), spread, group, is_whole), args.scales, scratch,
            group=group, padded_to=padded_to,
        )  # fmt: skip
    return x


def _wgrad(
    args: BwdArgs, stage: StageConfig, dy: TensorOrQuantized, x: TensorOrQuantized, slot: int, result: BwdResult
) -> None:
    if not args.config.flags.param_grads[slot]:
        return
    if isinstance(dy, Tensor) and isinstance(x, Tensor) and x.dtype != dy.dtype:
        x = x.to(dy.dtype)
    dy, x = _same_rows(dy, x)
    dtype = args.param_dtypes[slot]
    assert dtype is not None
    main_grad = None if args.main_grads is None else args.main_grads[slot]
    product = WeightGradient(
        dy,
        x,
        dtype,
        stage.split_accumulator[2],
        main_grad,
        main_grad is not None and slot not in args.overwrite_main_grads,
    )
    if args.wgrad_store is not None:
        args.wgrad_store.append((slot, product))
    elif main_grad is not None:
        product.run()
    else:
        result.dparams[slot] = product.run()


def _same_rows(dy: TensorOrQuantized, x: TensorOrQuantized) -> tuple[TensorOrQuantized, TensorOrQuantized]:
    """One of the two may have been padded for its quantizer, and the other not because it is plain."""
    rows = max(dy.shape[0], x.shape[0])
    padded = [
        torch.nn.functional.pad(t, (0, 0, 0, rows - t.shape[0])) if isinstance(t, Tensor) and t.shape[0] != rows else t
        for t in (dy, x)
    ]
    return padded[0], padded[1]


def _through_producer(
    args: BwdArgs, stage: StageConfig, saved: StageSaved, da: Tensor, result: BwdResult, first: bool
) -> Producer:
    """From the gradient of what the GEMM consumed to the gradient of what the stage got."""
    x = saved.produced_from if saved.produced_from is not None else args.x
    if stage.spec.produce == ACTIVATION:
        assert isinstance(x, Tensor)
        return ActivationGradient(da, x, stage.spec.activation)
    if stage.spec.produce != NORM:
        return Plain(da)
    assert isinstance(x, Tensor) and saved.rstd is not None
    if first and args.dnorm_output is not None and not args.config.spec.gathers_norm:
        da = da + args.dnorm_output
    slot = stage.first_param
    weight = args.params[slot]
    assert weight is not None
    wants_weight, wants_bias = args.config.flags.param_grads[slot : slot + 2]
    dx, dweight, dbias = kernels.norm_backward(
        da.to(x.dtype),
        x,
        weight,
        saved.mean,
        saved.rstd,
        zero_centered=stage.spec.zero_centered,
        weight_grad=wants_weight,
        bias_grad=wants_bias,
    )
    if stage.spec.comm.plan.x is Move.ALL_GATHER:  # the norm saw this rank's rows only
        dweight, dbias = (None if g is None else _summed(stage.spec.comm, g) for g in (dweight, dbias))
    result.dparams[slot], result.dparams[slot + 1] = dweight, dbias
    return Plain(dx)


def _summed(comm: Comm, gradient: Tensor) -> Tensor:
    return comm.sum_gradient(gradient.float()).to(gradient.dtype)


def run_delayed(products: Sequence[Any]) -> dict[int, Tensor]:
    """The products that ``wgrad_store`` has collected: gradients by parameter slot."""
    gradients: dict[int, Tensor] = {}
    for item in products:
        slot, product = item
        gradient = product.run()
        if product.out is None:
            gradients[slot] = gradients[slot] + gradient if slot in gradients else gradient
    return gradients
