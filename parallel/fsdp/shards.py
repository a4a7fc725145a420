"""How FSDP2 cuts a weight, and where quantization blocks lie across the cuts.

FSDP2 gives rank r the rows [r * height, (r + 1) * height) with height = ceil(rows / ranks), wherever blocks begin and
end. The last shards may be short or empty. Letters: N rows and K columns of the whole weight, B rows of a block.
"""

from __future__ import annotations

import dataclasses
import functools

from te_dist.formats import ceil_div


@dataclasses.dataclass(frozen=True)
class Shards:
    """The rows of a weight over the ranks, seen from one of them."""

    rows: int
    ranks: int
    rank: int

    @functools.cached_property
    def height(self) -> int:
        """Rows of a full shard, to which short ones are padded on the wire."""
        return ceil_div(self.rows, self.ranks)

    @functools.cached_property
    def first(self) -> int:
        return min(self.rank * self.height, self.rows)

    @functools.cached_property
    def last(self) -> int:
        """The row after this rank's last one."""
        return min(self.first + self.height, self.rows)

    @property
    def count(self) -> int:
        return self.last - self.first

    def straddling(self, block: int) -> list[int]:
        """The block rows that lie on several ranks, in order: nobody knows their amax alone."""
        cuts = [r * self.height for r in range(1, self.ranks) if r * self.height < self.rows]
        return sorted({cut // block for cut in cuts if cut % block})

    def cover(self, block: int) -> tuple[int, int]:
        """This rank's rows, extended to whole blocks (the last block of the weight may be a part of one)."""
        if self.count == 0:
            return self.first, self.first
        return self.first // block * block, min(ceil_div(self.last, block) * block, self.rows)

    def owned(self, block: int) -> tuple[int, int]:
        """The block rows that begin on this rank, which is the one to send their scales: from, to."""
        return ceil_div(self.first, block), ceil_div(self.last, block)

    def slots(self, block: int) -> int:
        """How many block rows a rank can own at most: the size of its place on the wire."""
        return ceil_div(self.height, block)

    def places(self, block: int) -> list[int]:
        """For each block row of the whole weight, its place among the gathered ones."""
        slots = self.slots(block)
        found = []
        for b in range(ceil_div(self.rows, block)):
            owner = b * block // self.height
            found.append(owner * slots + b - ceil_div(owner * self.height, block))
        return found


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a parameter's rows begin in the weight that its layer multiplies, and how many rows that has: as many as
    the parameter, unless the layer joins several."""

    first: int
    whole: int
