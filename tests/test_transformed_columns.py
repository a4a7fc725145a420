"""NVFP4's transformed columns, which matrix units make where their sums are exact (csrc/cuda/nvfp4_transformed.cuh)."""

from __future__ import annotations

import pytest
import torch
from cases import PLANES, QUANTIZERS, check_against_reference
from test_nvfp4_norm_rows import number
from test_producers import matrix
from test_whole_tiles import CODES, nvfp4_under
from torch import Tensor

import te_dist
from te_dist import kernels, reference

pytestmark = pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")


def signed_ones() -> Tensor:
    """The transform's matrix, without the product with 1/4."""
    return (4 * reference.hadamard(torch.eye(16), True)).t().double()


def random_columns(count: int, seed: int) -> Tensor:
    """bf16 values [16, count] of which the smallest are further and further below the largest; some are zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = 1 + torch.randint(0, 128, (16, count), generator=generator) / 128
    x *= 2.0 ** torch.randint(-24, 1, (16, count), generator=generator).clamp(min=-(torch.arange(count) % 25))
    x *= torch.randint(0, 9, (16, count), generator=generator).clamp(max=1)
    return x * (1 - 2 * torch.randint(0, 2, (16, count), generator=generator))


def is_exact(x: Tensor, sums: Tensor, share: float) -> Tensor:
    """As the kernel sees it."""
    amax = sums.abs().amax(0).bfloat16().float()
    least = torch.where(x == 0, torch.inf, x.abs()).amin(0)
    return amax * share < 2.0 ** least.log2().floor()


def cut(x: Tensor) -> Tensor:
    """Behind the 24th bit."""
    rounded = x.float()
    beyond = rounded.double().abs() > x.abs()
    return torch.where(beyond, (rounded.view(torch.int32) - 1).view(torch.float32), rounded).double()


def in_order(x: Tensor, order: Tensor, at_once: int) -> Tensor:
    """The 16 numbers of each column, of some products at once, added and then cut off."""
    signs = signed_ones()
    total = torch.zeros(16, x.shape[1], dtype=torch.float64)
    for places in order.split(at_once):
        total = cut(total + signs[:, places] @ x[places].double())
    return total.float()


@pytest.mark.parametrize("which", ["kOnHopper", "kInAnyOrder"])
def test_sums_that_are_called_exact_are(which: str) -> None:
    (power,) = number("nvfp4_transformed.cuh", rf"{which} = 0x1p(-\d+)f;")
    generator = torch.Generator().manual_seed(1)
    allowed = differ = 0
    for seed in range(24):
        x = random_columns(4000, seed)
        sums = (signed_ones() @ x.double()).float()
        if which == "kOnHopper":
            order, at_once = torch.arange(16), 8 * (1 + seed % 2)
        else:
            order, at_once = torch.randperm(16, generator=generator), 2 ** (seed % 5)
        made = in_order(x, order, at_once)
        groups = x.t() * reference.hadamard_signs(True, x.device)
        same = (reference._butterfly(groups).t() == made).all(0)
        exact, fewer = is_exact(x, sums, 2.0**power), is_exact(x, sums, 2.0 ** (power - 3))
        allowed += int(exact.sum())
        assert same[exact].all()
        differ += int((fewer & ~exact & ~same).sum())
    assert 0.2 < allowed / (24 * 4000) < 0.8
    assert differ > 20  # where values are smaller, some are not


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_sums_of_zero_have_no_sign(backend: str, device: str) -> None:
    """Whatever the signs of zeros, and of what cancels, added in the order of the butterfly they may come to -0."""
    quantizer = te_dist.NVFP4Quantizer(rowwise=False, with_rht=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(256, 256)
    x *= 1 - 2 * torch.randint(0, 2, x.shape, generator=generator)  # all kinds of zeros
    x[:, 128:] = torch.where(torch.rand(256, 128, generator=generator) < 0.2, 1.0, x[:, 128:])
    groups = x.t().reshape(-1, 16) * reference.hadamard_signs(True, x.device)
    sums = reference._butterfly(groups)
    assert ((sums == 0) & sums.signbit()).any()
    with te_dist.use_backend(backend):
        codes = quantizer.quantize(x.bfloat16().to(device))._columnwise_data.cpu()
    both = torch.stack([codes & 15, codes >> 4], -1).view(256, 256)
    assert not (both == 8).any()
    assert ((both == 0) == (sums.view(256, 256) == 0)).all()


def columns_next_to_ties() -> Tensor:
    """Sums that are halfway between two bf16 numbers, but for something that is too small for a fp32 sum."""
    generator = torch.Generator().manual_seed(3)
    x = torch.zeros(256, 512)
    for first in range(0, 256, 16):
        places = torch.rand(16, 512, generator=generator).argsort(0)
        values = torch.zeros(16, 512)
        values[0] = 1 + torch.randint(0, 64, (512,), generator=generator) / 64
        values[1] = torch.randint(-64, 64, (512,), generator=generator) / 64
        values[2] = 2.0**-8
        small = 1 + torch.randint(0, 128, (5, 512), generator=generator) / 128
        signs = 1 - 2 * torch.randint(0, 2, (5, 512), generator=generator)
        values[3:8] = small * signs * 2.0 ** -torch.randint(17, 25, (5, 512), generator=generator)
        x[first : first + 16] = values.gather(0, places)
    return x.bfloat16()


def inputs() -> dict[str, Tensor]:
    """Few and many columns in a warp's 256 blocks that are made by the butterfly, and zeros of all kinds."""
    generator = torch.Generator().manual_seed(0)
    x = matrix(256, 512, torch.bfloat16)
    result = {"next to ties": columns_next_to_ties()}
    for one_in in (100_000, 5000, 1000, 100, 1):
        small = torch.rand(x.shape, generator=generator) < 1 / one_in
        result[f"one in {one_in} is small"] = torch.where(small, x * 2.0**-24, x)
        result[f"one in {one_in} is subnormal"] = torch.where(small, x * 2.0**-130, x * 2.0**-108)
    zero = torch.rand(x.shape, generator=generator) < 0.5
    result["every other zero"] = torch.where(zero, x * 0, x)
    result["positive or zero"] = x.relu()
    result["rows of zeros"] = torch.where(torch.arange(256)[:, None] % 5 < 2, 0 * x, x)
    result["a tile of zeros"] = torch.where(torch.arange(512) < 128, 0.0, x)
    result["ones and zeros of both signs"] = torch.where(zero, 1.0, torch.where(x < 0, -0.0, 0.0)).bfloat16()
    result["an infinity, a NaN"] = x.clone()
    result["an infinity, a NaN"][7, 40], result["an infinity, a NaN"][40, 100] = float("inf"), float("nan")
    return result


@pytest.mark.parametrize("name", ["nvfp4_rht", "nvfp4_stochastic"])
@pytest.mark.parametrize("planes", PLANES)
def test_all_columns_are_the_reference_s(name: str, planes: str, device: str) -> None:
    for label, x in inputs().items():
        check_against_reference(QUANTIZERS[name], x, planes, device, f"{name} {label}")


@pytest.mark.cuda
@pytest.mark.parametrize("codes", [name for name, (hadamard, _, _) in CODES.items() if hadamard])
def test_columns_next_to_ties_under_many_amaxes(codes: str) -> None:
    """Of few amaxes there would be few codes that such a sum decides. tests/test_whole_tiles.py has other inputs."""
    x = columns_next_to_ties()
    for step in range(40):
        amax = 2.0 * 2.0 ** (step / 40)
        with te_dist.use_backend("reference"):
            expected = nvfp4_under(amax, x, codes, "cpu")
        for mine, theirs in zip(nvfp4_under(amax, x, codes, "cuda"), expected, strict=True):
            assert torch.equal(mine, theirs), f"{codes} under {amax}"
