"""Delayed scaling's update rule, and the recording quantizer."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES, PLANES, assert_equal_with_nan, varied

import te_dist
from te_dist import kernels
from te_dist.delayed_scaling import advance, largest_of, update_scale
from te_dist.formats import DType
from te_dist.producers import ActivationGradient, ActivationOutput, NormOutput, Plain

FLOAT_MAX = torch.finfo(torch.float32).max


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_update(algo: str, margin: int) -> None:
    history = torch.tensor([[2.0, 0.0, math.inf, math.nan, 1e-44], [8.0, 0.0, 1.0, 1.0, 0.0]])
    scale = torch.full((5,), 5.0)
    update_scale(history, scale, "e4m3", margin=margin, amax_compute_algo=algo)
    amax = 8.0 if algo == "max" else 2.0
    expected = torch.tensor([448.0 / amax / 2**margin, 5.0, 5.0, 5.0, FLOAT_MAX])
    assert torch.equal(scale, expected)
    assert torch.equal(history[0], torch.zeros(5))
    # Rolled by -1, and then the row that quantizers record into is cleared.
    assert history[1, 0] == 2.0


def test_a_training_like_sequence() -> None:
    """Record, update, quantize: the scale follows the largest amax of the last three steps."""
    history, scale = torch.zeros(3, 1), torch.ones(1)
    quantizer = te_dist.Float8Quantizer(scale, history[0], "e4m3")
    seen = []
    for step, magnitude in enumerate([1.0, 4.0, 2.0, 2.0, 2.0, 2.0]):
        quantizer.quantize(torch.full((4, 4), magnitude))
        update_scale(history, scale, "e4m3")
        seen.append(magnitude)
        assert scale.item() == 448.0 / max(seen[-3:]), step


def test_microbatches_record_their_maximum() -> None:
    quantizer = te_dist.Float8Quantizer(torch.ones(1), torch.zeros(1), "e5m2")
    for magnitude in (1.0, 3.0, 2.0):
        quantizer.quantize(torch.full((2, 2), magnitude))
    assert quantizer.amax.item() == 3.0
    quantizer.quantize(torch.full((2, 2), math.nan))
    assert quantizer.amax.isnan().item()


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="amax_history"):
        update_scale(torch.zeros(3), torch.ones(1), "e4m3")
    with pytest.raises(TypeError, match="scale in float32"):
        update_scale(torch.zeros(3, 1), torch.ones(1).double(), "e4m3")
    with pytest.raises(ValueError, match="amax_compute_algo"):
        update_scale(torch.zeros(3, 1), torch.ones(1), "e4m3", amax_compute_algo="mean")


@pytest.mark.parametrize("length", [1, 2, 16, 255, 256, 257, 1024])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_the_step_equals_the_reference(device: str, length: int, algorithm: str) -> None:
    """Scales of two formats at once, amaxes that are zero, infinite, NaN and tiny among them."""
    generator = torch.Generator().manual_seed(length)
    history = torch.rand(length, 8, generator=generator) * torch.exp2(torch.arange(-3.0, 5.0))
    history[:, 1] = 0
    history[0, 2], history[-1, 3], history[0, 4] = float("inf"), float("nan"), 1e-44
    formats = [DType.kFloat8E4M3] * 5 + [DType.kFloat8E5M2] * 3
    scales, largest = torch.rand(8, generator=generator), largest_of(formats)
    for margin in (0, 2, -1):
        expected = [t.clone() for t in (history, scales, largest)]
        actual = [t.to(device, copy=True) for t in expected]
        with te_dist.use_backend("reference"):
            advance(*expected, margin, algorithm)
        advance(*actual, margin, algorithm)
        for name, a, e in zip(("history", "scales"), actual, expected, strict=False):
            assert_equal_with_nan(a.cpu(), e, f"{name} margin {margin}")


PRODUCERS = {
    "plain": lambda x: Plain(x),
    "norm": lambda x: NormOutput(x, torch.ones_like(x[0]), None, None, torch.empty(len(x), device=x.device), eps=1e-5),
    "swiglu": lambda x: ActivationOutput(x, "swiglu"),
    "dgelu": lambda x: ActivationGradient(x.flip(0), x, "gelu"),
    "dswiglu": lambda x: ActivationGradient(x[:, : x.shape[1] // 2].contiguous(), x, "swiglu"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planes", sorted(PLANES))
def test_the_cast_records_the_amax_on_its_way(device: str, planes: str, dtype: torch.dtype) -> None:
    """Of every kernel that casts: flat, in tiles, of something made on the fly; wherever the largest element lies."""
    row, column = PLANES[planes]
    for rows, cols in ((1, 16), (3, 5), (130, 258), (256, 512), (1000, 40)):
        for at in {0, rows * cols - 1, rows * cols // 2 + 1}:
            x = varied((rows, cols), dtype).clamp(-100, 100).to(device)
            x.view(-1)[at] = -3072.0
            for before, after in ((1.0, 3072.0), (5000.0, 5000.0), (math.nan, math.nan)):
                amax = torch.full((1,), before, device=device)
                scale = torch.tensor([0.7], device=device)
                quantizer = te_dist.Float8Quantizer(scale, amax, "e4m3", rowwise=row, columnwise=column)
                out = quantizer.quantize(x)
                assert_equal_with_nan(amax.cpu(), torch.tensor([after]), f"{rows}x{cols} at {at}, {before} before")
                strided = torch.cat((x, 2 * x), 1)[:, :cols]  # what lies between its rows is not seen
                quantizer.quantize(strided)
                assert_equal_with_nan(amax.cpu(), torch.tensor([after]), f"{rows}x{cols} strided")
                amax.zero_()
                quantizer.quantize(x, out=out, noop=torch.ones(1, device=device))
                assert amax.item() == 0.0


@pytest.mark.parametrize("name", sorted(PRODUCERS))
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("planes", sorted(PLANES))
def test_and_that_of_what_is_made_on_the_fly(device: str, name: str, fp8: str, planes: str) -> None:
    row, column = PLANES[planes]
    for rows, cols in ((32, 64), (130, 272), (300, 1024), (75, 3072), (35, 5120)):
        x = varied((rows, cols), torch.bfloat16).to(device)
        amax, scale = torch.zeros(1, device=device), torch.tensor([0.7], device=device)
        quantizer = te_dist.Float8Quantizer(scale, amax, fp8, rowwise=row, columnwise=column)
        producer = PRODUCERS[name](x)
        quantizer.quantize_produced(producer, producer.shape)
        expected = kernels.materialize(PRODUCERS[name](x)).float().abs().amax()
        assert torch.equal(amax[0], expected), (rows, cols)
