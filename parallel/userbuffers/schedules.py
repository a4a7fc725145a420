"""When which part travels and which product runs. The same on every link.

Letters: R ranks, r this one, p rows of a shard, N features of the result.

    gather_and_consume   the products of all shards, each as soon as it is there           (all-gather + GEMM)

        wire      [ shard r+1 ][ shard r+2 ][ ... ]
        products  [ r ]        [ r+1 ]      [ r+2 ] ...

    produce_and_reduce   the products of all ranks' rows, each sent as soon as it is there (GEMM + reduce-scatter)

        products  [ rows of r+1 ][ rows of r+2 ][ ... ][ rows of r ] [ sum ]
        wire                     [ r+1 ]        [ r+2 ]...

    produce_features_and_reduce   the same by features: fewer and wider products, each sent to all at once (pipeline)

        products  [ all rows, features 0 ][ features 1 ][ ... ]      [ sum ]
        wire                              [ features 0 ][ features 1 ] ...

Sums are made in float32, of what the ranks r = 0, 1, .. R-1 computed in that order, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from te_dist.parallel.userbuffers.links import Gathering, Link, Stopwatch

ProduceFeatures = Callable[[int, int], Tensor]
FEATURE_STEP = 128  # parts of features consist of whole blocks of every format, and of whole tiles of the kernels


def gather_and_consume(
    link: Link,
    parts: Sequence[Tensor],
    places: Sequence[Tensor],
    consume: Callable[[list[int], list[Tensor]], None],
    *,
    payload: str,
    watch: Stopwatch | None = None,
    together: int = 1,
) -> Gathering:
    """Equal to

        for each rank: places[i][rank] = parts[i] of that rank (this one's excepted)
        for each rank: consume([rank], [places[0][rank:rank+1], ...])

    Args:
        consume: gets ranks, and their parts as [len(ranks), ...].
        together: how many shards one call of `consume` gets once they have arrived, this rank's own excepted.

    Returns:
        the gather, to be finished by the caller.
    """
    gathering = link.gather(parts, places, payload)
    consume([link.rank], [part.unsqueeze(0) for part in parts])
    sources = [(link.rank + distance) % link.size for distance in range(1, link.size)]
    for first in range(0, len(sources), together):
        some = sources[first : first + together]
        for source in some:
            _timed(watch, lambda source=source: gathering.wait(source))  # type: ignore[misc]
        consume(some, [_of_ranks(place, some) for place in places])
    return gathering


def _of_ranks(place: Tensor, ranks: list[int]) -> Tensor:
    """[len(ranks), ...] of [R, ...]; a view if they are neighbours."""
    if ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return place[ranks[0] : ranks[0] + len(ranks)]
    return torch.cat([place[rank : rank + 1] for rank in ranks])


def produce_and_reduce(
    link: Link, produce: Callable[[int], Tensor], *, payload: str, watch: Stopwatch | None = None
) -> Callable[[], Tensor]:
    """Equal to ``reduce_scatter(cat([produce(rank) for each rank]))``.

    Args:
        produce: this rank's contribution [p, N] to the rows of a rank.

    Returns:
        what waits for the sum [p, N] and returns it.
    """
    rank, size = link.rank, link.size
    part = produce((rank + 1) % size)
    rounds = link.rounds(part, size - 1, payload)
    received = part.new_empty((size, *part.shape))
    for distance in range(1, size):
        if distance > 1:
            part = produce((rank + distance) % size)
        rounds.start({distance: part}, {distance: received[(rank - distance) % size]})
    mine = produce(rank)  # while the last ones travel

    def finish() -> Tensor:
        _timed(watch, rounds.finish)
        return summed([mine if source == rank else received[source] for source in range(size)])

    return finish


def produce_features_and_reduce(
    link: Link,
    produce: Callable[[int, int], Tensor],
    bounds: Sequence[tuple[int, int]],
    *,
    payload: str,
    watch: Stopwatch | None = None,
) -> Callable[[], Tensor]:
    """Equal to ``reduce_scatter(cat([produce(first, last) for first, last in bounds], 1))``.

    Args:
        produce: this rank's contribution [R * p, last - first] to some features.
        bounds: of the features, all of one width but the last, which may be narrower.
    """
    rank, size = link.rank, link.size
    rounds, received, kept = None, [], []
    for first, last in bounds:
        part = produce(first, last)
        whole = part.view(size, part.shape[0] // size, part.shape[1])
        if rounds is None:
            rounds = link.rounds(whole[0], (size - 1) * len(bounds), payload)
        arriving = torch.empty_like(whole)
        rounds.start(
            {d: whole[(rank + d) % size] for d in range(1, size)},
            {d: arriving[(rank - d) % size] for d in range(1, size)},
        )
        received.append(arriving)
        kept.append(whole[rank])
    assert rounds is not None
    in_flight = rounds

    def finish() -> Tensor:
        sums = []
        for number, (arrived, mine) in enumerate(zip(received, kept, strict=True)):
            _timed(watch, lambda number=number: in_flight.wait(number))  # type: ignore[misc]
            sums.append(summed([mine if source == rank else arrived[source] for source in range(size)]))
        _timed(watch, in_flight.finish)
        return sums[0] if len(sums) == 1 else torch.cat(sums, 1)

    return finish


def summed(parts: Sequence[Tensor]) -> Tensor:
    """The sum in float32, in that order, rounded to the parts' dtype once."""
    if len(parts) == 2:  # rounded once anyway
        return parts[0] + parts[1]
    total = parts[0].float()
    for part in parts[1:]:
        total = total.add_(part) if total is not parts[0] else total + part
    return total.to(parts[0].dtype)


def feature_bounds(features: int, splits: int) -> list[tuple[int, int]]:
    """At most so many parts, of whole blocks, and of equal width but for the last."""
    width = max(FEATURE_STEP, -(-features // (splits * FEATURE_STEP)) * FEATURE_STEP)
    return [(first, min(first + width, features)) for first in range(0, features, width)]


def _timed(watch: Stopwatch | None, wait: Callable[[], None]) -> None:
    if watch is None:
        wait()
        return
    watch.start()
    wait()
    watch.stop()
