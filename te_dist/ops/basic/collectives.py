"""AllGather, ReduceScatter, AllReduce along the first dimension. They know a Comm, never a process group."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from te_dist.comm import LOCAL, Comm
from te_dist.dynamo.operations import Collective, collective_now
from te_dist.ops.context import OperationContext
from te_dist.ops.op import BasicOperation, Gradients, Saved
from te_dist.plan import Move


def as_comm(label: str, comm: object) -> Comm:
    """A Comm, or None for no communication."""
    if comm is None:
        return LOCAL
    if not isinstance(comm, Comm):
        raise TypeError(
            f"{label} expects a te_dist.comm.Comm, which names its group and can be compiled, but got "
            f"{type(comm).__name__}; te_dist.parallel makes one of a process group or a device mesh"
        )
    return comm


class _Collective(BasicOperation):
    """
    Args:
        process_group: a ``te_dist.comm.Comm``; None moves nothing. Its size and group count, not its plan.
    """

    forward_move: ClassVar[Move]
    backward_move: ClassVar[Move]

    def __init__(self, process_group: Comm | None = None) -> None:
        super().__init__()
        self.comm = as_comm(type(self).__name__, process_group)

    def moved(self, x: Tensor, move: Move) -> Tensor:
        spec = Collective(self.comm, move)
        if torch.compiler.is_compiling():
            return torch.ops.te_dist.collective(x, spec)
        if move is Move.REDUCE_SCATTER and x.dim() and x.shape[0] % self.comm.size:
            raise ValueError(
                f"{self.label()} expects a first dimension that {self.comm.size} ranks can share evenly but got shape "
                f"{list(x.shape)}"
            )
        return collective_now(x, spec)

    def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **kwargs: Any) -> tuple[Tensor, Saved]:
        return self.moved(input_.detach(), self.forward_move), ()

    def op_forward_save_ctx(self, ctx: OperationContext, input_: Tensor, tensors_to_save: Saved, **kwargs: Any) -> None:
        pass

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        return self.moved(grad_output, self.backward_move), ()


class AllGather(_Collective):
    """The shards of all ranks one after the other; backward reduce-scatters. Before a linear operation it becomes part
    of it, and quantized bytes are gathered."""

    forward_move, backward_move = Move.ALL_GATHER, Move.REDUCE_SCATTER


class ReduceScatter(_Collective):
    """This rank's shard of the sum over ranks; backward gathers."""

    forward_move, backward_move = Move.REDUCE_SCATTER, Move.ALL_GATHER


class AllReduce(_Collective):
    """The sum over ranks.

    Args:
        process_group: as for ``AllGather``.
        reduce_in_backward: sum gradients too. False passes them on, which is right where every rank holds the same
            gradient, as after a row-parallel linear operation.
    """

    forward_move = Move.ALL_REDUCE

    def __init__(self, process_group: Comm | None = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self.reduce_in_backward = reduce_in_backward

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        return self.moved(grad_output, Move.ALL_REDUCE) if self.reduce_in_backward else grad_output, ()
