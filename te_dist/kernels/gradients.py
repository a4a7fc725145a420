"""Column sums of what was made, and the gradients of norms."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import reference_producers
from te_dist.kernels.backend import FLOAT_CODE, find, pointer, run
from te_dist.kernels.sources import column_tiles, described, materialize, vector
from te_dist.producers import Producer


def column_sums(p: Producer, dtype: torch.dtype) -> Tensor:
    """[K]: what the columns of a produced matrix add up to; ``want_column_sums`` was called before it was made."""
    if p.partials is None:
        raise ValueError(f"column_sums needs {type(p).__name__}.want_column_sums() before the matrix is made")
    if not p.partials_ready:
        materialize(p)
    return reduce_partials(p.partials, dtype)


def reduce_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [tiles, K] -> [K]."""
    kernel = find(partials.device, "reduce_partials")
    if kernel is None:
        return reference_producers.reduce_partials(partials).to(dtype)
    out = torch.empty(partials.shape[1], dtype=dtype, device=partials.device)
    run(kernel, partials.device, pointer(partials), partials.shape[0], pointer(out), FLOAT_CODE[dtype], 1, out.shape[0])
    return out


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    zero_centered: bool,
    weight_grad: bool = True,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx [M, K] of x's dtype, and the gradients of weight and bias [K] of the weight's dtype where they are wanted."""
    kernel = find(x.device, "norm_backward")
    weight_partials: Tensor | None
    bias_partials: Tensor | None
    if kernel is None:
        dx, weight_partials, bias_partials = reference_producers.norm_backward(
            grad, x, weight, mean, rstd, zero_centered=zero_centered
        )
    else:
        rows, cols = x.shape
        tiles = column_tiles(rows)
        dx = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
        partials = torch.empty((weight_grad + bias_grad, tiles, cols), dtype=torch.float32, device=x.device)
        weight_partials = partials[0] if weight_grad else None
        bias_partials = partials[-1] if bias_grad else None
        workspace = torch.empty((2, rows), dtype=torch.float32, device=x.device) if x.device.type == "cuda" else None
        run(
            kernel, x.device, *described(x), pointer(grad), max(grad.stride(0), cols), *vector(weight), zero_centered,
            pointer(mean), pointer(rstd), pointer(dx), FLOAT_CODE[dx.dtype], rows, cols,
            pointer(weight_partials), pointer(bias_partials), pointer(workspace),
        )  # fmt: skip
    return (
        dx,
        reduce_partials(weight_partials, weight.dtype) if weight_grad and weight_partials is not None else None,
        reduce_partials(bias_partials, weight.dtype) if bias_grad and bias_partials is not None else None,
    )
