"""A plain linear layer inside a compiled graph on a GPU: its quantizes and its products are nodes of the graph.

The layer ops of layer.py run the stage chain in Python when the graph runs, which for a small layer costs more host
time than its kernels take. The most common layer, per-tensor FP8 with current scaling, needs nothing of the chain but
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
from te_dist.pipeline.config import IDENTITY, CallFlags, LayerConfig, LayerSpec, StageConfig, resolve
from te_dist.producers import Plain
from te_dist.quantizers import Float8CurrentScalingQuantizer
from te_dist.recipe import Recipe
from te_dist.tensors import Float8TensorStorage

_MULTIPLE = 16  # of every size that a product sums over


# Constants of a traced call, as plain tuples, which every dynamo can unpack.
Cast = tuple[int, float, bool]  # fp8 type, eps, power of 2: how an operand is quantized
# x, the weight, dy; short accumulators in fprop, dgrad, wgrad; which gradients are wanted: of x, the weight, the bias
LinearPlan = tuple[tuple[Cast, Cast, Cast], tuple[bool, bool, bool], tuple[bool, bool, bool]]


@functools.cache
def _quantizer(
    fp8: int, eps: float, power_of_2: bool, rowwise: bool, columnwise: bool
) -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(
        DType(fp8), rowwise=rowwise, columnwise=columnwise, force_pow_2_scales=power_of_2, amax_epsilon=eps
    )


@pure_op("quantize_for_products")
def quantize_for_products(
    x: Tensor, fp8: int, eps: float, power_of_2: bool, rowwise: bool, columnwise: bool, column_sums: bool
) -> list[Tensor]:
    """The row plane [M, K], the column plane [K, M padded to 16], the scale, the sums of x's columns: what is wanted
    of them, in this order."""
    quantizer = _quantizer(fp8, eps, power_of_2, rowwise, columnwise)
    producer = Plain(kernels.as_rows(x))
    if column_sums:
        producer.want_column_sums()
    storage = cast(Float8TensorStorage, quantizer.quantize_produced(producer, x.shape))
    kind = TORCH_FP8[quantizer.fp8_dtype]
    made = [] if storage._data is None else [storage._data.view(kind)]
    if storage._transpose is not None:
        made.append(_padded(storage._transpose).view(kind))
    made.append(storage._scale_inv)
    return [*made, kernels.column_sums(producer, x.dtype)] if column_sums else made


def _padded(plane: Tensor) -> Tensor:
    """Zero codes add exactly nothing. Sizes are not compared while they may be symbols."""
    lines, size = plane.shape
    whole = round_up(size, _MULTIPLE)
    if kernels.is_shapes_only():
        return plane.new_empty(lines, whole)
    return plane if whole == size else torch.nn.functional.pad(plane, (0, whole - size))


# ------------------------------------------------------------------------------------------------- eligible layers
@torch.compiler.assume_constant_result
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
    if not _is_usual(config, stage) or not gemm_direct._is_native("Float8CurrentScaling", device):
        return None
    if grads == (False, False, True):  # nothing to quantize in backward
        return None
    kinds = {kind for kind in dtypes if kind is not None}
    if len(kinds) != 1 or not kinds <= {torch.bfloat16, torch.float16} or any(size % _MULTIPLE for size in sizes):
        return None
    casts = []
    for quantizer in (stage.x, stage.weight, stage.dy if stage.dy is not None else stage.x):
        if type(quantizer) is not Float8CurrentScalingQuantizer:
            return None
        casts.append((int(quantizer.fp8_dtype), quantizer.amax_epsilon, quantizer.force_pow_2_scales))
    e5m2 = int(DType.kFloat8E5M2)
    if [fp8 for fp8, _, _ in casts].count(e5m2) > 1:  # no kernel multiplies two of them
        return None
    fast = [
        default if split is None else not split
        for default, split in zip((True, False, False), stage.split_accumulator, strict=True)
    ]
    return (casts[0], casts[1], casts[2]), (fast[0], fast[1], fast[2]), grads


def _is_usual(config: LayerConfig, stage: StageConfig) -> bool:
    spec = config.spec
    special = spec.save_original_input or spec.return_norm_output or config.recipe is None or config.delayed
    if len(config.stages) != 1 or special or stage.spec.produce != IDENTITY or stage.spec.groups:
        return False
    wanted = ((True, stage.fprop), (stage.needs_dgrad, stage.dgrad), (stage.needs_wgrad, stage.wgrad))
    return stage.spec.comm.is_local and all(quantized for needed, quantized in wanted if needed)


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
    y = torch._scaled_mm(x_planes[0], w_planes[0].t(), x_planes[-1], w_planes[-1], bias, None, x.dtype, fast[0])
    return y.view(*x.shape[:-1], weight.shape[0]), x_planes, w_planes


class TracedLinear(torch.autograd.Function):
    """y = x W^T + b in nodes that a graph can hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor], plan: LinearPlan) -> Tensor:
        needs_dx, needs_dw, _ = plan[2]
        y, x_planes, w_planes = _forward(x, weight, bias, plan)
        ctx.plan, ctx.x_shape = plan, x.shape
        kept = [t for planes, wanted in ((x_planes, needs_dw), (w_planes, needs_dx)) if wanted for t in planes[1:]]
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
        db = planes[-1] if needs_db else None
        scale = planes[-2] if needs_db else planes[-1]
        dx = dw = None
        if needs_dx:
            column, w_scale = kept[-2], kept[-1]
            dx = torch._scaled_mm(planes[0], column.t(), scale, w_scale, None, None, dy.dtype, fast[1])
            dx = dx.view(ctx.x_shape)
        if needs_dw:
            column, x_scale = kept[0], kept[1]
            mine = planes[1 if needs_dx else 0]
            dw = torch._scaled_mm(mine, column.t(), scale, x_scale, None, None, dy.dtype, fast[2])
        return dx, dw, db, None
