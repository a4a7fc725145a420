"""Overlapped: the Comm of a layer whose collectives run beside its products."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.comm import Multiply, Operand, Product
from te_dist.parallel import wire
from te_dist.parallel.comm import TensorParallel
from te_dist.parallel.userbuffers import record, schedules
from te_dist.parallel.userbuffers.methods import BULK, NOTHING, PIPELINE, RING, LayerMethods
from te_dist.parallel.userbuffers.registry import link_for
from te_dist.parallel.userbuffers.shards import Parcel, Shard, payload_of
from te_dist.plan import Move
from te_dist.tensors import QuantizedStorage
from te_dist.transport import Pending
from te_dist.values import value_type


@value_type
@dataclasses.dataclass(frozen=True)
class Overlapped(TensorParallel):
    """A ``TensorParallel`` that computes products in parts while others travel.

    Which of the two tables counts is up to the collective: x and dx are moved by column-parallel layers, y and dy by
    row-parallel ones. An operation of te_dist.ops may be both.

    Attributes:
        column, row: how each product overlaps; see te_dist/parallel/userbuffers/methods.py.
    """

    column: LayerMethods = NOTHING
    row: LayerMethods = NOTHING

    @staticmethod
    def around(
        comm: TensorParallel, column: LayerMethods = NOTHING, row: LayerMethods = NOTHING
    ) -> TensorParallel:
        """The same Comm with overlap; itself where nothing overlaps."""
        if comm.size == 1 or not (column.is_on or row.is_on):
            return comm
        fields = {field.name: getattr(comm, field.name) for field in dataclasses.fields(TensorParallel)}
        return Overlapped(**fields, column=column, row=row)

    # ---------------------------------------------------------------------------------------- beside a product
    def start_gather(self, operands: list[Operand], beside: str = "") -> Pending[list[Operand]]:
        if beside != "dgrad" or not self.column.dgrad.is_on or not _can(operands):
            return super().start_gather(operands, beside)
        return self._bulk_gather(operands, "dgrad")

    def start_reduce(self, move: Move, result: Tensor, beside: str = "") -> Pending[Tensor]:
        is_bulk = beside == "wgrad" and self.column.wgrad.name == BULK and move is Move.REDUCE_SCATTER
        if not is_bulk or not _can([result]):
            return super().start_reduce(move, result, beside)
        return self._reduce_features("wgrad", BULK, [(0, result.shape[1])], lambda first, last: result)

    # ---------------------------------------------------------------------------------------- within a product
    def gather_and_multiply(
        self, kind: str, operands: list[Operand], multiply: Multiply, keep: bool
    ) -> tuple[Pending[list[Operand]], list[Tensor]]:
        method = self.column.fprop if kind == "fprop" else self.row.dgrad
        if method.name != RING or not _can(operands):
            return super().gather_and_multiply(kind, operands, multiply, keep)
        shards = [Shard.of(operand) for operand in operands]
        parcel = Parcel([shard.first for shard in shards])
        link = link_for(self.group, parcel.tensors[0].device)
        places = parcel.places(self.size)
        entry = record.begin(kind, RING, link)
        results: list[Tensor] = []

        def consume(ranks: list[int], parts: list[Tensor]) -> None:
            some = parcel.operands if ranks == [link.rank] else parcel.unpack(parts)
            made = multiply(some)  # type: ignore[arg-type]
            if not results:
                results.extend(m.new_empty((self.size * m.shape[0], m.shape[1])) for m in made)
            for result, part in zip(results, made, strict=True):
                rows = part.shape[0] // len(ranks)
                for rank, mine in zip(ranks, part.split(rows), strict=True):
                    result[rank * rows : (rank + 1) * rows].copy_(mine)

        gathering = schedules.gather_and_consume(
            link, parcel.tensors, places, consume,
            payload=f"{payload_of(shards[0].first)}, {RING}", watch=entry.watch, together=1 + method.aggregate,
        )  # fmt: skip
        chunks = 1 + -(-(self.size - 1) // (1 + method.aggregate))
        columns = self._start_columns([shard.rest for shard in shards if shard.rest is not None]) if keep else None
        gathering.finish()
        entry.end(chunks, parcel.nbytes)

        def whole() -> list[Operand]:
            for tensor, place in zip(parcel.tensors, places, strict=True):
                place[link.rank].copy_(tensor)
            firsts = parcel.unpack(places)
            rest = iter([] if columns is None else columns.wait())
            return [
                shard.gathered(first, next(rest) if shard.rest is not None else None)  # type: ignore[arg-type]
                for shard, first in zip(shards, firsts, strict=True)
            ]

        return Pending(None, whole), results

    def _start_columns(self, columns: list[QuantizedStorage]) -> Pending[list[Operand]] | None:
        """The planes that only wgrad reads, while dgrad runs."""
        operands: list[Operand] = list(columns)
        if not operands:
            return None
        if self.row.wgrad.is_on:
            return self._bulk_gather(operands, "wgrad")
        return super().start_gather(operands)

    def multiply_and_reduce(self, move: Move, product: Product, beside: str = "") -> Pending[Tensor]:
        method = self.row.fprop if product.kind == "fprop" else self.column.dgrad
        if move is not Move.REDUCE_SCATTER or method.name not in (RING, PIPELINE) or not _can(product.operands):
            return super().multiply_and_reduce(move, product, beside)
        if method.name == RING:
            return self._reduce_rows(product)
        along = wire.some_rows if product.kind == "fprop" else wire.some_columns
        features = product.weights[0].shape[0 if product.kind == "fprop" else 1]

        def produce(first: int, last: int) -> Tensor:
            if (first, last) == (0, features):
                return product.whole()
            some = [along(weight, first, last - first) for weight in product.weights]
            return product.arrange(product.multiply(product.operands, some))

        return self._reduce_features(
            product.kind, PIPELINE, schedules.feature_bounds(features, method.splits), produce
        )

    def _reduce_rows(self, product: Product) -> Pending[Tensor]:
        link = link_for(self.group, product.operands[0].device)
        entry = record.begin(product.kind, RING, link)
        sizes = [operand.shape[0] // self.size for operand in product.operands]
        sent = 0

        def produce(rank: int) -> Tensor:
            nonlocal sent
            some = [wire.some_rows(o, rank * rows, rows) for o, rows in zip(product.operands, sizes, strict=True)]
            made = product.multiply(some, product.weights)
            part = made[0] if len(made) == 1 else torch.cat(made)
            sent += part.numel() * part.element_size() if rank != link.rank else 0
            return part.contiguous()

        finish = schedules.produce_and_reduce(link, produce, payload=RING, watch=entry.watch)
        return Pending(None, lambda: entry.ended(finish(), self.size, sent))

    # ---------------------------------------------------------------------------------------- common
    def _bulk_gather(self, operands: list[Operand], product: str) -> Pending[list[Operand]]:
        shards = [Shard.of(operand) for operand in operands]
        parcel = Parcel([part for shard in shards for part in (shard.first, shard.rest)])
        link = link_for(self.group, parcel.tensors[0].device)
        entry = record.begin(product, BULK, link)
        places = parcel.places(self.size)
        gathering = link.gather(parcel.tensors, places, f"{payload_of(operands[0])}, {BULK}")

        def finish() -> list[Operand]:
            entry.timed(gathering.finish)
            for tensor, place in zip(parcel.tensors, places, strict=True):
                place[link.rank].copy_(tensor)
            entry.end(1, parcel.nbytes)
            parts = parcel.unpack(places)
            return [
                shard.gathered(parts[2 * index], parts[2 * index + 1])  # type: ignore[arg-type]
                for index, shard in enumerate(shards)
            ]

        return Pending(None, finish)

    def _reduce_features(
        self, kind: str, method: str, bounds: list[tuple[int, int]], produce: schedules.ProduceFeatures
    ) -> Pending[Tensor]:
        first = produce(*bounds[0])
        link = link_for(self.group, first.device)
        entry = record.begin(kind, method, link)
        rows, width = first.shape[0], bounds[-1][1]
        sent = rows // self.size * (self.size - 1) * width * first.element_size()
        waiting = [first]
        del first

        def contiguous(start: int, end: int) -> Tensor:
            return (waiting.pop() if waiting else produce(start, end)).contiguous()

        finish = schedules.produce_features_and_reduce(link, contiguous, bounds, payload=method, watch=entry.watch)
        return Pending(None, lambda: entry.ended(finish(), len(bounds), sent))


def _can(operands: list[Operand]) -> bool:
    """Whether there is something to move: a fake talks to nobody, and empty shards are left to the collectives."""
    return not kernels.is_shapes_only() and any(operand.numel() for operand in operands)
