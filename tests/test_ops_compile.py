"""Operations inside torch.compile(fullgraph=True): equal to eager bit for bit, and legacy ones outside with a word."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from module_cases import sample
from ops_cases import (
    BF16,
    CASES,
    RECIPES,
    K,
    TwinComm,
    assert_equal,
    chains,
    filled,
    linear,
    make_op,
    run,
    whole_numbers,
)
from torch import Tensor, nn

import te_dist
from te_dist import ops
from te_dist.dynamo.operations import Collective
from te_dist.plan import Move

CHAINS = tuple(chains())
# Each chain under a recipe or two, the recipes going round.
PAIRS = [(kind, list(RECIPES)[(i + 3 * j) % len(RECIPES)]) for i, kind in enumerate(CHAINS) for j in range(2)]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    def __init__(self, module: nn.Module, function: Any = None, backend: str = "aot_eager") -> None:
        self.counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        self.call = torch.compile(function or module, backend=self.counter, fullgraph=True)
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def parameters(self) -> Any:
        return self.module.parameters()

    @property
    def graphs(self) -> int:
        return self.counter.frame_count


def twins(module: nn.Module) -> tuple[nn.Module, Compiled]:
    return module, Compiled(copy.deepcopy(module))


@pytest.mark.parametrize("name", CASES)
def test_basic_operations(name: str, device: str) -> None:
    eager, compiled = twins(make_op(name, BF16, device))
    for s in range(2):
        x = (whole_numbers(6, 2, K, seed=s) * 0.5).to(device)
        assert_equal(run(compiled, compiled.parameters(), x), run(eager, eager.parameters(), x))
    with torch.no_grad():
        assert torch.equal(compiled(x), eager(x))
    assert compiled.graphs == 2


@pytest.mark.parametrize("name", RECIPES)
def test_mlp(name: str, device: str) -> None:
    """Several steps with delayed scaling's state, a size that fits no block, one graph."""
    eager, compiled = twins(chains(RECIPES[name], device=device)["mlp"][0])
    for s in range(3):
        x = sample(3, 11, seed=s).to(device)
        assert_equal(run(compiled, compiled.parameters(), x), run(eager, eager.parameters(), x), f"step {s}")
    assert compiled.graphs == 1
    for mine, theirs in zip(eager.buffers(), compiled.module.buffers(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_chains(kind: str, name: str, device: str) -> None:
    chain, count = chains(RECIPES[name], device=device)[kind]
    eager, compiled = twins(chain)
    width = next(p.shape[0] for p in reversed(list(chain.parameters())) if p.dim() == 2) if count else 0
    for s in range(2):
        inputs = [sample(48, seed=s).to(device)] + [sample(48, width=width, seed=9).to(device)] * count
        assert_equal(run(compiled, compiled.parameters(), *inputs), run(eager, eager.parameters(), *inputs))
    assert compiled.graphs == 1


def test_inductor(device: str) -> None:
    """te_dist's own ops are opaque to it; what is left to it here are the sums of the branches."""
    chain, _ = chains(RECIPES["mxfp8"], device=device)["residual block"]
    eager, compiled = copy.deepcopy(chain), Compiled(chain, backend="inductor")
    inputs = [sample(48).to(device), sample(48, seed=4).to(device)]
    assert_equal(run(compiled, compiled.parameters(), *inputs), run(eager, eager.parameters(), *inputs))


@pytest.mark.parametrize("name", ["current", "nvfp4", "delayed"])
def test_train_and_eval(name: str) -> None:
    eager, compiled = twins(chains(RECIPES[name])["residual block"][0])
    inputs = [sample(33), sample(33, seed=2)]
    for train in (True, False, True, False):
        eager.train(train), compiled.module.train(train)
        if train:
            assert_equal(run(compiled, compiled.parameters(), *inputs), run(eager, eager.parameters(), *inputs))
        else:
            with torch.no_grad():
                assert_equal(list(compiled(*inputs)), list(eager(*inputs)))


@pytest.mark.parametrize("name", ["block", "delayed"])
def test_frozen_weights_and_autocast(name: str) -> None:
    eager, compiled = twins(chains()["mlp"][0])
    for _ in range(2):
        with te_dist.autocast(recipe=RECIPES[name]), te_dist.frozen_weights():
            for s in range(2):
                x = sample(33, seed=s)
                assert_equal(run(compiled, compiled.parameters(), x), run(eager, eager.parameters(), x))
        with torch.no_grad():
            for p in (*eager.parameters(), *compiled.parameters()):
                p.mul_(-1.5)


@pytest.mark.parametrize("name", ["mxfp8", "current"])
def test_dynamic_batch(name: str) -> None:
    eager, compiled = twins(chains(RECIPES[name])["mlp"][0])
    for rows in (144, 130, 160, 257):
        x = sample(rows)
        assert_equal(run(compiled, compiled.parameters(), x), run(eager, eager.parameters(), x), str(rows))
    assert compiled.graphs <= 2


def test_retained_graph_and_double_backward() -> None:
    _, compiled = twins(chains(RECIPES["current"])["mlp"][0])
    x = sample(33, grad=True)
    y = compiled(x)
    first = torch.autograd.grad(y.sum(), [x], retain_graph=True)
    assert torch.equal(torch.autograd.grad(y.sum(), [x])[0], first[0])


def test_dropout_is_seeded_alike() -> None:
    """Random numbers come in the order of the operations: of dropout, then of stochastic rounding."""
    chain = filled(ops.Sequential(linear(K, 96, RECIPES["nvfp4"]), ops.Dropout(0.5), linear(96, K, RECIPES["nvfp4"])))
    eager, compiled = twins(chain)
    for s in range(3):
        x = sample(33, seed=s)
        a, b = run(compiled, compiled.parameters(), x, seed=s), run(eager, eager.parameters(), x, seed=s)
        assert_equal(a, b)


def test_scopes_in_turns() -> None:
    """Training under one recipe and evaluation under another compile once each, whoever ran last."""
    eager, compiled = twins(chains()["mlp"][0])
    x = sample(33)
    for turn in range(3):
        for name in ("mxfp8", "current"):
            with te_dist.autocast(recipe=RECIPES[name]):
                assert_equal(run(compiled, compiled.parameters(), x), run(eager, eager.parameters(), x))
        with torch.no_grad():
            assert torch.equal(compiled(x), eager(x))
        if turn == 0:
            graphs = compiled.graphs
    assert compiled.graphs == graphs == 3


def test_change_after_compiling() -> None:
    chain = chains(RECIPES["mxfp8"])["mlp"][0]
    compiled = Compiled(chain)
    x = sample(33)
    before = compiled(x)
    chain[2] = ops.GEGLU()
    assert torch.equal(compiled(x), chain(x)) and not torch.equal(chain(x), before)
    chain.append(ops.ConstantScale(2.0))
    assert torch.equal(compiled(x), chain(x))
    chain.pop()
    other = te_dist.recipe.Float8CurrentScaling()
    for op in (chain[1], chain[3]):
        op.basic_ops[0].recipe = other
    assert torch.equal(compiled(x), chain(x))


def test_one_tensor_twice() -> None:
    """A residual branch that is the input itself, and a weight that two operations share."""
    chain = filled(ops.Sequential(linear(K, K, RECIPES["mxfp8"]), ops.GELU(), linear(K, K, None), ops.AddExtraInput()))
    chain[2].basic_ops[0].weight = chain[0].weight
    eager, compiled = twins(chain)
    assert eager[2].weight is eager[0].weight
    x = sample(48)
    results = [run(lambda t, c=call: c(t, t), m.parameters(), x) for call, m in ((compiled, compiled), (eager, eager))]
    assert_equal(*results)
    assert_equal(run(eager, eager.parameters(), x, x)[:1], results[1][:1])


@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_quantize_in_a_graph(name: str) -> None:
    eager, compiled = twins(ops.Sequential(ops.Quantize(True, True, recipe=RECIPES[name]), ops.ConstantScale(1.5)))
    for s in range(2):
        x = sample(64, seed=s)
        assert_equal(run(compiled, (), x), run(eager, (), x))


@pytest.mark.parametrize("name", ["none", "mxfp8"])
def test_grouped_mlp(name: str, device: str) -> None:
    kw: dict[str, Any] = {"recipe": RECIPES[name], "dtype": BF16, "device": device}
    chain = filled(ops.Sequential(ops.GroupedLinear(2, K, 128, **kw), ops.SwiGLU(), ops.GroupedLinear(2, 64, K, **kw)))
    eager, compiled = twins(chain)
    sizes = torch.tensor([32, 64])
    options = {"op_kwargs": {0: {"m_splits": [32, 64]}, 2: {"m_splits": [32, 64]}}}
    x = sample(96).to(device)
    assert_equal(
        run(lambda t: compiled(t, sizes, sizes, **options), compiled.parameters(), x),
        run(lambda t: eager(t, sizes, sizes), eager.parameters(), x),
    )
    torch._dynamo.reset()
    for op in (eager[0], eager[2], compiled.module[0], compiled.module[2]):
        op._keep_splits_on_device = True
    sizes = sizes.to(device)
    assert_equal(
        run(lambda t: compiled(t, sizes, sizes), compiled.parameters(), x),
        run(lambda t: eager(t, sizes, sizes), eager.parameters(), x),
    )


# ------------------------------------------------------------------------------------------------- users' operations
tracings: list[str] = []


@torch.compiler.assume_constant_result
def note(what: str) -> None:
    """Runs while tracing, not in the graph."""
    tracings.append(what)


ROWS_ONLY = te_dist.MXFP8Quantizer("e4m3", columnwise=False)


class Squared(ops.BasicOperation):
    """Keeps its input quantized: a storage among what is saved."""

    def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **unused: Any) -> Any:
        return input_ * input_, (ROWS_ONLY.quantize(input_),)

    def op_forward_save_ctx(self, ctx: Any, input_: Tensor, tensors_to_save: Any, **unused: Any) -> None:
        note("setup")
        ctx.save_for_backward(*tensors_to_save)
        ctx.shape, ctx.dtype = input_.shape, input_.dtype

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        (held,) = ctx.saved_tensors
        assert isinstance(held, te_dist.QuantizedStorage) and held.shape == ctx.shape
        return (2 * held.dequantize() * grad_output).to(ctx.dtype), ()


def test_setup_runs_on_fakes_once() -> None:
    """C5, C7: the notes for backward are made while tracing; the graph carries the tensors of a saved storage."""
    chain = filled(ops.Sequential(linear(K, 96, RECIPES["mxfp8"]), Squared(), linear(96, K, RECIPES["mxfp8"])))
    eager, compiled = twins(chain)
    x = sample(64)
    compiled(x.requires_grad_())
    after_tracing = len(tracings)
    assert after_tracing > 0
    for s in range(4):
        x = sample(64, seed=s)
        a = run(compiled, compiled.parameters(), x)
        assert len(tracings) == after_tracing, "no setup outside of tracing"
        assert_equal(a, run(eager, eager.parameters(), x))
        assert len(tracings) == after_tracing + 1, "eager code makes its notes each time"
        tracings.pop()
    assert compiled.graphs == 1


class LooksAtData(ops.BasicOperation):
    """What its setup notes does not follow from shapes."""

    def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **unused: Any) -> Any:
        return input_ * 2, (input_,)

    def op_forward_save_ctx(self, ctx: Any, input_: Tensor, tensors_to_save: Any, **unused: Any) -> None:
        ctx.factor = 2.0 if float(input_.sum()) >= 0 else 3.0

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output * ctx.factor, ()


def test_setup_that_looks_at_data_cannot_be_traced() -> None:
    op = LooksAtData()
    x = torch.ones(4, 4, requires_grad=True)
    op(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 4), 2.0))
    with pytest.raises(Exception, match=r"item|data.dependent|float"):
        torch.compile(op, fullgraph=True, backend="aot_eager")(x)


class Legacy(ops.BasicOperation):
    name = "mine"

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_ * input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output, ()


def test_legacy_operation_breaks_the_graph_with_one_warning() -> None:
    chain = filled(ops.Sequential(linear(K, 96, RECIPES["mxfp8"]), Legacy()))
    eager = copy.deepcopy(chain)
    words = r"Legacy 'mine' defines the legacy op_forward, whose context cannot be made while tracing"
    with pytest.raises(Exception, match=words):
        torch.compile(chain, fullgraph=True, backend="aot_eager")(sample(48, grad=True))
    torch._dynamo.reset()
    loose = torch.compile(chain, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for s in range(3):
            x = sample(48, seed=s)
            assert_equal(run(loose, chain.parameters(), x), run(eager, eager.parameters(), x))
    said = [str(w.message) for w in caught if "legacy op_forward" in str(w.message)]
    assert len(said) == 1 and "Legacy 'mine'" in said[0]


# ------------------------------------------------------------------------------------------------- ops
@pytest.mark.parametrize("op", [ops.AllGather, ops.ReduceScatter, ops.AllReduce])
def test_collectives_in_a_graph(op: Any) -> None:
    """The fakes know the shapes, forward and backward."""
    eager, compiled = twins(ops.Sequential(op(TwinComm()), ops.ConstantScale(0.5)))
    x = whole_numbers(8, K)
    assert_equal(run(compiled, (), x), run(eager, (), x))


def test_opcheck() -> None:
    x, dy = sample(6, K), sample(6, K, seed=3)
    for op, args in (
        ("activation_forward", (x, "swiglu")),
        ("activation_backward", (sample(6, K, width=K // 2), x, "swiglu")),
        ("activation_bias_backward", (dy, x, "gelu", torch.float32)),
        ("column_sums", (dy, BF16)),
        ("l2norm_forward", (x, 1e-6)),
        ("l2norm_backward", (dy, x, torch.ones(6, K, 1))),
        ("collective", (x, Collective(TwinComm(), Move.ALL_GATHER))),
        ("collective", (x, Collective(TwinComm(), Move.REDUCE_SCATTER))),
    ):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(torch.ops.te_dist, op).default, args, test_utils=checks)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_equal_sequentials_share_their_graphs(recipe: str) -> None:
    """torch gives up after eight graphs of one function, and a model has more blocks than that."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    blocks = torch.nn.Sequential()
    for _ in range(10):
        block = ops.Sequential(ops.RMSNorm(32, **options), ops.Linear(32, 64, **options), ops.SwiGLU())
        block.compile(fullgraph=True, backend=counter)
        blocks.append(block)
    for s in range(2):
        with te_dist.autocast(recipe=RECIPES[recipe]):
            y = blocks(torch.ones(32, 32, dtype=torch.bfloat16, requires_grad=True))
        y.sum().backward()
        assert counter.frame_count == 1, f"step {s}"
