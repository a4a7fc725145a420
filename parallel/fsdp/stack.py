"""StackCodec: of a parameter [E, N, K] that holds several weights, as single_grouped_weight of GroupedLinear does.

FSDP2 cuts it between weights: a rank has ceil(E / ranks) of them, whole, and quantizes each as one process would. The
weights of a rank lie on the wire one after the other, so those of all ranks lie in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.parallel.fsdp.codec import COMMON, Encoded, WeightCodec, quantize_with
from te_dist.parallel.fsdp.planes import COLUMN, ROW, Plane, PlaneName
from te_dist.parallel.fsdp.shards import Place, Shards
from te_dist.quantizers import Quantizer
from te_dist.tensors.gathered import unstacked
from te_dist.tensors.storage import QuantizedStorage


class StackCodec(WeightCodec):
    """As WeightCodec, whose rows are weights here.

    Args:
        shards: of the E weights.
        rows, cols: of one weight.
    """

    def __init__(self, quantizer: Quantizer, shards: Shards, rows: int, cols: int, delayed: bool = False) -> None:
        super().__init__(quantizer, shards, cols, delayed)
        self.rows = rows
        self.one = WeightCodec(quantizer, Shards(rows, 1, 0), cols, delayed)
        self.place = Place(0, shards.rows)

    # ---------------------------------------------------------------------------------------- amaxes
    @property
    def amax_count(self) -> int:
        return self.tensor_amax_count

    @property
    def tensor_amax_count(self) -> int:
        return self.shards.rows if self.one.tensor_amax_count else 0

    def contribution(self, local: Tensor) -> Tensor:
        out = torch.zeros(self.amax_count, dtype=torch.float32, device=local.device)
        if self.amax_count:
            for at, weight in enumerate(local, self.shards.first):
                kernels.amax(kernels.as_rows(weight), out[at : at + 1])
        return out

    # ---------------------------------------------------------------------------------------- sending
    def wire_sizes(self, wanted: Sequence[PlaneName]) -> list[int]:
        return [size * self.shards.height for size in self.one.wire_sizes(wanted)]

    def encode(
        self, local: Tensor, wanted: Sequence[PlaneName], amaxes: Tensor | None, scale: Tensor | None = None
    ) -> Encoded:
        def of(values: Tensor | None, at: int) -> Tensor | None:
            return None if values is None else values[at : at + 1]

        sizes = self.one.wire_sizes(wanted)
        wire = [local.new_zeros((self.shards.height, size), dtype=torch.uint8) for size in sizes]
        common: dict[str, list[Tensor]] = {}
        for at in range(self.shards.rows):
            place = at - self.shards.first
            if 0 <= place < self.shards.count:
                made = self.one.encode(local[place], wanted, of(amaxes, at), of(scale, at))
                for out, part in zip(wire, made.wire, strict=True):
                    out[place].copy_(part)
                known = made.common
            else:  # somebody else's: its scale is known, because it comes from the reduced amax
                known = self._common(local, wanted, of(amaxes, at), of(scale, at))
            for name, value in known.items():
                common.setdefault(name, []).append(value)
        return Encoded([out.view(-1) for out in wire], {name: torch.stack(v) for name, v in common.items()})

    def _common(
        self, like: Tensor, wanted: Sequence[PlaneName], amax: Tensor | None, scale: Tensor | None
    ) -> dict[str, Tensor]:
        if amax is None and scale is None:
            return {}
        quantizer = self.quantizer.with_usage(rowwise=ROW in wanted, columnwise=COLUMN in wanted)
        nothing = like.new_zeros((max(plane.block for plane in self.planes.values()), self.cols))
        storage = quantizer.make_empty(nothing.shape, dtype=nothing.dtype, device=nothing.device)
        quantize_with(quantizer, nothing, storage, amax, scale)
        return {name: getattr(storage, name) for name in COMMON if getattr(storage, name, None) is not None}

    # ---------------------------------------------------------------------------------------- receiving
    def storage(self, dtype: torch.dtype, device: torch.device) -> QuantizedStorage:
        """Each buffer of one weight's storage, with a leading dimension of E."""
        one = self.one.storage(dtype, device)
        count = self.shards.rows
        buffers = {}
        for name in one.inner_names():
            like: Tensor = getattr(one, name)
            buffers[name] = torch.empty((count, *like.shape), dtype=like.dtype, device=device)
            if name not in COMMON:
                buffers[name].untyped_storage().resize_(0)
        shape = torch.Size((count, self.rows, self.cols))
        return type(one)(buffers, shape=shape, dtype=dtype, quantizer=one.quantizer)

    def adopt(self, storage: QuantizedStorage, plane: Plane, gathered: Tensor) -> None:
        if not plane.transposed:
            shape = (self.shards.rows, self.rows, self.cols // plane.values)
            setattr(storage, plane.data, gathered.view(-1)[: shape[0] * shape[1] * shape[2]].view(shape))

    def decode(self, storage: QuantizedStorage, wanted: Sequence[PlaneName], gathered: Sequence[Tensor]) -> None:
        parts = [t.view(self.shards.ranks * self.shards.height, -1) for t in gathered]
        for at, weight in enumerate(unstacked(storage)):
            self.one.decode(weight, wanted, [part[at] for part in parts])
