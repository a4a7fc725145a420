"""The amax of transformed columns, where a GPU leaves out columns whose sums of magnitudes are small enough: it has to
be the reference's for matrices that leave those little room."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import QUANTIZERS, assert_same_bytes, assert_same_storage, on
from test_producers import activation, gradient
from torch import Tensor

import te_dist
from te_dist import kernels, reference
from te_dist.formats import HADAMARD_SIGN_MASK
from te_dist.producers import ActivationGradient, ActivationOutput, NormOutput, Plain, Producer

pytestmark = pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")


def signs_of_rows(random_signs: bool) -> Tensor:
    """What each of 16 rows is multiplied with before it is added up, for the first of the transform's results."""
    mask = HADAMARD_SIGN_MASK if random_signs else 0
    return torch.tensor([-1.0 if mask >> i & 1 else 1.0 for i in range(16)])


def aligned_columns(magnitudes: Tensor, random_signs: bool) -> Tensor:
    """Columns whose largest transformed value is a quarter of the sum of their magnitudes, which none exceeds."""
    rows = magnitudes.shape[0]
    return (magnitudes * signs_of_rows(random_signs).repeat(rows // 16)[:, None]).bfloat16()


def norm_of_ones(x: Tensor) -> Producer:
    """A norm that makes `x` of `x`."""
    weight, rstd = (torch.ones(size, device=x.device) for size in reversed(x.shape))
    made = NormOutput(x, weight, None, None, rstd, eps=0.0)
    made.stats_ready = True
    return made


def summed(x: Tensor) -> Producer:
    made = Plain(x)
    made.want_column_sums()
    return made


def gradient_of_ones(x: Tensor) -> Producer:
    """The gradient of a gated activation that makes `x`, twice, of `x`."""
    ones = torch.ones(x.shape[0], 2 * x.shape[1], dtype=x.dtype, device=x.device)
    return ActivationGradient(x, ones, "reglu")


def sums_by_halves(magnitudes: Tensor) -> Tensor:
    """Of columns [16, n] in bf16, rounded four times."""
    while len(magnitudes) > 1:
        magnitudes = magnitudes[0::2] + magnitudes[1::2]
    return magnitudes[0]


def sums_by_rows(magnitudes: Tensor) -> Tensor:
    """Rounded eight times: two threads have eight rows each, one after another."""
    halves = magnitudes.view(2, 8, -1)
    total = torch.zeros_like(halves[:, 0])
    for row in range(8):
        total = total + halves[:, row]
    return total[0] + total[1]


SUMS = {4: sums_by_halves, 8: sums_by_rows}


def is_left_out(column: Tensor, known: Tensor, roundings: int) -> Tensor:
    """The arithmetic of csrc/cuda/nvfp4_amax.cuh's ColumnAmax, of columns [16, n]: whether they are not transformed."""
    source = (Path(__file__).parent.parent / "csrc/cuda/nvfp4_amax.cuh").read_text()
    found = re.search(r"kFour = ([0-9.]+)f - kRoundings / ([0-9.]+)f - ([0-9.]+)f;", source)
    assert found is not None
    four, share, rest = (float(number) for number in found.groups())
    sums = SUMS[roundings](column.bfloat16().abs())
    most = (known.float() * torch.tensor(four - roundings / share - rest)).view(torch.int32) >> 16
    return sums.view(torch.int16).int() <= most.clamp(max=0x7F7F)


@pytest.mark.parametrize("roundings", SUMS)
def test_no_column_is_left_out_that_would_raise_the_amax(roundings: int) -> None:
    """With the next smaller amax known already, which is the closest case."""
    generator = torch.Generator().manual_seed(0)
    rounded_down = torch.full((16, 1), 1.0078125)
    rounded_down[0] = 1.0
    # Each rounding takes 2^-8 of a sum that stays 1: so much is added, on every level of halves or row by row.
    halves = [1, *(2.0**-8 / size for size in (1, 2, 4, 8) for _ in range(size))]
    rows = [1, *7 * [2.0**-8], *8 * [2.0**-11]]
    lost = torch.tensor([halves, rows]).T
    assert SUMS[4](lost[:, :1].bfloat16()).item() == SUMS[8](lost[:, 1:].bfloat16()).item() == 1.0
    for spread in (0.0, 0.01, 1.0, 20.0):
        exponents = torch.randn(16, 200_000, generator=generator) * spread
        magnitudes = torch.cat(
            [(1 + torch.rand(exponents.shape, generator=generator)) * exponents.exp2(), rounded_down, lost], 1
        )
        x = aligned_columns(magnitudes.clamp(2.0**-120, 2.0**120), True)
        signed = x.float() * signs_of_rows(True)[:, None]
        amax = (signed.sum(0) * 0.25).bfloat16()  # of the first result, the largest
        below = (amax.view(torch.int16) - 1).view(torch.bfloat16)
        assert not is_left_out(x, below, roundings).any(), spread
        far_above = amax * (1 + roundings / 64)
        assert is_left_out(x, far_above, roundings).all(), spread  # those that are far below need no transform


def sums_of_neighbours(x: Tensor) -> Tensor:
    """Of columns [16, n] in bf16: the magnitudes of what neighbours add up to, and of what they differ by, added up."""
    first, second = (x.float() * signs_of_rows(True)[:, None]).bfloat16().unflatten(0, (8, 2)).unbind(1)
    return torch.maximum(*(sums_by_halves(both.abs()) for both in (first + second, first - second)))


def transformed(x: Tensor) -> Tensor:
    """The largest of what the transform makes of columns [16, n], before it is divided by four."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix @ (x.double() * signs_of_rows(True)[:, None])).abs().amax(0)


def test_neighbours_bound_the_transform() -> None:
    """But for four roundings. Of columns whose values have much in common, far closer than the sum of magnitudes."""
    generator = torch.Generator().manual_seed(7)
    closest = 0.0
    for spread in (0.0, 0.5, 4.0):
        x = torch.randn(16, 200_000, generator=generator)
        x = ((x.sign() if spread == 0 else x) * 2.0 ** (torch.randn(x.shape, generator=generator) * spread)).bfloat16()
        closest = max(closest, (transformed(x) / sums_of_neighbours(x).double()).max().item())
    assert 1.003 < closest < 1 + 4 / 256, closest
    alike = (torch.randn(16, 200_000, generator=generator) + 1).bfloat16()
    largest = transformed(alike).max() * 0.9
    by_magnitudes, by_neighbours = (
        (sums.double() > largest).double().mean() for sums in (sums_by_halves(alike.abs()), sums_of_neighbours(alike))
    )
    assert by_neighbours < 0.02 * by_magnitudes


MAKERS: dict[str, Callable[[Tensor], Producer]] = {"norm": norm_of_ones, "sums": summed, "pairs": gradient_of_ones}


def check(x: Tensor, maker: str, random_signs: bool, device: str) -> Tensor:
    expected = reference.amax_nvfp4(x, with_rht=True, random_signs=random_signs)
    quantizer = on(device, QUANTIZERS["nvfp4_rht" if random_signs else "nvfp4_rht_plain_signs"]())
    producer = MAKERS[maker](x.to(device))
    storage = quantizer.quantize_produced(producer, producer.shape)
    amaxes = (storage._amax_rowwise, storage._amax_columnwise)
    for mine, theirs, which in zip(amaxes, expected, ("row", "column"), strict=True):
        assert_same_bytes(mine, theirs.reshape(1).to(device), f"{maker} {tuple(x.shape)} {which}")
    return expected[1]


@pytest.mark.parametrize("random_signs", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_columns_that_are_almost_alike(maker: str, random_signs: bool, device: str) -> None:
    """Everywhere columns that could be the largest, and one that is, by less than sums in bf16 can tell."""
    generator = torch.Generator().manual_seed(3)
    for rows, cols in ((512, 1024), (272, 640)):
        magnitudes = torch.rand(rows // 16, cols, generator=generator) * 0.03 + 1
        for place in ((0, 0), (rows // 16 - 1, cols - 1), (9, 77)):
            magnitudes[place] = 1.04
            x = aligned_columns(magnitudes.repeat_interleave(16, 0), random_signs)
            assert float(check(x, maker, random_signs, device)) == 4.15625  # 1.04 as bf16, times 4
            magnitudes[place] = 1.0


@pytest.mark.parametrize("maker", MAKERS)
def test_a_sum_that_is_rounded_down_four_times(maker: str, device: str) -> None:
    """1 + 1.0078125 is 2 in bf16, and so it goes on: 16, where the sum is 16.1. The other columns have 16."""
    magnitudes = torch.ones(2048, 1024)
    magnitudes[-16:, -1] = 1.0078125
    magnitudes[-16, -1] = 1.0
    total = magnitudes[-16:, -1].bfloat16().tolist()
    while len(total) > 1:
        pairs = torch.tensor(total).bfloat16().view(-1, 2)
        total = (pairs[:, 0] + pairs[:, 1]).tolist()
    assert total == [16.0]
    assert float(check(aligned_columns(magnitudes, True), maker, True, device)) == 4.03125


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**127, 2.0**-133])
@pytest.mark.parametrize("maker", MAKERS)
def test_special_values_in_one_column(maker: str, value: float, device: str) -> None:
    """2^127, sixteen times, is more than bf16 and fp32 hold; 2^-133 is the smallest number of all."""
    for others in (0.0, 1.0, 2.0**125):
        magnitudes = torch.full((512, 256), others)
        magnitudes[-16:, 100] = value
        check(aligned_columns(magnitudes, True), maker, True, device)
        one = torch.full((512, 256), others).bfloat16()
        one[200, 100] = value
        check(one, maker, True, device)


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e30])
def test_many_normal_values(scale: float) -> None:
    """Most columns are left out here."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = (torch.randn(4096, 2048, generator=generator, device="cuda") * scale).bfloat16()
    producers = [
        norm_of_ones(x),
        summed(x),
        activation(x, "silu", False),
        activation(x, "relu", False),
        activation(torch.cat([x, x.flip(0)], 1), "swiglu", False),
        gradient(x, "gelu", False),
        gradient(torch.cat([x, x.flip(0)], 1), "swiglu", False),
    ]
    for producer in producers:
        storage = on("cuda", QUANTIZERS["nvfp4_rht"](rowwise=False)).quantize_produced(producer, producer.shape)
        expected = [torch.empty(1, device="cuda") for _ in range(2)]
        kernels.amax_nvfp4(kernels.materialize(producer), *expected, with_rht=True, random_signs=True)
        assert_same_bytes(storage._amax_columnwise, expected[1], type(producer).__name__)


# ---------------------------------------------------------------------------------------------- activations
SMOOTH = ("silu", "gelu", "qgelu")
ALL = (*SMOOTH, "relu", "srelu")


def all_values() -> Tensor:
    """Every finite bf16 value."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    return values[values.isfinite()]


def made(x: Tensor, name: str) -> Tensor:
    with te_dist.use_backend("reference"):
        return kernels.materialize(activation(x.reshape(1, -1), name, False))[0]


ACTIVATIONS = (Path(__file__).parent.parent / "csrc/cuda/nvfp4_find_activation.cuh").read_text()


def constants(symbol: str, pattern: str, name: str) -> str:
    """ActivationBound has one for SiLU, and one for the others."""
    found = re.findall(pattern, re.search(rf" {symbol} = (.*);", ACTIVATIONS)[1])  # type: ignore[index]
    return found[0 if name == "silu" else -1]


def parabola(x: Tensor, name: str, which: str = "") -> Tensor:
    """The arithmetic of csrc/cuda/nvfp4_find_activation.cuh's Parabola. Products and sums are exact in fp64."""

    def constant(symbol: str) -> Tensor:
        bits = int(constants(f"k{which}{symbol}", "0x[0-9A-F]{4}", name), 16)
        return torch.tensor(bits - (bits >> 15 << 16), dtype=torch.int16).view(torch.bfloat16).double()

    def rounded(value: Tensor) -> Tensor:
        return value.bfloat16().double()

    wide = x.double()
    of_two = rounded(wide * rounded(wide * constant("Q") + constant("P")))
    return torch.maximum(torch.minimum(wide, of_two), constant("Trough"))


def bound_of(x: Tensor, name: str) -> Tensor:
    return torch.where(x > -torch.inf, parabola(x, name).abs(), torch.inf)


def off(name: str) -> float:
    return float(constants("kOff", r"[0-9]+\.[0-9]+", name)) if name in SMOOTH else 0.0


def near(x: Tensor, name: str) -> Tensor:
    return parabola(x, name, "Near").bfloat16() if name in SMOOTH else made(x.flatten(), name).view(x.shape)


@pytest.mark.parametrize("name", SMOOTH)
def test_no_activation_is_larger_than_its_bound(name: str) -> None:
    x = all_values()
    largest = made(x, name).double().abs()
    bound = bound_of(x, name)
    assert (largest <= bound).all(), x[largest > bound]
    usual = (x.abs() > 0.25) & (x.abs() < 8)
    assert (bound[usual & (x > 0)] < 1.2 * largest[usual & (x > 0)]).all()  # or columns would not be left out


@pytest.mark.parametrize("name", ALL)
def test_no_activation_is_far_from_what_is_near(name: str) -> None:
    x = all_values()
    x = x[x.abs() < 2.0**60]  # lower ones may be made nothing, or no numbers; larger ones are squared to infinities
    apart = (made(x, name).double() - near(x, name).double()).abs()
    assert apart.max() <= off(name), x[apart > off(name)]
    assert apart.max() >= 0.99 * off(name)


@pytest.mark.parametrize("name", ALL)
def test_no_column_behind_a_bias_is_left_out_that_would_raise_the_amax(name: str) -> None:
    """With the next smaller amax known already, which is the closest case."""
    generator = torch.Generator().manual_seed(0)
    signs = signs_of_rows(True)[:, None]
    (far_above,) = re.findall(r"kFarAbove = ([0-9.]+)f;", ACTIVATIONS)
    least = float(far_above) * off(name)  # that has to be known
    slack = 16 * off(name)

    def is_left_out(x: Tensor, known: Tensor) -> Tensor:
        most = known.float() * torch.tensor(4 - 4 / 64 - 0.0075) - slack
        sums = sums_of_neighbours(near(x, name)).view(torch.int16).int()
        return (known > least) & (most > 0) & (sums <= most.view(torch.int32) >> 16)

    tried = 0
    for bias in (0.0, 1.0, 6.0):
        for spread in (1.0, 3.0, 30.0):
            x = torch.randn(16, 100_000, generator=generator) * spread
            x[:, ::2] = x[:, ::2].abs() * signs  # what is made has the signs that add up, where it is not nothing
            x = (x + bias).bfloat16()
            amax = (transformed(made(x.flatten(), name).view(x.shape)).float() * 0.25).bfloat16()
            known = torch.where(amax > 0, (amax.view(torch.int16) - 1).view(torch.bfloat16), amax)
            tried += int((known > least).sum())
            assert not is_left_out(x, known).any(), (bias, spread)
            if bias == spread == 1:
                assert is_left_out(x[:, 1::2], known[1::2].max()).float().mean() > 0.99
    assert tried > 500_000


@pytest.mark.cuda
@pytest.mark.parametrize("name", ALL)
def test_activations_behind_biases(name: str) -> None:
    """Columns that are left out by what neighbours differ by, and those that are close to it."""
    generator = torch.Generator().manual_seed(13)
    signs = signs_of_rows(True).repeat(16)[:, None]
    quantizer = on("cuda", QUANTIZERS["nvfp4_rht"]())
    for most in (0.0, 1.0, 5.0, 100.0):
        bias = (torch.randn(384, generator=generator) * most).bfloat16()
        x = torch.randn(256, 384, generator=generator)
        aligned = x.abs() * signs * 4
        few = x.clone()
        few[48:64, 77] = 3 * signs[:16, 0] + 3
        for operand in (x, x * 5, aligned, few, torch.where(x > 2.5, torch.inf, x), torch.where(x < -2.5, -100.0, x)):
            operand = operand.bfloat16()
            with te_dist.use_backend("reference"):
                y = kernels.materialize(ActivationOutput(operand, name, bias))
            expected = reference.amax_nvfp4(y, with_rht=True, random_signs=True)
            producer = ActivationOutput(operand.cuda(), name, bias.cuda())
            storage = quantizer.quantize_produced(producer, producer.shape)
            for mine, theirs in zip((storage._amax_rowwise, storage._amax_columnwise), expected, strict=True):
                assert_same_bytes(mine, theirs.reshape(1).cuda(), f"biases up to {most}")


@pytest.mark.parametrize("name", ["gelu", "silu", "relu"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_columns_of_few_or_many_lanes(name: str, bias: bool, device: str) -> None:
    """Where all else is zero, those lanes alone have columns to transform that have others, four of them each."""
    generator = torch.Generator().manual_seed(11)
    zeros = torch.zeros(128, dtype=torch.bfloat16, device=device) if bias else None
    for lanes in (1, 2, 7, 8, 9, 32):
        x = torch.zeros(16, 32, 4, dtype=torch.bfloat16)
        chosen = torch.randperm(32, generator=generator)[:lanes]
        x[:, chosen] = torch.randn(16, lanes, 4, generator=generator).bfloat16()
        for column in range(4):  # the largest is in each of them once
            x[:, chosen[0]] = x[:, chosen[0]].roll(1, -1)
            x[3, chosen[0], column] = 9.0
            operand = torch.zeros(128, 128, dtype=torch.bfloat16)
            operand[32:48] = x.view(16, 128)
            x[3, chosen[0], column] = 0.5
            with te_dist.use_backend("reference"):
                made = kernels.materialize(ActivationOutput(operand, name))
            expected = reference.amax_nvfp4(made, with_rht=True, random_signs=True)
            quantizer = on(device, QUANTIZERS["nvfp4_rht"]())
            storage = quantizer.quantize_produced(ActivationOutput(operand.to(device), name, zeros), (128, 128))
            for mine, theirs in zip((storage._amax_rowwise, storage._amax_columnwise), expected, strict=True):
                assert_same_bytes(mine, theirs.reshape(1).to(device), f"{lanes} lanes, column {column}")


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.skipif("TE_DIST_TEST_SHARE" in os.environ, reason="thousands of small launches, under a tool")
@pytest.mark.parametrize("name", ALL)
def test_activations_of_all_values(name: str) -> None:
    """An activation that is made for NVFP4's columns, value by value: alone in its matrix, a quarter of it is the amax
    of the transformed columns."""
    x = all_values()
    x = x[(x.abs() >= 2.0**-12) & (x.abs() < 2.0**7)]
    expected = (made(x, name).float().abs() * 0.25).bfloat16().float()
    quantizer = on("cuda", QUANTIZERS["nvfp4_rht"](rowwise=False))
    matrix = torch.zeros(128, 128, dtype=torch.bfloat16, device="cuda")
    found = []
    for i, value in enumerate(x.cuda()):
        matrix[5, i % 128] = value
        found.append(quantizer.quantize_produced(activation(matrix, name, False), (128, 128))._amax_columnwise)
        matrix[5, i % 128] = 0.0
    assert_same_bytes(torch.cat(found), expected.cuda(), name)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), -(2.0**127), -(2.0**110), -100.0, 2.0**-133]
)
@pytest.mark.parametrize("name", ALL)
def test_special_operands_of_activations(name: str, value: float, device: str) -> None:
    """Of minus infinity activations with a sigmoid are NaN; of what is next to it they are 0."""
    quantizer = on(device, QUANTIZERS["nvfp4_rht"]())
    generator = torch.Generator().manual_seed(7)
    for others in (0.0, -1.0, 1.0):
        x = (torch.randn(256, 384, generator=generator) * abs(others) + others).bfloat16()
        for where in (slice(200, 201), slice(32, 48)):
            special = x.clone()
            special[where, 100] = value
            producer = activation(special.to(device), name, False)
            with te_dist.use_backend("reference"):
                expected = on(device, QUANTIZERS["nvfp4_rht"]()).quantize(
                    kernels.materialize(activation(special.to(device), name, False))
                )
            assert_same_storage(quantizer.quantize_produced(producer, producer.shape), expected, f"{others} {where}")
