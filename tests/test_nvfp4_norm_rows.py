"""NVFP4's amaxes of an RMSNorm's long rows, which clusters of blocks find without making most of the matrix
(csrc/cuda/nvfp4_amax_norm_rows.cu): those of the CPU's kernels, for matrices that leave the bounds little room."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import QUANTIZERS, assert_equal_with_nan, assert_same_bytes, assert_same_storage, varied
from test_blocks_that_stay import multiprocessors
from test_cuda_streams import kernels_of
from test_nvfp4_column_amax import aligned_columns, signs_of_rows
from torch import Tensor

from te_dist import kernels
from te_dist.producers import NormOutput

pytestmark = pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")
# To a sum of four rows each, half of its last place is added, and as much to the sum of these: all of that is lost.
LOST = (torch.tensor([1.0, *3 * [2.0**-8]])[:, None] * torch.tensor([1.0, 2.0**-8, 2.0**-9, 2.0**-9])).reshape(16, 1)
SOURCES = Path(__file__).parent.parent / "csrc/cuda"
SANITIZED = "TE_DIST_TEST_SHARE" in os.environ  # under racecheck, a matrix takes seconds: fewer of the same kind


# ---------------------------------------------------------------------------------------------- bounds
def number(file: str, pattern: str) -> tuple[float, ...]:
    found = re.search(pattern, (SOURCES / file).read_text())
    assert found is not None, pattern
    return tuple(float(of) for of in found.groups())


def rounded_up(x: Tensor) -> Tensor:
    """The first bf16 number from a magnitude on."""
    return ((x.abs().view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def bounds(x: Tensor, rstd: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Of columns x [16, n]: of the sum of what is made, and of its largest, as the kernel finds them. Columns have
    rstds of their own, so that many are tried."""
    made = x.abs() * rounded_up(rstd)
    sums = made[0:4]
    for four in range(4, 16, 4):
        sums = sums + made[four : four + 4]
    sum = (sums[0] + sums[1]) + (sums[2] + sums[3])
    return sum * rounded_up(gain), made.amax(0) * rounded_up(gain)


def is_left_out(bound: Tensor, known: Tensor, share: float) -> Tensor:
    most = (known.float() * torch.tensor(share)).view(torch.int32) >> 16
    return bound.view(torch.int16).int() <= most.clamp(max=0x7F7F)


def shares() -> tuple[float, float]:
    """What a bound has to be above, of a known amax: that of sums, and that of values."""
    (of_values,) = number("nvfp4_amax_norm_rows.cu", r"kOfValues = (\d+);")
    (more,) = number("nvfp4_amax_norm_rows.cu", r"kOfSums = kOfValues \+ (\d+);")
    (steps,) = number("nvfp4_amax_norm_rows.cu", r"kShare = 1\.0f - kOfValues / ([0-9.]+)f;")
    four, share, rest = number("nvfp4_amax.cuh", r"kFour = ([0-9.]+)f - kRoundings / ([0-9.]+)f - ([0-9.]+)f;")
    return four - (of_values + more) / share - rest, 1 - of_values / steps


def next_below(x: Tensor) -> Tensor:
    return (x.view(torch.int16) - 1).view(torch.bfloat16)


def test_no_column_is_left_out_that_would_raise_an_amax() -> None:
    """With the next smaller amax known already, which is the closest case."""
    of_sums, of_largest = shares()
    generator = torch.Generator().manual_seed(0)

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + torch.rand(shape, generator=generator) * (high - low)

    closest = {"sum": 0.0, "largest": 0.0}
    for pattern in (*(2.0 ** (torch.randn(16, 1, generator=generator) * spread) for spread in (0, 1, 20)), LOST):
        parts = between(0.8, 1.0, 16, 200_000)
        parts[0] = between(1.0, 2.0, 200_000)
        x = aligned_columns((pattern * parts).clamp(2.0**-60, 2.0**60), True)
        for scale in (1.0, 2.0**-30, 2.0**30):
            rstd = between(1.0, 2.0, 1, x.shape[1]) * scale
            gain = between(1.0, 2.0, x.shape[1])
            made = (x.float() * rstd * gain).bfloat16()
            of_columns = ((made.float() * signs_of_rows(True)[:, None]).sum(0) * 0.25).bfloat16()
            of_rows = made.abs().amax(0)
            sums, largest = bounds(x, rstd, gain)
            assert not is_left_out(sums, next_below(of_columns), of_sums).any(), scale
            assert not is_left_out(largest, next_below(of_rows), of_largest).any(), scale
            # Those that are far below are not made.
            assert is_left_out(sums, of_columns * 1.2, of_sums).all(), scale
            assert is_left_out(largest, of_rows * 1.1, of_largest).all(), scale
            closest["sum"] = max(closest["sum"], (of_columns.float() * 4 / sums.float()).max().item())
            closest["largest"] = max(closest["largest"], (of_rows.float() / largest.float()).max().item())
    assert closest["sum"] > 1.025 and closest["largest"] > 1.0075  # the allowances are needed


def test_no_small_product_is_left_out_that_would_raise_an_amax() -> None:
    """Of what is too small for bf16, products are no bounds. Within the kernel's limits, that does not matter."""
    (most_gain,) = number("nvfp4_amax_norm_rows.cu", r"kMostGain = 0x1p(\d+)f;")
    (least_amax,) = number("nvfp4_amax_norm_rows.cu", r"kLeastAmax = 0x1p(-\d+)f;")
    of_sums, of_largest = shares()
    generator = torch.Generator().manual_seed(1)
    met = 0
    for limited in (True, False):
        exponents = torch.randint(-136, -119, (16, 100_000), generator=generator).float()
        x = aligned_columns((1 + torch.rand(exponents.shape, generator=generator)) * exponents.exp2(), True)
        gain = 2.0 ** torch.randint(10, int(most_gain) + 1 if limited else 60, (100_000,), generator=generator).float()
        rstd = 1 + torch.rand(1, 100_000, generator=generator) / 100 if limited else torch.full((1, 100_000), 0.25)
        made = (x.float() * rstd * gain).bfloat16()
        of_columns = ((made.float() * signs_of_rows(True)[:, None]).sum(0) * 0.25).bfloat16()
        sums, largest = bounds(x, rstd, gain)
        left = is_left_out(sums, next_below(of_columns), of_sums)
        left |= is_left_out(largest, next_below(made.abs().amax(0)), of_largest)
        if limited:
            large = of_columns.float() >= 2.0**least_amax
            met = int(large.sum())
            assert not (left & large).any()
        else:
            assert left.any()  # the limits are needed
    assert met > 1000


# ---------------------------------------------------------------------------------------------- kernel
PLANES = {"both": {}, "column": {"rowwise": False}}


def assert_cpu_finds_the_same(
    make: Callable[[Tensor, Callable[[Tensor], Tensor]], NormOutput], x: Tensor, planes: str, what: str
) -> None:
    """Statistics, amaxes and codes. make(x, on): the norm; on(vector): one of its vectors, where x is."""
    quantizer = QUANTIZERS["nvfp4_rht"](**PLANES[planes])
    expected = make(x, lambda vector: vector)
    storage = quantizer.quantize_produced(expected, x.shape)
    on_gpu = x.new_empty(0, device="cuda").set_(x.untyped_storage().cuda(), x.storage_offset(), x.shape, x.stride())
    for most in (12,) if SANITIZED else (1, 12):  # multiprocessors that work is laid out for
        with multiprocessors(most):
            actual = make(on_gpu, Tensor.cuda)
            mine = quantizer.quantize_produced(actual, x.shape)
        assert_equal_with_nan(actual.rstd.cpu(), expected.rstd, f"{what} rstd on {most}")
        if expected.mean is not None and actual.mean is not None:
            assert_equal_with_nan(actual.mean.cpu(), expected.mean, f"{what} mean on {most}")
        assert mine.inner_names() == storage.inner_names()
        for name in storage.inner_names():
            same = assert_equal_with_nan if "amax" in name else assert_same_bytes
            same(getattr(mine, name).cpu(), getattr(storage, name), f"{what} {name} on {most}")


def norm(x: Tensor, gain: Tensor, eps: float, zero_centered: bool = False) -> NormOutput:
    rstd = torch.empty(x.shape[0], device=x.device)
    return NormOutput(x, gain, None, None, rstd, eps=eps, zero_centered=zero_centered)


def check(
    x: Tensor, gain: Tensor, eps: float = 1e-5, *, planes: str = "both", zero_centered: bool = False, what: str = ""
) -> None:
    """On as few multiprocessors as one cluster needs, so that few rows are enough, and some more."""
    assert_cpu_finds_the_same(lambda x, on: norm(x, on(gain), eps, zero_centered), x, planes, what)


def ones(cols: int) -> Tensor:
    return torch.ones(cols)


def has_room() -> bool:
    """Whether GPUs take this kernel: Hopper's clusters, and shared memory for three stages."""
    properties = torch.cuda.get_device_properties(0)
    return properties.major >= 9 and properties.shared_memory_per_block_optin >= 110 * 1024


@pytest.mark.cuda
@pytest.mark.skipif(SANITIZED, reason="a sanitizer leaves no room for a profiler")
def test_it_is_this_kernel() -> None:
    if not has_room():
        pytest.skip("this GPU has no clusters, or too little shared memory for three stages, and makes tiles")
    for planes in PLANES.values():
        quantizer = QUANTIZERS["nvfp4_rht"](**planes)
        for cols, here in ((8192, True), (4608, True), (4096, False), (4224, False)):
            x = varied((128, cols), torch.bfloat16).cuda()
            gain = ones(cols).cuda()
            with multiprocessors(4):
                names = kernels_of(
                    lambda x=x, gain=gain, q=quantizer: q.quantize_produced(norm(x, gain, 1e-5), x.shape)
                )
            assert any("nvfp4_amax_norm" in name for name in names), names
            assert any("nvfp4_amax_norm_rows" in name for name in names) == here, (cols, names)


@pytest.mark.cuda
@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_kinds_of_gains_and_rows(dtype: torch.dtype, planes: str) -> None:
    """Rows may be a part of longer ones."""
    for zero_centered in (False, True):
        for cols in (4608,) if SANITIZED else (8192, 7168, 4608):
            wide = varied((256, cols + 136), torch.bfloat16)
            gain = varied((1, cols), dtype, 1)[0]
            for x in (wide[:, :cols].contiguous(), wide[:, 8 : cols + 8]):
                check(x, gain, planes=planes, zero_centered=zero_centered, what=f"{cols} {x.stride()}")


@pytest.mark.cuda
def test_in_a_graph() -> None:
    """Sums and statistics start anew at each replay."""
    quantizer = QUANTIZERS["nvfp4_rht"]()
    gain = varied((1, 5120), torch.bfloat16, 1)[0].cuda()
    with multiprocessors(4):
        captured = norm(varied((256, 5120), torch.bfloat16).cuda(), gain, 1e-5)
        quantizer.quantize_produced(captured, captured.shape)
        graph = torch.cuda.CUDAGraph()
        captured.stats_ready = False
        with torch.cuda.graph(graph):
            out = quantizer.quantize_produced(captured, captured.shape)
        for seed in (1, 2):
            again = norm(varied((256, 5120), torch.bfloat16, seed).cuda(), gain, 1e-5)
            captured.x.copy_(again.x)
            graph.replay()
            assert_same_storage(out, quantizer.quantize_produced(again, again.shape), str(seed))
            assert_same_bytes(captured.rstd, again.rstd, str(seed))


@pytest.mark.cuda
@pytest.mark.parametrize("cols", [8192, 7168, 4608])
def test_columns_that_are_almost_alike(cols: int) -> None:
    """Everywhere columns that could be the largest, and one that is, by less than sums in bf16 can tell."""
    generator = torch.Generator().manual_seed(3)
    magnitudes = torch.rand(16, cols, generator=generator) * 0.03 + 1
    for place in ((0, 0), (15, cols - 1), (9, 777)):
        magnitudes[place] = 1.04
        check(aligned_columns(magnitudes.repeat_interleave(16, 0), True), ones(cols), what=str(place))
        magnitudes[place] = 1.0


@pytest.mark.cuda
def test_a_column_whose_bound_lost_most() -> None:
    """Behind rows with the amax below its own; all other columns are far below, and are left out. Rows have the same
    mean of squares, a power of 4, or what is lost would be another share of each."""
    generator = torch.Generator().manual_seed(6)
    for scale in (1.0, 2.0**20, 2.0**-20):
        magnitudes = torch.rand(256, 4608, generator=generator)
        below = torch.tensor([1, 2.0**-6, *14 * [0.0]])
        for first, column in ((32, below), (240, LOST[:, 0])):
            rows = magnitudes[first : first + 16]
            rows.zero_()
            rows[:, 1000] = 4 * column
            for row, others in enumerate([1, *15 * [3]]):  # 16 + 1 + 1 is 9 + 9, and 18 is 4608 times 2^-8
                rows[row, 2000 + 2 * row : 2002 + 2 * row] = others
        x = aligned_columns(magnitudes * scale, True)
        check(x, ones(4608), 0.0, planes="column", what=f"{scale}")  # for rows, the column would be made anyway
        expected = norm(x, ones(4608), 0.0)
        amax = QUANTIZERS["nvfp4_rht"]().quantize_produced(expected, x.shape)._amax_columnwise
        assert (expected.rstd[240] * scale, amax) == (16, 16.375)  # 16.25 of the rows before


@pytest.mark.cuda
def test_the_largest_of_few_and_of_many_lanes() -> None:
    """One column of a warp may raise what is known, or all may, by their values or by their sums."""
    generator = torch.Generator().manual_seed(4)
    for count in (1, 7, 40, 4608):
        x = torch.randn(128, 4608, generator=generator) * 0.1
        where = torch.randperm(4608, generator=generator)[:count]
        x[100, where] = 3 + torch.rand(count, generator=generator)
        check(x.bfloat16(), ones(4608), what=f"values of {count}")
        x[64:80, where] = torch.rand(16, count, generator=generator) + 2
        check(aligned_columns(x.abs(), True), ones(4608), what=f"sums of {count}")


@pytest.mark.cuda
def test_rows_and_gains_of_all_sizes() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(256, 5120, generator=generator)
    sizes = torch.randint(-30, 30, (256, 1), generator=generator).float().exp2()
    check((x * sizes).bfloat16(), ones(5120), what="rows")
    check((x * sizes).bfloat16(), ones(5120), 0.0, what="rows without eps")
    for most in (4, 40, 120):
        gain = torch.randint(-most, most, (5120,), generator=generator).float().exp2()
        gain *= torch.randn(5120, generator=generator)
        check(x.bfloat16(), gain, what=f"gains up to 2^{most}")
    check(x.bfloat16(), torch.zeros(5120), what="no gains")
    # Amaxes that are too small for bounds in bf16.
    for exponent in (-120, -132, -140):
        check(x.bfloat16(), ones(5120) * 2.0**exponent, what=f"gains of 2^{exponent}")
    # The smallest number of all, in a long row: its bound is nothing, but for the gain it would be the largest.
    small, gain = x * 4, ones(5120) * 2.0**-90
    small[:, 300] = 0.0
    small[200, 300] = 2.0**-133
    gain[300] = 2.0**100
    check(small.bfloat16(), gain, what="a large gain of a small value")


@pytest.mark.cuda
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**127, 2.0**-133, 0.0])
def test_special_values(value: float) -> None:
    """2^127, squared, is more than fp32 holds; 2^-133 is the smallest number of all."""
    for others in (0.0, 1.0, 2.0**-133):
        for eps in (0.0, 1e-5):
            x = torch.full((128, 4608), others).bfloat16()
            x[77, 4000] = value
            check(x, ones(4608), eps, what=f"{value} among {others}, eps {eps}")
    gain = ones(4608)
    gain[-1] = value
    check(varied((128, 4608), torch.bfloat16), gain, what=f"a gain of {value}")
