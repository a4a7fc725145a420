"""Operands of the products: quantized, gathered, or as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.pipeline.config import LayerConfig, StageConfig
from te_dist.producers import Plain, Producer
from te_dist.quantizers import Float8Quantizer, NVFP4Quantizer, Quantizer
from te_dist.tensors.storage import QuantizedStorage

NVFP4_ROWS = 16  # the column plane's transform and packing want whole blocks along M


def padded_rows(quantizer: Quantizer, rows: int) -> int:
    """M as the quantizer can take it. Rows of zeros change no amax and add nothing to a product."""
    if isinstance(quantizer, NVFP4Quantizer) and quantizer.columnwise:
        return -(-rows // NVFP4_ROWS) * NVFP4_ROWS
    return rows


def quantize_operand(
    config: LayerConfig,
    stage: StageConfig,
    operand: str,
    quantizer: Quantizer,
    source: Producer,
    scales: Tensor | None,
    amaxes: Tensor | None,
    seed: Tensor | None = None,
    group: int = 0,
) -> QuantizedStorage:
    """Quantize a produced matrix as one operand of a stage; under delayed scaling with the operand's own scale."""
    rows, cols = source.shape
    wanted = padded_rows(quantizer, rows)
    # A fake needs the shape alone, and asking whether there is something to pad would tie a graph to the answer.
    if not kernels.is_shapes_only() and wanted != rows:
        matrix = kernels.materialize(source)
        source = Plain(torch.nn.functional.pad(matrix, (0, 0, 0, wanted - rows)))
    if config.delayed:
        index = stage.scale_index(operand, group)
        assert scales is not None and amaxes is not None
        quantizer = Float8Quantizer(
            scales[index : index + 1],
            amaxes[index : index + 1],
            quantizer.fp8_dtype,  # type: ignore[attr-defined]
            rowwise=quantizer.rowwise,
            columnwise=quantizer.columnwise,
        )
    amax_group = stage.spec.comm.amax_group if operand != "weight" else None
    return quantizer.quantize_produced(source, (wanted, cols), amax_reduction_group=amax_group, rng_state=seed)


def first_rows(result: Tensor, rows: int) -> Tensor:
    """The rows of a product that were not padding."""
    if kernels.is_shapes_only():
        return result.new_empty((rows, result.shape[1]))
    return result if result.shape[0] == rows else result[:rows]


def high_precision(operand: Tensor | QuantizedStorage, dtype: torch.dtype) -> Tensor:
    """An operand as a plain tensor."""
    return operand.dequantize(dtype=dtype) if isinstance(operand, QuantizedStorage) else operand


def one_plane(operand: QuantizedStorage, quantizer: Quantizer) -> QuantizedStorage:
    """The storage reduced to the planes of `quantizer`, sharing buffers."""
    return operand.with_usage(rowwise=quantizer.rowwise, columnwise=quantizer.columnwise)


def split_rows(source: Producer, splits: list[int] | None) -> list[Producer]:
    """The rows of every group."""
    if splits is None:
        raise ValueError("a grouped stage expects the rows of each group")
    matrix = kernels.materialize(source)
    return [Plain(part) for part in matrix.split(splits)]
