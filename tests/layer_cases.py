"""Recipes, runs and comparisons of the module tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from gemm_cases import sqnr
from torch import Tensor, nn

from te_dist import recipe as recipes
from te_dist.recipe import Recipe

RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}
OVERRIDES: dict[str, Recipe | None] = {
    "dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "high_precision": recipes.Float8CurrentScaling(backward_override="high_precision"),
    "bf16_wgrad": recipes.NVFP4BlockScaling(fp8_gemm_wgrad=recipes.MMParams(quantized=False)),
}

# Floors in dB of results and gradients against fp64, 2 dB below what an error that is uniform over each rounding step
# gives. With b significant bits that is 6.02 * b + 7.5 dB for values spread over a binade: 55 for bf16, 31.5 for e4m3,
# 25.5 for e5m2 and 19.5 for e2m1. A product of two quantized operands has the errors of both: 3 dB less for equal
# ones, 1 less where e5m2 meets e4m3. Stochastic rounding errs by up to a whole step: 6 dB off its operand.
FLOORS = {"none": 53.0, "current": 22.5, "delayed": 22.5, "block": 26.5, "mxfp8": 26.5, "nvfp4": 10.5}


def run(
    module: nn.Module, x: Tensor, *args: Any, dy: Tensor, call: Callable[..., Any] | None = None, **kw: Any
) -> dict:
    """y and all gradients of one step, with the generator where every run starts."""
    module.zero_grad(set_to_none=True)
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    torch.manual_seed(11)
    y = (module if call is None else call)(leaf, *args, **kw)
    y.backward(dy)
    made = {"y": y.detach(), **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}
    if leaf.grad is not None:
        made["dx"] = leaf.grad
    return made


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(actual[name], value)]
    assert not different, different


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], floor: float) -> None:
    assert actual.keys() == expected.keys()
    low = {n: round(s, 1) for n, v in expected.items() if (s := sqnr(actual[n], v.double())) < floor}
    assert not low, f"below {floor} dB: {low}"


def compiled(module: nn.Module, backend: str = "aot_eager") -> tuple[nn.Module, Callable[..., Any]]:
    """A copy of the module, and that copy compiled."""
    twin = copy.deepcopy(module)
    return twin, torch.compile(twin, fullgraph=True, backend=backend)
