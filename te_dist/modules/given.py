"""Inputs that were quantized before the layer that multiplies them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from te_dist.pipeline.config import CallFlags, LayerConfig, LayerSpec, resolve
from te_dist.quantizers import Quantizer
from te_dist.recipe import Recipe


class GivenInput(NamedTuple):
    """A compiled call's input, quantized before it: as the layer of that spec would quantize its own, under that
    recipe and where these gradients are wanted. Not the quantizer itself: Dynamo cannot pass on a constant that it
    was given while tracing."""

    buffers: list[Tensor]
    spec: LayerSpec
    recipe: Recipe | None
    input_grad: bool
    weight_grad: bool


def input_quantizer(spec: LayerSpec, recipe: Recipe | None, input_grad: bool, weight_grad: bool) -> Quantizer | None:
    """What the layer's first product reads its input by; None where that is not quantized."""
    flags = CallFlags(input_grad, (weight_grad,) + (False,) * (spec.param_count - 1))
    stage = resolve(spec, recipe, flags).stages[0]
    return stage.x if stage.fprop else None


def check_given(label: str, config: LayerConfig, given: Quantizer) -> None:
    """Raise unless the layer's first product reads what an input was quantized by."""
    wanted, both = config.stages[0].x, {"rowwise": True, "columnwise": True}
    layout = None if wanted is None else wanted.with_usage(**both)
    if config.stages[0].spec.produce != "identity" or layout != given.layout_quantizer().with_usage(**both):
        needed = "an unquantized tensor" if layout is None else f"one quantized by {wanted!r}, or an unquantized one"
        raise ValueError(f"{label} got an input quantized by {given!r} but expects {needed}")
