"""The lean way through te_dist.Linear gives the bits of the stage chain, and is taken only where it may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import te_dist
from te_dist.modules import linear as linear_module
from te_dist.pipeline.config import CallFlags, resolve
from te_dist.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    Recipe,
)

pytestmark = pytest.mark.cuda
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def layer_and_input(bias: bool = True, shape: tuple[int, ...] = (64, 128), **options: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    options = {"recipe": Float8CurrentScaling(), **options}
    layer = te_dist.Linear(128, 96, bias=bias, **{**BF16, **options})
    return layer, torch.randn(*shape, device="cuda", dtype=layer.weight.dtype)


def step(layer: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    for p in layer.parameters():
        p.grad = None
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).to(y.dtype))
    return [y.detach(), x.grad, *[p.grad for p in layer.parameters()]]


@pytest.fixture
def lean_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    apply = linear_module.LeanLinear.apply
    monkeypatch.setattr(linear_module.LeanLinear, "apply", lambda *args: calls.append(1) or apply(*args))
    return calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64, 128), (2, 8, 128), (16, 128), (4, 128, 128)])
@pytest.mark.parametrize(
    "recipe",
    [
        Float8CurrentScaling(),
        Float8CurrentScaling(fp8_format=Format.E4M3, use_power_2_scales=True, amax_epsilon=1e-3),
        Float8CurrentScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True)),
    ],
    ids=["default", "e4m3 pow2", "split"],
)
def test_equals_the_chain(bias: bool, shape: tuple[int, ...], recipe: Any, lean_calls: list[int]) -> None:
    layer, x = layer_and_input(bias, shape, recipe=recipe)
    chain = step(layer, x)
    assert not lean_calls  # the first call makes the plan
    lean = step(layer, x)
    assert len(lean_calls) == 1
    for a, b in zip(lean, chain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(64, 128, 96), (400, 144, 272), (128, 256, 256)], ids=str)
@pytest.mark.parametrize(
    "recipe", [Float8BlockScaling(), Float8BlockScaling(w_block_scaling_dim=1)], ids=["128x128 weights", "1x128"]
)
def test_blocks_equal_the_chain(bias: bool, sizes: tuple[int, ...], recipe: Recipe, lean_calls: list[int]) -> None:
    rows, depth, features = sizes
    torch.manual_seed(0)
    layer = te_dist.Linear(depth, features, bias=bias, recipe=recipe, **BF16)
    x = torch.randn(rows, depth, **BF16)
    chain, lean = step(layer, x), step(layer, x)
    assert len(lean_calls) == 1
    for a, b in zip(lean, chain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "recipe", [DelayedScaling(amax_history_len=4), DelayedScaling(margin=1, amax_compute_algo="most_recent")], ids=str
)
def test_delayed_scaling_equals_the_chain(bias: bool, recipe: Recipe, lean_calls: list[int]) -> None:
    """Over steps in which the scales move, two microbatches before their backwards, and a recomputed forward."""
    lean, x = layer_and_input(bias, recipe=recipe)
    chain, _ = layer_and_input(bias, recipe=recipe)
    step(lean, x), step(chain, x)

    def microbatches(layer: Any, s: int) -> list[Tensor]:
        layer.zero_grad()
        leaves = [(x * (2.0**s + i)).requires_grad_() for i in range(2)]
        outs = [layer(leaf) for leaf in leaves]
        outs.append(torch.utils.checkpoint.checkpoint(layer, leaves[0], use_reentrant=False))
        for y in outs:
            y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).to(y.dtype) * 2.0**-s)
        buffers = [layer.fp8_scale.clone(), layer.fp8_amax_history.clone()]
        return [*outs, *[leaf.grad for leaf in leaves], *[p.grad for p in layer.parameters()], *buffers]

    for s in range(6):
        taken = len(lean_calls)
        made = microbatches(lean, s)
        assert len(lean_calls) == taken + 4
        chain._lean = None
        expected = microbatches(chain, s)
        assert len(lean_calls) == taken + 4
        for i, (a, b) in enumerate(zip(made, expected, strict=True)):
            assert torch.equal(a, b), (s, i)


def test_whoever_was_first_to_use_an_equal_recipe(lean_calls: list[int]) -> None:
    layer, x = layer_and_input(recipe=Float8CurrentScaling(amax_epsilon=0.125))
    resolve(layer.spec, Float8CurrentScaling(amax_epsilon=0.125), CallFlags(True, (True, True)))
    step(layer, x)
    step(layer, x)
    assert len(lean_calls) == 1


def test_falls_back(lean_calls: list[int]) -> None:
    layer, x = layer_and_input()
    step(layer, x)
    step(layer, x)
    assert len(lean_calls) == 1
    step(layer, x[:17])  # rows that need padding
    step(layer, x.t().contiguous().t())  # not contiguous
    with torch.no_grad():
        layer(x)
    layer(x)  # no gradient of x
    with te_dist.autocast(enabled=False):
        step(layer, x)
    with te_dist.frozen_weights():
        step(layer, x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        step(layer, x)
    layer(x.clone().requires_grad_(), is_first_microbatch=True)
    layer.weight.requires_grad_(False)
    layer(x.detach().requires_grad_()).sum().backward()
    layer.weight.requires_grad_(True)
    layer.recipe = MXFP8BlockScaling()
    step(layer, x.detach())
    assert len(lean_calls) == 1


def test_twice_and_double_backward(lean_calls: list[int]) -> None:
    layer, x = layer_and_input()
    step(layer, x)
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.sum().backward(retain_graph=True)
    first = [x.grad.clone(), layer.weight.grad.clone()]
    x.grad = layer.weight.grad = None
    y.sum().backward()
    assert torch.equal(x.grad, first[0]) and torch.equal(layer.weight.grad, first[1])
    (dx,) = torch.autograd.grad((layer(x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.sum().backward()
    assert len(lean_calls) == 2
