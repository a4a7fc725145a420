"""Collectives with gradients, for code around te_dist's layers. Each is the other's backward.

    copy_to_tensor_parallel             x                          all_reduce(dy)
    reduce_from_tensor_parallel         all_reduce(x)              dy
    gather_from_sequence_parallel       all_gather(x_m)            reduce_scatter(dy)
    reduce_scatter_to_sequence_parallel reduce_scatter(x)          all_gather(dy_m)
    scatter_to_sequence_parallel        this rank's rows of x      all_gather(dy_m)

They move plain tensors along the first dimension, and compile with ``fullgraph=True``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist import groups
from te_dist.groups import GroupLike
from te_dist.parallel import ops as ops
from te_dist.parallel.collectives import _ranks_of
from te_dist.torch_compat import constant_in_graphs


@constant_in_graphs
def _rank_in(name: str) -> int:
    return int(groups.resolve_group(name, "group").rank())


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return torch.ops.te_dist.all_reduce(dy.contiguous(), ctx.group, None), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return torch.ops.te_dist.all_reduce(x.contiguous(), group, None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return torch.ops.te_dist.all_gather(x.contiguous(), group, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return torch.ops.te_dist.reduce_scatter(dy.contiguous(), ctx.group, ctx.ranks, None), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return torch.ops.te_dist.reduce_scatter(x.contiguous(), group, ranks, None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return torch.ops.te_dist.all_gather(dy.contiguous(), ctx.group, ctx.ranks), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int, rank: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        rows = x.shape[0] // ranks
        return x[rank * rows : (rank + 1) * rows].clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return torch.ops.te_dist.all_gather(dy.contiguous(), ctx.group, ctx.ranks), None, None, None


def copy_to_tensor_parallel(x: Tensor, group: GroupLike) -> Tensor:
    """x; its gradient is summed over the group."""
    return _Copy.apply(x, groups.group_name(group))


def reduce_from_tensor_parallel(x: Tensor, group: GroupLike) -> Tensor:
    """The sum of x over the group."""
    return _Reduce.apply(x, groups.group_name(group))


def gather_from_sequence_parallel(x: Tensor, group: GroupLike) -> Tensor:
    """All ranks' rows of x, for code whose result differs from rank to rank: gradients are summed."""
    name = groups.group_name(group)
    return _Gather.apply(x, name, _ranks_of(name))


def reduce_scatter_to_sequence_parallel(x: Tensor, group: GroupLike) -> Tensor:
    """This rank's rows of the sum of x over the group."""
    name = groups.group_name(group)
    _check_even("reduce_scatter_to_sequence_parallel", x, _ranks_of(name))
    return _ReduceScatter.apply(x, name, _ranks_of(name))


def scatter_to_sequence_parallel(x: Tensor, group: GroupLike) -> Tensor:
    """This rank's rows of an x that all ranks have."""
    name = groups.group_name(group)
    _check_even("scatter_to_sequence_parallel", x, _ranks_of(name))
    return _Scatter.apply(x, name, _ranks_of(name), _rank_in(name))


def _check_even(name: str, x: Tensor, ranks: int) -> None:
    if x.dim() == 0 or x.shape[0] % ranks:
        raise ValueError(f"{name} expects a first dimension that {ranks} ranks share evenly but got {list(x.shape)}")
