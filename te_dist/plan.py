"""Tensor and sequence parallelism of a linear layer, as a table.

A layer has three products: fprop y = x w^T, dgrad dx = dy w, wgrad dw = dy^T x. A Plan says which operand is gathered
over the ranks before a product and which result is reduced after it.
"""

from __future__ import annotations

import dataclasses
import enum

from te_dist.values import Value, value_type


class Move(enum.Enum):
    """What happens to a tensor on its way into or out of a product; gathers and scatters are along the first dim."""

    NONE = "none"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"

    def rows(self, rows: int, ranks: int, what: str = "the tensor") -> int:
        """The size of the first dimension after the move."""
        if self is Move.ALL_GATHER:
            return rows * ranks
        if self is Move.REDUCE_SCATTER:
            if rows % ranks:
                raise ValueError(f"{what} has {rows} rows, which {ranks} ranks cannot share evenly")
            return rows // ranks
        return rows


@value_type
@dataclasses.dataclass(frozen=True)
class Plan(Value):
    """Moves of the operands x and dy, and of the results y and dx."""

    x: Move = Move.NONE  # repeated for wgrad: only the shard is saved
    y: Move = Move.NONE
    dy: Move = Move.NONE  # the gathered copy serves dgrad and wgrad
    dx: Move = Move.NONE


PLANS: dict[tuple[str | None, bool], Plan] = {
    (None, False): Plan(),
    ("column", False): Plan(dx=Move.ALL_REDUCE),
    ("column", True): Plan(x=Move.ALL_GATHER, dx=Move.REDUCE_SCATTER),
    ("row", False): Plan(y=Move.ALL_REDUCE),
    ("row", True): Plan(y=Move.REDUCE_SCATTER, dy=Move.ALL_GATHER),
}


def plan_for(parallel_mode: str | None, sequence_parallel: bool = False) -> Plan:
    """The plan of a parallel mode ("column", "row" or None)."""
    key = (parallel_mode, bool(sequence_parallel))
    if key not in PLANS:
        raise ValueError(
            f'plan_for expects parallel_mode "column", "row" or None (without sequence_parallel) but got {key}'
        )
    return PLANS[key]
