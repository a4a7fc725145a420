"""Each layer against float64 on the very values its quantizers make: only summation and casts are left between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DTYPES, varied
from gemm_cases import SQNR, exact, product, sqnr
from module_cases import LAYERS, QUANTIZED, RECIPES, F, K, assert_equal, identity, make, sample, step
from torch import Tensor, nn

import te_dist
from te_dist import kernels
from te_dist.producers import ACTIVATIONS, ActivationGradient, ActivationOutput, split_activation
from te_dist.recipe import CustomRecipe, DelayedScaling, QuantizerRole

# M, K, N: rows that NVFP4 pads, blocks of 128 that are cut, and whole ones.
SHAPES = ((33, 64, 96), (144, 272, 130), (128, 128, 256))
# A norm's gradient passes through dgrad's result, which is rounded to the dtype as well: a second rounding of the same
# size, 3 dB; and its float32 sums over rows and columns cancel, which costs another 3.
TWICE = 6.0
# e4m3 has 3 bits of mantissa and fp4 one; with a scale that fits, a product of two such operands has 6.02 * 3 + 10
# and 6.02 * 1 + 8 dB, give or take the distribution. A layer that did not quantize would have 50 or more.
QUANTIZED_RANGE = {"nvfp4": (10.0, 25.0)}
FP8_RANGE = (22.0, 42.0)


class Operands:
    """The operands of a layer's products as its recipe quantizes them, in float64."""

    def __init__(self, recipe: str, layer: Any, seed: int, stage: int = 0) -> None:
        self.recipe, self.layer, self.stage = RECIPES[recipe](), layer, stage
        torch.manual_seed(seed)
        self.seeds = torch.randint(0, 2**62, (1, 2))

    def quantize(self, operand: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The row plane and the column plane."""
        if self.recipe is None:
            return tensor.double(), tensor.double()
        if isinstance(self.recipe, DelayedScaling):
            index = ("input", "weight", "grad_output").index(operand)
            fp8 = "e5m2" if operand == "grad_output" else "e4m3"
            quantizer = te_dist.Float8Quantizer(self.layer.fp8_scale[index : index + 1].clone(), torch.zeros(1), fp8)
        else:
            quantizer = self.recipe.quantizer_for(QuantizerRole("linear", operand))
        rows = tensor.shape[0]
        rng = None
        if isinstance(quantizer, te_dist.NVFP4Quantizer):
            if operand != "weight":
                tensor = nn.functional.pad(tensor, (0, 0, 0, -rows % 16))
            rng = self.seeds[0] if quantizer.stochastic_rounding else None
        made = quantizer.quantize(tensor, rng_state=rng)
        row, column = (made.with_usage(rowwise=r, columnwise=not r) for r in (True, False))
        return exact(row)[:rows], exact(column)


def check(actual: Tensor, expected: Tensor, what: str, slack: float = 0.0) -> None:
    assert actual.shape == expected.shape, what
    floor = SQNR[actual.dtype] - slack
    assert sqnr(actual, expected) >= floor, f"{what}: {sqnr(actual, expected):.1f} dB < {floor}"


def products(operands: Operands, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The three products of a linear layer and its bias gradient, in float64."""
    x_row, x_col = operands.quantize("input", x)
    w_row, w_col = operands.quantize("weight", weight)
    dy_row, dy_col = operands.quantize("grad_output", dy)
    rows = max(dy_col.shape[0], x_col.shape[0])  # one may be padded and the other plain
    dy_col, x_col = (nn.functional.pad(t, (0, 0, 0, rows - t.shape[0])) for t in (dy_col, x_col))
    return {
        "y": product("fprop", x_row, w_row) + bias.double(),
        "dx": product("dgrad", dy_row, w_col),
        "weight": product("wgrad", dy_col, x_col),
        "bias": dy.double().sum(0),
    }


def build(kind: str, recipe: str, shape: tuple[int, int, int], dtype: torch.dtype, **options: Any) -> Any:
    _, inner, outer = shape
    torch.manual_seed(0)
    cls = te_dist.Linear if kind == "linear" else te_dist.LayerNormLinear
    layer = cls(inner, outer, recipe=RECIPES[recipe](), dtype=dtype, **options)
    with torch.no_grad():
        layer.weight.copy_(varied((outer, inner), dtype, seed=3))
        layer.bias.copy_(varied((outer,), dtype, seed=4))
        if kind != "linear":
            layer.layer_norm_weight.copy_(varied((inner,), dtype, seed=5).abs() + 0.5)
    return layer


def warm_up(layer: Any, x: Tensor) -> None:
    """Delayed scaling: a step after which the scales are not 1."""
    out = layer(x)
    y = out[0] if isinstance(out, tuple) else out
    y.backward(varied(tuple(y.shape), y.dtype, seed=9))
    for p in layer.parameters():
        p.grad = None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_linear(recipe: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inner, outer = shape
    layer, x = build("linear", recipe, shape, dtype), varied((rows, inner), dtype, seed=1)
    warm_up(layer, x)
    y, dx, dweight, dbias = step(layer, x, seed=7)
    dy = varied((rows, outer), dtype, seed=9)
    expected = products(Operands(recipe, layer, 7), x, layer.weight.detach(), layer.bias.detach(), dy)
    check(y, expected["y"], "y")
    check(dx, expected["dx"], "dx")
    check(dweight, expected["weight"], "dweight")
    check(dbias, expected["bias"], "dbias")


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_linear_is_really_quantized(recipe: str) -> None:
    """The distance to the unquantized layer is the format's: neither nothing, nor a wrong scale."""
    shape, dtype = (128, 256, 128), torch.float32
    layer = build("linear", recipe, shape, dtype)
    x, dy = torch.randn(128, 256), torch.randn(128, 128)
    with torch.no_grad():
        layer.weight.normal_()
    x.requires_grad_()
    layer(x).backward(dy)
    layer.weight.grad = x.grad = None
    y = layer(x)
    y.backward(dy)
    low, high = QUANTIZED_RANGE.get(recipe, FP8_RANGE)
    weight = layer.weight.detach().double()
    assert low < sqnr(y.detach(), x.detach().double() @ weight.t() + layer.bias.detach().double()) < high
    assert low < sqnr(x.grad, dy.double() @ weight) < high
    assert low < sqnr(layer.weight.grad, dy.double().t() @ x.detach().double()) < high


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_layernorm_linear(recipe: str, norm: str, dtype: torch.dtype) -> None:
    """The norm's output, whose own precision is checked against float64, is what the products are fed with."""
    shape = rows, inner, outer = (33, 64, 96)
    options = {"normalization": norm, "zero_centered_gamma": norm == "RMSNorm"}
    layer = build("layernorm_linear", recipe, shape, dtype, return_layernorm_output=True, **options)
    x = varied((rows, inner), dtype, seed=1)
    warm_up(layer, x)
    x.requires_grad_()
    torch.manual_seed(7)
    y, normed = layer(x)
    dy = varied((rows, outer), dtype, seed=9)
    y.backward(dy)

    x64 = x.detach().double().requires_grad_()
    gain = layer.layer_norm_weight.detach().double().requires_grad_()
    scale = gain + 1 if norm == "RMSNorm" else gain
    shift = None if layer.layer_norm_bias is None else layer.layer_norm_bias.detach().double().requires_grad_()
    if norm == "LayerNorm":
        normed64 = nn.functional.layer_norm(x64, (inner,), scale, shift, layer.eps)
    else:
        normed64 = nn.functional.rms_norm(x64, (inner,), scale, layer.eps)
    check(normed.detach(), normed64.detach(), "norm")
    expected = products(Operands(recipe, layer, 7), normed.detach(), layer.weight.detach(), layer.bias.detach(), dy)
    check(y.detach(), expected["y"], "y")
    check(layer.weight.grad, expected["weight"], "dweight")
    check(layer.bias.grad, expected["bias"], "dbias")
    normed64.backward(expected["dx"])
    check(x.grad, x64.grad, "dx", TWICE)
    check(layer.layer_norm_weight.grad, gain.grad, "norm weight", TWICE)
    if shift is not None:
        check(layer.layer_norm_bias.grad, shift.grad, "norm bias", TWICE)


class Activation(torch.autograd.Function):
    """An activation as its own kernel, between two layers."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, name: str) -> Tensor:
        ctx.name = name
        ctx.save_for_backward(h)
        return kernels.materialize(ActivationOutput(h.detach(), name))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        return kernels.materialize(ActivationGradient(grad.contiguous(), h, ctx.name)), None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_layernorm_mlp_is_its_two_layers(recipe: str, activation: str, dtype: torch.dtype) -> None:
    """Bit for bit LayerNormLinear, activation, Linear: in output and all gradients, over two steps."""
    mlp = make("layernorm_mlp", recipe, activation=activation, dtype=dtype)
    rows = mlp.fc1_weight.shape[0]
    first = te_dist.LayerNormLinear(K, rows, recipe=RECIPES[recipe](), dtype=dtype)
    second = te_dist.Linear(F, K, recipe=RECIPES[recipe](), dtype=dtype)
    both = [*first.parameters(), *second.parameters()]
    with torch.no_grad():
        for mine, theirs in zip(both, mlp.parameters(), strict=True):
            mine.copy_(theirs)

    def composed(x: Tensor) -> Tensor:
        return second(Activation.apply(first(x), activation))

    composed.parameters = lambda: both
    for s in range(2):
        x = sample(33, dtype=dtype, seed=s)
        assert_equal(step(composed, x), step(mlp, x), f"step {s}")


def torch_activation(name: str, h: Tensor) -> Tensor:
    plain, gated = split_activation(name)
    functions = {
        "gelu": lambda t: nn.functional.gelu(t, approximate="tanh"),
        "qgelu": lambda t: t * torch.sigmoid(1.702 * t),
        "relu": torch.relu,
        "srelu": lambda t: torch.relu(t).square(),
        "silu": nn.functional.silu,
    }
    if not gated:
        return functions[plain](h)
    a, b = h.chunk(2, dim=-1)
    return functions[plain](a) * b


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layernorm_mlp_without_a_recipe(activation: str) -> None:
    """Plain PyTorch in float64, every activation."""
    mlp = make("layernorm_mlp", None, activation=activation, dtype=torch.float32)
    results = step(mlp, sample(33, dtype=torch.float32))
    params = [p.detach().double().requires_grad_() for p in mlp.parameters()]
    x = sample(33, dtype=torch.float32).double().requires_grad_()
    gain, shift, w1, b1, w2, b2 = params
    h = nn.functional.linear(nn.functional.layer_norm(x, (K,), gain, shift, mlp.eps), w1, b1)
    y = nn.functional.linear(torch_activation(activation, h), w2, b2)
    y.backward(varied((33, K), torch.float32, seed=9).double())
    names = ["y", "dx", *[name for name, _ in mlp.named_parameters()]]
    for name, actual, expected in zip(names, results, [y.detach(), x.grad, *[p.grad for p in params]], strict=True):
        check(actual, expected, name, TWICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_without_a_recipe_is_nn_linear(dtype: torch.dtype) -> None:
    """At least as close to float64 as nn.Linear itself, but for rounding."""
    layer = make("linear", None, dtype=dtype)
    plain = nn.Linear(layer.in_features, layer.out_features, dtype=dtype)
    plain.load_state_dict(layer.state_dict())
    x = sample(33, dtype=dtype)
    wide = nn.Linear(layer.in_features, layer.out_features).double()
    wide.load_state_dict({name: t.double() for name, t in layer.state_dict().items()})
    dy = varied((33, layer.out_features), dtype, seed=9)
    x64 = x.double().requires_grad_()
    wide(x64).backward(dy.double())
    truth = [wide(x64).detach(), x64.grad, wide.weight.grad, wide.bias.grad]
    for mine, theirs, expected in zip(step(layer, x), step(plain, x), truth, strict=True):
        assert sqnr(mine, expected) >= min(sqnr(theirs, expected) - 1.0, SQNR[dtype])
        assert sqnr(mine, expected) >= SQNR[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_identity_quantizers_are_no_recipe(kind: str, dtype: torch.dtype) -> None:
    x = sample(33, dtype=dtype)
    assert_equal(step(make(kind, CustomRecipe(qfactory=identity), dtype=dtype), x), step(make(kind, dtype=dtype), x))
    with te_dist.autocast(enabled=False):
        assert_equal(step(make(kind, "mxfp8", dtype=dtype), x), step(make(kind, dtype=dtype), x))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_scope_is_the_recipe_of_layers_without_one(kind: str, recipe: str) -> None:
    layer, own = make(kind), make(kind, recipe)
    other = "current" if recipe != "current" else "mxfp8"

    def scoped(x: Tensor) -> Tensor:
        with te_dist.autocast(recipe=RECIPES[recipe]()):
            return layer(x)

    def own_inside_another(x: Tensor) -> Tensor:
        with te_dist.autocast(recipe=RECIPES[other]()):
            return own(x)

    scoped.parameters, own_inside_another.parameters = layer.parameters, own.parameters
    expected = step(make(kind, recipe), sample(33))
    assert_equal(step(scoped, sample(33)), expected)
    assert_equal(step(own_inside_another, sample(33)), expected, "a layer's own recipe wins")


@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4"])
def test_weights_are_quantized_from_the_master(recipe: str) -> None:
    """float32 weights under bf16 inputs are not rounded to bf16 on the way."""
    layer = make("linear", recipe, dtype=torch.float32)
    with torch.no_grad():
        y = layer(sample(33))
    operands = Operands(recipe, layer, 0)
    (x_row, _), (w_row, _) = operands.quantize("input", sample(33)), operands.quantize("weight", layer.weight.detach())
    check(y, product("fprop", x_row, w_row) + layer.bias.detach().double(), "y")
    rounded, _ = operands.quantize("weight", layer.weight.detach().bfloat16().float())
    assert not torch.equal(rounded, w_row), "the test could not fail"
