"""The lean way through te_dist.Linear gives the bits of the stage chain, and is taken only where it may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import te_dist
from te_dist.modules import linear as linear_module
from te_dist.recipe import Float8CurrentScaling, Format, MMParams, MXFP8BlockScaling

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
