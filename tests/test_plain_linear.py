"""Which linear layers take the short ways, decided without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_dist import gemm_direct, kernels
from te_dist.modules.linear import linear_spec
from te_dist.pipeline.config import CallFlags, resolve
from te_dist.pipeline.lean import LeanPlan
from te_dist.pipeline.plain_linear import accumulators, block_dims, is_plain
from te_dist.quantizers import Float8CurrentScalingQuantizer, Quantizer
from te_dist.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
)

GRADS = CallFlags(True, (True, True))


def all_e5m2(role: QuantizerRole) -> Quantizer:
    return Float8CurrentScalingQuantizer("e5m2")


def forward_e5m2(role: QuantizerRole) -> Quantizer:
    return Float8CurrentScalingQuantizer("e4m3" if role.is_gradient else "e5m2")


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Float8CurrentScaling(), (0, 0, 0)),
        (DelayedScaling(), (0, 0, 0)),
        (Float8BlockScaling(), (1, 2, 1)),
        (Float8BlockScaling(w_block_scaling_dim=1), (1, 1, 1)),
        (Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1), None),
        (Float8BlockScaling(fp8_format=Format.HYBRID), None),
        (MXFP8BlockScaling(), None),
        (NVFP4BlockScaling(), None),
        (CustomRecipe(qfactory=all_e5m2), None),
        (CustomRecipe(qfactory=forward_e5m2), None),
    ],
    ids=str,
)
def test_formats(recipe: Recipe, expected: tuple[int, int, int] | None) -> None:
    config = resolve(linear_spec(True, "x"), recipe, GRADS)
    assert is_plain(config)
    assert block_dims(config.stages[0]) == expected


def test_what_is_not_plain() -> None:
    current = Float8CurrentScaling()
    assert not is_plain(resolve(linear_spec(True, "x"), None, GRADS))
    assert not is_plain(resolve(linear_spec(True, "x", save_original_input=True), current, GRADS))
    in_bf16 = Float8CurrentScaling(fp8_gemm_wgrad=MMParams(quantized=False))
    assert not is_plain(resolve(linear_spec(True, "x"), in_bf16, GRADS))
    # A product that nobody asks for may be what it likes.
    assert is_plain(resolve(linear_spec(True, "x"), in_bf16, CallFlags(True, (False, False))))


def test_accumulators() -> None:
    def of(recipe: Recipe) -> tuple[bool, bool, bool]:
        return accumulators(resolve(linear_spec(True, "x"), recipe, GRADS).stages[0])

    split, short = MMParams(use_split_accumulator=True), MMParams(use_split_accumulator=False)
    assert of(Float8CurrentScaling(fp8_gemm_fprop=split, fp8_gemm_wgrad=short))[0] is False
    assert of(Float8CurrentScaling(fp8_gemm_fprop=split, fp8_gemm_wgrad=short))[2] is True
    assert [gemm_direct.fast_accumulation(kind, None) for kind in ("fprop", "dgrad", "wgrad")] == [True, False, False]


@pytest.mark.skipif(not getattr(kernels.extension, "has_cuda", False), reason="built without CUDA")
@pytest.mark.parametrize(
    ("recipe", "kernel"),
    [
        (Float8CurrentScaling(), "quantize_current"),
        (DelayedScaling(), "cast_scaled"),
        (Float8BlockScaling(), "quantize_block"),
        (MXFP8BlockScaling(), None),
        (DelayedScaling(margin=127), "cast_scaled"),
        (DelayedScaling(margin=128), None),
    ],
    ids=str,
)
def test_lean_plans(recipe: Recipe, kernel: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer as if it were on a GPU; nothing runs there."""
    monkeypatch.setattr(gemm_direct, "_is_native", lambda rule, device: True)
    device, bf16 = torch.device("cuda", 0), torch.bfloat16

    def plan(flags: CallFlags = GRADS, shape: tuple[int, int] = (96, 64), dtype: Any = bf16) -> LeanPlan | None:
        config = resolve(linear_spec(True, "x"), recipe, flags)
        weight: Any = SimpleNamespace(shape=shape)
        bias: Any = SimpleNamespace(dtype=bf16)
        inp: Any = SimpleNamespace(dtype=dtype, device=device)
        return LeanPlan.of(config, recipe, weight, bias, inp)

    made = plan()
    if kernel is None:
        assert made is None
        return
    assert made is not None and made.kernel is kernels.functions(device)[kernel]
    assert made.recipe is recipe and made.fast == accumulators(resolve(linear_spec(True, "x"), recipe, GRADS).stages[0])
    assert plan(CallFlags(True, (False, True))) is None, "no gradient of the weight"
    assert plan(CallFlags(True, (True, True), True)) is None, "kept planes"
    assert plan(shape=(90, 64)) is None
    assert plan(dtype=torch.float32) is None
