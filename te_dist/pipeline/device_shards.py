"""Rows that are spread over ranks and belong to groups whose sizes only the device knows.

Letters: R ranks, E groups, m rows of this rank, p after padding, M rows of all ranks. A shard has its rows group by
group; gathered, they lie rank by rank; a grouped product wants them group by group again:

    shard              g0 g0 g1               rank 1: g0 g1 g1
    gathered           g0 g0 g1 | g0 g1 g1
    group by group     g0 g0 g0 g1 g1 g1      in each group the rows of rank 0, of rank 1, ...

Quantized rows are moved as they are, with their scales. Where each of them goes is computed on the device:

    column + SP    every rank has groups of its own sizes; the ranks exchange them (4 E bytes)
    row + SP       all ranks know the whole groups, of which each has an equal share of rows
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.comm import Comm
from te_dist.pipeline.args import TensorOrQuantized
from te_dist.pipeline.shards import GroupRows
from te_dist.plan import Move
from te_dist.transport import Pending


class RowExchange:
    """Moves rows between shards and groups.

    Attributes:
        offsets: int32 [E], where each group ends: of all ranks' rows.
        own_offsets: of this rank's rows.
    """

    def __init__(self, comm: Comm, rows: GroupRows, offsets: Tensor) -> None:
        self.comm, self.rows = comm, rows
        self.offsets = self.own_offsets = offsets
        self._position: Tensor | None = None  # int64 [M]: where the rows of the groups are in [R * p]
        if kernels.is_shapes_only():
            return
        if comm.plan.x is Move.ALL_GATHER:
            self._of_shards(offsets)
        else:
            self._of_whole(offsets)

    def _of_shards(self, own: Tensor) -> None:
        everyone = self.comm.start_gather([own.view(1, -1)]).wait()[0]
        assert isinstance(everyone, Tensor)
        sizes = torch.diff(everyone, dim=1, prepend=everyone.new_zeros(everyone.shape[0], 1))
        self.offsets = sizes.sum(0).cumsum(0, dtype=torch.int32)
        # By group, and within one in the order of the ranks, which a stable sort keeps; padding comes last.
        row = torch.arange(self.rows.padded, dtype=own.dtype, device=own.device)
        group = torch.searchsorted(everyone, row.expand(everyone.shape[0], -1).contiguous(), right=True)
        self._position = torch.argsort(group.flatten(), stable=True)[: self.rows.whole]

    def _of_whole(self, offsets: Tensor) -> None:
        ranks = len(self.rows.rows)
        sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
        torch._assert_async(
            (sizes % ranks == 0).all(),
            f"GroupedLinear expects the {ranks} ranks to share the rows of each group evenly",
        )
        self.own_offsets = offsets // ranks
        row = torch.arange(self.rows.whole, dtype=offsets.dtype, device=offsets.device)
        group = torch.searchsorted(offsets, row, right=True).clamp_(max=offsets.shape[0] - 1)
        share = (sizes // ranks)[group].clamp_(min=1)
        within = row - (offsets - sizes)[group]
        rank = within // share
        self._position = rank * self.rows.padded + (self.own_offsets - sizes // ranks)[group] + within % share

    def start_gather(self, operands: Sequence[TensorOrQuantized]) -> Pending[list[TensorOrQuantized]]:
        """All ranks' rows, rank by rank and padded."""
        padded = [self.rows.pad_mine(operand) if isinstance(operand, Tensor) else operand for operand in operands]
        return self.comm.start_gather(padded)

    def grouped(self, gathered: TensorOrQuantized) -> TensorOrQuantized:
        """Rows that lie rank by rank, group by group."""
        return self.comm.take_rows(gathered, self._position, self.rows.whole)

    def start_scatter(self, whole: Tensor) -> Pending[Tensor]:
        """The sum over the ranks of rows that lie group by group; of each group this rank's rows."""
        ranks, width = len(self.rows.rows), whole.shape[1]
        if kernels.is_shapes_only():
            shards = whole.new_empty((ranks * self.rows.padded, width))
        else:
            assert self._position is not None
            shards = whole.new_zeros((ranks * self.rows.padded, width))
            shards.index_copy_(0, self._position.long(), whole)
        pending = self.comm.start_reduce(Move.REDUCE_SCATTER, shards)
        return Pending(None, lambda: self.rows.drop_mine(pending.wait()))
