"""What a layer refuses, and that the message says which layer, what it was given and what it needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import varied
from module_cases import LAYERS, QUANTIZED, RECIPES, K, N, assert_equal, make, sample
from torch import nn

import te_dist
from te_dist.recipe import CustomRecipe, QuantizerRole

CLASSES = {
    "linear": (te_dist.Linear, (K, N)),
    "layernorm_linear": (te_dist.LayerNormLinear, (K, N)),
    "layernorm_mlp": (te_dist.LayerNormMLP, (K, N)),
}
layers = pytest.mark.parametrize("kind", LAYERS)


def refuses(error: type[Exception], parts: list[str], call: Callable[[], Any]) -> None:
    with pytest.raises(error) as info:
        call()
    for part in parts:
        assert part in str(info.value), f"{part!r} is not in: {info.value}"


def named(kind: str, recipe: str | None = "mxfp8") -> tuple[nn.Module, str]:
    layer = make(kind, recipe, name="block.3")
    return layer, f"{type(layer).__name__} 'block.3'"


@layers
@pytest.mark.parametrize("given", ["mxfp8", te_dist.MXFP8Quantizer("e4m3"), te_dist.recipe.MXFP8BlockScaling], ids=str)
def test_unknown_recipe(kind: str, given: object) -> None:
    cls, sizes = CLASSES[kind]
    refuses(
        TypeError,
        [f"{cls.__name__} 'block.3'", "recipe", repr(given)],
        lambda: cls(*sizes, recipe=given, name="block.3"),
    )


def test_unknown_activation() -> None:
    refuses(
        ValueError,
        ["LayerNormMLP", "activation", "'swish'", "swiglu"],
        lambda: te_dist.LayerNormMLP(K, N, activation="swish"),
    )


@pytest.mark.parametrize("kind", ["layernorm_linear", "layernorm_mlp"])
def test_unknown_normalization(kind: str) -> None:
    cls, sizes = CLASSES[kind]
    refuses(
        ValueError,
        [cls.__name__, "normalization", "'BatchNorm'", "RMSNorm"],
        lambda: cls(*sizes, normalization="BatchNorm"),
    )


@layers
@pytest.mark.parametrize("recipe", ["none", "current", "nvfp4"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_dtypes_that_cannot_be(kind: str, recipe: str, dtype: torch.dtype) -> None:
    layer, label = named(kind, recipe)
    name = str(dtype).removeprefix("torch.")
    x = torch.zeros(4, K).to(dtype)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            refuses(TypeError, [label, "input", "float32, float16 or bfloat16", name], lambda: layer(x))


@layers
@pytest.mark.parametrize("shape", [(4, K + 1), (K, 4), (4, K, 1), (), (0,), (4, 0)], ids=str)
def test_shapes_that_cannot_be(kind: str, shape: tuple[int, ...]) -> None:
    layer, label = named(kind)
    refuses(ValueError, [label, "last dimension", str(K), str(list(shape))], lambda: layer(torch.zeros(shape)))


@layers
@pytest.mark.parametrize("given", [None, [1.0], 3, "x"], ids=repr)
def test_not_a_tensor(kind: str, given: object) -> None:
    layer, label = named(kind)
    refuses(TypeError, [label, "tensor", type(given).__name__], lambda: layer(given))


@layers
def test_a_layer_without_a_name_is_called_by_its_class(kind: str) -> None:
    layer = make(kind)
    refuses(ValueError, [f"{type(layer).__name__} expects"], lambda: layer(torch.zeros(3)))


@layers
def test_input_on_another_device(kind: str) -> None:
    layer, name = named(kind)
    refuses(ValueError, [name, "on cpu", "on meta"], lambda: layer(torch.zeros(4, K, device="meta")))


@layers
def test_a_factory_that_returns_no_quantizer(kind: str) -> None:
    layer = make(kind, CustomRecipe(qfactory=lambda role: role.tensor_type))
    refuses(TypeError, ["qfactory", "Quantizer"], lambda: layer(sample(4)))


@pytest.mark.parametrize("flag", [torch.tensor([True]), torch.ones(3), 1.0], ids=str)
def test_a_wrong_skip_flag(flag: object) -> None:
    layer, _ = named("linear")
    with pytest.raises((TypeError, ValueError), match="skip_update_flag"):
        layer(sample(4), True, skip_weight_update=flag)


# ------------------------------------------------------------------------------------------------- quantized inputs
def quantizer_of(recipe: str) -> te_dist.Quantizer:
    made = RECIPES[recipe]()
    if recipe == "delayed":
        return te_dist.Float8CurrentScalingQuantizer("e4m3")
    assert made is not None
    return made.quantizer_for(QuantizerRole("linear", "input"))


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("bias", [True, False])
def test_an_input_quantized_by_the_recipe_itself(recipe: str, bias: bool) -> None:
    """As for the tensor it was made from: output, weight and bias gradients, and dx straight through."""
    x = varied((2, 16, K), torch.bfloat16, seed=1)
    quantizer = quantizer_of(recipe)
    if recipe == "delayed":  # the scale that the layer starts with
        quantizer = te_dist.Float8Quantizer(torch.ones(1), torch.zeros(1), "e4m3")

    def run(quantized: bool) -> list[torch.Tensor]:
        layer = make("linear", recipe, bias=bias)
        torch.manual_seed(7)
        leaf = x.clone().requires_grad_()
        y = layer(quantizer.make_tensor(leaf) if quantized else leaf)
        y.backward(varied(tuple(y.shape), y.dtype, seed=9))
        return [y.detach(), leaf.grad, *[p.grad for p in layer.parameters()]]

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_quantized_input_in_eval(recipe: str) -> None:
    x = sample(32)
    quantizer = quantizer_of(recipe)
    if recipe == "delayed":
        quantizer = te_dist.Float8Quantizer(torch.ones(1), torch.zeros(1), "e4m3")
    with torch.no_grad():
        tensor = quantizer.with_usage(rowwise=True, columnwise=False).make_tensor(x)
        assert torch.equal(make("linear", recipe)(tensor), make("linear", recipe)(x))


@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4"])
def test_a_quantized_input_without_the_plane_that_wgrad_reads(recipe: str) -> None:
    layer, label = named("linear", recipe)
    tensor = quantizer_of(recipe).with_usage(rowwise=True, columnwise=False).make_tensor(sample(32))
    if recipe == "current":  # per-tensor scaling: the transpose is exact
        y = layer(tensor)
        y.backward(varied(tuple(y.shape), y.dtype, seed=9))
        return
    refuses(ValueError, [label, "columnwise"], lambda: layer(tensor))


@layers
@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("given", ["current", "block", "mxfp8", "nvfp4"])
def test_an_input_of_another_format(kind: str, recipe: str, given: str) -> None:
    """A layer with a norm takes none at all; the message shows both formats."""
    layer, label = named(kind, recipe)
    if kind == "linear" and recipe != "none" and quantizer_of(recipe) == quantizer_of(given):
        return
    tensor = quantizer_of(given).make_tensor(sample(32))
    refuses(ValueError, [label, repr(tensor.quantizer), "unquantized"], lambda: layer(tensor))


def test_messages_are_one_sentence_without_addresses() -> None:
    layer, _ = named("linear", "current")
    with pytest.raises(ValueError) as info:
        layer(quantizer_of("mxfp8").make_tensor(sample(32)))
    assert not re.search(r"0x[0-9a-f]{6}", str(info.value))
