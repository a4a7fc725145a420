"""Column sums of what was made, and the gradients of norms."""

from __future__ import annotations

import math

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
    """float32 [..., tiles, K] -> [..., K]: of one set of sums or, in one launch, of several."""
    *sets, tiles, cols = partials.shape
    kernel = find(partials.device, "reduce_partials")
    if kernel is None:
        flat = partials.reshape(math.prod(sets), tiles, cols)
        return torch.stack([reference_producers.reduce_partials(one).to(dtype) for one in flat]).reshape(*sets, cols)
    out = torch.empty((*sets, cols), dtype=dtype, device=partials.device)
    run(kernel, partials.device, pointer(partials), tiles, pointer(out), FLOAT_CODE[dtype], math.prod(sets), cols)
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
    if kernel is None:
        dx, *both = reference_producers.norm_backward(grad, x, weight, mean, rstd, zero_centered=zero_centered)
        partials = torch.stack(both)[0 if weight_grad else 1 : 2 if bias_grad else 1]
    else:
        rows, cols = x.shape
        tiles = column_tiles(rows)
        dx = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
        partials = torch.empty((weight_grad + bias_grad, tiles, cols), dtype=torch.float32, device=x.device)
        workspace = torch.empty((2, rows), dtype=torch.float32, device=x.device) if x.device.type == "cuda" else None
        run(
            kernel, x.device, *described(x), pointer(grad), max(grad.stride(0), cols), *vector(weight), zero_centered,
            pointer(mean), pointer(rstd), pointer(dx), FLOAT_CODE[dx.dtype], rows, cols,
            pointer(partials[0] if weight_grad else None), pointer(partials[-1] if bias_grad else None),
            pointer(workspace),
        )  # fmt: skip
    if not len(partials):
        return dx, None, None
    sums = reduce_partials(partials, weight.dtype)
    return dx, sums[0] if weight_grad else None, sums[-1] if bias_grad else None
