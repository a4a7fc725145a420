"""WeightCodec: from a shard of a weight to bytes on the wire, and from everybody's bytes to the quantized weight.

What comes out equals quantizing the whole weight in one process, byte for byte, wherever the shards end. A scale
depends on the amax of its block: one that lies on several ranks is reduced over them first (``contribution``), and so
is the amax of the whole tensor where the format has one. To give a block an amax that is partly somebody else's, a
shard is extended to whole blocks, and the reduced amax is put into the rows that were added. So the kernels that
quantize weights everywhere else quantize them here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats import ceil_div
from te_dist.parallel.fsdp.planes import COLUMN, ROW, Plane, PlaneName, planes_of
from te_dist.parallel.fsdp.shards import Shards
from te_dist.quantizers import Float8CurrentScalingQuantizer, NVFP4Quantizer, Quantizer
from te_dist.quantizers.float8 import Float8QuantizerBase
from te_dist.tensors.storage import QuantizedStorage

# Buffers that hold the same on every rank, because they come from the reduced amax.
COMMON = ("_scale_inv", "_amax_rowwise", "_amax_columnwise")


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What a rank sends for one weight, and what it knows without asking."""

    wire: list[Tensor]  # uint8 vectors of the same sizes on all ranks: of each plane, data and then scales
    common: dict[str, Tensor]


class WeightCodec:
    """For one weight [N, K] that `ranks` ranks share.

    Args:
        quantizer: of the weight, with all the planes that layers read.
        delayed: the scale is given with each call (delayed scaling); no amax is needed for it.
    """

    def __init__(self, quantizer: Quantizer, shards: Shards, cols: int, delayed: bool = False) -> None:
        planes = planes_of(quantizer)
        if planes is None:
            raise ValueError(f"no way to gather the bytes of {quantizer!r}")
        self.quantizer, self.shards, self.cols, self.delayed = quantizer, shards, cols, delayed
        self.planes = planes
        self._has_amax = isinstance(quantizer, Float8QuantizerBase | NVFP4Quantizer)
        # The one plane whose blocks may straddle: only one of them spans rows, and 2-D formats have one plane.
        self._blocked = next((plane for plane in planes.values() if plane.block > 1), None)
        self._straddling = [] if self._blocked is None else shards.straddling(self._blocked.block)
        self._indices: dict[tuple[str, torch.device], Tensor | None] = {}

    @staticmethod
    def obstacle(quantizer: Quantizer, shards: Shards) -> str:
        """Why shards of this weight cannot be quantized apart; "" if they can."""
        planes = planes_of(quantizer)
        if planes is None:
            return f"{quantizer.describe()} cannot be quantized in parts"
        packed = any(plane.transposed and plane.values > 1 for plane in planes.values())
        if packed and shards.ranks > 1 and shards.height % 2:
            return f"two rows share a byte of the column plane, and shards have {shards.height} rows"
        return ""

    # ---------------------------------------------------------------------------------------- amaxes
    @property
    def amax_count(self) -> int:
        """float32 values that are reduced over the ranks before shards can be encoded: the tensor's own, then one line
        for each straddling block row."""
        return int(self._has_amax) + len(self._straddling) * self._straddling_width

    @property
    def _straddling_width(self) -> int:
        if self._blocked is None or self._blocked.scale is None:
            return 0
        return self._blocked.scale.width(self.cols)

    @property
    def tensor_amax_count(self) -> int:
        """How many of them, the first ones, belong to the tensor as a whole, and to other shards of it too."""
        return int(self._has_amax)

    def contribution(self, local: Tensor) -> Tensor:
        """This rank's part of the amaxes: zeros where it has nothing to say. An empty shard takes part as well."""
        out = torch.zeros(self.amax_count, dtype=torch.float32, device=local.device)
        if local.numel() == 0:
            return out
        if self._has_amax:
            kernels.amax(kernels.as_rows(local), out[:1])
        if self._straddling:
            assert self._blocked is not None
            lines = out[self.tensor_amax_count :].view(len(self._straddling), -1)
            block, first, last = self._blocked.block, self.shards.first, self.shards.last
            for line, b in zip(lines, self._straddling, strict=True):
                begin, end = max(first, b * block), min(last, (b + 1) * block)
                if begin < end:
                    line.copy_(self._block_amaxes(local[begin - first : end - first]))
        return out

    def _block_amaxes(self, rows: Tensor) -> Tensor:
        """Of the given rows, together: one for each column of blocks."""
        assert self._blocked is not None and self._blocked.scale is not None
        columns = rows.abs().amax(0).float()
        span = self._blocked.scale.columns
        if span > 1:
            width = ceil_div(self.cols, span)
            columns = torch.nn.functional.pad(columns, (0, width * span - self.cols)).view(width, span).amax(1)
        return columns.abs()  # amax makes NaNs with a sign, which would be the smallest of all when bits are compared

    # ---------------------------------------------------------------------------------------- sending
    def wire_sizes(self, wanted: Sequence[PlaneName]) -> list[int]:
        """Bytes of each tensor that a rank sends for these planes."""
        sizes = []
        for name in wanted:
            plane = self.planes[name]
            sizes.append(plane.data_bytes(self.shards.height, self.cols))
            if plane.scale is not None:
                sizes.append(plane.scale_bytes(self.shards.slots(plane.block), self.cols))
        return sizes

    def encode(
        self, local: Tensor, wanted: Sequence[PlaneName], amaxes: Tensor | None, scale: Tensor | None = None
    ) -> Encoded:
        """Quantize this rank's rows.

        Args:
            local: [count, K], in high precision.
            wanted: which planes.
            amaxes: reduced, see ``contribution``.
            scale: float32 [1] under delayed scaling.
        """
        block = max(self.planes[name].block for name in wanted)
        begin, end = self.shards.cover(block)
        matrix = self._extended(local, begin, end, block, amaxes)
        quantizer = self.quantizer.with_usage(rowwise=ROW in wanted, columnwise=COLUMN in wanted)
        storage = quantizer.make_empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
        quantize_with(quantizer, matrix, storage, amaxes, scale)
        wire: list[Tensor] = []
        for name in wanted:
            plane = self.planes[name]
            wire.append(self._outgoing_data(plane, storage, begin))
            if plane.scale is not None:
                wire.append(self._outgoing_scales(plane, storage, begin))
        common = {name: getattr(storage, name) for name in COMMON if getattr(storage, name, None) is not None}
        return Encoded(wire, common)

    def _extended(self, local: Tensor, begin: int, end: int, block: int, amaxes: Tensor | None) -> Tensor:
        """The rows [begin, end) of the weight as far as this rank must know them: its own, and around them zeros and
        the amaxes of the blocks that it shares."""
        local = kernels.as_rows(local)
        if self.shards.count == 0:  # a scale comes from quantizing something
            return local.new_zeros((block, self.cols))
        if (begin, end) == (self.shards.first, self.shards.last):
            return local
        assert self._blocked is not None and self._blocked.scale is not None and amaxes is not None
        matrix = local.new_zeros((end - begin, self.cols))
        matrix[self.shards.first - begin : self.shards.last - begin] = local
        lines = amaxes[self.tensor_amax_count :].view(len(self._straddling), -1)
        span = self._blocked.scale.columns
        if begin < self.shards.first:
            matrix[0, ::span] = lines[self._straddling.index(begin // block)].to(matrix.dtype)
        if end > self.shards.last:
            matrix[-1, ::span] = lines[self._straddling.index((end - 1) // block)].to(matrix.dtype)
        return matrix

    def _outgoing_data(self, plane: Plane, storage: QuantizedStorage, begin: int) -> Tensor:
        data: Tensor = getattr(storage, plane.data)
        at, count, height = self.shards.first - begin, self.shards.count, self.shards.height
        if plane.transposed:
            return _bytes_padded(data[:, at // plane.values : (at + count) // plane.values], 1, height // plane.values)
        return _bytes_padded(data[at : at + count], 0, height)

    def _outgoing_scales(self, plane: Plane, storage: QuantizedStorage, begin: int) -> Tensor:
        layout = plane.scale
        assert layout is not None
        stored: Tensor = getattr(storage, layout.buffer)
        lines = stored.t() if layout.transposed else stored
        block, slots = layout.rows, self.shards.slots(layout.rows)
        since, until = self.shards.owned(block)
        if layout.repeated:
            lines = lines[since * block - begin :: block]
        else:
            lines = lines[since - begin // block :] if block > 1 else lines[since - begin :]
        lines = lines[: until - since, : layout.width(self.cols)]
        return _bytes_padded(lines, 0, slots)

    # ---------------------------------------------------------------------------------------- receiving
    def storage(self, dtype: torch.dtype, device: torch.device) -> QuantizedStorage:
        """A storage of the whole weight without memory for the planes' buffers: ``place`` and ``decode`` give it some.
        The buffers that are the same on all ranks are there, they are small."""
        quantizer = self.quantizer.with_usage(rowwise=True, columnwise=COLUMN in self.planes)
        specs = quantizer._describe_buffers((self.shards.rows, self.cols), dtype)
        buffers = {}
        for name, (shape, kind) in specs.items():
            buffers[name] = torch.empty(shape, dtype=kind, device=device)
            if name not in COMMON:
                buffers[name].untyped_storage().resize_(0)
        shape = torch.Size((self.shards.rows, self.cols))
        return quantizer.storage_cls(buffers, shape=shape, dtype=dtype, quantizer=quantizer)

    def copied(self, wanted: Sequence[PlaneName]) -> list[str]:
        """The buffers that ``decode`` fills; those of data that is not transposed are views of what was gathered."""
        names = []
        for name in wanted:
            plane = self.planes[name]
            names += [plane.data] if plane.transposed else []
            names += [plane.scale.buffer] if plane.scale is not None else []
        return names

    def place(self, storage: QuantizedStorage, plane: Plane, gathered: Tensor) -> None:
        """Let the data buffer be a view of what is gathered: no second copy."""
        if not plane.transposed:
            size = self.shards.rows * self.cols // plane.values
            setattr(storage, plane.data, gathered.view(-1)[:size].view(self.shards.rows, self.cols // plane.values))

    def decode(self, storage: QuantizedStorage, wanted: Sequence[PlaneName], gathered: Sequence[Tensor]) -> None:
        """Fill the buffers of these planes, which have memory, from the ranks' wire tensors."""
        parts = iter(gathered)
        for name in wanted:
            plane = self.planes[name]
            data = next(parts)
            if plane.transposed:
                self._incoming_transposed(plane, getattr(storage, plane.data), data)
            if plane.scale is not None:
                self._incoming_scales(plane, getattr(storage, plane.scale.buffer), next(parts))

    def _incoming_transposed(self, plane: Plane, out: Tensor, data: Tensor) -> None:
        """[R, K, h] -> [K, N]."""
        ranks, width = self.shards.ranks, self.shards.height // plane.values
        whole = data.view(ranks, self.cols, width)
        if ranks * width == out.shape[1]:
            out.view(self.cols, ranks, width).copy_(whole.permute(1, 0, 2))
            return
        for rank in range(ranks):
            part = out[:, rank * width : (rank + 1) * width]
            part.copy_(whole[rank, :, : part.shape[1]])

    def _incoming_scales(self, plane: Plane, out: Tensor, scales: Tensor) -> None:
        layout = plane.scale
        assert layout is not None
        width = layout.width(self.cols)
        lines = scales.view(-1).view(layout.dtype).view(self.shards.ranks * self.shards.slots(layout.rows), width)
        index = self._index(layout.buffer, plane, out.device)
        if index is not None:
            lines = lines.index_select(0, index)
        target = out.t() if layout.transposed else out
        if target.shape != lines.shape:
            out.zero_()  # the padding that kernels expect
        target[: lines.shape[0], :width].copy_(lines)

    def _index(self, name: str, plane: Plane, device: torch.device) -> Tensor | None:
        """Which gathered line belongs to each line of the buffer; None if they lie in order."""
        if (name, device) not in self._indices:
            assert plane.scale is not None
            block = plane.scale.rows
            places = self.shards.places(block)
            if plane.scale.repeated:
                places = [places[row // block] for row in range(self.shards.rows)]
            in_order = places == list(range(self.shards.ranks * self.shards.slots(block)))
            self._indices[name, device] = None if in_order else torch.tensor(places, device=device)
        return self._indices[name, device]


def _bytes_padded(matrix: Tensor, dim: int, size: int) -> Tensor:
    """The bytes of a matrix with zeros up to `size` along `dim`, as a vector."""
    if matrix.shape[dim] != size:
        shape = list(matrix.shape)
        shape[dim] = size
        whole = matrix.new_zeros(shape)
        whole.narrow(dim, 0, matrix.shape[dim]).copy_(matrix)
        matrix = whole
    flat = matrix.reshape(-1)
    if flat.dtype != torch.uint8:  # a view of one element may have kept a stride that no byte view takes
        flat = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return flat.contiguous()


def quantize_with(
    quantizer: Quantizer, x: Tensor, out: QuantizedStorage, amaxes: Tensor | None, scale: Tensor | None
) -> None:
    """Quantize `x` with a scale, or with the first of `amaxes` where the format has an amax of the whole tensor."""
    if isinstance(quantizer, Float8QuantizerBase):
        if scale is not None:
            kernels.cast_scaled(
                x, scale, out._data, out._transpose, out._scale_inv, fp8=quantizer.fp8_dtype  # type: ignore[attr-defined]
            )
            return
        assert isinstance(quantizer, Float8CurrentScalingQuantizer) and amaxes is not None
        kernels.cast_current(
            x,
            amaxes[:1],
            out._data,  # type: ignore[attr-defined]
            out._transpose,  # type: ignore[attr-defined]
            out._scale_inv,  # type: ignore[attr-defined]
            fp8=quantizer.fp8_dtype,
            eps=quantizer.amax_epsilon,
            power_of_2=quantizer.force_pow_2_scales,
        )
    elif isinstance(quantizer, NVFP4Quantizer):
        assert amaxes is not None
        for name in ("_amax_rowwise", "_amax_columnwise"):
            kernels.store(getattr(out, name), amaxes[:1], None)
        kernels.quantize_nvfp4(
            x,
            out._amax_rowwise,  # type: ignore[attr-defined]
            out._amax_columnwise,  # type: ignore[attr-defined]
            out._rowwise_data,  # type: ignore[attr-defined]
            out._rowwise_scale_inv,  # type: ignore[attr-defined]
            out._columnwise_data,  # type: ignore[attr-defined]
            out._columnwise_scale_inv,  # type: ignore[attr-defined]
            two_d=quantizer.with_2d_quantization,
            with_rht=False,
            random_signs=quantizer.with_random_sign_mask,
            rng_state=None,
        )
    else:
        quantizer._quantize_into(x, out, None, None, None)


@functools.lru_cache(maxsize=4096)
def codec_for(quantizer: Quantizer, shards: Shards, cols: int, delayed: bool) -> WeightCodec:
    """Layers of equal shape share one."""
    return WeightCodec(quantizer, shards, cols, delayed)
