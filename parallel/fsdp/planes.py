"""What a plane of a quantized weight looks like on the wire and in its buffers.

Letters: N rows, K columns, h rows of a shard. Scales travel one per block, without the padding that GEMMs want and
without the repetitions of 2-D blocks, so the bytes that a rank sends for one plane are

    format                     data       scales
    per tensor                 h K        -                    one amax, reduced over the ranks
    128x128 blocks             h K        4 ceil(h/128) ceil(K/128)
    1x128, row plane           h K        4 h ceil(K/128)
    1x128, column plane        h K        4 ceil(h/128) K
    MXFP8 1x32, row plane      h K        h ceil(K/32)
    MXFP8 1x32, column plane   h K        ceil(h/32) K
    MXFP8 32x32                h K        ceil(h/32) ceil(K/32)
    NVFP4 16x16                h K/2      ceil(h/16) ceil(K/16)      and one amax
    NVFP4 1x16, row plane      h K/2      h ceil(K/16)               and one amax
    NVFP4 1x16, column plane   h K/2      ceil(h/16) K               and one amax

A format whose column plane follows from the row plane (per tensor, and all 2-D blocks) sends the row plane alone.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from te_dist.formats import BLOCK_SIZE, MXFP8_BLOCK_SIZE, NVFP4_BLOCK_SIZE, ceil_div
from te_dist.quantizers import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer, Quantizer
from te_dist.quantizers.float8 import Float8QuantizerBase

PlaneName = Literal["row", "column"]
ROW: PlaneName = "row"
COLUMN: PlaneName = "column"


@dataclasses.dataclass(frozen=True)
class ScaleLayout:
    """Where a plane's scales are.

    Attributes:
        buffer: name in the storage.
        rows: of the weight under one scale: 1, or the height of a block.
        columns: of the weight under one scale.
        repeated: the buffer has a line for each row of the weight, also where a scale spans several.
        transposed: the buffer's lines run along the weight's columns.
    """

    buffer: str
    rows: int
    columns: int
    dtype: torch.dtype
    repeated: bool = False
    transposed: bool = False

    def width(self, cols: int) -> int:
        return ceil_div(cols, self.columns)


@dataclasses.dataclass(frozen=True)
class Plane:
    """One plane.

    Attributes:
        data: name of the data buffer.
        values: in a byte of data.
        transposed: the data buffer is [K, N], not [N, K].
    """

    data: str
    scale: ScaleLayout | None = None
    values: int = 1
    transposed: bool = False

    @property
    def block(self) -> int:
        """Rows that must be quantized together."""
        return 1 if self.scale is None else self.scale.rows

    def data_bytes(self, height: int, cols: int) -> int:
        return height * cols // self.values

    def scale_bytes(self, slots: int, cols: int) -> int:
        return 0 if self.scale is None else slots * self.scale.width(cols) * self.scale.dtype.itemsize


def planes_of(quantizer: Quantizer) -> dict[PlaneName, Plane] | None:
    """The planes that must be gathered, each by itself; None if this kind of quantizer is not known here."""
    f32, u8 = torch.float32, torch.uint8
    row_data, row_scale = "_rowwise_data", "_rowwise_scale_inv"
    col_data, col_scale = "_columnwise_data", "_columnwise_scale_inv"
    if isinstance(quantizer, Float8QuantizerBase):
        return {ROW: Plane("_data")}
    if type(quantizer) is Float8BlockQuantizer:
        size = BLOCK_SIZE
        if quantizer.block_scaling_dim == 2:
            return {ROW: Plane(row_data, ScaleLayout(row_scale, size, size, f32))}
        return {
            ROW: Plane(row_data, ScaleLayout(row_scale, 1, size, f32, transposed=True)),
            COLUMN: Plane(col_data, ScaleLayout(col_scale, size, 1, f32), transposed=True),
        }
    if type(quantizer) is MXFP8Quantizer:
        size = MXFP8_BLOCK_SIZE
        if quantizer.with_2d_quantization:
            return {ROW: Plane(row_data, ScaleLayout(row_scale, size, size, u8, repeated=True))}
        return {
            ROW: Plane(row_data, ScaleLayout(row_scale, 1, size, u8)),
            COLUMN: Plane(col_data, ScaleLayout(col_scale, size, 1, u8)),
        }
    if type(quantizer) is NVFP4Quantizer and not quantizer.with_rht and not quantizer.stochastic_rounding:
        size = NVFP4_BLOCK_SIZE
        if quantizer.with_2d_quantization:
            return {ROW: Plane(row_data, ScaleLayout(row_scale, size, size, u8, repeated=True), values=2)}
        column = ScaleLayout(col_scale, size, 1, u8, transposed=True)
        return {
            ROW: Plane(row_data, ScaleLayout(row_scale, 1, size, u8), values=2),
            COLUMN: Plane(col_data, column, values=2, transposed=True),
        }
    return None
