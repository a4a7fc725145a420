"""Comm: what a stage knows of communication. One process talks to nobody; te_dist.parallel supplies the rest.

A Comm is a frozen value (it is part of a compiled graph's constants), so a group is in it by name only. Its methods
run inside ops: ``gather`` on a quantized operand, ``reduce`` on a result.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from te_dist.plan import PLANS, Move, Plan
from te_dist.tensors.storage import QuantizedStorage
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
    def amax_group(self) -> str | None:
        """The group over which an operand's amax is reduced before it is gathered; None without a gather."""
        return None

    def gather(self, move: Move, operand: Tensor | QuantizedStorage) -> Tensor | QuantizedStorage:
        return operand

    def reduce(self, move: Move, result: Tensor) -> Tensor:
        return result


LOCAL = Comm()
