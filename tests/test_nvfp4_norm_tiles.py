"""NVFP4's amaxes of a norm, of which most is not made, tile by tile or, of a LayerNorm's long rows, by clusters
(csrc/cuda/nvfp4_norm_nearly.cuh): those of the CPU's kernels, for matrices that leave the bounds little room."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import QUANTIZERS, varied
from test_blocks_that_stay import multiprocessors
from test_cuda_streams import kernels_of
from test_nvfp4_column_amax import aligned_columns, signs_of_rows, sums_of_neighbours
from test_nvfp4_norm_rows import PLANES, SANITIZED, assert_cpu_finds_the_same, has_room, next_below, number, ones
from torch import Tensor

from te_dist import kernels
from te_dist.producers import NormOutput

pytestmark = pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")
SOURCE = "nvfp4_norm_nearly.cuh"
BY_TILES, BY_CLUSTERS = 640, 4608  # columns


# ---------------------------------------------------------------------------------------------- bounds
def fma_bf16(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Rounded once: a product of two bf16 numbers is a double, and so is its sum with one that is not far from it."""
    return (a.double() * b.double() + c.double()).bfloat16()


def nearly(x: Tensor, rstd: Tensor, shift: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """What the kernel makes in bf16."""
    normalized = fma_bf16(x, rstd.bfloat16(), shift.bfloat16())
    return fma_bf16(normalized, gain.bfloat16(), bias.bfloat16())


def bound_of_sums(n: Tensor, signs: Tensor) -> Tensor:
    """Of both eights of 16 rows, the largest that three stages of the transform make of them, in bf16."""
    v = (n * signs).bfloat16().unflatten(0, (2, 2, 2, 2))
    for stage in (3, 2):
        a, b = v.unbind(stage)
        v = torch.stack((a + b, a - b), stage)
    a, b = v.unbind(1)
    of_eights = (a.abs() + b.abs()).flatten(1, 2).amax(1)
    return of_eights[0] + of_eights[1]


def test_eights_bound_the_transform() -> None:
    """By less than 8.2 / 512 of what they say, whatever the numbers: rounding errors of three sums and the last one."""
    generator = torch.Generator().manual_seed(7)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    closest = 0.0
    for random_signs in (True, False):
        signs = signs_of_rows(random_signs)[:, None]
        for spread in (0.0, 0.5, 4.0):
            n = torch.randn(16, 200_000, generator=generator)
            n = (n.sign() if spread == 0 else n) * 2.0 ** (torch.randn(n.shape, generator=generator) * spread)
            n = n.bfloat16()
            true = (matrix @ (n.double() * signs)).abs().amax(0)
            closest = max(closest, (true / bound_of_sums(n, signs).double()).max().item())
    assert 1.003 < closest < 1 + 8.2 / 512, closest


def rest(shift: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    of_bias, of_gain, least, of_shift = number(
        SOURCE,
        r"of_all_\(bias \* \(([0-9.]+)f / 256.0f\) \+ gain \* 0x1p(-\d+)f \+ 0x1p(-\d+)f\), "
        r"of_shift_\(gain \* \(([0-9.]+)f / 256.0f\)\)",
    )
    gain, bias = gain.bfloat16().float().abs(), bias.bfloat16().float().abs()
    of_all = bias * of_bias / 256 + gain * 2.0**of_gain + 2.0**least
    return (shift.abs().amax(0).double() * (gain * of_shift / 256).double() + of_all.double()).float()


def is_left_out(n: Tensor, known: Tensor, share: float, rest: Tensor) -> Tensor:
    return n.float() < (known.float() * torch.tensor(share)).clamp(max=2.0**126) - rest


def test_nothing_is_left_out_that_would_raise_an_amax() -> None:
    """With the next smaller amax known already, which is the closest case. Columns have statistics of their own, so
    that many are tried."""
    (of_rows,) = number(SOURCE, r"kOfRows = ([0-9.]+)f;")
    (of_columns,) = number(SOURCE, r"kOfColumns = ([0-9.]+)f;")
    generator = torch.Generator().manual_seed(0)
    count = 100_000
    signs = signs_of_rows(True)[:, None]

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + torch.rand(shape, generator=generator) * (high - low)

    closest = {"row": 0.0, "column": 0.0}
    for means, biases, size in ((0, 0, 1.0), (0, 1, 1.0), (1, 0, 1.0), (8, 1, 2.0**-30), (40, 40, 2.0**30)):
        for spread in (0.0, 0.2, 3.0):
            mean = between(-1, 1, 1, count) * means
            # What is made shall have the signs that add up.
            wanted = signs * 2.0 ** (torch.randn(16, count, generator=generator) * spread)
            rstd = between(0.5, 2.0, 1, count) / size
            gain = between(0.5, 2.0, count)
            bias = between(-1, 1, count) * biases
            x = (((wanted - bias) / gain + mean) / rstd).bfloat16()
            shift = -mean
            made = ((x.float() * rstd + shift) * gain + bias).bfloat16()
            n = nearly(x, rstd, shift, gain, bias)
            slack = rest(shift, gain, bias)
            row, largest = made.abs().amax(0), n.abs().amax(0)
            column = ((made.float() * signs).sum(0).abs() * 0.25).bfloat16()
            by_tiles, by_clusters = bound_of_sums(n, signs), sums_of_neighbours(n)
            what = f"means {means}, biases {biases}, size {size}, spread {spread}"
            assert not is_left_out(largest, next_below(row), of_rows, slack).any(), what
            for sums in (by_tiles, by_clusters):
                assert not is_left_out(sums, next_below(column), of_columns, 16 * slack).any(), what
                size_of_sums = (column.float() * 4 / (sums.float() + 16 * slack)).max().item()
                closest["column"] = max(closest["column"], size_of_sums)
            closest["row"] = max(closest["row"], (row.float() / (largest.float() + slack)).max().item())
            if means + biases == 0:  # those that are far below are not made
                assert is_left_out(largest, row * 1.1, of_rows, slack).all(), what
                for sums in (by_tiles, by_clusters):
                    assert is_left_out(sums, (sums.float() / 4 * 1.1).bfloat16(), of_columns, 16 * slack).all(), what
    assert closest["row"] > 1.008 and closest["column"] > 1.005, closest  # the allowances are needed


# ---------------------------------------------------------------------------------------------- kernel
def check(
    x: Tensor,
    gain: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    planes: str = "both",
    centered: bool = True,
    zero_centered: bool = False,
    what: str = "",
) -> None:
    def norm(x: Tensor, on: Callable[[Tensor], Tensor]) -> NormOutput:
        mean = torch.empty(x.shape[0], device=x.device) if centered else None
        rstd = torch.empty(x.shape[0], device=x.device)
        there = None if bias is None else on(bias)
        return NormOutput(x, on(gain), there, mean, rstd, eps=eps, zero_centered=zero_centered)

    assert_cpu_finds_the_same(norm, x, planes, what)


@pytest.mark.cuda
@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_kinds_of_gains_and_biases(dtype: torch.dtype, planes: str) -> None:
    for cols in (128, 640, 4224, 4608, 8192) if not SANITIZED else (640, 4608):
        x = varied((256, cols), torch.bfloat16)
        gain, bias = varied((2, cols), dtype, 1)
        for centered in (True, False):
            for zero_centered in (False, True):
                for there in (bias, None):
                    what = f"{cols} {centered} {zero_centered} {there is None}"
                    check(x, gain, there, planes=planes, centered=centered, zero_centered=zero_centered, what=what)


@pytest.mark.cuda
@pytest.mark.parametrize("cols", [BY_TILES, BY_CLUSTERS])
def test_means_and_biases_of_all_sizes(cols: int) -> None:
    """Those that are far larger than what is made leave nothing to be bounded."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, cols, generator=generator)
    for most in (1, 30, 1000):
        means = torch.randn(256, 1, generator=generator) * most
        check((x + means).bfloat16(), ones(cols), what=f"means up to {most}")
        bias = torch.randn(cols, generator=generator) * most
        check(x.bfloat16(), ones(cols), bias, what=f"biases up to {most}")
        check((x + means).bfloat16(), torch.randn(cols, generator=generator), bias, what=f"both up to {most}")
    # One bias that is the amax, but for what cancels it.
    bias = torch.zeros(cols)
    bias[600] = -6.0
    x[130, 600] = 6.0
    check(x.bfloat16(), ones(cols), bias, what="a bias and a value that cancel")


@pytest.mark.cuda
@pytest.mark.parametrize("cols", [BY_TILES, BY_CLUSTERS])
def test_columns_that_are_almost_alike(cols: int) -> None:
    """Everywhere columns that could be the largest, and one that is, by less than sums in bf16 can tell."""
    generator = torch.Generator().manual_seed(3)
    magnitudes = torch.rand(16, cols, generator=generator) * 0.03 + 1
    for place in ((0, 0), (15, cols - 1), (9, 577)):
        magnitudes[place] = 1.04
        check(aligned_columns(magnitudes.repeat_interleave(16, 0), True), ones(cols), what=str(place))
        magnitudes[place] = 1.0


@pytest.mark.cuda
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("cols", [BY_TILES, BY_CLUSTERS])
def test_the_largest_of_few_and_of_many(centered: bool, cols: int) -> None:
    """One eight of a warp's columns may raise what is known, or more than it takes one by one; by values or by sums."""
    generator = torch.Generator().manual_seed(4)
    for count in (1, 2, 7, 40, cols):
        x = torch.randn(256, cols, generator=generator) * 0.1
        where = torch.randperm(cols, generator=generator)[:count]
        x[200, where] = 3 + torch.rand(count, generator=generator)
        check(x.bfloat16(), ones(cols), centered=centered, what=f"values of {count}")
        x[192:208, where] = torch.rand(16, count, generator=generator) + 2
        aligned = aligned_columns(x.abs(), True)
        for planes in PLANES:
            check(aligned, ones(cols), planes=planes, centered=centered, what=f"sums of {count}")


@pytest.mark.cuda
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("cols", [BY_TILES, BY_CLUSTERS])
def test_columns_that_raise_amaxes_every_time(centered: bool, cols: int) -> None:
    """The warp that has them is late every time, and the others of its cluster are ahead, with statistics of rows that
    come later."""
    generator = torch.Generator().manual_seed(6)
    rows = 16 * (48 if SANITIZED else 192)
    x = torch.randn(rows, cols, generator=generator)
    signs = signs_of_rows(True).repeat(rows // 16)
    sizes = 3.0 + torch.arange(rows).div(16, rounding_mode="floor") * 0.2
    for where in (0, 100, cols - 4):
        spiked = x.clone()
        spiked[:, where : where + 4] = (sizes * signs)[:, None]
        check(spiked.bfloat16(), ones(cols), ones(cols), centered=centered, what=f"columns from {where} on")


@pytest.mark.cuda
@pytest.mark.parametrize("cols", [BY_TILES, BY_CLUSTERS])
def test_rows_and_gains_of_all_sizes(cols: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(256, cols, generator=generator)
    sizes = torch.randint(-30, 30, (256, 1), generator=generator).float().exp2()
    for eps in (1e-5, 0.0):
        check((x * sizes).bfloat16(), ones(cols), eps=eps, what=f"rows, eps {eps}")
    for most in (4, 40, 120):
        gain = torch.randint(-most, most, (cols,), generator=generator).float().exp2()
        gain *= torch.randn(cols, generator=generator)
        check(x.bfloat16(), gain, what=f"gains up to 2^{most}")
        check(x.bfloat16(), gain, gain.flip(0), what=f"gains and biases up to 2^{most}")
    check(x.bfloat16(), torch.zeros(cols), what="no gains")
    for exponent in (-90, -120, -132, -140):  # too small for bounds in bf16
        check(x.bfloat16(), ones(cols) * 2.0**exponent, what=f"gains of 2^{exponent}")
    # The smallest number of all: in bf16 it becomes nothing, but for the gain it would be the largest.
    small, gain = x * 4, ones(cols) * 2.0**-90
    small[:, 300] = 0.0
    small[200, 300] = 2.0**-133
    gain[300] = 2.0**100
    check(small.bfloat16(), gain, centered=False, what="a large gain of a small value")


@pytest.mark.cuda
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**127, 2.0**-133, 0.0])
@pytest.mark.parametrize("cols", [BY_TILES, BY_CLUSTERS])
def test_special_values(value: float, cols: int) -> None:
    for others in (0.0, 1.0, 2.0**-133):
        for eps in (0.0, 1e-5):
            x = torch.full((128, cols), others).bfloat16()
            x[77, 400] = value
            check(x, ones(cols), eps=eps, what=f"{value} among {others}, eps {eps}")
    vector = ones(cols)
    vector[-1] = value
    x = varied((128, cols), torch.bfloat16)
    check(x, vector, what=f"a gain of {value}")
    check(x, ones(cols), vector, what=f"a bias of {value}")


@pytest.mark.cuda
@pytest.mark.skipif(SANITIZED, reason="a sanitizer leaves no room for a profiler")
def test_long_rows_of_a_layer_norm_go_by_clusters() -> None:
    if not has_room():
        pytest.skip("this GPU has no clusters, or too little shared memory for three stages, and makes tiles")
    quantizer = QUANTIZERS["nvfp4_rht"]()
    for cols, by_clusters in ((8192, True), (4608, True), (4096, False), (4224, False)):
        x = varied((128, cols), torch.bfloat16).cuda()
        vectors = [ones(cols).cuda(), torch.zeros(cols).cuda()]
        stats = [torch.empty(128, device="cuda") for _ in range(2)]
        with multiprocessors(4):
            names = kernels_of(lambda x=x, v=vectors, s=stats, q=quantizer: q.quantize_produced(
                NormOutput(x, *v, *s, eps=1e-5), x.shape))  # fmt: skip
        assert any("nvfp4_amax_norm_rows" in name for name in names) == by_clusters, (cols, names)
