"""The one pipeline under all layers (SPEC B): what it saves, what it computes, what it leaves out."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from cases import varied
from gemm_cases import SQNR, sqnr
from module_cases import LAYERS, QUANTIZED, RECIPES, F, K, N, assert_equal, make, sample, step, weights_of
from torch import Tensor, nn

import te_dist
from te_dist.pipeline import args as pipeline_args
from te_dist.pipeline import backward as pipeline_backward
from te_dist.pipeline import forward as pipeline_forward
from te_dist.pipeline.function import LayerCall
from te_dist.recipe import Float8CurrentScaling, MMParams, MXFP8BlockScaling, NVFP4BlockScaling, QuantizerRole, Recipe

recipes = pytest.mark.parametrize("recipe", sorted(RECIPES))
layers = pytest.mark.parametrize("kind", LAYERS)


# ------------------------------------------------------------------------------------------------- structure
@pytest.mark.parametrize(
    "cls",
    [
        pipeline_args.FwdArgs,
        pipeline_args.BwdArgs,
        pipeline_args.FwdResult,
        pipeline_args.BwdResult,
        pipeline_args.StageSaved,
        LayerCall,
    ],
    ids=lambda cls: cls.__name__,
)
def test_a_misspelt_field_raises(cls: type) -> None:
    """B2."""
    made = cls(**{f.name: None for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING})
    for field in dataclasses.fields(cls):
        setattr(made, field.name, None)
        with pytest.raises(AttributeError):
            setattr(made, field.name + "_", None)


@layers
@recipes
def test_what_requires_grad_is_read_once(kind: str, recipe: str) -> None:
    """B4: what is switched after forward does not reach this call's backward."""
    layer = make(kind, recipe)
    expected = step(make(kind, recipe), sample(32))
    torch.manual_seed(7)
    x = sample(32, grad=True)
    with te_dist.autocast(enabled=True):
        y = layer(x)
    weights = list(layer.parameters())
    for weight in weights:
        weight.requires_grad_(False)
    layer.recipe = Float8CurrentScaling(backward_override="high_precision")
    with te_dist.autocast(recipe=NVFP4BlockScaling()), torch.no_grad():
        torch.autograd.backward(y, varied(tuple(y.shape), y.dtype, seed=9))
    if recipe != "none":  # whose layer took the scope's recipe
        assert_equal([y, x.grad], expected[:2])


# ------------------------------------------------------------------------------------------------- autograd
@layers
@recipes
def test_backward_twice(kind: str, recipe: str) -> None:
    """B9: with retain_graph the second backward gives the same gradients, stochastic rounding included."""
    layer, x = make(kind, recipe), sample(48, grad=True)
    y = layer(x)
    dy = varied(tuple(y.shape), y.dtype, seed=9)
    inputs = [x, *layer.parameters()]
    first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    torch.manual_seed(12345)
    second = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    third = torch.autograd.grad(y, inputs, dy)
    assert_equal(list(second), list(first))
    assert_equal(list(third), list(first))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, inputs, dy)


@layers
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_double_backward_is_an_error(kind: str, recipe: str) -> None:
    layer, x = make(kind, recipe), sample(32, grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_by(layer: nn.Module, x: Tensor) -> tuple[Tensor, list[weakref.ref[Box]]]:
    boxes: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        y = layer(x)
    return y[0] if isinstance(y, tuple) else y, boxes


def saved_tensors(layer: nn.Module, x: Tensor) -> list[Tensor]:
    _y, boxes = saved_by(layer, x)
    return [box().tensor for box in boxes]


@layers
@recipes
def test_nothing_saved_outlives_backward(kind: str, recipe: str) -> None:
    """B9."""
    layer, x = make(kind, recipe), sample(48, grad=True)
    y, boxes = saved_by(layer, x)
    assert boxes
    y.sum().backward(retain_graph=True)
    assert all(box() is not None for box in boxes)
    y.sum().backward()
    gc.collect()
    assert not any(box() is not None for box in boxes)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_quantized_linear_lets_go_of_its_input(recipe: str) -> None:
    """Neither what is saved nor the call that backward finds keeps the bf16 input alive in any form."""
    layer = make("linear", recipe)
    x = sample(48, grad=True)
    h = x * 2
    where = h.data_ptr()
    y = layer(h)
    del h
    gc.collect()
    alive = [t for t in gc.get_objects() if isinstance(t, Tensor) and type(t) is Tensor and t.data_ptr() == where]
    assert not alive
    assert y.grad_fn.call.x is None and not y.grad_fn.call.weights
    y.sum().backward()
    assert x.grad is not None


# ------------------------------------------------------------------------------------------------- memory
def plane_bytes(recipe: Recipe | None, operand: str, shape: tuple[int, int]) -> int:
    """What backward keeps of an operand: the column plane of its format, or all of it in bf16."""
    rows, cols = shape
    if recipe is None:
        return 2 * rows * cols
    if isinstance(recipe, te_dist.recipe.DelayedScaling):
        recipe = Float8CurrentScaling()
    quantizer = recipe.quantizer_for(QuantizerRole("linear", operand))
    if isinstance(quantizer, te_dist.NVFP4Quantizer) and operand == "input":
        rows = -(-rows // 16) * 16  # the transform takes blocks of 16 rows
    return quantizer.with_usage(rowwise=False, columnwise=True).make_empty((rows, cols)).nbytes()


def extras(recipe: str, stages: int) -> int:
    """Seeds of stochastic rounding, scales of delayed scaling."""
    return {"nvfp4": 2 * 8 * stages, "delayed": 4 * 3 * stages}.get(recipe, 0)


def nbytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@recipes
@pytest.mark.parametrize("rows", [48, 33])
@pytest.mark.parametrize("cached", [None, True])
def test_what_a_linear_saves(recipe: str, rows: int, cached: bool | None) -> None:
    layer, x = make("linear", recipe), sample(rows, grad=True)
    saved = saved_tensors(lambda x: layer(x, cached), x)
    made = RECIPES[recipe]()
    expected = plane_bytes(made, "input", (rows, K)) + plane_bytes(made, "weight", (N, K)) + extras(recipe, 1)
    assert nbytes(saved) == expected
    if recipe != "none":
        assert not any(t.dtype in (torch.bfloat16, torch.float16) for t in saved)


@recipes
def test_save_original_input(recipe: str) -> None:
    """The input itself in place of its quantized plane, and the same gradients."""
    layer, x = make("linear", recipe, save_original_input=True), sample(33, grad=True)
    saved = saved_tensors(layer, x)
    made = RECIPES[recipe]()
    assert nbytes(saved) == x.numel() * 2 + plane_bytes(made, "weight", (N, K)) + extras(recipe, 1)
    assert any(t.data_ptr() == x.data_ptr() for t in saved), "no copy"
    assert_equal(step(make("linear", recipe, save_original_input=True), x), step(make("linear", recipe), x))


@recipes
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_what_a_layernorm_linear_saves(recipe: str, norm: str) -> None:
    layer, x = make("layernorm_linear", recipe, normalization=norm), sample(48, grad=True)
    made = RECIPES[recipe]()
    statistics = 48 * 4 * (2 if norm == "LayerNorm" else 1)
    expected = nbytes([x, layer.layer_norm_weight]) + statistics
    expected += plane_bytes(made, "input", (48, K)) + plane_bytes(made, "weight", (N, K)) + extras(recipe, 1)
    assert nbytes(saved_tensors(layer, x)) == expected


@recipes
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_what_a_layernorm_mlp_saves(recipe: str, activation: str) -> None:
    layer, x = make("layernorm_mlp", recipe, activation=activation), sample(48, grad=True)
    made = RECIPES[recipe]()
    fc1 = 2 * F if activation == "swiglu" else F
    expected = nbytes([x, layer.layer_norm_weight]) + 2 * 48 * 4 + 48 * fc1 * 2 + extras(recipe, 2)
    expected += plane_bytes(made, "input", (48, K)) + plane_bytes(made, "weight", (fc1, K))
    expected += plane_bytes(made, "input", (48, F)) + plane_bytes(made, "weight", (K, F))
    assert nbytes(saved_tensors(layer, x)) == expected


@layers
@recipes
def test_frozen_weights_save_no_input(kind: str, recipe: str) -> None:
    """A frozen base model under adapters: no wgrad operand is kept."""
    layer, x = make(kind, recipe), sample(48, grad=True)
    everything = nbytes(saved_tensors(layer, x))
    layer.requires_grad_(False)
    saved = nbytes(saved_tensors(layer, x))
    made = RECIPES[recipe]()
    operands = plane_bytes(made, "input", (48, K)) + (plane_bytes(made, "input", (48, F)) if "mlp" in kind else 0)
    assert saved == everything - operands


# ------------------------------------------------------------------------------------------------- work left out
@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many GEMMs of each kind were run."""
    counts: Counter[str] = Counter()
    for module in (pipeline_forward, pipeline_backward):
        original = module.gemm

        def counting(*args: Any, original: Any = original, **kwargs: Any) -> Tensor:
            counts[kwargs["kind"]] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, "gemm", counting)
    return counts


@layers
@recipes
def test_frozen_weights_do_no_wgrad(kind: str, recipe: str, products: Counter[str]) -> None:
    layer, x = make(kind, recipe), sample(32, grad=True)
    expected = step(make(kind, recipe), x)[1]
    products.clear()
    for weight in weights_of(layer):
        weight.requires_grad_(False)
    dx = step(layer, x)[1]
    gemms = 2 if "mlp" in kind else 1
    assert products == {"fprop": gemms, "dgrad": gemms}
    assert torch.equal(dx, expected)
    assert all(weight.grad is None for weight in weights_of(layer))


@layers
@recipes
def test_an_input_without_grad_gets_no_dgrad(kind: str, recipe: str, products: Counter[str]) -> None:
    layer, x = make(kind, recipe), sample(32)
    torch.manual_seed(7)
    y = layer(x)
    y.backward(varied(tuple(y.shape), y.dtype, seed=9))
    gradients = [p.grad for p in layer.parameters()]
    # A norm's own parameters need the gradient of its output; without them the first stage needs none.
    count = 2 if "mlp" in kind else 1
    assert products == {"fprop": count, "wgrad": count} | ({"dgrad": count} if "layernorm" in kind else {})
    assert_equal(gradients, step(make(kind, recipe), x)[2:])
    if "layernorm" in kind:
        products.clear()
        layer.layer_norm_weight.requires_grad_(False)
        layer.layer_norm_bias.requires_grad_(False)
        layer(x).sum().backward()
        assert products["dgrad"] == count - 1


@layers
@recipes
def test_no_grad_saves_nothing(kind: str, recipe: str) -> None:
    layer, x = make(kind, recipe).eval(), sample(32, grad=True)
    expected = make(kind, recipe)(x)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = layer(x)
            assert not saved_by(layer, x)[1]
        assert not y.requires_grad and torch.equal(y, expected)


@layers
@pytest.mark.parametrize("trainable", range(7))
def test_any_subset_of_parameters(kind: str, trainable: int) -> None:
    """Each gradient alone equals the one computed together with all others."""
    layer, x = make(kind, "mxfp8"), sample(32)
    names = ["input", *[name for name, _ in layer.named_parameters()]]
    if trainable >= len(names):
        return
    expected = dict(zip(names, step(make(kind, "mxfp8"), x)[1:], strict=True))
    for name, param in layer.named_parameters():
        param.requires_grad_(name == names[trainable])
    x = x.requires_grad_(trainable == 0)
    y = layer(x)
    y.backward(varied(tuple(y.shape), y.dtype, seed=9))
    gradients = {"input": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
    for name, gradient in gradients.items():
        assert (gradient is None) == (name != names[trainable])
    assert torch.equal(gradients[names[trainable]], expected[names[trainable]])


# ------------------------------------------------------------------------------------------------- switches
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear"])
@pytest.mark.parametrize("cls", [Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling])
@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
def test_one_product_in_high_precision(kind: str, cls: type[Recipe], product: str) -> None:
    """MMParams(quantized=False): that product equals the unquantized layer's, the others the quantized layer's."""
    mixed = make(kind, cls(**{f"fp8_gemm_{product}": MMParams(quantized=False)}))
    names = ["y", "dx", *[name for name, _ in mixed.named_parameters()]]
    x = sample(48)
    results = (dict(zip(names, step(layer, x), strict=True)) for layer in (mixed, make(kind, cls()), make(kind)))
    actual, quantized, plain = results
    of_product = {"fprop": {"y"}, "wgrad": {"weight"}}.get(product, {"dx", "layer_norm_weight", "layer_norm_bias"})
    for name in names:
        expected = plain if name in of_product else quantized
        assert torch.equal(actual[name], expected[name]), name
        assert name == "bias" or not torch.equal(quantized[name], plain[name]), f"{name}: the test could not fail"


def check(actual: Tensor, expected: Tensor) -> None:
    """Against float64, up to the summation and the cast (gemm_cases.SQNR says why)."""
    assert actual.shape == expected.shape
    assert sqnr(actual, expected) >= SQNR[actual.dtype], sqnr(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(recipe: str, override: str, dtype: torch.dtype) -> None:
    made = type(RECIPES[recipe]())(backward_override=override)
    layer, x = make("linear", made, dtype=dtype), sample(33, dtype=dtype)
    y, dx, dweight, dbias = step(layer, x)
    quantized = step(make("linear", recipe, dtype=dtype), x)
    assert torch.equal(y, quantized[0]), "forward is the quantized one"
    values = []
    for operand, tensor in (("input", x), ("weight", layer.weight)):
        if override == "high_precision":
            values.append(tensor.detach().double())
        else:
            quantizer = made.quantizer_for(QuantizerRole("linear", operand)).with_usage(columnwise=False)
            values.append(quantizer.quantize(tensor.detach()).dequantize(dtype=torch.float32).to(dtype).double())
    dy = varied((33, N), dtype, seed=9).double()
    check(dx, dy @ values[1])
    check(dweight, dy.t() @ values[0])
    check(dbias, dy.sum(0))


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("kind", ["layernorm_linear", "layernorm_mlp"])
def test_backward_override_behind_a_norm(kind: str, override: str) -> None:
    """With a format whose error is nothing (bf16 data as bf16), both overrides equal the unquantized layer."""
    recipe = te_dist.recipe.CustomRecipe(qfactory=bf16_copies, backward_override=override)
    x = sample(33)
    assert_equal(step(make(kind, recipe), x), step(make(kind), x))


def bf16_copies(role: QuantizerRole) -> te_dist.Quantizer:
    return te_dist.IdentityQuantizer(dtype="bf16")


# ------------------------------------------------------------------------------------------------- main_grad
def with_main_grads(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    for weight in weights_of(layer):
        weight.main_grad = torch.zeros_like(weight, dtype=dtype)
        weight.grad_added_to_main_grad = False
    return layer


@layers
@recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_accumulation(kind: str, recipe: str, dtype: torch.dtype) -> None:
    """Two microbatches add up in main_grad, in float32 before one rounding; .grad is a placeholder for hooks."""
    layer = with_main_grads(make(kind, recipe, fuse_wgrad_accumulation=True), dtype)
    reference = with_main_grads(make(kind, recipe, fuse_wgrad_accumulation=True), torch.float32)
    plain = make(kind, recipe)
    total = [torch.zeros_like(weight, dtype=dtype) for weight in weights_of(layer)]
    for s in range(2):
        expected = step(plain, sample(32, seed=s))
        actual = step(layer, sample(32, seed=s))
        for weight in weights_of(reference):
            weight.main_grad.zero_()
        step(reference, sample(32, seed=s))  # one product in float32
        for sum_, weight in zip(total, weights_of(reference), strict=True):
            sum_.copy_(sum_.float() + weight.main_grad)
        assert_equal(actual[:2], expected[:2])
    for weight, sum_ in zip(weights_of(layer), total, strict=True):
        assert weight.grad.shape == weight.shape and weight.grad_added_to_main_grad
        assert torch.equal(weight.main_grad, sum_)
        assert weight.main_grad.abs().sum() > 0
    others = [p for p in layer.parameters() if not hasattr(p, "main_grad")]
    assert all(p.grad is not None for p in others), "the rest goes to .grad"


@layers
def test_overwrite_main_grad_is_per_weight(kind: str) -> None:
    layer = with_main_grads(make(kind, "mxfp8", fuse_wgrad_accumulation=True), torch.float32)
    weights = weights_of(layer)
    weights[0].overwrite_main_grad = True
    for weight in weights:
        weight.main_grad.fill_(7.0)
    step(layer, sample(32))
    fresh = with_main_grads(make(kind, "mxfp8", fuse_wgrad_accumulation=True), torch.float32)
    step(fresh, sample(32))
    for i, (weight, other) in enumerate(zip(weights, weights_of(fresh), strict=True)):
        assert torch.equal(weight.main_grad, other.main_grad if i == 0 else 7.0 + other.main_grad)


@layers
def test_missing_main_grad_is_an_error(kind: str) -> None:
    layer = make(kind, "mxfp8", fuse_wgrad_accumulation=True, name="decoder.7")
    with pytest.raises(ValueError, match=r"'decoder\.7'.*main_grad"):
        layer(sample(32))
    with torch.no_grad():
        layer(sample(32))


# ------------------------------------------------------------------------------------------------- delayed wgrad
@layers
@recipes
@pytest.mark.parametrize("fused", [False, True])
def test_delayed_wgrad(kind: str, recipe: str, fused: bool) -> None:
    """backward leaves out the weights; backward_dw computes them, for every microbatch that has run."""
    options = {"fuse_wgrad_accumulation": fused}
    layer, plain = make(kind, recipe, delay_wgrad_compute=True, **options), make(kind, recipe, **options)
    for each in (layer, plain) if fused else ():
        with_main_grads(each, torch.float32)
    assert not layer.need_backward_dw()
    delayed, expected = [], []
    for s in range(2):
        for each, results in ((layer, delayed), (plain, expected)):
            torch.manual_seed(s)
            x = sample(32, seed=s, grad=True)
            y = each(x)
            y.backward(varied(tuple(y.shape), y.dtype, seed=9))
            results += [y.detach(), x.grad]
    assert_equal(delayed, expected)
    assert layer.need_backward_dw()
    assert all(w.grad is None for w in weights_of(layer))
    layer.backward_dw()
    assert not layer.need_backward_dw()

    def gradients(each: nn.Module) -> list[Tensor]:
        return [getattr(p, "main_grad", p.grad) for p in each.parameters()]

    assert_equal(gradients(layer), gradients(plain))
    before = [g.clone() for g in gradients(layer)]
    layer.backward_dw()  # nothing is left
    assert_equal(gradients(layer), before)


def test_wgrad_store_only_where_it_is_on() -> None:
    """B8."""
    plain = make("linear", "mxfp8")
    y = plain(sample(32, grad=True))
    assert y.grad_fn.call.wgrad_store is None and not plain.need_backward_dw()
    plain.backward_dw()


# ------------------------------------------------------------------------------------------------- results
@layers
@recipes
def test_return_bias(kind: str, recipe: str) -> None:
    """The bias is returned instead of added, and gets its gradient from whoever adds it."""
    layer, plain = make(kind, recipe, return_bias=True, dtype=torch.float32), make(kind, recipe, dtype=torch.float32)
    x = sample(32, dtype=torch.float32)
    y, bias = layer(x)
    assert bias is (layer.fc2_bias if "mlp" in kind else layer.bias)
    assert torch.equal(y + bias, plain(x))
    (y + bias).sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, 32.0))
    without = make(kind, recipe, return_bias=True, bias=False)
    assert without(sample(32))[1] is None


@pytest.mark.parametrize("kind", ["layernorm_linear", "layernorm_mlp"])
@recipes
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_return_layernorm_output(kind: str, recipe: str, norm: str) -> None:
    """y is unchanged; the norm's output is the norm's, and its gradient adds to that of y."""
    options = {"normalization": norm, "dtype": torch.float32}
    layer, plain = make(kind, recipe, return_layernorm_output=True, **options), make(kind, recipe, **options)
    x = sample(32, dtype=torch.float32, grad=True)
    torch.manual_seed(7)
    y, normed = layer(x)
    torch.manual_seed(7)
    assert torch.equal(y, plain(x))
    xr = x.detach().double().requires_grad_()
    gain = layer.layer_norm_weight.detach().double().requires_grad_()
    if norm == "LayerNorm":
        expected = nn.functional.layer_norm(xr, (K,), gain, layer.layer_norm_bias.detach().double(), layer.eps)
    else:
        expected = nn.functional.rms_norm(xr, (K,), gain, layer.eps)
    check(normed, expected.detach())
    inputs = [x, layer.layer_norm_weight]
    dy, dn = varied(tuple(y.shape), y.dtype, seed=9), varied((32, K), torch.float32, seed=8)
    through_y = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    both = torch.autograd.grad([y, normed], inputs, [dy, dn], retain_graph=True)
    through_norm = torch.autograd.grad(normed, inputs, dn)
    for a, b in zip(through_norm, torch.autograd.grad(expected, [xr, gain], dn.double()), strict=True):
        check(a, b)
    for total, one, other in zip(both, through_y, through_norm, strict=True):
        check(total, one.double() + other.double())


def test_return_bias_and_norm_output() -> None:
    for kind in ("layernorm_linear", "layernorm_mlp"):
        layer = make(kind, "mxfp8", return_bias=True, return_layernorm_output=True)
        y, bias, normed = layer(sample(2, 16))
        assert y.shape[:2] == normed.shape[:2] == (2, 16) and normed.shape[-1] == K
        assert isinstance(bias, nn.Parameter)


@recipes
@pytest.mark.parametrize("split", [("query_", "key_", "value_"), {"q": 48, "kv": 32, "gate": 16}])
def test_parameters_split(recipe: str, split: Any) -> None:
    """Three parameters that behave like their concatenation, in every gradient."""
    layer, plain = make("linear", recipe, parameters_split=split), make("linear", recipe)
    names = [name for name, _ in layer.named_parameters()]
    expected_names = [name.rstrip("_") for name in split]
    assert names == [f"{n}_{p}" for p in ("weight", "bias") for n in expected_names]
    with torch.no_grad():
        plain.weight.copy_(torch.cat([p for name, p in layer.named_parameters() if name.endswith("weight")]))
        plain.bias.copy_(torch.cat([p for name, p in layer.named_parameters() if name.endswith("bias")]))
    x = sample(33)
    for flag in (None, True, False):
        y, dx, *gradients = step(layer, x, flag)
        expected = step(plain, x, flag)
        assert_equal([y, dx, torch.cat(gradients[:3]), torch.cat(gradients[3:])], expected)


def test_parameters_split_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="out_features 96"):
        make("linear", parameters_split=("a", "b", "c", "d", "e"))
    with pytest.raises(ValueError, match="out_features 96"):
        make("linear", parameters_split={"a": 1, "b": 2})
    with pytest.raises(ValueError, match="fuse_wgrad_accumulation"):
        make("linear", parameters_split=("a", "b"), fuse_wgrad_accumulation=True)


def test_parameters_split_with_delayed_weight_gradients() -> None:
    delayed, plain = (
        make("linear", "mxfp8", parameters_split=("a", "b"), delay_wgrad_compute=d) for d in (True, False)
    )
    delayed.load_state_dict(plain.state_dict())
    x = torch.randn(8, K, dtype=torch.bfloat16)
    for layer in (delayed, plain):
        layer(x).sum().backward()
    assert delayed.a_weight.grad is None
    delayed.backward_dw()
    for name in ("a_weight", "b_weight"):
        assert torch.equal(getattr(delayed, name).grad, getattr(plain, name).grad)


def test_parameters_split_is_printed() -> None:
    layer = make("linear", "mxfp8", parameters_split={"q": 64, "kv": 32}, bias=False)
    assert "bias=False" in repr(layer) and "'kv': 32" in repr(layer) and "MXFP8BlockScaling()" in repr(layer)


def test_parameters_split_starts_like_any_linear() -> None:
    layer = te_dist.Linear(K, N, parameters_split=("a", "b"), init_method=lambda w: w.fill_(0.5), device="meta")
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for param in layer.parameters():
            param.fill_(torch.nan)
    layer.reset_parameters()
    assert torch.equal(layer.a_weight, torch.full((N // 2, K), 0.5))
    bound = K**-0.5
    assert layer.b_bias.abs().max() <= bound and layer.b_bias.unique().numel() > 8


@pytest.mark.parametrize("kind", ["layernorm_linear", "layernorm_mlp"])
@recipes
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_zero_centered_gamma(kind: str, recipe: str, norm: str) -> None:
    """gain = 1 + weight: exact for weights whose sum with 1 is."""
    options = {"normalization": norm, "dtype": torch.float32}
    layer, plain = make(kind, recipe, zero_centered_gamma=True, **options), make(kind, recipe, **options)
    gain = torch.arange(K) / 32.0
    with torch.no_grad():
        plain.layer_norm_weight.copy_(gain)
        layer.layer_norm_weight.copy_(gain - 1)
        for (name, a), b in zip(layer.named_parameters(), plain.parameters(), strict=True):
            if name != "layer_norm_weight":
                b.copy_(a)
    assert_equal(step(layer, sample(33, dtype=torch.float32)), step(plain, sample(33, dtype=torch.float32)))
    fresh = te_dist.LayerNormLinear(K, N, zero_centered_gamma=True)
    assert fresh.layer_norm_weight.abs().max() == 0


# ------------------------------------------------------------------------------------------------- shapes, dtypes
@layers
@recipes
@pytest.mark.parametrize("lead", [(), (1,), (7,), (33,), (0,), (3, 5), (2, 0, 4), (2, 3, 4)], ids=str)
def test_any_number_of_rows(kind: str, recipe: str, lead: tuple[int, ...]) -> None:
    """Leading dimensions are rows: the same results as for the matrix, and none for no rows."""
    x = sample(*lead)
    rows = x.numel() // K
    matrix = step(make(kind, recipe), x.reshape(rows, K))
    actual = step(make(kind, recipe), x)
    width = K if "mlp" in kind else N
    assert actual[0].shape == (*lead, width) and actual[1].shape == x.shape
    dy = varied((*lead, width), torch.bfloat16, seed=9)
    assert torch.equal(actual[0].reshape(rows, width), matrix[0])
    if len(lead) == 1 and rows:
        assert_equal(actual, matrix)
    assert all(g.isfinite().all() for g in actual)
    if rows == 0:
        assert all(g.shape == p.shape and not g.any() for g, p in zip(actual[2:], make(kind).parameters(), strict=True))
    else:
        last = list(actual)[-1]
        check(last, dy.double().reshape(rows, width).sum(0))  # the last bias sees dy itself


@recipes
@pytest.mark.parametrize("layout", ["transposed", "strided", "offset", "expanded"])
def test_inputs_that_are_not_contiguous(recipe: str, layout: str) -> None:
    base = sample(48)
    views = {
        "transposed": base.t().contiguous().t(),
        "strided": sample(96)[::2],
        "offset": varied((48, K + 8), torch.bfloat16)[:, 3 : K + 3],
        "expanded": base[:1].expand(48, K),
    }
    x = views[layout]

    def run(x: Tensor) -> list[Tensor]:
        layer = make("linear", recipe)
        torch.manual_seed(7)
        x = x.detach().requires_grad_()
        y = layer(x)
        y.backward(varied((N, 48), torch.bfloat16, seed=9).t())
        return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]

    assert_equal(run(x), run(x.contiguous()))


@layers
@recipes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("params_dtype", [torch.bfloat16, torch.float32])
def test_dtypes(kind: str, recipe: str, dtype: torch.dtype, params_dtype: torch.dtype) -> None:
    """The output and dx have the input's dtype, each gradient its parameter's."""
    layer = make(kind, recipe, dtype=params_dtype)
    y, dx, *gradients = step(layer, sample(33, dtype=dtype))
    assert y.dtype == dx.dtype == dtype
    assert all(g.dtype == params_dtype and g.isfinite().all() for g in gradients)


@layers
@recipes
def test_autocast_of_torch(kind: str, recipe: str) -> None:
    """float32 parameters under torch.autocast(bf16): the products run as for a bf16 input, on the float32 weights."""
    layer, plain = make(kind, recipe, dtype=torch.float32), make(kind, recipe, dtype=torch.float32)
    x = sample(33, dtype=torch.float32)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    run.parameters = layer.parameters
    actual, expected = step(run, x), step(plain, x.bfloat16())
    assert actual[0].dtype == torch.bfloat16 and actual[1].dtype == torch.float32
    assert_equal([actual[0], *actual[2:]], [expected[0], *expected[2:]])
    assert torch.equal(actual[1].bfloat16(), expected[1])
    with torch.autocast("cpu", enabled=False):
        assert layer(x).dtype == torch.float32


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "nvfp4"])
@pytest.mark.parametrize("shape", [(50, 70), (33, 31), (130, 129), (1, 1)])
def test_sizes_that_fit_no_block(recipe: str, shape: tuple[int, int]) -> None:
    inner, outer = shape
    layer = te_dist.Linear(inner, outer, recipe=RECIPES[recipe](), dtype=torch.bfloat16)
    results = step(layer, varied((7, inner), torch.bfloat16))
    assert results[0].shape == (7, outer) and results[1].shape == (7, inner) and results[2].shape == (outer, inner)
    assert all(t.isfinite().all() for t in results)


@pytest.mark.parametrize("shape", [(50, 70), (34, 18), (2, 2)])
def test_nvfp4_takes_even_sizes(shape: tuple[int, int]) -> None:
    layer = te_dist.Linear(*shape, recipe=NVFP4BlockScaling(), dtype=torch.bfloat16)
    results = step(layer, varied((7, shape[0]), torch.bfloat16))
    assert all(t.isfinite().all() for t in results)
    assert results[2].shape == (shape[1], shape[0])


@pytest.mark.parametrize(("shape", "what"), [((33, 32), "in_features.*33"), ((32, 33), "out_features.*33")])
def test_nvfp4_refuses_odd_sizes_by_name(shape: tuple[int, int], what: str) -> None:
    layer = te_dist.Linear(*shape, recipe=NVFP4BlockScaling(), name="head")
    for run in (layer, torch.no_grad()(layer.forward)):
        with pytest.raises(ValueError, match=f"Linear 'head'.*{what}"):
            run(torch.ones(4, shape[0]))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_checkpoint_in_a_scope_that_ends_before_backward(recipe: str, use_reentrant: bool) -> None:
    """The usual training loop: the scope is around forward, and backward recomputes outside of it."""
    layer = make("layernorm_mlp")
    x = torch.randn(16, K, dtype=torch.bfloat16)

    def run(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(3)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with te_dist.autocast(recipe=RECIPES[recipe]()):
            if checkpointed:
                y = torch.utils.checkpoint.checkpoint(layer, leaf, use_reentrant=use_reentrant)
            else:
                y = layer(leaf)
        y.square().sum().backward()
        return [y.detach(), leaf.grad, *[p.grad.clone() for p in layer.parameters()]]

    assert_equal(run(True), run(False))


def test_the_recipe_of_a_scope_is_forgotten_by_the_next_forward() -> None:
    layer = make("linear")
    x = torch.randn(16, K, dtype=torch.bfloat16, requires_grad=True)
    with te_dist.autocast(recipe=RECIPES["current"]()):
        quantized = layer(x)
    plain = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    assert not torch.equal(plain, quantized)
    plain.sum().backward()  # would raise if it recomputed with the recipe


def test_first_microbatch_overwrites_main_grad_and_hooks_run() -> None:
    """What Megatron relies on: True overwrites, hooks see a gradient though main_grad holds it."""
    layer = make("linear", "mxfp8", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full_like(layer.weight, 100.0, dtype=torch.float32)
    layer.weight.grad_added_to_main_grad = False
    seen = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    x = torch.randn(16, K, dtype=torch.bfloat16)
    layer(x, is_first_microbatch=True).sum().backward()
    first = layer.weight.main_grad.clone()
    assert first.abs().max() < 90 and layer.weight.grad_added_to_main_grad
    assert seen == [layer.weight.shape]
    layer(x, is_first_microbatch=False).sum().backward()
    assert torch.equal(layer.weight.main_grad, first + first)


def test_backward_frees_what_it_has_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """When fc1's weight gradient, the largest of all, is made, the activation's input, its gradient and the row plane
    of dy are gone: that is what keeps the peak below that of bf16."""
    held: list[weakref.ref[Tensor]] = []
    planes: list[bool] = []

    class Recorded(pipeline_backward.ActivationGradient):
        def __init__(self, grad: Tensor, x: Tensor, activation: str) -> None:
            super().__init__(grad, x, activation)
            held.extend((weakref.ref(grad), weakref.ref(x)))

    gemm, alive = pipeline_backward.gemm, []

    def recorded(a: Any, b: Any, *, kind: str, **options: Any) -> Tensor:
        if kind == "wgrad":
            alive.append([ref() is not None for ref in held])
            planes.append(a.has_rowwise)
        return gemm(a, b, kind=kind, **options)

    layer = make("layernorm_mlp", "mxfp8", activation="swiglu")
    y = layer(sample(32, grad=True))
    monkeypatch.setattr(pipeline_backward, "ActivationGradient", Recorded)
    monkeypatch.setattr(pipeline_backward, "gemm", recorded)
    y.sum().backward()
    assert alive == [[], [False, False]] and planes == [False, False]
