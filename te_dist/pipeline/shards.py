"""Rows that are spread over ranks: how many each of them has, and the padding that makes shards equal whole blocks.

Letters: R ranks, m rows of this rank's shard, M rows of all shards. Collectives move equal shards, and a quantized
shard consists of whole blocks; so shards are padded with zeros to p rows, exchanged as [R * p, K], and the padding is
dropped from results. Where shards are equal and whole already, which is the rule, nothing is padded or copied.

A column-parallel stage with sequence parallelism gets a shard and returns the whole; a row-parallel one the reverse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.comm import Comm
from te_dist.pipeline.config import LayerConfig, LayerSpec, StageConfig
from te_dist.plan import Move
from te_dist.producers import Plain, Producer


@dataclasses.dataclass(frozen=True, slots=True)
class GroupRows:
    """The rows of one group of a stage (a dense one has one): of every rank, and after padding."""

    rows: tuple[int, ...]  # by rank
    padded: int  # p
    rank: int

    @property
    def mine(self) -> int:
        return self.rows[self.rank]

    @property
    def whole(self) -> int:
        return sum(self.rows)

    @property
    def padded_whole(self) -> int:
        return self.padded * len(self.rows)

    @property
    def is_even(self) -> bool:
        return all(rows == self.padded for rows in self.rows)

    def pad_mine(self, matrix: Tensor) -> Tensor:
        """[m, K] -> [p, K]."""
        if kernels.is_shapes_only():
            return matrix.new_empty((self.padded, matrix.shape[1]))
        return _pad(matrix, self.padded)

    def pad_whole(self, matrix: Tensor) -> Tensor:
        """[M, K] -> [R * p, K]."""
        if kernels.is_shapes_only():
            return matrix.new_empty((self.padded_whole, matrix.shape[1]))
        if self.is_even:
            return matrix
        return torch.cat([_pad(part, self.padded) for part in matrix.split(list(self.rows))])

    def drop_mine(self, matrix: Tensor) -> Tensor:
        """[p, N] -> [m, N]."""
        if kernels.is_shapes_only():
            return matrix.new_empty((self.mine, matrix.shape[1]))
        return matrix if self.mine == self.padded else matrix[: self.mine]

    def drop_whole(self, matrix: Tensor) -> Tensor:
        """[R * p, N] -> [M, N]."""
        if kernels.is_shapes_only():
            return matrix.new_empty((self.whole, matrix.shape[1]))
        if self.is_even:
            return matrix
        parts = matrix.split(self.padded) if self.padded else [matrix] * len(self.rows)
        return torch.cat([part[:rows] for part, rows in zip(parts, self.rows, strict=True)])


def _pad(matrix: Tensor, rows: int) -> Tensor:
    missing = rows - matrix.shape[0]
    return torch.nn.functional.pad(matrix, (0, 0, 0, missing)) if missing else matrix


def stage_rows(config: LayerConfig, rows: int, splits: Sequence[int] | None, unit: int) -> list[list[GroupRows] | None]:
    """For every stage the rows of its groups; None where no rows are spread over ranks.

    Args:
        rows: of the layer's input on this rank, all leading dimensions together.
        splits: of those, the rows of each group.
        unit: rows of the matrix per entry of the input's first dimension, in which ``flags.shards`` counts.
    """
    result: list[list[GroupRows] | None] = []
    for stage in config.stages:
        comm = stage.spec.comm
        if not comm.shards_rows:
            result.append(None)
            continue
        # Groups that only the device knows are moved there (pipeline/device_shards.py): here they count as one.
        if stage.spec.groups and splits is None and config.flags.shards and comm.plan.x is not Move.ALL_GATHER:
            raise ValueError(
                f"{_label(config.spec)} expects m_splits as a list of numbers where sequence_shards says how many rows "
                f"of each group a rank gets, but got them on the device"
            )
        sizes = list(splits) if stage.spec.groups and splits is not None else [rows]
        per_rank = _rows_by_rank(config, comm, sizes, unit)
        groups = [GroupRows(r, _padded(r, stage.shard_block), comm.rank()) for r in per_rank]
        result.append(groups)
        rows = sum(g.whole if comm.plan.x is Move.ALL_GATHER else g.mine for g in groups)
    return result


def _padded(rows: tuple[int, ...], block: int) -> int:
    most = rows[0] if all(r is rows[0] for r in rows) else max(rows)  # equal ones may be symbols
    return most if block == 1 else -(-most // block) * block


def _rows_by_rank(config: LayerConfig, comm: Comm, sizes: list[int], unit: int) -> list[tuple[int, ...]]:
    """Of each group. Raises before any communication, on every rank alike."""
    given, ranks, label = config.flags.shards, comm.size, _label(config.spec)
    is_shard = comm.plan.x is Move.ALL_GATHER
    if not given:
        if is_shard:
            return [(size,) * ranks for size in sizes]
        for size in sizes:
            if not kernels.is_shapes_only() and size % ranks:
                raise ValueError(
                    f"{label} expects its {size} rows to be a multiple of the {ranks} ranks that share them; say how "
                    f"many each rank has with te_dist.parallel.sequence_shards"
                )
        return [(size // ranks,) * ranks for size in sizes]
    if len(given) != ranks:
        raise ValueError(f"{label}: sequence_shards expects a number for each of {ranks} ranks but got {given}")
    by_rank = [entry if isinstance(entry, tuple) else (entry,) for entry in given]
    if any(len(entry) != len(sizes) for entry in by_rank):
        raise ValueError(
            f"{label}: sequence_shards expects for every rank the rows of {len(sizes)} group(s) but got {given}"
        )
    result = [tuple(entry[group] * unit for entry in by_rank) for group in range(len(sizes))]
    for size, rows in zip(sizes, result, strict=True):
        expected = rows[comm.rank()] if is_shard else sum(rows)
        if size != expected:
            raise ValueError(
                f"{label}: sequence_shards says that this rank's input has {expected} rows ({given}, {unit} rows each) "
                f"but it has {size}"
            )
    return result


def _label(spec: LayerSpec) -> str:
    return f"{spec.module_type} {spec.name!r}" if spec.name else spec.module_type


def out_lead(config: LayerConfig, lead: Sequence[int], rows: int) -> tuple[int, ...]:
    """The leading dimensions of a result of so many rows, given those of the input."""
    return _lead_after(config, config.stages, lead, rows)


def norm_lead(config: LayerConfig, lead: Sequence[int], rows: int) -> tuple[int, ...]:
    """Those of the norm's output."""
    return _lead_after(config, config.stages[:1] if config.spec.gathers_norm else (), lead, rows)


def _lead_after(config: LayerConfig, stages: Sequence[StageConfig], lead: Sequence[int], rows: int) -> tuple[int, ...]:
    if not config.spec.shards_rows or not lead:
        return tuple(lead)
    if len(lead) == 1:
        return (rows,)
    first = lead[0]
    for stage in stages:
        comm, given = stage.spec.comm, config.flags.shards
        if comm.plan.x is Move.ALL_GATHER:
            first = sum(_entry(e) for e in given) if given else first * comm.size
        elif comm.plan.y is Move.REDUCE_SCATTER:
            first = _entry(given[comm.rank()]) if given else first // comm.size
    return (first, *lead[1:])


def _entry(entry: int | tuple[int, ...]) -> int:
    return entry if isinstance(entry, int) else sum(entry)


def rows_per_entry(shape: Sequence[int]) -> int:
    """Rows of the matrix [M, K] per entry of the first dimension of a tensor [.., K]."""
    unit = 1
    for size in shape[1:-1]:
        unit = unit * size
    return unit


def saved_rows(stage: StageConfig, groups: list[GroupRows]) -> list[int]:
    """Rows of what is kept of x for wgrad, group by group."""
    comm = stage.spec.comm
    whole = comm.plan.x is not Move.ALL_GATHER or comm.keeps_gathered
    return [g.padded_whole if whole else g.padded for g in groups]


# ------------------------------------------------------------------------------------------------- operands
def laid_out(source: Producer, spread: list[GroupRows] | None, group: int, is_whole: bool) -> Producer:
    """A matrix of all ranks' rows with each shard padded for itself; a shard is padded at its end, by the quantize."""
    if spread is None or not is_whole or kernels.is_shapes_only() or spread[group].is_even:
        return source
    return Plain(spread[group].pad_whole(kernels.materialize(source)))


def laid_out_rows(spread: list[GroupRows] | None, group: int, is_whole: bool) -> int | None:
    """Rows of the operand that is made of it; None where rows are not spread over ranks."""
    if spread is None:
        return None
    return spread[group].padded_whole if is_whole else spread[group].padded


# ------------------------------------------------------------------------------------------------- results
def by_rank(results: Sequence[Tensor], groups: Sequence[GroupRows]) -> Tensor:
    """The groups' results [R * p, N] as one tensor in which each rank's rows lie together."""
    if len(results) == 1:
        return results[0]
    ranks, width = len(groups[0].rows), results[0].shape[1]
    parts = [r.view(ranks, g.padded, width) for r, g in zip(results, groups, strict=True)]
    return torch.cat(parts, 1).view(-1, width) if not kernels.is_shapes_only() else torch.cat(list(results))


def of_groups(mine: Tensor, groups: Sequence[GroupRows]) -> Tensor:
    """This rank's rows of what ``by_rank`` arranged, without padding, group by group."""
    if len(groups) == 1:
        return groups[0].drop_mine(mine)
    parts = mine.split([g.padded for g in groups])
    return torch.cat([g.drop_mine(part) for g, part in zip(groups, parts, strict=True)])
