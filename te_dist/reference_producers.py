"""Norms, activations and column sums in plain PyTorch: the definition that the C++ and CUDA kernels equal bit for bit.

Sums of floats depend on their order, so the order is part of the definition. It was chosen so that a warp or a
thread block adds without waiting: see ``row_sums`` and ``column_sums``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist.formats import ceil_div

ROW_ACCUMULATORS = 1024
STATS_GROUP = 64  # neighbouring columns
COLUMN_SLOTS = 32


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c, rounded once, in float32.

    The product is exact in float64. The sum is rounded to odd there, so that the second rounding cannot go wrong.
    """
    product = a.double() * (b.double() if isinstance(b, Tensor) else b)
    addend = c.double() if isinstance(c, Tensor) else torch.full_like(product, c)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # exactly what `total` lost
    bits = total.view(torch.int64)
    inexact = (error != 0) & error.isfinite()
    too_large = inexact & ((error < 0) == (total > 0))
    odd = torch.where(inexact, (bits - too_large.long()) | 1, bits)
    return odd.view(torch.float64).float()


def _fold(x: Tensor, dim: int) -> Tensor:
    """Halves a dimension of 2^n by adding its upper half to its lower one, until one entry is left."""
    while x.shape[dim] > 1:
        half = x.shape[dim] // 2
        x = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
    return x


def _chunks(values: Tensor) -> Tensor:
    """[M, K] -> [M, chunks, 1024], zeros behind the end."""
    rows, cols = values.shape
    chunks = max(1, ceil_div(cols, ROW_ACCUMULATORS))
    padded = torch.nn.functional.pad(values, (0, chunks * ROW_ACCUMULATORS - cols))
    return padded.view(rows, chunks, ROW_ACCUMULATORS)


def row_sums(values: Tensor, factors: Tensor | None = None) -> Tensor:
    """[M, K] float32 -> [M]: 1024 accumulators take every 1024th value in turn, then fold.

    Accumulator 256 w + 8 l + j is value j of lane l's w-th vector: vectors fold first, then w, then the lanes.
    With factors, values times factors are added up, each with one rounding.
    """
    rows, chunks = values.shape[0], _chunks(values)
    others = None if factors is None else _chunks(factors)
    total = torch.zeros_like(chunks[:, 0])
    for i in range(chunks.shape[1]):
        total = total + chunks[:, i] if others is None else fma(chunks[:, i], others[:, i], total)
    return _fold(_fold(_fold(total.view(rows, 4, 32, 8), 3), 1), 2).reshape(rows)


def _groups(values: Tensor) -> Tensor:
    """[M, K] -> [tiles of 128 rows, 16 groups, 8 rows, K], zeros behind the end."""
    rows, cols = values.shape
    tiles = ceil_div(rows, 128)
    return torch.nn.functional.pad(values, (0, 0, 0, tiles * 128 - rows)).view(tiles, 16, 8, cols)


def column_partials(values: Tensor, factors: Tensor | None = None) -> Tensor:
    """[M, K] float32 -> [ceil(M / 128), K]: 16 groups of 8 rows each add up in order, then fold.

    With factors, values times factors are added up, each with one rounding.
    """
    groups = _groups(values)
    others = None if factors is None else _groups(factors)
    total = torch.zeros_like(groups[:, :, 0])
    for row in range(8):
        total = total + groups[:, :, row] if others is None else fma(groups[:, :, row], others[:, :, row], total)
    return _fold(total, 1).reshape(groups.shape[0], groups.shape[3])


def reduce_partials(partials: Tensor) -> Tensor:
    """[tiles, K] -> [K]: 32 slots take every 32nd tile in turn, then fold."""
    tiles, cols = partials.shape
    rounds = max(1, ceil_div(tiles, COLUMN_SLOTS))
    padded = torch.nn.functional.pad(partials, (0, 0, 0, rounds * COLUMN_SLOTS - tiles)).view(
        rounds, COLUMN_SLOTS, cols
    )
    total = torch.zeros_like(padded[0])
    for step in range(rounds):
        total = total + padded[step]
    return _fold(total, 0).reshape(cols)


def column_sums(values: Tensor) -> Tensor:
    return reduce_partials(column_partials(values))


# ------------------------------------------------------------------------------------------------- activations
def _sigmoid(t: Tensor) -> Tensor:
    """1 / (1 + 2^t), and 0 where that would be subnormal."""
    t = torch.where(t > 127, torch.full_like(t, 127), t)
    t = torch.where(t < -125, torch.full_like(t, -125), t)
    shift = 12582912.0
    shifted = t + shift
    f = t - (shifted - shift)
    p = torch.full_like(f, float.fromhex("0x1.5bba14p-10"))
    for coefficient in ("0x1.3cea88p-7", "0x1.c6b752p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1", "0x1p0"):
        p = fma(p, f, float.fromhex(coefficient))
    below = 1.0 + (p.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)
    return torch.where(below > 2.0**126, torch.zeros_like(below), torch.ones_like(below) / below)


def activate(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Value and slope of an activation, in float32."""
    if activation == "relu":
        off = x <= 0
        zero = torch.zeros_like(x)
        return torch.where(off, zero, x), torch.where(off, zero, torch.ones_like(x))
    if activation == "srelu":
        positive = torch.where(x <= 0, torch.zeros_like(x), x)
        return positive * positive, positive + positive
    if activation == "silu":
        t, w = x * -float.fromhex("0x1.715476p+0"), x
    elif activation == "qgelu":
        t, w = x * -float.fromhex("0x1.3a4cbep+1"), x * float.fromhex("0x1.b3b646p+0")
    elif activation == "gelu":
        square = x * x
        t = x * fma(square, -float.fromhex("0x1.a5a7d0p-4"), -float.fromhex("0x1.26aec2p+1"))
        w = x * fma(square, float.fromhex("0x1.b6676cp-3"), float.fromhex("0x1.988454p+0"))
    else:
        raise ValueError(f"activation expects gelu, qgelu, relu, srelu or silu but got {activation!r}")
    s = _sigmoid(t)
    return x * s, s * fma(w, 1.0 - s, 1.0)


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.float() if bias is None else (x.float() + bias.float()).to(x.dtype).float()


def activation_output(x: Tensor, activation: str, gated: bool, bias: Tensor | None) -> Tensor:
    wide = _with_bias(x, bias)
    if not gated:
        return activate(wide, activation)[0].to(x.dtype)
    first, second = wide.chunk(2, dim=1)
    return (activate(first, activation)[0] * second).to(x.dtype)


def activation_gradient(grad: Tensor, x: Tensor, activation: str, gated: bool, bias: Tensor | None) -> Tensor:
    wide, dy = _with_bias(x, bias), grad.float()
    if not gated:
        return (dy * activate(wide, activation)[1]).to(x.dtype)
    first, second = wide.chunk(2, dim=1)
    value, slope = activate(first, activation)
    return torch.cat([dy * second * slope, dy * value], dim=1).to(x.dtype)


# ------------------------------------------------------------------------------------------------- norms
def _gain(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1.0 if zero_centered else weight.float()


def _spread(wide: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] float32 -> the mean of each row [M], and what the squares of its distances from there add up to [M].

    Column c is in group c / 64 % 16. Of each group, distances from its first value are added up, and their squares, so
    that rows are gone through once: with d from there to the mean, its n values are (n d - 2 sum) d + squares apart
    from the mean. (From the second value, if that is smaller: some models have columns that are far from all others.)
    A group has 32 accumulators, of which number 4 l + j takes values j and j + 4 of its l-th vectors of eight in turn.
    """
    rows, cols = wide.shape
    chunks = _chunks(wide)
    inside = _chunks(torch.ones_like(wide[:1])) > 0
    first, second = chunks[:, 0, ::STATS_GROUP], chunks[:, 0, 1::STATS_GROUP]
    first = torch.where(inside[:, 0, 1::STATS_GROUP] & (second.abs() < first.abs()), second, first)
    apart = chunks - first.repeat_interleave(STATS_GROUP, 1)[:, None]
    apart = torch.where(inside, apart, torch.zeros_like(apart)).view(rows, chunks.shape[1], 16, 8, 2, 4)
    total = squares = torch.zeros_like(apart[:, 0, :, :, 0])
    for part in (apart[:, i, :, :, half] for i in range(apart.shape[1]) for half in range(2)):
        total = total + part
        squares = fma(part, part, squares)
    sums, squares = (_fold(_fold(v, 3), 2).reshape(rows, 16) for v in (total, squares))
    counts = inside.view(-1, 16, STATS_GROUP).sum((0, 2)).float().expand(rows, 16)
    mean = _fold(fma(counts, first, sums), 1).reshape(rows) / torch.full_like(sums[:, 0], float(cols))
    off = mean[:, None] - first
    apart = _fold(fma(off, fma(counts, off, -(sums + sums)), squares), 1).reshape(rows)
    return mean, torch.where(apart < 0, torch.zeros_like(apart), apart)


def norm_stats(x: Tensor, *, layer_norm: bool, eps: float) -> tuple[Tensor | None, Tensor]:
    """Mean (None for RMSNorm) and reciprocal standard deviation of every row."""
    wide = x.float()
    count = torch.full((), float(x.shape[1]), dtype=torch.float32, device=x.device)
    mean, total = _spread(wide) if layer_norm else (None, row_sums(wide, wide))
    variance = total / count
    # By way of float64, whose square root rounds to the right float32: torch's own one is a unit off now and then.
    deviation = (variance + torch.full_like(count, eps)).double().sqrt().float()
    return mean, torch.ones_like(deviation) / deviation


def _normalized(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    if mean is None:
        return x.float() * rstd[:, None]
    return fma(x.float(), rstd[:, None], -(mean * rstd)[:, None])


def norm_output(
    x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor | None, rstd: Tensor, *, zero_centered: bool
) -> Tensor:
    normal, gain = _normalized(x, mean, rstd), _gain(weight, zero_centered)
    return (normal * gain if bias is None else fma(normal, gain, bias.float())).to(x.dtype)


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, *, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and the column partials of the weight's and the bias's gradients."""
    dy, normal = grad.float(), _normalized(x, mean, rstd)
    count = torch.full((), float(x.shape[1]), dtype=torch.float32, device=x.device)
    scaled = dy * _gain(weight, zero_centered)
    slope = (row_sums(scaled, normal) / count * rstd)[:, None]
    along = normal * slope
    if mean is not None:
        along = fma(normal, slope, (row_sums(scaled) / count * rstd)[:, None])
    dx = fma(scaled, rstd[:, None], -along)
    return dx.to(x.dtype), column_partials(dy, normal), column_partials(dy)
