"""Comm: what a stage knows of communication. One process talks to nobody; te_dist.parallel supplies the rest.

A Comm is a frozen value (it is part of a compiled graph's constants), so a group is in it by name only. Its methods
run inside ops: ``start_gather`` on operands, ``start_reduce`` on results.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from te_dist.plan import PLANS, Move, Plan
from te_dist.tensors.storage import QuantizedStorage
from te_dist.transport import Done, Pending
from te_dist.values import Value, value_type


@value_type
@dataclasses.dataclass(frozen=True)
class Comm(Value):
    """No communication, and the interface of those that have some.

    Attributes:
        plan: which operands are gathered and which results are reduced.
        size: over how many ranks.
    """

    plan: Plan = PLANS[None, False]
    size: int = 1

    @property
    def is_local(self) -> bool:
        return True

    @property
    def group_name(self) -> str:
        """The c10d name of the group; "" where there is none."""
        return ""

    @property
    def keeps_gathered(self) -> bool:
        """Whether a gathered x is kept for wgrad, in place of the shard that would be gathered again."""
        return False

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """In which results are summed; None is the result's own."""
        return None

    @property
    def shards_rows(self) -> bool:
        """Whether rows are spread over the ranks on one side of the layer (sequence parallelism)."""
        return self.plan.x is Move.ALL_GATHER or self.plan.y is Move.REDUCE_SCATTER

    def rank(self) -> int:
        return 0

    def amax_group(self, operand: str) -> str | None:
        """Over which group the amax of "input", "weight" or "grad_output" is reduced; None: of what is here."""
        return None

    def start_gather(self, operands: list[Tensor | QuantizedStorage]) -> Pending[list[Tensor | QuantizedStorage]]:
        """All ranks' rows of every operand; shapes are equal on all ranks."""
        return Done(operands)

    def take_rows(
        self, operand: Tensor | QuantizedStorage, index: Tensor | None, rows: int
    ) -> Tensor | QuantizedStorage:
        """The `rows` rows of a gathered operand at `index`, in that order; a quantized one has a row plane only."""
        return operand

    def start_reduce(self, move: Move, result: Tensor) -> Pending[Tensor]:
        """A result after its move; it is given in ``wire_dtype`` where there is one."""
        return Done(result)

    def sum_gradient(self, partial: Tensor) -> Tensor:
        """The gradient of a parameter that every rank has for its own rows only."""
        return partial

    def own_seeds(self, seeds: Tensor) -> Tensor:
        """Seeds of stochastic rounding: the ranks' own where they round different parts of a tensor."""
        return seeds


LOCAL = Comm()


class SequenceShards:
    """How many rows each rank holds, where that is not the same number: see te_dist.parallel.sequence_shards.

    An object's attribute, because Dynamo follows writes to those.
    """

    rows: tuple[int | tuple[int, ...], ...] = ()


sequence_shards = SequenceShards()
