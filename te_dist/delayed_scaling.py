"""Delayed scaling's state as ordinary tensors: an amax history in, scales out, nothing hidden."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_dist import kernels, reference
from te_dist.formats import FP8_MAX, DType
from te_dist.quantizers.checks import check_fp8_dtype

AMAX_ALGORITHMS = ("max", "most_recent")


def update_scale(
    amax_history: Tensor,
    scale: Tensor,
    fp8_dtype: DType | torch.dtype | str,
    *,
    margin: int = 0,
    amax_compute_algo: str = "max",
) -> None:
    """Advance scales from their history, in place, on the device.

    ``scale = (fp8_max / amax) / 2**margin``, where amax is the maximum of the history or its newest row (row 0). An
    amax that is 0 or not finite keeps the old scale; an infinite result becomes the largest float. The history then
    rolls by -1 and its row 0, which quantizers record into, becomes zero.

    Args:
        amax_history: float32 [length, n].
        scale: float32 [n].
    """
    if amax_history.dim() != 2 or scale.shape != amax_history.shape[1:]:
        raise ValueError(
            f"update_scale expects amax_history [length, n] and scale [n] but got "
            f"{list(amax_history.shape)} and {list(scale.shape)}"
        )
    for name, tensor in (("amax_history", amax_history), ("scale", scale)):
        if tensor.dtype != torch.float32:
            raise TypeError(f"update_scale expects {name} in float32 but got {tensor.dtype}")
    if amax_compute_algo not in AMAX_ALGORITHMS:
        raise ValueError(f"update_scale expects amax_compute_algo in {AMAX_ALGORITHMS} but got {amax_compute_algo!r}")
    largest = torch.full_like(scale, FP8_MAX[check_fp8_dtype(fp8_dtype, "update_scale")])
    reference.advance_scales(amax_history, scale, largest, margin=margin, most_recent=amax_compute_algo != "max")


def largest_of(dtypes: Sequence[DType], device: torch.device | str | None = None) -> Tensor:
    """fp8_max of every scale, as ``advance`` wants it."""
    largest = torch.empty(len(dtypes), dtype=torch.float32, device=device)
    for index, dtype in enumerate(dtypes):
        largest[index].fill_(FP8_MAX[dtype])  # a copy from the host would wait for the device
    return largest


def advance(history: Tensor, scales: Tensor, largest: Tensor, margin: int, algorithm: str) -> None:
    """``update_scale`` for scales of different formats at once: the start of a layer's step."""
    kernels.advance_scales(history, scales, largest, margin=margin, most_recent=algorithm != "max")


def record(history: Tensor, amaxes: Tensor) -> None:
    """Raise the current row of the history to what was seen. A NaN stays: it keeps the scale as it is."""
    torch.maximum(history[0], amaxes, out=history[0])
