"""NVFP4's amaxes of a LayerNorm's long rows (csrc/cuda/nvfp4_amax_layer_rows.cu): the bounds by which columns are left
out, on the CPU, and the kernel's results against the CPU's, for rows whose first columns tell little of the others."""

from __future__ import annotations

import pytest
import torch
from cases import varied
from test_nvfp4_column_amax import aligned_columns, signs_of_rows
from test_nvfp4_norm_rows import PLANES, SANITIZED, next_below, number, ones
from test_nvfp4_norm_tiles import check
from torch import Tensor

from te_dist import kernels

pytestmark = pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")
SOURCE = "nvfp4_amax_layer_rows.cu"
COLS = 2048  # two boxes
FAR = 2.0**126


def constant(name: str) -> float:
    (found,) = number(SOURCE, rf"{name} = (-?[0-9.x+p-]+)f;")
    return found


# ---------------------------------------------------------------------------------------------- bounds
def largest_of_sixteen(u: Tensor, signs: Tensor) -> Tensor:
    """What the transform makes of 16 rows, by all but its last sums, whose larger ones are sums of magnitudes."""
    v = (u * signs).bfloat16().unflatten(0, (2, 2, 2, 2))
    for stage in (3, 2, 1):
        a, b = v.unbind(stage)
        v = torch.stack((a + b, a - b), stage)
    return (v[0].abs() + v[1].abs()).flatten(0, 2).amax(0)


def test_nothing_is_left_out_that_would_raise_an_amax() -> None:
    """With the next smaller amax known already. Columns have statistics of their own, so that many are tried, and the
    first box's are apart from those by up to a few percent, or far."""
    least = 2.0**-128
    of_sums, of_values, of_shift = constant("kOfSums"), constant("kOfValues"), 2.0**-19
    generator = torch.Generator().manual_seed(0)
    count = 50_000
    signs = signs_of_rows(True)[:, None]
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    most_ones = (matrix @ signs).abs().max().item()

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + torch.rand(shape, generator=generator) * (high - low)

    closest = {"row": 0.0, "column": 0.0}
    for means, biases, size in ((0, 0, 1.0), (0, 1, 1.0), (1, 0, 1.0), (8, 1, 2.0**-30), (40, 40, 2.0**30)):
        for spread in (0.0, 0.2, 3.0):
            for apart in (0.0, 0.03, 0.9):
                wanted = signs * 2.0 ** (torch.randn(16, count, generator=generator) * spread)
                gain = between(0.5, 2.0, count)
                bias = between(-1, 1, count) * biases
                rstd = between(0.5, 2.0, 16, count) / size
                shift = -between(-1, 1, 16, count) * means
                x = (((wanted - bias) / gain - shift) / rstd).bfloat16()
                near = (rstd * (1 + between(-apart, apart, 16, count))).bfloat16()
                near_shift = (shift + between(-apart, apart, 16, count)).bfloat16()
                u = (x.double() * near.double() + near_shift.double()).bfloat16()
                ratio = rstd / near.float()
                rest = (shift.double() - ratio.double() * near_shift.double()).float()
                rests = (rest.abs() + shift.abs() * of_shift + ratio.abs() * least).sum(0)
                mean = ratio.mean(0)
                most = mean.abs() + ((ratio - mean) ** 2).sum(0).sqrt()
                normalized = (x.double() * rstd.double() + shift.double()).float()
                made = (normalized.double() * gain.double() + bias.double()).float().bfloat16()
                row = made.abs().amax(0)
                column = ((matrix @ (made.float() * signs)).abs().amax(0) * 0.25).bfloat16()
                sums = largest_of_sixteen(u, signs).float()
                b = bias.abs() * of_values
                bound = gain * (of_sums * most * sums + of_values * rests) + b * most_ones + least
                bound_of_row = gain * (of_values * most * u.abs().amax(0).float() + of_values * rests) + b + least
                what = f"means {means}, biases {biases}, size {size}, spread {spread}, apart {apart}"
                assert not (bound <= (4 * next_below(column).float()).clamp(max=FAR)).any(), what
                assert not (bound_of_row <= next_below(row).float().clamp(max=FAR)).any(), what
                closest["row"] = max(closest["row"], (row.float() / bound_of_row).max().item())
                closest["column"] = max(closest["column"], (column.float() * 4 / bound).max().item())
                if means + biases + apart == 0:  # those that are far below are not made
                    assert (bound <= 4.4 * sums).all() and (bound_of_row <= 1.1 * row.float()).all(), what
    assert closest["row"] > 0.97 and closest["column"] > 0.93, closest  # they are no wider than they have to be


# ---------------------------------------------------------------------------------------------- kernel
@pytest.mark.cuda
def test_first_columns_that_tell_little_of_the_others() -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(256, 3072, generator=generator)
    gain, bias = torch.randn(2, 3072, generator=generator)
    for size, mean in ((0.0, 0.0), (1e-3, 0.0), (30.0, 0.0), (2.0**-60, 0.0), (2.0**60, 0.0), (1.0, 20.0), (0.5, -3.0)):
        first = x.clone()
        first[:, :1024] = first[:, :1024] * size + mean
        every = torch.where(torch.arange(256)[:, None] % 3 == 0, first, x)  # of some rows
        for eps in (1e-5, 0.0):
            check(first.bfloat16(), ones(3072), eps=eps, what=f"{size} and {mean}, eps {eps}")
            check(every.bfloat16(), gain, bias, eps=eps, what=f"{size} and {mean} in some rows, eps {eps}")


@pytest.mark.cuda
@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_kinds_of_gains_and_biases(dtype: torch.dtype, planes: str) -> None:
    for cols in (2048, 8192) if not SANITIZED else (2048,):
        x = varied((256, cols), torch.bfloat16)
        gain, bias = varied((2, cols), dtype, 1)
        for zero_centered in (False, True):
            for there in (bias, None):
                what = f"{cols} {zero_centered} {there is None}"
                check(x, gain, there, planes=planes, zero_centered=zero_centered, what=what)


@pytest.mark.cuda
def test_the_largest_of_few_and_of_many() -> None:
    generator = torch.Generator().manual_seed(4)
    for count in (1, 2, 7, 40, COLS):
        x = torch.randn(256, COLS, generator=generator) * 0.1
        where = torch.randperm(COLS, generator=generator)[:count]
        x[200, where] = 3 + torch.rand(count, generator=generator)
        check(x.bfloat16(), ones(COLS), what=f"values of {count}")
        x[192:208, where] = torch.rand(16, count, generator=generator) + 2
        aligned = aligned_columns(x.abs(), True)
        for planes in PLANES:
            check(aligned, ones(COLS), planes=planes, what=f"sums of {count}")


@pytest.mark.cuda
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**127, 2.0**-133, 0.0])
def test_special_values(value: float) -> None:
    for place in ((77, 400), (77, 1400)):  # in the first box, and behind it
        for others in (0.0, 1.0, 2.0**-133):
            for eps in (0.0, 1e-5):
                x = torch.full((128, COLS), others).bfloat16()
                x[place] = value
                check(x, ones(COLS), eps=eps, what=f"{value} among {others}, eps {eps}")
    vector = ones(COLS)
    vector[-1] = value
    x = varied((128, COLS), torch.bfloat16)
    check(x, vector, what=f"a gain of {value}")
    check(x, ones(COLS), vector, what=f"a bias of {value}")
