"""The shortest way through a plain linear layer: per-tensor FP8 with current scaling, in eager code on a GPU.

A small layer costs its host time and nothing else, so for the most common layer the stage chain is unrolled here: the
same kernels and products in the same order as forward.py and backward.py, on bare tensors, with everything that does
not change from call to call looked up beforehand. Whatever is not that common takes the chain. Compiled code always
does, and tests compare the two bit for bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from te_dist import gemm_direct, kernels, torch_compat
from te_dist.formats import TORCH_FP8, DType
from te_dist.pipeline.config import IDENTITY, LayerConfig
from te_dist.producers import COLUMN_TILE_ROWS
from te_dist.quantizers import Float8CurrentScalingQuantizer
from te_dist.recipe import Recipe

_EMPTY = torch.empty
_F32 = torch.float32


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
    # (fp8 code, torch dtype, eps, power of 2) of x, the weight and dy
    operands: tuple[tuple[int, torch.dtype, float, bool], ...]
    fast: tuple[bool, ...]  # short accumulators in fprop, dgrad, wgrad
    bias_grad: bool
    quantize: Any  # kernels
    reduce: Any
    stream: Any  # device index -> handle of the current stream

    @staticmethod
    def of(config: LayerConfig, weight: Tensor, bias: Tensor | None, inp: Tensor) -> LeanPlan | None:
        """The plan of a layer, or None if it has to take the chain."""
        spec = config.spec
        stage = config.stages[0]
        special = spec.save_original_input or spec.return_norm_output or config.delayed or config.recipe is None
        if len(config.stages) != 1 or special or stage.spec.produce != IDENTITY or stage.spec.groups:
            return None
        all_quantized = stage.fprop and stage.dgrad and stage.wgrad and config.recipe is not None
        if not stage.spec.comm.is_local or not all_quantized or config.flags.keep_planes:
            return None
        if not (stage.needs_dgrad and stage.needs_wgrad):
            return None
        quantizers = (stage.x, stage.weight, stage.dy)
        if any(type(q) is not Float8CurrentScalingQuantizer for q in quantizers):
            return None
        dtype, device = inp.dtype, inp.device
        sixteen_bits = dtype in (torch.bfloat16, torch.float16)
        if device.type != "cuda" or not sixteen_bits or not gemm_direct._is_native("Float8CurrentScaling", device):
            return None
        table = kernels.functions(device)
        rows, cols = weight.shape
        if table is None or rows % 16 or cols % 16 or (bias is not None and bias.dtype != dtype):
            return None
        if stage.needs_bias_grad and dtype != torch.bfloat16:  # no kernel adds up its columns on the way
            return None
        types = [q.fp8_dtype for q in cast(tuple[Float8CurrentScalingQuantizer, ...], quantizers)]
        if types[2] == DType.kFloat8E5M2 and DType.kFloat8E5M2 in types[:2]:
            return None
        return LeanPlan(
            recipe=config.recipe,  # type: ignore[arg-type]
            dtype=dtype,
            code=kernels._FLOAT_CODE[dtype],
            device=device,
            index=device.index or 0,
            features=rows,
            depth=cols,
            operands=tuple(
                (kernels._FP8_CODE[q.fp8_dtype], TORCH_FP8[q.fp8_dtype], q.amax_epsilon, q.force_pow_2_scales)
                for q in cast(tuple[Float8CurrentScalingQuantizer, ...], quantizers)
            ),
            fast=tuple(
                default if split is None else not split
                for default, split in zip((True, False, False), stage.split_accumulator, strict=True)
            ),
            bias_grad=stage.needs_bias_grad,
            quantize=table["quantize_current"],
            reduce=table["reduce_partials"],
            stream=torch_compat.current_raw_stream,
        )


class LeanLinear(torch.autograd.Function):
    """y = x W^T + b, where gradients of x and W are wanted."""

    @staticmethod
    def forward(ctx: Any, plan: LeanPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        depth, features, device = plan.depth, plan.features, plan.device
        rows = x.numel() // depth
        stream = plan.stream(plan.index)
        code, fp8, eps, power_of_2 = plan.operands[0]
        x_row = _EMPTY((rows, depth), dtype=fp8, device=device)
        x_col = _EMPTY((depth, rows), dtype=fp8, device=device)
        amax, x_scale = _EMPTY(1, dtype=_F32, device=device), _EMPTY(1, dtype=_F32, device=device)
        plan.quantize(
            x.data_ptr(), plan.code, rows, depth, depth, amax.data_ptr(), eps, power_of_2, code,
            x_row.data_ptr(), x_col.data_ptr(), x_scale.data_ptr(), stream,
        )  # fmt: skip
        code, fp8, eps, power_of_2 = plan.operands[1]
        w_row = _EMPTY((features, depth), dtype=fp8, device=device)
        w_col = _EMPTY((depth, features), dtype=fp8, device=device)
        w_scale = _EMPTY(1, dtype=_F32, device=device)
        plan.quantize(  # the same stream, so x is done with its amax
            weight.data_ptr(), plan.code, features, depth, depth, amax.data_ptr(), eps, power_of_2, code,
            w_row.data_ptr(), w_col.data_ptr(), w_scale.data_ptr(), stream,
        )  # fmt: skip
        y = torch._scaled_mm(x_row, w_row.t(), x_scale, w_scale, bias, None, plan.dtype, plan.fast[0])
        ctx.plan, ctx.x_shape = plan, x.shape
        ctx.save_for_backward(x_col, x_scale, w_col, w_scale)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], features)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        plan: LeanPlan = ctx.plan
        x_col, x_scale, w_col, w_scale = ctx.saved_tensors
        torch_compat.release_saved_tensors(ctx)
        features, device = plan.features, plan.device
        if not dy.is_contiguous():
            dy = dy.contiguous()
        rows = dy.numel() // features
        stream = plan.stream(plan.index)
        code, fp8, eps, power_of_2 = plan.operands[2]
        row = _EMPTY((rows, features), dtype=fp8, device=device)
        col = _EMPTY((features, rows), dtype=fp8, device=device)
        amax, scale = _EMPTY(1, dtype=_F32, device=device), _EMPTY(1, dtype=_F32, device=device)
        db = None
        if plan.bias_grad:
            if dy.data_ptr() % 16:
                dy = dy.clone()
            tiles = -(-rows // COLUMN_TILE_ROWS)
            partials = _EMPTY((tiles, features), dtype=_F32, device=device)
            source = kernels.plain_with_sums(dy.data_ptr(), plan.code, rows, features, partials.data_ptr())
            plan.quantize(
                source, amax.data_ptr(), eps, power_of_2, code,
                row.data_ptr(), col.data_ptr(), scale.data_ptr(), stream,
            )  # fmt: skip
            db = _EMPTY(features, dtype=plan.dtype, device=device)
            plan.reduce(partials.data_ptr(), tiles, db.data_ptr(), plan.code, 1, features, stream)
        else:
            plan.quantize(
                dy.data_ptr(), plan.code, rows, features, features, amax.data_ptr(), eps, power_of_2, code,
                row.data_ptr(), col.data_ptr(), scale.data_ptr(), stream,
            )  # fmt: skip
        dx = torch._scaled_mm(row, w_col.t(), scale, w_scale, None, None, plan.dtype, plan.fast[1])
        del row
        dw = torch._scaled_mm(col, x_col.t(), scale, x_scale, None, None, plan.dtype, plan.fast[2])
        return None, dx if len(ctx.x_shape) == 2 else dx.view(ctx.x_shape), dw, db


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
