"""How a quantized shard travels: which bytes of each buffer are sent, and where they belong in the gathered buffer.

Letters: R ranks, m rows of a shard, M = R * m, K columns. Scale buffers are padded for the GEMMs; the padding of the
row direction is cut off before the exchange and put back, as zeros, around the whole. In the buffers that hold the
transpose the rows run along the second dimension, so shards come back one below the other and are set side by side.

    buffer                              rows run along   sent of a shard       gathered, then padded to
    per tensor   _data                  0                [m, K]                [M, K]
                 _transpose             1                [K, m]                [K, M]
                 _scale_inv             -                nothing: all ranks have reduced the amax
    1x128        row data, column data  0, 1             [m, K], [K, m]        [M, K], [K, M]
                 row scale              1                [K/128, m]            [K/128, rup(M, 4)]
                 column scale           0                [m/128, rup(K, 4)]    [M/128, rup(K, 4)]
    128x128      row scale              0                [m/128, .]            [M/128, .]
                 column scale           1                [K/128, m/128]        [K/128, rup(M/128, 4)]
    MXFP8        row and column data    0                [m, K]                [M, K]
                 row scale              0                [m, .]                [rup(M, 128), .]
                 column scale           0                [m/32, .]             [rup(M/32, 4), .]
    NVFP4        row data, column data  0, 1             [m, K/2], [K, m/2]    [M, K/2], [K, M/2]
                 row scale              0                [m, .]                [rup(M, 128), .]
                 column scale           1                [., m/16]             [., rup(M/16, 4)]
                 amaxes                 -                nothing
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from te_dist.formats import BLOCK_SIZE, MXFP8_BLOCK_SIZE, NVFP4_BLOCK_SIZE
from te_dist.quantizers import (
    Float8BlockQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dist.quantizers.float8 import Float8QuantizerBase
from te_dist.tensors import QuantizedStorage


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where the rows of a tensor are in one of its buffers: along `dim`, one entry for `per` of them."""

    dim: int
    per: int = 1


def row_layout(quantizer: Quantizer) -> dict[str, Rows | None]:
    """Of each buffer; None for one that is the same on all ranks."""
    if isinstance(quantizer, IdentityQuantizer):
        return {"_hp_data": Rows(0)}
    if isinstance(quantizer, Float8QuantizerBase):
        return {"_data": Rows(0), "_transpose": Rows(1), "_scale_inv": None}
    if isinstance(quantizer, Float8BlockQuantizer):
        blocks_of_rows = quantizer.block_scaling_dim == 2
        return {
            "_rowwise_data": Rows(0),
            "_rowwise_scale_inv": Rows(0, BLOCK_SIZE) if blocks_of_rows else Rows(1),
            "_columnwise_data": Rows(1),
            "_columnwise_scale_inv": Rows(1, BLOCK_SIZE) if blocks_of_rows else Rows(0, BLOCK_SIZE),
        }
    if isinstance(quantizer, MXFP8Quantizer):
        return {
            "_rowwise_data": Rows(0),
            "_rowwise_scale_inv": Rows(0),
            "_columnwise_data": Rows(0),
            "_columnwise_scale_inv": Rows(0, MXFP8_BLOCK_SIZE),
        }
    if isinstance(quantizer, NVFP4Quantizer):
        return {
            "_rowwise_data": Rows(0),
            "_rowwise_scale_inv": Rows(0),
            "_columnwise_data": Rows(1, 2),
            "_columnwise_scale_inv": Rows(1, NVFP4_BLOCK_SIZE),
            "_amax_rowwise": None,
            "_amax_columnwise": None,
        }
    raise TypeError(
        f"te_dist.parallel expects a quantizer of te_dist, whose buffers it can gather, but got "
        f"{type(quantizer).__name__}"
    )


def column_layout(quantizer: Quantizer) -> dict[str, Rows]:
    """Where the columns of a tensor are in the buffers of its column plane, as ``row_layout`` says it of the rows."""
    if isinstance(quantizer, IdentityQuantizer):
        return {"_hp_data": Rows(1)}
    if isinstance(quantizer, Float8QuantizerBase):
        return {"_transpose": Rows(0)}
    if isinstance(quantizer, Float8BlockQuantizer):
        blocks = quantizer.block_scaling_dim == 2
        return {"_columnwise_data": Rows(0), "_columnwise_scale_inv": Rows(0, BLOCK_SIZE) if blocks else Rows(1)}
    if isinstance(quantizer, MXFP8Quantizer):
        return {"_columnwise_data": Rows(1), "_columnwise_scale_inv": Rows(1)}
    if isinstance(quantizer, NVFP4Quantizer):
        return {"_columnwise_data": Rows(0), "_columnwise_scale_inv": Rows(0)}
    row_layout(quantizer)  # raises
    raise AssertionError(f"{type(quantizer).__name__} has a layout of rows and none of columns")


def check_shard(quantizer: Quantizer, rows: int, what: str) -> None:
    """Raise ValueError if shards of so many rows do not add up to the blocks of the whole. Same on every rank."""
    block = quantizer.block_rows
    if rows % block:
        raise ValueError(
            f"{what} expects each shard to have a multiple of {block} rows, because blocks of {quantizer.describe()} "
            f"span as many, but got {rows}; pad each shard with zeros, or gather the row plane only"
        )


def outgoing(storage: QuantizedStorage) -> list[Tensor]:
    """What this rank sends of a matrix: in the order of its buffers, without padding along the rows."""
    rows = storage.shape[0]
    layout = row_layout(storage.quantizer)
    sent = []
    for name in storage.inner_names():
        where = layout[name]
        if where is not None:
            sent.append(getattr(storage, name).narrow(where.dim, 0, rows // where.per))
    return sent


def incoming(storage: QuantizedStorage, gathered: list[Tensor], ranks: int) -> QuantizedStorage:
    """The whole matrix, from what ``outgoing`` of all ranks has become."""
    rows, cols = storage.shape
    layout = row_layout(storage.quantizer)
    shape = torch.Size((rows * ranks, cols))
    layout_of = storage.quantizer.layout_quantizer()
    specs = layout_of._describe_buffers(shape, storage.dtype)
    parts = iter(gathered)
    buffers: dict[str, Tensor] = {}
    for name in storage.inner_names():
        where = layout[name]
        if where is None:
            buffers[name] = getattr(storage, name)
            continue
        whole = next(parts)
        if where.dim == 1:
            depth, width = getattr(storage, name).shape[0], rows // where.per
            whole = whole.view(ranks, depth, width).permute(1, 0, 2)
        buffers[name] = _padded(whole, specs[name][0])
    return type(storage)._around(buffers, shape, storage.dtype, storage.quantizer)


def some_rows(matrix: Tensor | QuantizedStorage, first: int, count: int) -> Tensor | QuantizedStorage:
    """Rows of a matrix, of whole blocks: a plain one's, or the row plane of a quantized one's. Data are not copied
    where they lie together; scales are, because their padding differs."""
    if isinstance(matrix, Tensor):
        return matrix.narrow(0, first, count)
    quantizer = matrix.quantizer.with_usage(rowwise=True, columnwise=False)
    return _some(matrix, quantizer, row_layout(quantizer), (count, matrix.shape[1]), first, count)


def some_columns(matrix: Tensor | QuantizedStorage, first: int, count: int) -> Tensor | QuantizedStorage:
    """Columns of a matrix, of whole blocks: a plain one's, or the column plane of a quantized one's."""
    if isinstance(matrix, Tensor):
        return matrix.narrow(1, first, count)
    quantizer = matrix.quantizer.with_usage(rowwise=False, columnwise=True)
    return _some(matrix, quantizer, column_layout(quantizer), (matrix.shape[0], count), first, count)


def _some(
    matrix: QuantizedStorage,
    quantizer: Quantizer,
    layout: Mapping[str, Rows | None],
    shape: tuple[int, int],
    first: int,
    count: int,
) -> QuantizedStorage:
    specs = quantizer.layout_quantizer()._describe_buffers(shape, matrix.dtype)
    buffers: dict[str, Tensor] = {}
    for name, (size, _) in specs.items():
        where, whole = layout.get(name), getattr(matrix, name)
        if where is None:
            buffers[name] = whole
        elif first % where.per:
            raise AssertionError(f"{name} has one entry for {where.per}, so a part cannot begin at {first}")
        else:
            # Of a buffer that is padded a last part takes less than it could.
            entries = min(-(-count // where.per), whole.shape[where.dim] - first // where.per)
            buffers[name] = _padded(whole.narrow(where.dim, first // where.per, entries), size)
    return type(matrix)._around(buffers, torch.Size(shape), matrix.dtype, quantizer)


def take_rows(storage: QuantizedStorage, index: Tensor) -> QuantizedStorage:
    """Rows of a matrix that has a row plane only, in the order of `index`, with the scales that they have."""
    rows, cols = storage.shape
    layout = row_layout(storage.quantizer)
    shape = torch.Size((index.shape[0], cols))
    specs = storage.quantizer.layout_quantizer()._describe_buffers(shape, storage.dtype)
    buffers: dict[str, Tensor] = {}
    for name in storage.inner_names():
        where, buffer = layout[name], getattr(storage, name)
        if where is None:
            buffers[name] = buffer
            continue
        if where.per != 1 or name in type(storage).COLUMN_BUFFERS:
            raise ValueError(f"take_rows expects a row plane with scales of single rows but got {storage.summary()}")
        taken = buffer.narrow(where.dim, 0, rows).index_select(where.dim, index)
        buffers[name] = _padded(taken, specs[name][0])
    return type(storage)._around(buffers, shape, storage.dtype, storage.quantizer)


def _padded(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`part` ([A, B], or [A, R, b] with B = R * b) in the corner of a buffer of that shape, zeros elsewhere."""
    held = (part.shape[0], part.shape[1:].numel())
    if held == tuple(shape):
        return part.reshape(held).contiguous()
    out = part.new_zeros(shape)
    corner = out[: held[0], : held[1]]
    corner.copy_(part.reshape(held))
    return out
