"""Comm: what a stage knows of communication. One process talks to nobody; te_dist.parallel supplies the rest.

A Comm is a frozen value (it is part of a compiled graph's constants), so a group is in it by name only. Its methods
run inside ops: ``start_gather`` on operands, ``start_reduce`` on results, and both of them around a product that may
be computed in parts while others travel: ``gather_and_multiply`` and ``multiply_and_reduce``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from te_dist.plan import PLANS, Move, Plan
from te_dist.tensors.storage import QuantizedStorage
from te_dist.transport import Done, Pending
from te_dist.values import Value, value_type

Operand = Tensor | QuantizedStorage
# Products of operands, one for each group, of which there is one in a dense layer.
Multiply = Callable[[list[Operand]], list[Tensor]]


@dataclasses.dataclass(slots=True)
class Product:
    """A product whose result is reduced, before it is computed.

    Attributes:
        kind: "fprop" or "dgrad".
        operands: x or dy of each group; all ranks' rows, one rank's after the other's.
        weights: of each group, as the product reads them.
        multiply: the products of some rows of the operands with some features of the weights, by group.
        arrange: the whole results of the groups as one tensor, in which each rank's rows lie together.
    """

    kind: str
    operands: list[Operand]
    weights: list[Operand]
    multiply: Callable[[list[Operand], list[Operand]], list[Tensor]]
    arrange: Callable[[list[Tensor]], Tensor]

    def whole(self) -> Tensor:
        return self.arrange(self.multiply(self.operands, self.weights))


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

    def start_gather(self, operands: list[Operand], beside: str = "") -> Pending[list[Operand]]:
        """All ranks' rows of every operand; shapes are equal on all ranks.

        `beside`: the product that runs meanwhile ("dgrad"), if there is one.
        """
        return Done(operands)

    def take_rows(self, operand: Operand, index: Tensor | None, rows: int) -> Operand:
        """The `rows` rows of a gathered operand at `index`, in that order; a quantized one has a row plane only."""
        return operand

    def start_reduce(self, move: Move, result: Tensor, beside: str = "") -> Pending[Tensor]:
        """A result after its move; it is given in ``wire_dtype`` where there is one. `beside`: as above ("wgrad")."""
        return Done(result)

    def gather_and_multiply(
        self, kind: str, operands: list[Operand], multiply: Multiply, keep: bool
    ) -> tuple[Pending[list[Operand]], list[Tensor]]:
        """All ranks' rows of the operands, and the results of their products; the former only if they are kept.

        `multiply` reads row planes alone, and each of its results has the rows of its operand. An implementation may
        call it several times, with some ranks' rows each.
        """
        whole = self.start_gather(operands).wait()
        return Done(whole), multiply(whole)

    def multiply_and_reduce(self, move: Move, product: Product, beside: str = "") -> Pending[Tensor]:
        """The product's result after its move."""
        return self.start_reduce(move, product.whole(), beside)

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
