"""A norm's or an activation's output, handed over quantized where the operation that follows wants it so."""

from __future__ import annotations

import math
from collections.abc import Sequence

from te_dist.pipeline.operands import padded_rows
from te_dist.producers import Producer
from te_dist.quantizers import Quantizer
from te_dist.tensors.storage import QuantizedStorage


def quantized_output(source: Producer, quantizer: Quantizer | None, shape: Sequence[int]) -> QuantizedStorage | None:
    """The produced matrix quantized on the way, with the leading dimensions of `shape`; None if it is to be plain:
    without a quantizer, and where rows would have to be padded, which is the business of the product."""
    if quantizer is None:
        return None
    rows = math.prod(shape[:-1])
    if padded_rows(quantizer, rows) != rows:
        return None
    made = quantizer.quantize_produced(source, (rows, shape[-1]))
    return made if len(shape) == 2 else made.view(tuple(shape))
