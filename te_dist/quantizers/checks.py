"""Checks and small helpers that the quantizers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist.formats import FP8_DTYPES, DType, short_name


def check_fp8_dtype(value: Any, what: str) -> DType:
    dtype = DType.cast(value)
    if dtype not in FP8_DTYPES:
        raise ValueError(f"{what} expects fp8_dtype e4m3 or e5m2 but got {short_name(dtype)}")
    return dtype


def check_eps(value: float, what: str) -> float:
    value = float(value)
    if not 0.0 <= value <= torch.finfo(torch.float32).max:
        raise ValueError(f"{what} expects amax_epsilon to be finite and not negative but got {value}")
    return value


def check_has_dimensions(shape: Sequence[int], what: str) -> None:
    """A function and not a method: Dynamo of torch 2.11 cannot follow super() on a graph constant."""
    if len(shape) == 0:
        raise ValueError(f"{what} expects at least one dimension")


def check_small_tensor(argument: str, tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> None:
    """The flags and seeds that kernels read through a pointer."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{argument} expects a tensor but got {type(tensor).__name__}")
    if tensor.dtype != dtype or tensor.numel() != numel or not tensor.is_contiguous():
        raise ValueError(
            f"{argument} expects a contiguous {dtype} tensor with {numel} element(s) but got "
            f"{tensor.dtype} of shape {list(tensor.shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{argument} expects device {device} but is on {tensor.device}")


def group_refused(cls: str, field: str) -> str:
    return (
        f"{cls}.{field} holds a process group; a quantizer is a value and cannot store one. "
        f"Pass it to each call: quantize(x, amax_reduction_group=group)"
    )
