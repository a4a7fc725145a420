"""Options against independent expectations: a dropped option is wrong in kernel and reference alike.

Floors: a value rounded to m mantissa bits has a relative error of at most 2**-(m+1); uniform over that, SQNR is about
6.02 m + 10.8 + 3 dB for values well inside the range: E4M3 29 to 32 dB on Gaussian data, E5M2 23 to 26, E2M1 (one bit,
and subnormals) 17 to 21. A wrong scale, sign mask or plane costs tens of dB.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import PLANES, QUANTIZERS, rng_for

import te_dist
from te_dist import reference

FLOOR_DB = {"e5m2": 23.0, "e4m3": 29.0, "nvfp4": 17.0, "nvfp4_stochastic": 14.0}


def sqnr_db(x: torch.Tensor, y: torch.Tensor) -> float:
    noise = (x.double() - y.double()).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(x.double().square().sum().item() / noise)


def floor_of(name: str) -> float:
    if name == "nvfp4_stochastic":
        return FLOOR_DB[name]
    if name.startswith("nvfp4"):
        return FLOOR_DB["nvfp4"]
    return FLOOR_DB["e5m2" if "e5m2" in name else "e4m3"]


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_dequantized_is_close_to_the_input(name: str, planes: str, device: str) -> None:
    rowwise, columnwise = PLANES[planes]
    quantizer = QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise)
    if isinstance(quantizer, te_dist.Float8Quantizer):
        quantizer = quantizer.replace(scale=torch.full((1,), 64.0, device=device), amax=torch.zeros(1, device=device))
    x = torch.randn(256, 320, generator=torch.Generator().manual_seed(0)).to(device)
    y = quantizer.quantize(x, rng_state=rng_for(quantizer, device)).dequantize()
    assert sqnr_db(x, y) > floor_of(name)


@pytest.mark.parametrize("random_signs", [False, True])
@pytest.mark.parametrize("with_rht", [False, True])
def test_column_plane_is_the_transformed_transpose(with_rht: bool, random_signs: bool, device: str) -> None:
    """Against a matrix product with rht_matrix, on integers, where every summation order is exact."""
    quantizer = te_dist.NVFP4Quantizer(rowwise=False, with_rht=with_rht, with_random_sign_mask=random_signs)
    x = torch.randint(-8, 9, (64, 48), generator=torch.Generator().manual_seed(1)).float()
    turned = x.t().contiguous()
    if with_rht:
        turned = (turned.view(-1, 16) @ quantizer.rht_matrix.float()).view(turned.shape)
        turned = turned.to(torch.bfloat16).float()
    expected = te_dist.NVFP4Quantizer(columnwise=False).quantize(turned)
    storage = quantizer.quantize(x.to(device))
    assert torch.equal(storage._columnwise_data.cpu(), expected._rowwise_data)
    assert torch.equal(storage._columnwise_scale_inv.cpu(), expected._rowwise_scale_inv)
    assert torch.equal(storage._amax_columnwise.cpu(), expected._amax_rowwise)


def test_the_sign_mask_changes_the_bytes() -> None:
    x = torch.randn(64, 48)
    made = [
        te_dist.NVFP4Quantizer(rowwise=False, with_rht=rht, with_random_sign_mask=signs).quantize(x)._columnwise_data
        for rht, signs in ((False, True), (True, False), (True, True))
    ]
    assert not any(torch.equal(a, b) for i, a in enumerate(made) for b in made[i + 1 :])


def test_stochastic_rounding_is_unbiased_and_follows_its_seed(device: str) -> None:
    quantizer = te_dist.NVFP4Quantizer(columnwise=False, stochastic_rounding=True)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).to(device)

    def draw(seed: int, offset: int = 0) -> torch.Tensor:
        state = torch.tensor([seed, offset], device=device)
        return quantizer.quantize(x, rng_state=state).dequantize()

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2)) and not torch.equal(draw(1), draw(1, 1))
    nearest = te_dist.NVFP4Quantizer(columnwise=False).quantize(x).dequantize()
    mean = torch.stack([draw(seed) for seed in range(400)]).mean(0)
    # 400 draws shrink the noise by 20 (26 dB); rounding to nearest keeps its bias however often it is repeated.
    assert sqnr_db(x, mean) > sqnr_db(x, nearest) + 15


def test_stochastic_rounding_without_a_state_follows_torchs_generator() -> None:
    quantizer = te_dist.NVFP4Quantizer(columnwise=False, stochastic_rounding=True)
    x = torch.randn(64, 64)
    torch.manual_seed(7)
    first, second = quantizer.quantize(x).dequantize(), quantizer.quantize(x).dequantize()
    torch.manual_seed(7)
    again = quantizer.quantize(x).dequantize()
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_philox_is_the_published_one() -> None:
    """Known answer of Random123's Philox4x32-10: counter and key of all ones, and of all zeros."""
    ones = torch.tensor([0xFFFFFFFF])
    words = reference.philox(torch.tensor([-1, -1]), ones, ones)
    assert words.tolist() == [[0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]]
    words = reference.philox(torch.tensor([0, 0]), torch.tensor([0]), torch.tensor([0]))
    assert words.tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]


@pytest.mark.parametrize("dim", [1, 2])
def test_epsilon_bounds_block_scales(dim: int, device: str) -> None:
    x = torch.full((128, 256), 1e-4, device=device)
    x[:, 128:] = 2.0
    storage = te_dist.Float8BlockQuantizer(
        "e4m3", block_scaling_dim=dim, amax_epsilon=0.5, force_pow_2_scales=False
    ).quantize(x)
    scales = storage._rowwise_scale_inv[:1, :2][0] if dim == 2 else storage._rowwise_scale_inv[:, 0]
    expected = 1 / (torch.tensor([448.0, 448.0]) / torch.tensor([0.5, 2.0]))
    assert torch.equal(scales.cpu(), expected)


def test_epsilon_bounds_the_tensor_scale(device: str) -> None:
    quantizer = te_dist.Float8CurrentScalingQuantizer("e4m3", amax_epsilon=0.5)
    storage = quantizer.quantize(torch.full((16, 16), 1e-4, device=device))
    assert storage._scale_inv.item() == (1 / (torch.tensor(448.0) / torch.tensor(0.5))).item()
