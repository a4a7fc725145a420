"""The collectives as ops of a compiled graph. Each is marked as a side effect: a rank that dropped one as dead code
would leave the others waiting.

No ``from __future__ import annotations``: the annotations become op schemas.
"""

import math
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from te_dist import kernels, transport
from te_dist.dynamo.define import pure_op
from te_dist.groups import resolve_group
from te_dist.parallel import wire
from te_dist.parallel.collectives import _start_whole, start_gather, start_reduce
from te_dist.pipeline.config import CallFlags, LayerSpec
from te_dist.pipeline.function import config_of
from te_dist.pipeline.operands import quantize_delayed
from te_dist.producers import Plain
from te_dist.proto import TensorProto
from te_dist.quantizers import Quantizer
from te_dist.recipe import Recipe
from te_dist.tensors import QuantizedStorage


@pure_op("all_gather")
def all_gather(x: Tensor, group: str, ranks: int) -> Tensor:
    if kernels.is_shapes_only():
        return x.new_empty((x.shape[0] * ranks, *x.shape[1:]))
    made = _start_whole(x, resolve_group(group, "group")).wait()
    return made.clone() if made is x else made


@pure_op("all_gather_quantized")
def all_gather_quantized(
    buffers: Sequence[Tensor], quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, group: str, ranks: int
) -> list[Tensor]:
    if kernels.is_shapes_only():
        rows = math.prod(shape[:-1])
        if isinstance(rows, int):
            wire.check_shard(quantizer, rows, "gather_along_first_dim")
        whole = TensorProto((shape[0] * ranks, *shape[1:]), dtype, quantizer, device=buffers[0].device)
        return list(whole.create_inner_tensors().values())
    proto = TensorProto(tuple(shape), dtype, quantizer, device=buffers[0].device)
    storage = proto.assemble(dict(zip(proto.inner_names(), buffers, strict=True)))
    made = _start_whole(storage, resolve_group(group, "group")).wait()
    # Scales that all ranks share come back as they are; an op must not return its argument.
    layout = wire.row_layout(quantizer)
    tensors = {name: getattr(made, name) for name in made.inner_names()}
    return [t.clone() if layout[name] is None or ranks == 1 else t for name, t in tensors.items()]


@pure_op("all_reduce")
def all_reduce(x: Tensor, group: str, wire_dtype: Optional[torch.dtype]) -> Tensor:
    if kernels.is_shapes_only():
        return torch.empty_like(x)
    return start_reduce(x, resolve_group(group, "group"), scatter=False, wire_dtype=wire_dtype).wait()


@pure_op("all_reduce_max")
def all_reduce_max(x: Tensor, group: str) -> Tensor:
    if kernels.is_shapes_only():
        return torch.empty_like(x)
    return transport.all_reduce(x.clone(), resolve_group(group, "group"), maximum=True).wait()


@pure_op("reduce_scatter")
def reduce_scatter(x: Tensor, group: str, ranks: int, wire_dtype: Optional[torch.dtype]) -> Tensor:
    if kernels.is_shapes_only():
        return x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
    return start_reduce(x, resolve_group(group, "group"), scatter=True, wire_dtype=wire_dtype).wait()


# ------------------------------------------------------------------------------------------------- for several layers
@pure_op("gather_input")
def gather_input(
    x: Tensor,
    scale: Optional[Tensor],
    spec: LayerSpec,
    recipe: Recipe,
    flags: CallFlags,
    group: str,
    ranks: int,
    label: str,
) -> list[Tensor]:
    """All ranks' rows of x as the first product of `spec` reads it: the buffers of the quantized whole as a matrix, or
    the whole; then its amax under delayed scaling, whose scale is given."""
    stage = config_of(spec, recipe, flags).stages[0]
    quantizer = stage.x if stage.fprop else None  # else the layers quantize the whole for their other products
    rows = x.shape[:-1].numel()
    if kernels.is_shapes_only():
        if quantizer is None:
            return [x.new_empty((x.shape[0] * ranks, *x.shape[1:]))]
        if isinstance(rows, int):
            wire.check_shard(quantizer, rows, label)
        shape = (rows * ranks, x.shape[-1])
        made = list(TensorProto(shape, x.dtype, quantizer, device=x.device).create_inner_tensors().values())
        return made if scale is None else [*made, torch.zeros_like(scale)]
    process_group = resolve_group(group, "tp_group")
    with transport.layer_scope(label, "forward", group):
        if quantizer is None:
            return [_start_whole(x.contiguous(), process_group).wait()]
        wire.check_shard(quantizer, rows, label)
        matrix = Plain(kernels.as_rows(x))
        amax = None if scale is None else torch.zeros_like(scale)
        if scale is None or amax is None:
            storage = quantizer.quantize_produced(matrix, matrix.shape, amax_reduction_group=group)
        else:
            storage = quantize_delayed(quantizer, matrix, scale, amax, 0, group)
        whole = start_gather([storage], process_group).wait()[0]
        assert isinstance(whole, QuantizedStorage)
        buffers = whole.inner_tensors()
    return buffers if amax is None else [*buffers, amax]


@pure_op("scatter_input_gradient")
def scatter_input_gradient(dx: Tensor, group: str, ranks: int, label: str, wire_dtype: Optional[torch.dtype]) -> Tensor:
    """This rank's rows of the sum of what the layers behind ``gather_input`` gave back."""
    if kernels.is_shapes_only():
        return dx.new_empty((dx.shape[0] // ranks, *dx.shape[1:]))
    with transport.layer_scope(label, "backward", group):
        whole, process_group = dx.contiguous(), resolve_group(group, "tp_group")
        return start_reduce(whole, process_group, scatter=True, wire_dtype=wire_dtype).wait()


for _op in (gather_input, scatter_input_gradient, all_gather, all_gather_quantized, all_reduce, all_reduce_max,
            reduce_scatter):  # fmt: skip
    torch.fx.node.has_side_effect(getattr(torch.ops.te_dist, _op.__name__).default)
