"""The shortest way through a plain linear layer: per-tensor and blockwise FP8, in eager code on a GPU.

A small layer costs its host time and nothing else, so for the most common layer the stage chain is unrolled here: the
same kernels and products in the same order as forward.py and backward.py, on bare tensors, with everything that does
not change from call to call looked up beforehand. Whatever is not that common takes the chain. Compiled code always
does, and tests compare the two bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_dist import gemm_direct, kernels, torch_compat
from te_dist.formats import TORCH_FP8, ceil_div, round_up
from te_dist.pipeline.config import LayerConfig, StageConfig
from te_dist.pipeline.plain_linear import accumulators, block_dims, is_plain, native_rule
from te_dist.producers import COLUMN_TILE_ROWS
from te_dist.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Quantizer
from te_dist.recipe import DelayedScaling, Recipe

_STRIDED = torch.empty_strided  # the cheapest of torch's ways to get memory
_F32 = torch.float32
_BLOCK = 128

Planes = tuple[Tensor, Tensor, Tensor, Tensor]  # row plane, its scales, column plane, its scales
Source = tuple[Any, ...]  # a matrix as the kernels take it


@dataclasses.dataclass(slots=True)
class Operand:
    """How x, the weight or dy is quantized."""

    code: int  # the kernels' name of the fp8 type
    fp8: torch.dtype
    eps: float
    power_of_2: bool
    block_dim: int  # 0: one scale for the tensor
    scale_offset: int  # bytes into delayed scaling's scales
    row_transposed: bool  # whether a plane is the second factor of its product
    col_transposed: bool


@dataclasses.dataclass(slots=True)
class DelayedState:
    """What one call reads and writes of delayed scaling."""

    scales: Tensor  # the call's own copy
    seen: Tensor  # whose first row amaxes are recorded in


@dataclasses.dataclass(slots=True)
class LeanPlan:
    """What a layer's lean calls have in common. Valid for one recipe, one device and one combination of flags."""

    recipe: Recipe
    dtype: torch.dtype  # of x, the weight and y
    code: int  # the kernels' name for it
    device: torch.device
    index: int
    features: int
    depth: int
    operands: tuple[Operand, Operand, Operand]  # x, the weight and dy
    fast: tuple[bool, ...]  # short accumulators in fprop, dgrad, wgrad
    bias_grad: bool
    delayed: bool
    quantize: Callable[[LeanPlan, Operand, Source, int, int, int, DelayedState | None], Planes]
    multiply: Callable[..., Tensor]
    kernel: Any  # that quantizes
    reduce: Any  # kernels of column sums and of delayed scaling's step
    advance: Any
    stream: Any  # device index -> handle of the current stream
    amaxes: dict[int, Tensor]  # scratch, by stream

    @staticmethod
    def of(
        config: LayerConfig, recipe: Recipe | None, weight: Tensor, bias: Tensor | None, inp: Tensor
    ) -> LeanPlan | None:
        """The plan of a layer, or None if it has to take the chain.

        Args:
            recipe: the layer's. The configuration's own is equal to it, but may have come from another layer.
        """
        stage, dtype, device = config.stages[0], inp.dtype, inp.device
        table = kernels.functions(device)
        if recipe is None or not is_plain(config) or config.flags.keep_planes or table is None or device.type != "cuda":
            return None
        if not (stage.needs_dgrad and stage.needs_wgrad):
            return None
        if isinstance(recipe, DelayedScaling) and not -126 <= recipe.margin <= 127:
            return None  # the kernel's range
        dims = block_dims(stage)
        rows, cols = weight.shape
        if dims is None or not gemm_direct._is_native(native_rule(dims), device) or rows % 16 or cols % 16:
            return None
        if dims[0]:
            kernel, quantize, multiply = "quantize_block", _quantize_block, _multiply_blocks
        elif config.delayed:
            kernel, quantize, multiply = "cast_scaled", _cast, _multiply
        else:
            kernel, quantize, multiply = "quantize_current", _quantize_current, _multiply
        if dtype not in (torch.bfloat16, torch.float16) or (bias is not None and bias.dtype != dtype):
            return None
        if stage.needs_bias_grad and dtype != torch.bfloat16:  # no kernel adds up its columns on the way
            return None
        operands = [_operand(stage, name) for name in ("input", "weight", "grad_output")]
        return LeanPlan(
            recipe=recipe,
            dtype=dtype,
            code=kernels.FLOAT_CODE[dtype],
            device=device,
            index=device.index or 0,
            features=rows,
            depth=cols,
            operands=tuple(operands),  # type: ignore[arg-type]
            fast=accumulators(stage),
            bias_grad=stage.needs_bias_grad,
            delayed=config.delayed,
            quantize=quantize,
            multiply=multiply,
            kernel=table[kernel],
            reduce=table["reduce_partials"],
            advance=table["advance_scales"],
            stream=torch_compat.current_raw_stream,
            amaxes={},
        )


# ------------------------------------------------------------------------------------------------- formats
def _operand(stage: StageConfig, name: str) -> Operand:
    quantizer: Quantizer | None = {"input": stage.x, "weight": stage.weight, "grad_output": stage.dy}[name]
    assert isinstance(quantizer, Float8CurrentScalingQuantizer | Float8BlockQuantizer)
    return Operand(
        kernels.FP8_CODE[quantizer.fp8_dtype],
        TORCH_FP8[quantizer.fp8_dtype],
        quantizer.amax_epsilon,
        quantizer.force_pow_2_scales,
        getattr(quantizer, "block_scaling_dim", 0),
        4 * stage.scale_index(name),
        row_transposed=name == "weight",
        col_transposed=name != "grad_output",
    )


def _planes(plan: LeanPlan, operand: Operand, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Both planes, uninitialised; one that is the second factor of its product as the transpose of what the kernel
    fills, because that is how products take it."""
    fp8, device = operand.fp8, plan.device
    if operand.row_transposed:
        row = _STRIDED((cols, rows), (1, cols), dtype=fp8, device=device)
    else:
        row = _STRIDED((rows, cols), (cols, 1), dtype=fp8, device=device)
    if operand.col_transposed:
        return row, _STRIDED((rows, cols), (1, rows), dtype=fp8, device=device)
    return row, _STRIDED((cols, rows), (rows, 1), dtype=fp8, device=device)


def _quantize_current(
    plan: LeanPlan, operand: Operand, source: Source, rows: int, cols: int, stream: int, state: DelayedState | None
) -> Planes:
    row, col = _planes(plan, operand, rows, cols)
    scale = _STRIDED((1,), (1,), dtype=_F32, device=plan.device)
    # One amax for all tensors of a stream: the kernels that use it follow each other.
    amax = plan.amaxes.get(stream)
    if amax is None:
        amax = plan.amaxes[stream] = kernels.amax_scratch(plan.device)
    plan.kernel(
        *source, amax.data_ptr(), operand.eps, operand.power_of_2, operand.code,
        row.data_ptr(), col.data_ptr(), scale.data_ptr(), 0, stream,
    )  # fmt: skip
    return row, scale, col, scale


def _cast(
    plan: LeanPlan, operand: Operand, source: Source, rows: int, cols: int, stream: int, state: DelayedState | None
) -> Planes:
    assert state is not None
    row, col = _planes(plan, operand, rows, cols)
    scale = _STRIDED((1,), (1,), dtype=_F32, device=plan.device)
    offset = operand.scale_offset
    plan.kernel(
        *source, state.scales.data_ptr() + offset, operand.code, row.data_ptr(), col.data_ptr(), scale.data_ptr(),
        state.seen.data_ptr() + offset, 0, stream,
    )  # fmt: skip
    return row, scale, col, scale


def _quantize_block(
    plan: LeanPlan, operand: Operand, source: Source, rows: int, cols: int, stream: int, state: DelayedState | None
) -> Planes:
    row, col = _planes(plan, operand, rows, cols)
    device = plan.device
    if operand.block_dim == 1:
        down, across = rows, cols  # sizes are multiples of 16, so nothing is padded
    else:
        down, across = round_up(ceil_div(cols, _BLOCK), 4), round_up(ceil_div(rows, _BLOCK), 4)
        rows, cols = cols, rows
    # [blocks, pitch] in memory, and the product wants it the other way round.
    row_scale = _STRIDED((down, ceil_div(cols, _BLOCK)), (1, down), dtype=_F32, device=device)
    col_scale = _STRIDED((across, ceil_div(rows, _BLOCK)), (1, across), dtype=_F32, device=device)
    plan.kernel(
        *source, operand.block_dim, operand.eps, operand.power_of_2, operand.code,
        row.data_ptr(), row_scale.data_ptr(), col.data_ptr(), col_scale.data_ptr(), 0, stream,
    )  # fmt: skip
    return row, row_scale, col, col_scale


def _multiply(
    plan: LeanPlan, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None, fast: bool, tiles: int
) -> Tensor:
    return torch._scaled_mm(a, b, scale_a, scale_b, bias, None, plan.dtype, fast)


def _multiply_blocks(
    plan: LeanPlan, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None, fast: bool, tiles: int
) -> Tensor:
    row_tiles, square_tiles, no_swizzle = gemm_direct._block_recipes()
    swizzle = [no_swizzle]
    return torch._scaled_mm_v2(
        a, b, [scale_a], [row_tiles], swizzle, [scale_b], [row_tiles if tiles == 1 else square_tiles], swizzle,
        bias, plan.dtype, (), False,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- the layer
def delayed_state(plan: LeanPlan, history: Tensor, scales: Tensor, largest: Tensor) -> DelayedState:
    """Delayed scaling's step at the start of a forward, and what the call reads and records into."""
    recipe = plan.recipe
    assert isinstance(recipe, DelayedScaling)
    if torch_compat.in_backward():  # activation checkpointing: the same scales, and what it sees was recorded
        return DelayedState(scales.clone(), torch.zeros_like(scales))
    plan.advance(
        history.data_ptr(), scales.data_ptr(), largest.data_ptr(), *history.shape, recipe.margin,
        recipe.amax_compute_algo != "max", plan.stream(plan.index),
    )  # fmt: skip
    # By value: the next microbatch may advance them before this one's backward runs.
    return DelayedState(scales.clone(), history)


class LeanLinear(torch.autograd.Function):
    """y = x W^T + b, where gradients of x and W are wanted."""

    @staticmethod
    def forward(
        ctx: Any, plan: LeanPlan, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None = None,
        scales: Tensor | None = None, largest: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        depth, features = plan.depth, plan.features
        rows = x.numel() // depth
        stream = plan.stream(plan.index)
        state = None
        if plan.delayed:
            assert history is not None and scales is not None and largest is not None
            state = delayed_state(plan, history, scales, largest)
            ctx.grad_state = DelayedState(state.scales, history)
        x_operand, w_operand, _ = plan.operands
        source = (x.data_ptr(), plan.code, rows, depth, depth)
        x_row, x_row_scale, x_col, x_col_scale = plan.quantize(plan, x_operand, source, rows, depth, stream, state)
        source = (weight.data_ptr(), plan.code, features, depth, depth)
        w_row, w_row_scale, w_col, w_col_scale = plan.quantize(plan, w_operand, source, features, depth, stream, state)
        y = plan.multiply(plan, x_row, x_row_scale, w_row, w_row_scale, bias, plan.fast[0], w_operand.block_dim)
        ctx.plan, ctx.x_shape = plan, x.shape
        ctx.save_for_backward(x_col, x_col_scale, w_col, w_col_scale)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], features)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        # What refuses a second differentiation costs a few microseconds, and only create_graph can lead to one.
        return _differentiable_once(ctx, dy) if torch.is_grad_enabled() else LeanLinear._gradients(ctx, dy)

    @staticmethod
    def _gradients(ctx: Any, dy: Tensor) -> Any:
        plan: LeanPlan = ctx.plan
        x_col, x_scale, w_col, w_scale = ctx.saved_tensors
        torch_compat.release_saved_tensors(ctx)
        features, device = plan.features, plan.device
        if not dy.is_contiguous():
            dy = dy.contiguous()
        rows = dy.numel() // features
        stream = plan.stream(plan.index)
        db = partials = None
        tiles = 0
        source: Source = (dy.data_ptr(), plan.code, rows, features, features)
        if plan.bias_grad:
            if dy.data_ptr() % 16:
                dy = dy.clone()
            tiles = ceil_div(rows, COLUMN_TILE_ROWS)
            partials = _STRIDED((tiles, features), (features, 1), dtype=_F32, device=device)
            source = (kernels.plain_with_sums(dy.data_ptr(), plan.code, rows, features, partials.data_ptr()),)
        state = ctx.grad_state if plan.delayed else None
        row, row_scale, col, col_scale = plan.quantize(plan, plan.operands[2], source, rows, features, stream, state)
        if partials is not None:
            db = _STRIDED((features,), (1,), dtype=plan.dtype, device=device)
            plan.reduce(partials.data_ptr(), tiles, db.data_ptr(), plan.code, 1, features, stream)
        block_dim = plan.operands[1].block_dim
        dx = plan.multiply(plan, row, row_scale, w_col, w_scale, None, plan.fast[1], block_dim)
        del row
        dw = plan.multiply(plan, col, col_scale, x_col, x_scale, None, plan.fast[2], 1)
        return None, dx if len(ctx.x_shape) == 2 else dx.view(ctx.x_shape), dw, db, None, None, None


_differentiable_once = torch.autograd.function.once_differentiable(LeanLinear._gradients)


def fits(plan: LeanPlan, recipe: Recipe | None, inp: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether this call is one of those the plan was made for."""
    return (
        recipe is plan.recipe
        and type(inp) is Tensor
        and inp.requires_grad
        and inp.dtype is plan.dtype
        and inp.device == plan.device
        and inp.shape[-1] == plan.depth
        and inp.numel() > 0
        and inp.numel() // plan.depth % 16 == 0
        and inp.is_contiguous()
        and type(weight) is torch.nn.Parameter
        and weight.requires_grad
        and weight.dtype is plan.dtype
        and weight.device == plan.device
        and weight.is_contiguous()
        and (bias is not None and bias.requires_grad) is plan.bias_grad
        and torch_compat.current_cuda_device() == plan.index
    )
