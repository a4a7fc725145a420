"""The layers and recipes that every module test runs over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import varied
from torch import Tensor, nn

import te_dist
from te_dist.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
)

K, N, F = 64, 96, 80  # in, out, and the MLP's inner size: no multiples of 128


def mixed_formats(role: QuantizerRole) -> te_dist.Quantizer:
    """Another format for each operand, and one that is kept in high precision."""
    if role.tensor_type == "input":
        return te_dist.MXFP8Quantizer("e4m3")
    if role.tensor_type == "weight":
        return te_dist.Float8CurrentScalingQuantizer("e4m3")
    return te_dist.IdentityQuantizer()


def identity(role: QuantizerRole) -> te_dist.Quantizer:
    return te_dist.IdentityQuantizer()


RECIPES: dict[str, Callable[[], Recipe | None]] = {
    "none": lambda: None,
    "current": Float8CurrentScaling,
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "custom": lambda: CustomRecipe(qfactory=mixed_formats),
}
QUANTIZED = tuple(name for name in RECIPES if name != "none")
LAYERS = ("linear", "layernorm_linear", "layernorm_mlp")


def make(kind: str, recipe: Recipe | str | None = None, seed: int = 0, **options: Any) -> nn.Module:
    """A layer of that kind with weights of varied magnitude; the input has K columns."""
    recipe = RECIPES[recipe]() if isinstance(recipe, str) else recipe
    torch.manual_seed(seed)
    options.setdefault("dtype", torch.bfloat16)
    if kind == "linear":
        layer = te_dist.Linear(K, N, recipe=recipe, **options)
    elif kind == "layernorm_linear":
        layer = te_dist.LayerNormLinear(K, N, recipe=recipe, **options)
    else:
        layer = te_dist.LayerNormMLP(K, F, recipe=recipe, **({"activation": "swiglu"} | options))
    with torch.no_grad():
        for name, param in layer.named_parameters():
            if "norm" in name or "bias" in name:  # not the ones and zeros that hide a missing factor
                param.add_(torch.randn_like(param) * 0.2)
    return layer


def sample(
    *lead: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1, width: int = K, grad: bool = False
) -> Tensor:
    return varied((*lead, width), dtype, seed).requires_grad_(grad)


def weights_of(layer: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in layer.named_parameters() if name.endswith("weight") and "norm" not in name]


def change_weights(layer: nn.Module) -> None:
    with torch.no_grad():
        for weight in weights_of(layer):
            weight.mul_(-3.0)


def step(layer: Callable[..., Tensor], x: Tensor, *args: Any, seed: int = 7, **kwargs: Any) -> list[Tensor]:
    """The output and every gradient of one forward and backward, with the random state fixed (stochastic rounding)."""
    torch.manual_seed(seed)
    x = x.detach().clone().requires_grad_()
    y = layer(x, *args, **kwargs)
    params = list(layer.parameters())
    for p in params:
        p.grad = None
    y.backward(varied(tuple(y.shape), y.dtype, seed=9).to(y.device))
    return [y.detach(), x.grad, *[p.grad for p in params]]


def assert_equal(actual: list[Tensor], expected: list[Tensor], what: str = "") -> None:
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None) == (b is None), f"{what}: result {i}"
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape, f"{what}: result {i}"
            assert torch.equal(a, b), f"{what}: result {i} differs by {(a.double() - b.double()).abs().max()}"
