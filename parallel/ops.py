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
from te_dist.parallel.collectives import _start_whole, start_reduce
from te_dist.proto import TensorProto
from te_dist.quantizers import Quantizer


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


for _name in ("all_gather", "all_gather_quantized", "all_reduce", "all_reduce_max", "reduce_scatter"):
    torch.fx.node.has_side_effect(getattr(torch.ops.te_dist, _name).default)
