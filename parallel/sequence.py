"""Sequences that do not divide evenly over the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from te_dist.comm import sequence_shards as _scope


def shard_sizes(total: int, ranks: int) -> tuple[int, ...]:
    """Sizes of the shards of `total` entries, as torch.chunk and DTensor cut them: the last may be short or empty.

    Example:
        >>> from te_dist.parallel import shard_sizes
        >>> shard_sizes(10, 4)
        (3, 3, 3, 1)
    """
    if total < 0 or ranks < 1:
        raise ValueError(
            f"shard_sizes expects a total that is not negative and a rank or more but got {total}, {ranks}"
        )
    size = -(-total // ranks)
    return tuple(max(0, min(size, total - rank * size)) for rank in range(ranks))


@contextlib.contextmanager
def sequence_shards(rows: Sequence[int] | Sequence[Sequence[int]]) -> Iterator[None]:
    """Say how many entries of the first dimension each rank has, where they are not equally many.

    Without this scope, layers with sequence parallelism take all ranks to have as many as this one. Backward remembers
    the scope of its forward. A compiled graph is specialised to the sizes.

    Args:
        rows: a number for each rank; for ``GroupedLinear`` the rows of each of its groups, for each rank.

    Example:
        >>> from te_dist.parallel import sequence_shards, shard_sizes
        >>> with sequence_shards(shard_sizes(10, 4)):
        ...     pass  # y = model(x), with 3, 3, 3 and 1 entries on the four ranks
    """
    checked = tuple(tuple(int(n) for n in entry) if isinstance(entry, Sequence) else int(entry) for entry in rows)
    flat = [n for entry in checked for n in (entry if isinstance(entry, tuple) else (entry,))]
    if not checked or min(flat, default=0) < 0:
        raise ValueError(f"sequence_shards expects a number that is not negative for each rank but got {rows!r}")
    before, _scope.rows = _scope.rows, checked
    try:
        yield
    finally:
        _scope.rows = before
