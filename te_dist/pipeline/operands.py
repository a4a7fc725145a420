"""Operands of the products: quantized, gathered, or as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.pipeline.config import LayerConfig, StageConfig
from te_dist.producers import Plain, Producer
from te_dist.quantizers import Float8Quantizer, Quantizer
from te_dist.tensors.storage import QuantizedStorage


class Observer:
    """Who looks at operands as they are quantized: te_dist.monitor, in the steps that it samples."""

    see: Callable[[LayerConfig, StageConfig, str, Producer, QuantizedStorage], None] | None = None


observer = Observer()


def padded_rows(quantizer: Quantizer, rows: int) -> int:
    """M as the quantizer can take it."""
    multiple = quantizer.row_multiple
    return rows if multiple == 1 else -(-rows // multiple) * multiple


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
    padded_to: int | None = None,
) -> QuantizedStorage:
    """Quantize a produced matrix as one operand of a stage; under delayed scaling with the operand's own scale.

    `padded_to`: rows of the result where they are spread over ranks; `source` has as many then, but for the last.
    """
    rows, cols = source.shape
    wanted = padded_rows(quantizer, rows) if padded_to is None else padded_to
    # A fake needs the shape alone, and asking whether there is something to pad would tie a graph to the answer.
    if kernels.is_shapes_only() and padded_to is not None:
        source = Plain(torch.empty((wanted, cols), dtype=source.dtype, device=source.device))
    elif not kernels.is_shapes_only() and wanted != rows:
        matrix = kernels.materialize(source)
        padded = Plain(torch.nn.functional.pad(matrix, (0, 0, 0, wanted - rows)))
        source = padded
    amax_group = stage.spec.comm.amax_group(operand)
    if config.delayed:
        assert scales is not None and amaxes is not None
        index = stage.scale_index(operand, group)
        made = quantize_delayed(quantizer, source, scales, amaxes, index, amax_group)
    else:
        made = quantizer.quantize_produced(source, (wanted, cols), amax_reduction_group=amax_group, rng_state=seed)
    if observer.see is not None and not kernels.is_shapes_only():
        observer.see(config, stage, operand, source, made)
    return made


def quantize_delayed(
    layout: Quantizer,
    source: Producer | Tensor,
    scales: Tensor,
    amaxes: Tensor,
    index: int,
    group: str | None = None,
    out: QuantizedStorage | None = None,
    noop: Tensor | None = None,
) -> QuantizedStorage:
    """Cast with scale `index`, and raise amax `index` to what was seen. `layout` says which planes and format."""
    live = Float8Quantizer.around(scales[index : index + 1], amaxes[index : index + 1], layout)
    if out is None:
        out = layout.new_matrix(source.shape, source.dtype, source.device)
    live._quantize_into(source, out, group, noop, None)
    return out


def first_rows(result: Tensor, rows: int) -> Tensor:
    """The rows of a product that were not padding."""
    if kernels.is_shapes_only():
        return result.new_empty((rows, result.shape[1]))
    return result if result.shape[0] == rows else result[:rows]


def high_precision(operand: Tensor | QuantizedStorage, dtype: torch.dtype) -> Tensor:
    """An operand as a plain tensor."""
    return operand.dequantize(dtype=dtype) if isinstance(operand, QuantizedStorage) else operand


def split_rows(source: Producer, splits: list[int] | None) -> list[Producer]:
    """The rows of every group."""
    if splits is None:
        raise ValueError("a grouped stage expects the rows of each group")
    matrix = kernels.materialize(source)
    return [Plain(part) for part in matrix.split(splits)]
