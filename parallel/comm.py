"""TensorParallel: the Comm of a layer whose weights are spread over ranks.

Letters: R ranks, M tokens, K in, N out; a suffix _m, _n or _k says along which one a rank holds a share.

    column        y_n = x w_n^T                                dx = all_reduce(dy_n w_n)             dw_n = dy_n^T x
    column + SP   y_n = all_gather(x_m) w_n^T                  dx_m = reduce_scatter(dy_n w_n)       dw_n = dy_n^T all_gather(x_m)
    row           y = all_reduce(x_k w_k^T)                    dx_k = dy w_k                         dw_k = dy^T x_k
    row + SP      y_m = reduce_scatter(x_k w_k^T)              dx_k = all_gather(dy_m) w_k           dw_k = all_gather(dy_m)^T x_k

Every all_gather is of quantized bytes where the recipe quantizes the operand.
"""  # noqa: E501

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from te_dist import kernels, transport
from te_dist.comm import Comm
from te_dist.groups import GroupLike, resolve_group
from te_dist.parallel import wire
from te_dist.parallel.collectives import Operand, start_gather
from te_dist.plan import Move, plan_for
from te_dist.tensors import QuantizedStorage
from te_dist.transport import Done, Pending
from te_dist.values import value_type

COLUMN, ROW = "column", "row"
AMAX_SCOPES = ("global", "local")
# Odd, so that multiplying a rank by it loses nothing: ranks get seeds that have nothing to do with each other.
_SPREAD = 0x1E3779B97F4A7C15


@value_type
@dataclasses.dataclass(frozen=True)
class TensorParallel(Comm):
    """How one stage of a layer works with the other ranks of a tensor parallel group.

    Attributes:
        mode: "column" or "row", or "" for a layer whose input was gathered, and whose gradient will be reduced, by
            its surroundings (see parallel/shared.py).
        group: name of the process group.
        keep_gathered: column + SP keeps the gathered, quantized x for wgrad (M * K bytes at 8 bits) and does not
            gather it a second time; else it keeps its share (M * K / R bytes). An x that wgrad reads in high precision
            is gathered again in either case.
        reduce_dtype: in which results are summed over the ranks; None is their own.
        amax: "global" reduces the amax of every per-tensor scaled operand that is spread over the ranks, so that all
            scales are those of one process; "local" only where a gather needs it, as Transformer Engine does.
    """

    mode: str = ""
    group: str = ""
    keep_gathered: bool = False
    reduce_dtype: torch.dtype | None = None
    amax: str = "global"

    @staticmethod
    def of(
        group: GroupLike,
        mode: str | None,
        sequence_parallel: bool = False,
        *,
        keep_gathered: bool = False,
        reduce_dtype: torch.dtype | None = None,
        amax: str = "global",
    ) -> TensorParallel:
        """The Comm of a mode over a group, checked."""
        process_group = resolve_group(group, "tp_group")
        if amax not in AMAX_SCOPES:
            raise ValueError(f"TensorParallel expects amax in {AMAX_SCOPES} but got {amax!r}")
        if reduce_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"TensorParallel expects reduce_dtype float32, bfloat16 or float16 but got {reduce_dtype}")
        plan = plan_for(mode, sequence_parallel and mode is not None)
        return TensorParallel(
            plan=plan,
            size=process_group.size(),
            mode=mode or "",
            group=str(process_group.group_name),
            keep_gathered=keep_gathered,
            reduce_dtype=reduce_dtype,
            amax=amax,
        )

    @property
    def is_local(self) -> bool:
        return False

    @property
    def group_name(self) -> str:
        return self.group

    @property
    def _is_row(self) -> bool:
        """By the plan and not by the mode: operations of te_dist.ops bring a plan of their own."""
        return self.plan.y is not Move.NONE

    @property
    def keeps_gathered(self) -> bool:
        return self.keep_gathered

    @property
    def wire_dtype(self) -> torch.dtype | None:
        return self.reduce_dtype

    def rank(self) -> int:
        return int(resolve_group(self.group, "tp_group").rank())

    def amax_group(self, operand: str) -> str | None:
        if kernels.is_shapes_only():
            return None  # a fake talks to nobody
        gathered = (operand == "input" and self.plan.x is Move.ALL_GATHER) or (
            operand == "grad_output" and self.plan.dy is Move.ALL_GATHER
        )
        if gathered:
            return self.group
        # What every rank has whole needs no reduction.
        is_whole = operand == ("grad_output" if self._is_row else "input")
        return None if is_whole or self.amax == "local" else self.group

    def start_gather(self, operands: list[Operand], beside: str = "") -> Pending[list[Operand]]:
        if kernels.is_shapes_only():
            return Done([_gathered_shape(operand, self.size) for operand in operands])
        return start_gather(operands, resolve_group(self.group, "tp_group"))

    def take_rows(self, operand: Operand, index: Tensor | None, rows: int) -> Operand:
        if isinstance(operand, Tensor):
            return operand.new_empty((rows, operand.shape[1])) if index is None else operand.index_select(0, index)
        if index is None:  # a fake
            return operand.quantizer.layout_quantizer().new_matrix(
                (rows, operand.shape[1]), operand.dtype, operand.device
            )
        return wire.take_rows(operand, index)

    def start_reduce(self, move: Move, result: Tensor, beside: str = "") -> Pending[Tensor]:
        if move is Move.NONE:
            return Done(result)
        if kernels.is_shapes_only():
            rows = result.shape[0] // self.size if move is Move.REDUCE_SCATTER else result.shape[0]
            return Done(result.new_empty((rows, result.shape[1])))
        group = resolve_group(self.group, "tp_group")
        # A product of ours that nobody else holds: summed where it is.
        if move is Move.REDUCE_SCATTER:
            return transport.reduce_scatter(result, group)
        return transport.all_reduce(result.contiguous(), group)

    def sum_gradient(self, partial: Tensor) -> Tensor:
        if kernels.is_shapes_only():
            return partial
        return transport.all_reduce(partial, resolve_group(self.group, "tp_group"), payload="gradient").wait()

    def own_seeds(self, seeds: Tensor) -> Tensor:
        if self._is_row and self.plan.dy is not Move.ALL_GATHER:
            return seeds  # dy is the same on all ranks, and stays so
        return seeds ^ ((self.rank() * _SPREAD) & (2**62 - 1))


def _gathered_shape(operand: Operand, ranks: int) -> Operand:
    if isinstance(operand, Tensor):
        return operand.new_empty((operand.shape[0] * ranks, *operand.shape[1:]))
    assert isinstance(operand, QuantizedStorage)
    quantizer = operand.quantizer.layout_quantizer()
    return quantizer.new_matrix((operand.shape[0] * ranks, operand.shape[1]), operand.dtype, operand.device)
