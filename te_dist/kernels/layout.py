"""The same bytes in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import reference
from te_dist.kernels.backend import find, pointer, run


def transpose_bytes(data: Tensor) -> Tensor:
    """uint8 [R, C] -> [C, R]."""
    kernel = find(data.device, "transpose_bytes")
    if kernel is None:
        return data.t().contiguous()
    data = data.contiguous()
    out = data.new_empty((data.shape[1], data.shape[0]))
    run(kernel, data.device, pointer(data), *data.shape, pointer(out))
    return out


def transpose_nibbles(data: Tensor) -> Tensor:
    """Packed FP4 [R, C/2] -> [C, R/2]; R must be even."""
    rows, cols = data.shape[0], 2 * data.shape[1]
    if rows % 2:
        raise ValueError(f"transpose_nibbles expects an even number of rows but got {rows}")
    kernel = find(data.device, "transpose_nibbles")
    if kernel is None:
        return reference.transpose_nibbles(data)
    data = data.contiguous()
    out = data.new_empty((cols, rows // 2))
    run(kernel, data.device, pointer(data), rows, cols, pointer(out))
    return out


def swizzle_scales(scale: Tensor) -> Tensor:
    """Block scale bytes [rows, cols] into the order of 128x4 tiles that cuBLAS reads."""
    rows, cols = scale.shape
    if rows % 128 or cols % 4:
        raise ValueError(
            f"swizzle_scales expects rows in multiples of 128 and columns in multiples of 4 but got {rows} x {cols}"
        )
    kernel = find(scale.device, "swizzle_scales")
    if kernel is None:
        return reference.swizzle_scales(scale)
    scale = scale.contiguous()
    out = torch.empty_like(scale)
    run(kernel, scale.device, pointer(scale), rows, cols, pointer(out))
    return out
