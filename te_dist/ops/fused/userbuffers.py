"""A linear operation together with its communication. Whether a collective overlaps with a product is the Comm's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from te_dist.ops.basic import BasicLinear, Bias, ReduceScatter
from te_dist.ops.fused.linear_chain import LinearChain
from te_dist.ops.fusions import windows
from te_dist.ops.op import BasicOperation, FusibleOperation


def _communicates(op: FusibleOperation) -> bool:
    return type(op) is LinearChain and len(op.stages) == 1 and not op.layer.spec.stages[0].comm.is_local


class _WithCommunication(LinearChain):
    def __init__(
        self,
        *,
        linear: BasicLinear,
        bias: Bias | None = None,
        reduce_scatter: ReduceScatter | None = None,
        ops: Sequence[BasicOperation] | None = None,
    ) -> None:
        given: list[BasicOperation | None] = [linear, bias, reduce_scatter]
        super().__init__(ops or [op for op in given if op is not None])

    @classmethod
    def _match(cls, ops: list[Any]) -> tuple[int, FusibleOperation] | None:
        op = ops[0]
        if not _communicates(op):
            return None
        stage = op.stages[0]
        return 1, cls(linear=stage.linear, bias=stage.bias, ops=stage.ops)


class UserbuffersForwardLinear(_WithCommunication):
    """The forward of a linear operation whose input is gathered or whose output is reduced, in one stage."""

    @staticmethod
    def fuse_forward_ops(ops: Sequence[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        return windows(ops, UserbuffersForwardLinear._match)


class UserbuffersBackwardLinear(_WithCommunication):
    """Its backward, with the collectives that are dual to those of the forward."""

    @staticmethod
    def fuse_backward_ops(ops: Sequence[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        return windows(ops, UserbuffersBackwardLinear._match)
