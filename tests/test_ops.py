"""Every operation against plain torch in float64, and every fused operation against its operations apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemm_cases import sqnr
from module_cases import RECIPES as MODULE_RECIPES
from module_cases import sample
from ops_cases import (
    BF16,
    CASES,
    EXACT_RECIPES,
    RECIPES,
    K,
    TwinComm,
    assert_equal,
    chains,
    filled,
    linear,
    make_op,
    run,
    unfused,
    whole_numbers,
    without_chance,
)
from torch import Tensor, nn

import te_dist
from te_dist import ops
from te_dist.ops import fused
from te_dist.plan import Move

by_recipe = pytest.mark.parametrize("name", RECIPES)
CHAINS = tuple(chains())
# Results in bf16 keep 8 bits: 53 dB, see layer_cases.FLOORS.
BF16_FLOOR = 50.0


def in_float64(op: nn.Module, reference: Any, x: Tensor) -> list[Tensor]:
    """As run(), of the reference."""
    params = list(op.parameters())
    for p in params:
        p.grad = None
    leaf = x.double().requires_grad_()
    y = reference(op, leaf)
    y.backward(whole_numbers(*y.shape, seed=20, dtype=torch.float64).to(y.device))
    return [y.detach(), leaf.grad, *[p.grad for p in params]]


# ------------------------------------------------------------------------------------------------- one by one
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_basic_operations(name: str, dtype: torch.dtype, device: str) -> None:
    op = make_op(name, dtype, device)
    x = (whole_numbers(6, 2, K, dtype=dtype) * 0.5).to(device)
    actual = run(op, op.parameters(), x)
    expected = in_float64(op, CASES[name].reference, x)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype and a.shape == e.shape
        if CASES[name].exact:
            assert torch.equal(a.double(), e.double())
        else:
            assert sqnr(a, e.double()) > (BF16_FLOOR if dtype == BF16 else 100.0)


@by_recipe
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_exact_on_what_its_formats_hold(name: str, bias: bool, device: str) -> None:
    """-1, 0 and 1 are exact in each format, sums of 64 of them in bf16: so are y, dx, dw, db."""
    op = linear(K, 96, EXACT_RECIPES[name], bias=bias, device=device)
    with torch.no_grad():
        for i, p in enumerate(op.parameters()):
            p.copy_(whole_numbers(*p.shape, largest=1, seed=i))
    x = whole_numbers(48, K, largest=1, seed=5).to(device)
    leaf = x.clone().requires_grad_()
    y = op(leaf)
    dy = whole_numbers(48, 96, largest=1, seed=6).to(device)
    y.backward(dy)
    weight = op.weight.double()
    expected = x.double() @ weight.T
    if op.bias is not None:
        expected = expected + op.bias.double()
        assert torch.equal(op.bias.grad.double(), dy.double().sum(0))
    assert_whole(y, expected)
    assert_whole(leaf.grad, dy.double() @ weight)
    assert_whole(op.weight.grad, dy.double().T @ x.double())


def assert_whole(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal; on a GPU but for the rounding of the operands' scales, which tensor cores apply to the sum and not to each
    of its terms."""
    slack = 1e-5 if actual.is_cuda else 0.0
    assert actual.shape == expected.shape
    assert actual.numel() == 0 or (actual.double() - expected).abs().max().item() <= slack


@by_recipe
@pytest.mark.parametrize("single", [False, True])
def test_grouped_linear(name: str, single: bool, device: str) -> None:
    op = ops.GroupedLinear(
        3, K, 96, recipe=EXACT_RECIPES[name], dtype=BF16, device=device,
        single_grouped_weight=single, single_grouped_bias=single,
    )  # fmt: skip
    with torch.no_grad():
        for i, p in enumerate(op.parameters()):
            p.copy_(whole_numbers(*p.shape, largest=1, seed=i))
    sizes = torch.tensor([20, 0, 28])
    x = whole_numbers(48, K, largest=1, seed=5).to(device).requires_grad_()
    y = op(x, sizes)
    dy = whole_numbers(48, 96, largest=1, seed=6).to(device)
    y.backward(dy)
    start = 0
    for g, (weight, b) in enumerate(zip(op._weights(), op._biases(), strict=True)):
        rows = slice(start, start + int(sizes[g]))
        start = rows.stop
        part = x.detach()[rows].double()
        assert_whole(y[rows], part @ weight.double().T + b.double())
        assert_whole(x.grad[rows], dy[rows].double() @ weight.double())
        dw = op.weight.grad[g] if single else getattr(op, f"weight{g}").grad
        db = op.bias.grad[g] if single else getattr(op, f"bias{g}").grad
        assert_whole(dw, dy[rows].double().T @ part)
        assert torch.equal(db.double(), dy[rows].double().sum(0))
    again = op(x, sizes, m_splits=[20, 0, 28])
    assert_whole(again, y.double())  # delayed scaling has a scale of its own by now


def test_dropout(device: str) -> None:
    op = ops.Dropout(0.25)
    x = torch.ones(200, 300, device=device, requires_grad=True)
    y = op(x)
    kept = y != 0
    assert torch.equal(y, kept / 0.75) and abs(kept.float().mean().item() - 0.75) < 0.01
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, y.detach())
    assert not torch.equal(op(x), y)
    assert torch.equal(ops.Dropout(1.0)(x), torch.zeros_like(x))
    assert torch.equal(op.eval()(x), x)


@pytest.mark.parametrize("name", [n for n in RECIPES if n not in ("none", "delayed")])
def test_quantize(name: str, device: str) -> None:
    """What leaves the operation are the values that the quantized form holds; so do gradients, if asked."""
    x, dy = (sample(64, seed=s).to(device) for s in (1, 2))
    chosen = RECIPES[name]
    role = te_dist.QuantizerRole("quantize", "input", "")
    quantizer = chosen.quantizer_for(role)
    y = ops.Quantize(recipe=chosen)(x)
    assert isinstance(y, te_dist.QuantizedTensor)
    expected = quantizer.quantize(x).dequantize()
    assert torch.equal(y.dequantize(), expected)
    seq = ops.Sequential(ops.Quantize(backward=True, recipe=chosen), ops.ConstantScale(1.0))
    leaf = x.clone().requires_grad_()
    torch.manual_seed(0)
    out = seq(leaf)
    assert torch.equal(out, expected)
    out.backward(dy)
    torch.manual_seed(0)
    back = chosen.quantizer_for(te_dist.QuantizerRole("quantize", "grad_output", ""))
    assert torch.equal(leaf.grad, back.with_usage(rowwise=True, columnwise=False).quantize(dy).dequantize())
    assert not torch.equal(leaf.grad, dy)


def test_quantize_under_delayed_scaling() -> None:
    with pytest.raises(ValueError, match="Quantize keeps no scales of its own"):
        ops.Quantize(recipe=te_dist.recipe.DelayedScaling())(sample(32))


@pytest.mark.parametrize("op", [ops.GELU, ops.SwiGLU])
def test_cached_quantized_input(op: Any, device: str) -> None:
    """Only backward sees the quantized input: the gradient of act at what FP8 holds."""
    x = sample(33).to(device)
    keeps, plain = op(cache_quantized_input=True), op()
    a, b = run(keeps, (), x), run(plain, (), x)
    assert torch.equal(a[0], b[0])
    held = te_dist.Float8CurrentScalingQuantizer("e4m3").quantize(x).dequantize()
    assert torch.equal(a[1], run(plain, (), held)[1]) and not torch.equal(a[1], b[1])


# ------------------------------------------------------------------------------------------------- the modules' twin
def mlp_and_chain(chosen: Any, bias: bool, device: str = "cpu") -> tuple[nn.Module, ops.Sequential]:
    kw: dict[str, Any] = {"dtype": BF16, "device": device}
    options: dict[str, Any] = {"activation": "swiglu", "normalization": "RMSNorm", "bias": bias}
    mlp = filled(te_dist.LayerNormMLP(K, 80, recipe=chosen, **options, **kw))
    chain = ops.Sequential(
        ops.RMSNorm(K, **kw),
        linear(K, 160, chosen, bias=bias, device=device),
        ops.SwiGLU(),
        linear(80, K, chosen, bias=bias, device=device),
    )
    with torch.no_grad():
        for mine, theirs in zip(chain.parameters(), in_order(mlp), strict=True):
            mine.copy_(theirs)
    return mlp, chain


def in_order(mlp: Any) -> list[Tensor]:
    names = ("layer_norm_weight", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    return [p for name in names if (p := getattr(mlp, name)) is not None]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", MODULE_RECIPES)
def test_chain_equals_layernorm_mlp(name: str, bias: bool, device: str) -> None:
    """Bit for bit over several steps, delayed scaling's state included, with rows that fit no block."""
    mlp, chain = mlp_and_chain(MODULE_RECIPES[name](), bias, device)
    assert [type(step.op) for step in plan_of(chain).forward] == [ops.LinearChain]
    for s in range(3):
        x = sample(3, 11, seed=s).to(device)
        assert_equal(run(chain, chain.parameters(), x), run(mlp, in_order(mlp), x), f"step {s}")
    if name == "delayed":
        scales = torch.cat([chain[1].basic_ops[0].fp8_scale, chain[3].basic_ops[0].fp8_scale])
        assert torch.equal(scales, mlp.fp8_scale) and not torch.equal(scales, torch.ones_like(scales))
    with torch.no_grad():
        assert torch.equal(chain.eval()(sample(5).to(device)), mlp.eval()(sample(5).to(device)))


@by_recipe
def test_chain_under_autocast_and_checkpoint(name: str) -> None:
    mlp, chain = mlp_and_chain(None, True)
    x = sample(33)
    with te_dist.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        expected, actual = run(mlp, in_order(mlp), x), run(chain, chain.parameters(), x)
        again = run(lambda t: torch.utils.checkpoint.checkpoint(chain, t, use_reentrant=False), chain.parameters(), x)
    assert_equal(actual, expected)
    if name != "delayed":  # a third step has other scales
        assert_equal(again, expected)


def test_torch_autocast() -> None:
    mlp, chain = mlp_and_chain(te_dist.recipe.MXFP8BlockScaling(), True)
    mlp, chain = mlp.float(), chain.float()
    x = sample(33, dtype=torch.float32)
    with torch.autocast("cpu", dtype=BF16):
        actual, expected = run(chain, chain.parameters(), x), run(mlp, in_order(mlp), x)
    assert actual[0].dtype == BF16 and actual[1].dtype == torch.float32
    assert_equal(actual, expected)


@pytest.mark.parametrize("name", ["current", "nvfp4", "delayed"])
def test_frozen_weights(name: str) -> None:
    """Weights are quantized once in the scope, and anew after it."""
    mlp, chain = mlp_and_chain(RECIPES[name], True)
    for _ in range(2):
        with te_dist.frozen_weights():
            for s in range(2):
                x = sample(33, seed=s)
                assert_equal(run(chain, chain.parameters(), x), run(mlp, in_order(mlp), x))
        with torch.no_grad():
            for p in (*chain.parameters(), *mlp.parameters()):
                p.mul_(-1.5)
    with te_dist.frozen_weights(), torch.no_grad():
        first = chain(sample(33))
        for p in chain.parameters():
            if p.dim() == 2:
                p.mul_(2.0)
        if name != "delayed":
            assert torch.equal(chain(sample(33)), first)


def test_main_grad() -> None:
    x = sample(33)
    plain, fusing = (
        ops.Sequential(linear(K, 96, None, accumulate_into_main_grad=flag), ops.GELU(), linear(96, K, None))
        for flag in (False, True)
    )
    fusing.load_state_dict(plain.state_dict())
    weight = fusing[0].weight
    weight.main_grad = torch.ones(weight.shape)
    expected, actual = run(plain, plain.parameters(), x), run(fusing, fusing.parameters(), x)
    assert actual[2] is None
    assert sqnr(weight.main_grad - 1, expected[2].double()) > BF16_FLOOR
    assert_equal(actual[3:], expected[3:])
    assert "only one of BasicLinear and BasicLinear accumulates into main_grad" in fusing.explanation()


# ------------------------------------------------------------------------------------------------- fused and apart
def plan_of(chain: ops.Sequential) -> Any:
    (group,) = chain._current_groups()
    return group.plan()


def extra_for(chain: ops.Sequential, count: int, device: str) -> list[Tensor]:
    """Extra inputs of the output's shape."""
    width = next(p.shape[0] for p in reversed(list(chain.parameters())) if p.dim() == 2) if count else 0
    return [sample(48, width=width, seed=30 + i).to(device) for i in range(count)]


@by_recipe
@pytest.mark.parametrize("kind", CHAINS)
def test_fused_equals_apart(kind: str, name: str, device: str) -> None:
    """Bit for bit: the arithmetic is the same."""
    chosen = without_chance(name, device)
    (chain, count), (twin, _) = (chains(chosen, device=device)[kind] for _ in range(2))
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), chain.parameters(), strict=True):
            mine.copy_(theirs)
    if kind == "Quantize" and name == "delayed":
        pytest.skip("apart, Quantize has no scales")
    extra = extra_for(chain, count, device)
    for s in range(2):
        inputs = [sample(48, seed=s).to(device), *extra]
        fused_results = run(chain, chain.parameters(), *inputs)
        if kind == "Quantize" and name != "none":
            # The linear operation, run alone, is not asked before it what it quantizes by.
            twin = _without_quantize(twin)
        assert_equal(fused_results, run(unfused(twin), twin.parameters(), *inputs), f"{kind}, step {s}")


def _without_quantize(chain: ops.Sequential) -> ops.Sequential:
    return ops.Sequential(*[op for op in chain if not isinstance(op, ops.Quantize)])


@by_recipe
def test_bias_apart_is_rounded_twice(name: str, device: str) -> None:
    """Fused, the bias is added to the product before that is rounded; gradients are the same."""
    lin = filled(linear(K, 96, RECIPES[name], device=device))
    twin = filled(linear(K, 96, RECIPES[name], device=device))
    twin.load_state_dict(lin.state_dict())
    x = sample(48).to(device)
    actual = run(lin, lin.parameters(), x)
    apart = run(lambda t: twin.basic_ops[1](twin.basic_ops[0](t)), twin.parameters(), x)
    assert sqnr(actual[0], apart[0].double()) > 45.0  # two roundings of bf16, the first of a larger number perhaps
    assert_equal(actual[1:], apart[1:])


EXPECTED_STEPS = {
    "mlp": (["LinearChain"], ["LinearChain"]),
    "ForwardLinearBiasAdd": (["ForwardLinearBiasAdd"], ["LinearChain", "AddExtraInput"]),
    "ForwardLinearBiasActivation": (["ForwardLinearBiasActivation"], ["BackwardActivationBias"]),
    "ForwardLinearScaleAdd": (["ForwardLinearScaleAdd"], ["BasicLinear", "ConstantScale", "AddExtraInput"]),
    "BackwardActivationBias": (["ConstantScale", "Bias", "SiLU"], ["ConstantScale", "BackwardActivationBias"]),
    "BackwardLinearAdd": (["MakeExtraOutput", "LinearChain"], ["BackwardLinearAdd"]),
    "BackwardLinearScale": (["ConstantScale", "BasicLinear"], ["BackwardLinearScale"]),
    "BackwardAddRMSNorm": (["MakeExtraOutput", "LinearChain"], ["BackwardAddRMSNorm"]),
    "BackwardAddRMSNorm alone": (["MakeExtraOutput", "RMSNorm"], ["BackwardAddRMSNorm"]),
    "residual block": (
        ["MakeExtraOutput", "ForwardLinearBiasAdd"],
        ["BackwardLinearAdd", "AddExtraInput"],
    ),
    "Quantize": (["LinearChain"], ["LinearChain"]),
    "three": (["LinearChain"], ["LinearChain"]),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_which_steps(kind: str) -> None:
    plan = plan_of(chains()[kind][0])
    names = [[type(step.op).__name__ for step in steps] for steps in (plan.forward, plan.backward)]
    assert tuple(names) == EXPECTED_STEPS[kind]


def test_fused_operations_by_hand() -> None:
    """Their constructors, as Transformer Engine has them."""
    lin, bias, add, scale, act = (
        ops.BasicLinear(K, 96), ops.Bias(96), ops.AddExtraInput(), ops.ConstantScale(2.0), ops.GELU(),
    )  # fmt: skip
    extra_output, norm = ops.MakeExtraOutput(), ops.RMSNorm(K)
    for made, count in (
        (ops.ForwardLinearBiasAdd(linear=lin, bias=bias, add=add), 3),
        (ops.ForwardLinearBiasActivation(linear=lin, bias=bias, activation=act), 3),
        (ops.ForwardLinearScaleAdd(linear=lin, scale=scale, add=add), 3),
        (ops.BackwardActivationBias(bias=bias, activation=act), 2),
        (ops.BackwardLinearAdd(backward_add=extra_output, linear=lin), 2),
        (ops.BackwardLinearScale(scale=scale, linear=lin), 2),
        (ops.BackwardAddRMSNorm(add=extra_output, rmsnorm=norm), 2),
        (ops.UserbuffersForwardLinear(linear=lin, bias=bias), 2),
        (ops.UserbuffersBackwardLinear(linear=lin, bias=bias), 2),
    ):
        assert made.is_fused_op and len(made.basic_operations) == count
        assert type(made).__name__ in fused.__all__
    assert set(fused.__all__) <= set(ops.__all__)


@by_recipe
@pytest.mark.parametrize("on_device", [False, True])
def test_grouped_mlp(name: str, on_device: bool, device: str) -> None:
    """GroupedLinear, SwiGLU, GroupedLinear in one go, groups known to the host or to the device alone."""
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        kw: dict[str, Any] = {"recipe": without_chance(name, device), "dtype": BF16, "device": device}
        chain = filled(
            ops.Sequential(ops.GroupedLinear(3, K, 128, **kw), ops.SwiGLU(), ops.GroupedLinear(3, 64, K, **kw))
        )
        for op in (chain[0], chain[2]):
            op._keep_splits_on_device = on_device
        pair.append(chain)
    chain, twin = pair
    assert [type(s.op) for s in plan_of(chain).forward] == [ops.ForwardGroupedMLP]
    sizes = torch.tensor([32, 0, 64]).to(device if on_device else "cpu")
    for s in range(2):
        x = sample(96, seed=s).to(device)
        results = run(lambda t, c=chain: c(t, sizes, sizes), chain.parameters(), x)
        apart = run(lambda t, c=twin: unfused(c)(t, sizes, sizes), twin.parameters(), x)
        assert_equal(results, apart, f"step {s}")
    if not on_device:
        with pytest.raises(ValueError, match="pass the same tensor to both"):
            chain(x, sizes, sizes.flip(0))
        assert torch.equal(chain(x, sizes, sizes.clone()), chain(x, sizes, sizes)) or name == "delayed"


# ------------------------------------------------------------------------------------------------- quantized hand-over
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("make", [lambda **kw: ops.RMSNorm(K, **kw), lambda **kw: ops.SiLU()])
def test_norms_and_activations_hand_over_quantized(name: str, make: Any, device: str, monkeypatch: Any) -> None:
    """Without their fusion, a linear operation gets its operand quantized from the operation before it."""
    kw: dict[str, Any] = {"dtype": BF16, "device": device}
    chain = filled(ops.Sequential(make(**kw), ops.BasicLinear(K, 96, recipe=RECIPES[name], **kw)))
    expected = run(chain, chain.parameters(), sample(64).to(device))
    seen: list[type] = []
    compute = ops.BasicLinear.op_forward_compute

    def watching(self: Any, input_: Any, **kwargs: Any) -> Any:
        seen.append(type(input_))
        return compute(self, input_, **kwargs)

    monkeypatch.setattr(ops.BasicLinear, "op_forward_compute", watching)
    chain_fusion = ops.LinearChain.fuse_forward_backward_ops
    ops.unregister_fusion(chain_fusion)
    try:
        assert_equal(run(chain, chain.parameters(), sample(64).to(device)), expected)
        assert issubclass(seen[-1], te_dist.QuantizedStorage)
        run(chain, chain.parameters(), sample(33).to(device))  # rows that some formats pad
    finally:
        ops.register_forward_backward_fusion(chain_fusion)


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_linear_takes_a_quantized_input(name: str, device: str) -> None:
    op = linear(K, 96, RECIPES[name], device=device)
    x = sample(64).to(device)
    quantizer = op.basic_ops[0].get_input_quantizer()
    assert torch.equal(op(quantizer.make_tensor(x)), op(x))
    with pytest.raises(ValueError, match="BasicLinear got an input quantized by"):
        op(te_dist.MXFP8Quantizer("e5m2").make_tensor(x))
    with pytest.raises(TypeError, match="GELU expects an unquantized tensor"):
        ops.Sequential(ops.GELU(), op)(quantizer.make_tensor(x))


# ------------------------------------------------------------------------------------------------- communication
TWIN = TwinComm()


@pytest.mark.parametrize(
    ("make", "forward", "backward"),
    [
        (ops.AllGather, lambda t: torch.cat([t, t]), lambda g: g[:8] * 2),
        (ops.ReduceScatter, lambda t: t[:4] * 2, lambda g: torch.cat([g, g])),
        (ops.AllReduce, lambda t: t * 2, lambda g: g * 2),
        (lambda c: ops.AllReduce(c, reduce_in_backward=False), lambda t: t * 2, lambda g: g),
    ],
)
def test_collectives_speak_comm(make: Any, forward: Any, backward: Any) -> None:
    x = whole_numbers(8, K)
    before = x.clone()
    y, dx = run(make(TWIN), (), x)
    dy = whole_numbers(*y.shape, seed=20)
    assert torch.equal(y, forward(before)) and torch.equal(dx, backward(dy))
    assert torch.equal(x, before), "no collective writes into its input"


def test_collectives_do_not_write_into_what_they_get() -> None:
    x = whole_numbers(8, K)
    kept = x.clone()
    for op in (ops.AllReduce(TWIN), ops.AllReduce(), ops.ReduceScatter(TWIN), ops.AllGather()):
        with torch.no_grad():
            y = op(x)
        assert torch.equal(x, kept) and y.data_ptr() != x.data_ptr()


@by_recipe
@pytest.mark.parametrize("mode", ["gather", "reduce_scatter", "all_reduce"])
def test_collectives_become_part_of_the_linear(mode: str, name: str) -> None:
    """One stage with the collective in it, and the same numbers as apart."""
    chosen = EXACT_RECIPES[name]
    op = ops.BasicLinear(K, 96, recipe=chosen, dtype=BF16)
    with torch.no_grad():
        op.weight.copy_(whole_numbers(96, K, largest=1))
    x = whole_numbers(64, K, largest=1, seed=3)
    chain = {
        "gather": lambda: ops.Sequential(ops.AllGather(TWIN), op),
        "reduce_scatter": lambda: ops.Sequential(op, ops.ReduceScatter(TWIN)),
        "all_reduce": lambda: ops.Sequential(op, ops.AllReduce(TWIN, reduce_in_backward=False)),
    }[mode]()
    plan = plan_of(chain)
    assert [type(s.op) for s in plan.forward] == [ops.UserbuffersForwardLinear]
    assert [type(s.op) for s in plan.backward] == [ops.UserbuffersBackwardLinear]
    if mode == "reduce_scatter":  # the gather of dy belongs to te_dist.parallel
        with torch.no_grad():
            actual = chain(x)
            op._reset_delayed()
            assert torch.equal(actual, unfused(chain)(x))
        return
    actual = run(chain, chain.parameters(), x, scale=0.5)
    op._reset_delayed()
    assert_equal(actual, run(unfused(chain), chain.parameters(), x, scale=0.5))


@pytest.mark.parametrize(
    ("mode", "sequence_parallel", "rows_out", "size"),
    [("column", False, 64, (48, K)), ("column", True, 128, (48, K)), ("row", False, 64, (96, 32)),
     ("row", True, 32, (96, 32))],
)  # fmt: skip
def test_tensor_parallel_shapes(mode: str, sequence_parallel: bool, rows_out: int, size: tuple[int, int]) -> None:
    op = ops.Linear(
        K, 96, tensor_parallel_mode=mode, tensor_parallel_group=TWIN, sequence_parallel=sequence_parallel, dtype=BF16
    )
    assert tuple(op.weight.shape) == size and op.bias.shape == (size[0],)
    x = sample(64, width=size[1])
    with torch.no_grad():
        y = op(x)
        assert y.shape == (rows_out, size[0])
        assert op(x.view(32, 2, size[1])).shape == (rows_out // 2, 2, size[0])
    if mode == "column" or not sequence_parallel:
        y, dx, dw, db = run(op, op.parameters(), x)
        assert dx.shape == (64, size[1]) and dw.shape == size and db.shape == (size[0],)
        if not sequence_parallel:
            compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
            assert_equal(run(compiled, op.parameters(), x), [y, dx, dw, db])


def test_comm_errors() -> None:
    with pytest.raises(TypeError, match=r"AllGather expects a te_dist\.comm\.Comm.*but got str"):
        ops.AllGather("group")
    with pytest.raises(ValueError, match="BasicLinear expects tensor_parallel_group with tensor_parallel_mode='row'"):
        ops.BasicLinear(K, K, tensor_parallel_mode="row")
    with pytest.raises(ValueError, match="BasicLinear expects out_features to be a multiple of the 2 ranks"):
        ops.BasicLinear(K, 97, tensor_parallel_mode="column", tensor_parallel_group=TWIN)
    with pytest.raises(ValueError, match="parallel_mode"):
        ops.BasicLinear(K, K, tensor_parallel_mode="diagonal", tensor_parallel_group=TWIN)
    with pytest.raises(ValueError, match="ReduceScatter expects a first dimension that 2 ranks can share"):
        ops.ReduceScatter(TWIN)(sample(7))
    assert Move.ALL_GATHER.rows(8, 2) == 16
