"""Operands as they travel: of each shard first what the product reads, then what is only kept for another one.

A product along the rows reads row planes. Where the gathered operand is kept, for wgrad, its column plane follows when
all row planes are on their way, so that no product waits for it. Of a format whose column plane is its row plane
transposed only the latter travels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from te_dist.comm import Operand
from te_dist.parallel import wire
from te_dist.tensors import Float8TensorStorage, IdentityTensorStorage, QuantizedStorage


@dataclasses.dataclass(slots=True)
class Shard:
    """One operand, split by the order in which its parts travel.

    Attributes:
        whole: with all its planes.
        first: the plain tensor, or the row plane; None if it has none.
        rest: the column plane, unless it follows from the row plane.
    """

    whole: Operand
    first: Operand | None
    rest: QuantizedStorage | None

    @staticmethod
    def of(operand: Operand) -> Shard:
        if isinstance(operand, Tensor):
            return Shard(operand, operand, None)
        if not operand.has_rowwise:
            return Shard(operand, None, operand)
        if not operand.has_columnwise:
            return Shard(operand, operand, None)
        row = operand._planes_of(operand.quantizer.with_usage(rowwise=True, columnwise=False))
        if isinstance(operand, Float8TensorStorage | IdentityTensorStorage):
            return Shard(operand, row, None)
        return Shard(operand, row, operand._planes_of(operand.quantizer.with_usage(rowwise=False, columnwise=True)))

    def gathered(self, first: Operand | None, rest: QuantizedStorage | None) -> Operand:
        """The whole of all ranks, from the gathered parts."""
        if isinstance(first, Tensor):
            return first
        if first is None or rest is None:
            made = rest if first is None else first
            assert isinstance(made, QuantizedStorage) and isinstance(self.whole, QuantizedStorage)
            if made.has_rowwise == self.whole.has_rowwise and made.has_columnwise == self.whole.has_columnwise:
                return made
            return made.with_usage(rowwise=True, columnwise=True)
        assert isinstance(self.whole, QuantizedStorage)
        buffers = {n: getattr(plane, n) for plane in (first, rest) for n in plane.inner_names()}
        return type(first)._around(buffers, first.shape, first.dtype, self.whole.quantizer)


class Parcel:
    """The tensors of several operands, and the operands that they become again elsewhere."""

    def __init__(self, operands: Sequence[Operand | None]) -> None:
        self.operands = list(operands)
        self.tensors: list[Tensor] = []
        self.counts: list[int] = []
        for operand in operands:
            sent: list[Tensor] = []
            if isinstance(operand, QuantizedStorage):
                sent = wire.outgoing(operand)
            elif operand is not None:
                sent = [operand]
            self.tensors += [t.contiguous() for t in sent]
            self.counts.append(len(sent))

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def places(self, ranks: int) -> list[Tensor]:
        """Memory for the tensors of all ranks: [R, ...] for each."""
        return [t.new_empty((ranks, *t.shape)) for t in self.tensors]

    def unpack(self, places: Sequence[Tensor]) -> list[Operand | None]:
        """The operands from the tensors of one or more ranks, [r, ...] each: their rows one after the other."""
        at = 0
        made: list[Operand | None] = []
        for operand, count in zip(self.operands, self.counts, strict=True):
            parts = [t.flatten(0, 1) for t in places[at : at + count]]
            ranks = places[at].shape[0] if count else 1
            at += count
            if isinstance(operand, QuantizedStorage):
                made.append(wire.incoming(operand, parts, ranks))
            else:
                made.append(None if operand is None else parts[0])
        return made


def payload_of(operand: Operand | None) -> str:
    """What a report calls it."""
    if operand is None or isinstance(operand, torch.Tensor):
        return "high precision"
    planes = (("row", operand.has_rowwise), ("column", operand.has_columnwise))
    return f"{operand.quantizer.describe()}, {'+'.join(name for name, there in planes if there)}"
