"""The only door to the compiled kernels: checks nothing but what would be unsafe, and picks a backend per device.

    cuda tensors -> _kernels.cuda        cpu tensors -> _kernels.cpu        else -> reference.py

Every function writes into buffers that the caller allocated (see ``Quantizer.alloc_tensors``), so that what a fake
kernel promises is what the real one fills. Inputs are 2-D. ``TE_DIST_BACKEND=reference`` forces the reference.
"""

from __future__ import annotations

from te_dist.kernels.backend import (
    BACKENDS,
    FLOAT_CODE,
    FP8_CODE,
    backend_name,
    extension,
    extension_info,
    functions,
    has_extension,
    is_shapes_only,
    shapes_only,
    store,
    use_backend,
)
from te_dist.kernels.blocks import dequantize_block, dequantize_mxfp8, quantize_block, quantize_mxfp8
from te_dist.kernels.gradients import column_sums, norm_backward, reduce_partials
from te_dist.kernels.layout import swizzle_scales, transpose_bytes, transpose_nibbles
from te_dist.kernels.nvfp4 import amax_nvfp4, dequantize_nvfp4, quantize_nvfp4, quantize_nvfp4_current
from te_dist.kernels.per_tensor import (
    advance_scales,
    amax,
    amax_scratch,
    cast_current,
    cast_scaled,
    dequantize_tensor,
    quantize_current,
)
from te_dist.kernels.sources import Matrix, as_rows, materialize, plain_with_sums, producer_fields

__all__ = [
    "BACKENDS",
    "FLOAT_CODE",
    "FP8_CODE",
    "Matrix",
    "advance_scales",
    "amax",
    "amax_nvfp4",
    "amax_scratch",
    "as_rows",
    "backend_name",
    "cast_current",
    "cast_scaled",
    "column_sums",
    "dequantize_block",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "dequantize_tensor",
    "extension",
    "extension_info",
    "functions",
    "has_extension",
    "is_shapes_only",
    "materialize",
    "norm_backward",
    "plain_with_sums",
    "producer_fields",
    "quantize_block",
    "quantize_current",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "quantize_nvfp4_current",
    "reduce_partials",
    "shapes_only",
    "store",
    "swizzle_scales",
    "transpose_bytes",
    "transpose_nibbles",
    "use_backend",
]
