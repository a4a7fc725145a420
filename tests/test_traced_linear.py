"""A linear layer that a compiled graph holds in parts: the bits of eager code, any batch, and only where it may be."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from cases import varied
from module_cases import assert_equal
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import te_dist
from te_dist import gemm_direct
from te_dist.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MMParams, Recipe

K, N = 64, 96


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def native(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """torch's CPU has the per-tensor product too. Slow as it is, it is not used, except here. Blocks have none."""
    if device == "cpu":
        rules = ("Float8CurrentScaling", "Float8BlockScaling")
        monkeypatch.setattr(gemm_direct, "_is_native", lambda rule, device: rule in rules)
        monkeypatch.setattr(gemm_direct, "multiply_blocks", multiply_blocks)
    return device


def multiply_blocks(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Any, dtype: Any, tiles_a: int, tiles_b: int
) -> Tensor:
    def values(codes: Tensor, scale: Tensor, tiles: int) -> Tensor:
        rows, depth = codes.shape
        scale = scale.t() if tiles == 1 else scale.repeat_interleave(128, 0)
        return codes.float() * scale.repeat_interleave(128, 1)[:rows, :depth]

    y = values(a, scale_a, tiles_a) @ values(b, scale_b, tiles_b).t()
    return (y if bias is None else y + bias).to(dtype)


def make(device: str, bias: bool = True, recipe: Recipe | None = None, **options: Any) -> te_dist.Linear:
    torch.manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16, **options}
    return te_dist.Linear(K, N, bias=bias, recipe=recipe or Float8CurrentScaling(), **options)


def compiled(layer: torch.nn.Module, backend: str = "aot_eager", function: Any = None) -> tuple[Any, Any]:
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function or layer, fullgraph=True, backend=counter), counter


def step(layer: te_dist.Linear, call: Any, x: Tensor) -> list[Tensor | None]:
    layer.zero_grad()
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    y = call(leaf)
    if y.requires_grad:
        y.backward(varied(tuple(y.shape), y.dtype, seed=9).to(y.device))
    return [y.detach(), leaf.grad, *[p.grad for p in layer.parameters()]]


def operations(counter: Any) -> set[str]:
    """The names of all that the graphs call, those of an autograd Function's parts included."""
    found = set()
    for graph in counter.graphs:
        for module in graph.modules():
            if isinstance(module, torch.fx.GraphModule):
                found |= {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    return found


def is_traced(counter: Any) -> bool:
    names = operations(counter)
    assert any("te_dist" in name for name in names)
    return any("quantize_for_products" in name for name in names)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=["current", "block"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("grads", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_equals_eager(native: str, recipe: Recipe, bias: bool, grads: tuple[bool, bool]) -> None:
    """Whichever gradients are wanted, for batches that the products take as they are and others; two graphs in all."""
    layer = make(native, bias, recipe)
    layer.requires_grad_(grads[1])
    call, counter = compiled(layer)
    blocks_on_cpu = isinstance(recipe, Float8BlockScaling) and native == "cpu"  # whose stand-in does not pad
    for rows in (72, 80, 96, 88) if blocks_on_cpu else (72, 69, 96, 77):
        x = varied((2, rows, K), torch.bfloat16, seed=rows).to(native).requires_grad_(grads[0])
        assert_equal(step(layer, call, x), step(layer, layer, x), str(rows))
    assert counter.frame_count == 2 and is_traced(counter)


@pytest.mark.parametrize(
    "recipe",
    [
        Float8CurrentScaling(fp8_format=Format.E4M3, use_power_2_scales=True, amax_epsilon=1e-3),
        Float8CurrentScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True)),
    ],
    ids=["e4m3 pow2", "split"],
)
def test_options_and_inductor(native: str, recipe: Recipe) -> None:
    layer = make(native, recipe=recipe)
    call, counter = compiled(layer, "inductor")
    x = varied((24, K), torch.bfloat16).to(native).requires_grad_()
    assert_equal(step(layer, call, x), step(layer, layer, x))
    with torch.no_grad():
        assert torch.equal(call(x), layer(x))
    assert is_traced(counter)


def test_strided_input_and_a_scope(native: str) -> None:
    torch.manual_seed(0)
    layer = te_dist.Linear(K, N, device=native, dtype=torch.bfloat16)
    call, counter = compiled(layer)
    x = varied((K, 32), torch.bfloat16).to(native).t().requires_grad_()
    for _ in range(2):
        with te_dist.autocast(recipe=Float8CurrentScaling()):
            made, expected = step(layer, call, x), step(layer, layer, x)
        assert_equal(made, expected)
    assert counter.frame_count == 1 and is_traced(counter)


@pytest.mark.parametrize(
    "case",
    ["delayed", "caching", "frozen", "float32", "odd", "split", "high precision wgrad", "not native"],
)
def test_other_layers_take_the_op(native: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}
    args: tuple[Any, ...] = ()
    if case == "delayed":
        options["recipe"] = DelayedScaling()
    elif case == "high precision wgrad":
        options["recipe"] = Float8CurrentScaling(fp8_gemm_wgrad=MMParams(quantized=False))
    elif case == "split":
        options["parameters_split"] = ("a", "b")
    elif case == "float32":
        options["dtype"] = torch.float32
    elif case == "caching":
        args = (True,)
    elif case == "not native":
        monkeypatch.setattr(gemm_direct, "_is_native", lambda rule, device: False)
    layer = make(native, **options)
    if case == "odd":
        layer = te_dist.Linear(K, 90, recipe=Float8CurrentScaling(), device=native, dtype=torch.bfloat16)
    call, counter = compiled(layer)
    x = varied((32, K), next(layer.parameters()).dtype).to(native)
    if case == "frozen":
        with te_dist.frozen_weights():
            call(x)
    else:
        call(x, *args)
    assert not is_traced(counter)


def test_a_second_derivative_is_refused(native: str) -> None:
    layer = make(native)
    call, _ = compiled(layer)
    x = varied((32, K), torch.bfloat16).to(native).requires_grad_()
    with pytest.raises(RuntimeError):
        (dx,) = torch.autograd.grad(call(x).float().square().sum(), x, create_graph=True)
        dx.sum().backward()


# ------------------------------------------------------------------------------------------------- around the layer
def test_train_eval_and_no_grad_flips(native: str) -> None:
    layer = make(native)
    call, counter = compiled(layer)
    x = varied((32, K), torch.bfloat16).to(native).requires_grad_()
    for turn in range(2):
        for train in (True, False):
            layer.train(train)
            assert_equal(step(layer, call, x), step(layer, layer, x))
            with torch.no_grad():
                assert torch.equal(call(x), layer(x))
        if turn == 0:
            graphs = counter.frame_count
    assert counter.frame_count == graphs and is_traced(counter)


@pytest.mark.parametrize("where", ["around the graph", "inside the graph"])
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "selective"])
def test_checkpointing(native: str, how: str, where: str) -> None:
    if how == "reentrant" and where == "inside the graph":
        pytest.skip("torch does not trace reentrant checkpointing with fullgraph=True")
    layer = make(native)
    options: dict[str, Any] = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, save_products)

    def block(call: Any, x: Tensor) -> Tensor:
        return torch.tanh(call(x * 1.5))

    if where == "inside the graph":
        call, counter = compiled(layer, function=lambda x: checkpoint(block, layer, x, **options))
    else:
        inner, counter = compiled(layer)

        def call(x: Tensor) -> Tensor:
            return checkpoint(block, inner, x, **options)

    x = varied((32, K), torch.bfloat16).to(native).requires_grad_()
    for _ in range(2):
        assert_equal(step(layer, call, x), step(layer, lambda x: block(layer, x), x))
    assert is_traced(counter)


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "_scaled_mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=["current", "block"])
def test_reduce_overhead(recipe: Recipe) -> None:
    layer = make("cuda", recipe=recipe)
    call = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for s in range(4):
        x = varied((64, K), torch.bfloat16, seed=s).cuda().requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        made = [None if t is None else t.clone() for t in step(layer, call, x)]
        assert_equal(made, step(layer, layer, x), f"step {s}")


def test_a_monitor_sees_it(native: str) -> None:
    """A graph that holds a layer in parts does not know whose they are: a watched layer is one op again."""
    layer = make(native)
    call, counter = compiled(layer)
    x = varied((32, K), torch.bfloat16, seed=1).to(native).requires_grad_()
    with te_dist.monitor(layer, every=1) as watch:
        step(layer, call, x)
        (statistics,) = watch.step().values()
    assert sorted(statistics) == ["grad_output", "input", "weight"] and not is_traced(counter)
    call, counter = compiled(layer)
    step(layer, call, x)
    assert is_traced(counter), "and in parts when nobody watches"
