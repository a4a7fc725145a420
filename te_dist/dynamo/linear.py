"""A plain linear layer inside a compiled graph on a GPU: its quantizes and its products are nodes of the graph.

The layer ops of layer.py run the stage chain in Python when the graph runs, which for a small layer costs more host
time than its kernels take. The most common layers, FP8 per tensor or in blocks, need nothing of the chain but
three quantizes and three of torch's products, so these are traced one by one: what remains on the host is the graph's
own wrapper. The kernels are those of the chain, and so are the bits.

No ``from __future__ import annotations``: the annotations become op schemas.
"""

import functools
from typing import Any, Optional, cast

import torch
from torch import Tensor

from te_dist import gemm_direct, kernels
from te_dist.dynamo.define import pure_op
from te_dist.formats import TORCH_FP8, DType, round_up
from te_dist.pipeline.config import CallFlags, LayerSpec, resolve
from te_dist.pipeline.plain_linear import accumulators, block_dims, is_plain, native_rule
from te_dist.producers import Plain
from te_dist.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Quantizer
from te_dist.recipe import Recipe
from te_dist.torch_compat import constant_in_graphs

_MULTIPLE = 16  # of every size that a product sums over

# Constants of a traced call, as plain tuples, which every dynamo can unpack.
Cast = tuple[int, int, float, bool]  # fp8 type, dimensions of a block (0: one scale), eps, power of 2
# x, the weight, dy; short accumulators in fprop, dgrad, wgrad; which gradients are wanted: of x, the weight, the bias
LinearPlan = tuple[tuple[Cast, Cast, Cast], tuple[bool, bool, bool], tuple[bool, bool, bool]]


# ------------------------------------------------------------------------------------------------- ops
@functools.cache
def _quantizer(
    fp8: int, block_dim: int, eps: float, power_of_2: bool, rowwise: bool, columnwise: bool
) -> Float8CurrentScalingQuantizer | Float8BlockQuantizer:
    kind = functools.partial(Float8BlockQuantizer, block_scaling_dim=block_dim)
    made: Any = (kind if block_dim else Float8CurrentScalingQuantizer)(
        DType(fp8), rowwise=rowwise, columnwise=columnwise, force_pow_2_scales=power_of_2, amax_epsilon=eps
    )
    return cast(Float8CurrentScalingQuantizer | Float8BlockQuantizer, made)


@pure_op("quantize_for_products")
def quantize_for_products(
    x: Tensor,
    fp8: int,
    block_dim: int,
    eps: float,
    power_of_2: bool,
    rowwise: bool,
    columnwise: bool,
    column_sums: bool,
) -> list[Tensor]:
    """The row plane [M, K], the column plane [K, M padded to 16], their scales (one for both, or one for each), the
    sums of x's columns: what is wanted of them, in this order."""
    quantizer = _quantizer(fp8, block_dim, eps, power_of_2, rowwise, columnwise)
    producer = Plain(kernels.as_rows(x))
    if column_sums:
        producer.want_column_sums()
    storage: Any = quantizer.quantize_produced(producer, x.shape)
    kind = TORCH_FP8[quantizer.fp8_dtype]
    if block_dim:
        row, column = storage._rowwise_data, storage._columnwise_data
        scales = [s for s in (storage._rowwise_scale_inv, storage._columnwise_scale_inv) if s is not None]
    else:
        row, column, scales = storage._data, storage._transpose, [storage._scale_inv]
    made = [] if row is None else [row.view(kind)]
    if column is not None:
        made.append(_padded(column).view(kind))
    sums = [kernels.column_sums(producer, x.dtype)] if column_sums else []
    return made + scales + sums


def _padded(plane: Tensor) -> Tensor:
    """Zero codes add exactly nothing. Sizes are not compared while they may be symbols."""
    lines, size = plane.shape
    whole = round_up(size, _MULTIPLE)
    if kernels.is_shapes_only():
        return plane.new_empty(lines, whole)
    return plane if whole == size else torch.nn.functional.pad(plane, (0, whole - size))


@pure_op("multiply_blocks")
def multiply_blocks(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Optional[Tensor], dtype: torch.dtype, tiles: int
) -> Tensor:
    """a [R, D] . b [C, D]^T (+ bias), a with 1x128 scales, b with 1x128 (tiles 1) or 128x128 ones (tiles 2)."""
    rows = a.shape[0]
    if kernels.is_shapes_only():
        return a.new_empty(rows, b.shape[0], dtype=dtype)
    if rows % 4:  # the scales' pitch, which is padded already
        a = torch.nn.functional.pad(a.view(torch.uint8), (0, 0, 0, -rows % 4)).view(a.dtype)
    return gemm_direct.multiply_blocks(a, scale_a, b, scale_b, bias, dtype, 1, tiles)[:rows]


def _multiply(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Optional[Tensor], fast: bool, block_dim: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """a . b^T (+ bias); block_dim: of b's blocks, 0 where each operand has one scale."""
    if block_dim:
        return torch.ops.te_dist.multiply_blocks(a, scale_a, b, scale_b, bias, dtype, block_dim)
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, bias, None, dtype, fast)


# ------------------------------------------------------------------------------------------------- eligible layers
@constant_in_graphs
def plan_of(
    spec: LayerSpec,
    recipe: Optional[Recipe],
    device: torch.device,
    dtypes: tuple[Optional[torch.dtype], ...],
    sizes: tuple[int, int],
    grads: tuple[bool, bool, bool],
) -> Optional[LinearPlan]:
    """The plan of a layer that can be traced into parts, or None; executed while tracing, and baked in.

    Args:
        dtypes: of x, the weight and the bias (None without one).
        sizes: of the weight.
        grads: which gradients are wanted.
    """
    flags = CallFlags(grads[0], grads[1:] if dtypes[2] is not None else (grads[1], False))
    config = resolve(spec, recipe, flags)
    stage = config.stages[0]
    dims = block_dims(stage) if is_plain(config) and not config.delayed else None
    if dims is None or not gemm_direct._is_native(native_rule(dims), device):
        return None
    if grads == (False, False, True):  # nothing to quantize in backward
        return None
    kinds = {kind for kind in dtypes if kind is not None}
    if len(kinds) != 1 or not kinds <= {torch.bfloat16, torch.float16} or any(size % _MULTIPLE for size in sizes):
        return None
    casts = (_cast(stage.x), _cast(stage.weight), _cast(stage.dy if stage.dy is not None else stage.x))
    return casts, accumulators(stage), grads


def _cast(quantizer: Optional[Quantizer]) -> Cast:
    assert isinstance(quantizer, Float8CurrentScalingQuantizer | Float8BlockQuantizer)
    block_dim = quantizer.block_scaling_dim if isinstance(quantizer, Float8BlockQuantizer) else 0
    return int(quantizer.fp8_dtype), block_dim, quantizer.amax_epsilon, quantizer.force_pow_2_scales


# ------------------------------------------------------------------------------------------------- the layer
def traced_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], plan: LinearPlan) -> Tensor:
    if any(plan[2]):
        return TracedLinear.apply(x, weight, bias, plan)
    return _forward(x, weight, bias, plan)[0]


def _forward(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], plan: LinearPlan
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """y, and what was made of x and of the weight."""
    casts, fast, (needs_dx, needs_dw, _) = plan
    quantize = torch.ops.te_dist.quantize_for_products
    x_planes = quantize(x.reshape(-1, x.shape[-1]), *casts[0], True, needs_dw, False)
    w_planes = quantize(weight.detach(), *casts[1], True, needs_dx, False)
    x_scale, w_scale = x_planes[2 if needs_dw else 1], w_planes[2 if needs_dx else 1]
    y = _multiply(x_planes[0], x_scale, w_planes[0], w_scale, bias, fast[0], casts[1][1], x.dtype)
    return y.view(*x.shape[:-1], weight.shape[0]), x_planes, w_planes


class TracedLinear(torch.autograd.Function):
    """y = x W^T + b in nodes that a graph can hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor], plan: LinearPlan) -> Tensor:
        needs_dx, needs_dw, _ = plan[2]
        y, x_planes, w_planes = _forward(x, weight, bias, plan)
        ctx.plan, ctx.x_shape = plan, x.shape
        # The column plane and the last of the scales, which is its own.
        kept = [t for planes, wanted in ((x_planes, needs_dw), (w_planes, needs_dx)) if wanted
                for t in (planes[1], planes[-1])]  # fmt: skip
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        casts, fast, (needs_dx, needs_dw, needs_db) = ctx.plan
        kept = list(ctx.saved_tensors)
        planes = torch.ops.te_dist.quantize_for_products(
            dy.reshape(-1, dy.shape[-1]), *casts[2], needs_dx, needs_dw, needs_db
        )
        db = None
        if needs_db:
            db, planes = planes[-1], planes[:-1]
        dx = dw = None
        if needs_dx:
            scale = planes[2 if needs_dw else 1]
            dx = _multiply(planes[0], scale, kept[-2], kept[-1], None, fast[1], casts[1][1], dy.dtype)
            dx = dx.view(ctx.x_shape)
        if needs_dw:
            mine, block_dim = planes[1 if needs_dx else 0], casts[0][1]
            dw = _multiply(mine, planes[-1], kept[0], kept[1], None, fast[2], block_dim, dy.dtype)
        return dx, dw, db, None
