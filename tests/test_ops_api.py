"""The interface of te_dist.ops: what may be written, how it is run, what is refused and in which words."""

from __future__ import annotations

import copy
import doctest
import gc
import io
import pickle
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from module_cases import sample
from ops_cases import BF16, RECIPES, K, assert_equal, chains, filled, linear, run
from torch import Tensor, nn

import te_dist
from te_dist import ops
from te_dist.ops import BasicOperation, FusedOperation, OperationContext, OperationFuser

CURRENT = te_dist.recipe.Float8CurrentScaling()


class Tripled(BasicOperation):
    """The split API at its smallest."""

    def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **unused: Any) -> Any:
        return input_ * 3, ()

    def op_forward_save_ctx(self, ctx: Any, input_: Tensor, tensors_to_save: Any, **unused: Any) -> None:
        ctx.noted = input_.shape

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        assert ctx.noted == grad_output.shape
        return grad_output * 3, ()


class LegacyTripled(BasicOperation):
    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_ * 3

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        assert ctx.saved_tensors[0].shape == grad_output.shape
        return grad_output * 3, ()


# ------------------------------------------------------------------------------------------------- C: the two APIs
@pytest.mark.parametrize("cls", [Tripled, LegacyTripled])
def test_both_apis_run(cls: type[BasicOperation]) -> None:
    x = torch.ones(2, 3)
    for op in (cls(), ops.Sequential(ops.Identity(), cls())):
        y, dx = run(op, (), x)
        assert torch.equal(y, 3 * x) and torch.equal(dx.sign(), dx.sign()) and dx.shape == x.shape
    assert ops.Sequential(cls())(x).requires_grad is False


def test_legacy_forward_of_a_split_operation_is_compute_and_save() -> None:
    """C1: somebody who calls op_forward gets both."""
    ctx = OperationContext()
    x = torch.ones(2, 3)
    assert torch.equal(Tripled().op_forward(ctx, x), 3 * x) and ctx.noted == x.shape
    ctx = OperationContext()
    norm = ops.RMSNorm(3)
    norm.op_forward(ctx, x)
    assert len(ctx.to_save) == 3
    contexts = [OperationContext(), OperationContext()]
    lin = ops.LinearChain(ops.Linear(3, 4).basic_operations)
    y, extra = lin.fuser_forward(
        contexts, x, basic_op_extra_inputs=[(), ()], prev_op_grad_output_quantizer=None,
        next_op_input_quantizer=None, basic_op_kwargs=[{}, {}],
    )  # fmt: skip
    assert torch.equal(y, lin(x)) and extra == [(), ()] and contexts[0].to_save


def test_split_and_legacy_together() -> None:
    """C3, for op_* and fuser_*."""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    for prefix, base in (("op", BasicOperation), ("fuser", BasicOperation), ("fuser", FusedOperation)):
        legacy, compute, save = (f"{prefix}_forward{end}" for end in ("", "_compute", "_save_ctx"))
        with pytest.raises(TypeError, match=f"Both defines {legacy} and {compute}: choose the split API"):
            type("Both", (base,), {legacy: nothing, compute: nothing, save: nothing})
        with pytest.raises(TypeError, match=f"Half defines {compute} without {save}"):
            type("Half", (base,), {compute: nothing})
        with pytest.raises(TypeError, match=f"Half defines {save} without {compute}"):
            type("Half", (base,), {save: nothing})
        with pytest.raises(TypeError, match="Half defines"):
            type("Half", (base,), {legacy: nothing, save: nothing})
    mixed = {"op_forward": nothing, "fuser_forward_compute": nothing, "fuser_forward_save_ctx": nothing}
    with pytest.raises(TypeError, match="one is the split API and one the legacy one"):
        type("Mixed", (BasicOperation,), mixed)


def test_subclass_resets_dispatch() -> None:
    """C4: the API of a class is the one it defines, not the one it inherits."""

    class Older(Tripled):
        def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
            ctx.noted = input_.shape
            return input_ * 5

    class Newer(LegacyTripled):
        def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **unused: Any) -> Any:
            return input_ * 7, (input_,)

        def op_forward_save_ctx(self, ctx: Any, input_: Tensor, tensors_to_save: Any, **unused: Any) -> None:
            ctx.save_for_backward(*tensors_to_save)

    class Same(Older):
        pass

    x = torch.ones(2, requires_grad=True)
    assert not Older._split_forward and Newer._split_forward and not Same._split_forward and Tripled._split_forward
    for cls, factor in ((Older, 5), (Newer, 7), (Same, 5)):
        y = cls()(x)
        assert torch.equal(y, factor * x)
        y.sum().backward()


def test_operation_without_forward_or_backward() -> None:
    class Empty(BasicOperation):
        pass

    class OneWay(Tripled):
        op_backward = BasicOperation.op_backward

    with pytest.raises(TypeError, match="Empty defines no forward: define op_forward_compute and op_forward_save_ctx"):
        Empty()
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(OneWay()(x.detach()), 3 * x)
    with pytest.raises(NotImplementedError, match="OneWay does not define op_backward"):
        OneWay()(x).sum().backward()


def test_no_extra_tensors_by_accident() -> None:
    """C6: op_* methods with extra inputs declared, and extra inputs given to an operation that takes none."""

    class Greedy(Tripled):
        num_extra_inputs = 1

    class Generous(LegacyTripled):
        num_extra_outputs = 1

    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="Greedy has 1 extra inputs and 0 extra outputs, which op_forward"):
        Greedy()(x, x)
    with pytest.raises(RuntimeError, match="Generous has 0 extra inputs and 1 extra outputs"):
        Generous()(x)
    with pytest.raises(ValueError, match="Tripled: expects 0 extra inputs but got 1"):
        Tripled()(x, x)
    with pytest.raises(ValueError, match=r"AddExtraInput: expects 1 extra inputs \(for AddExtraInput\) but got 0"):
        ops.AddExtraInput()(x)
    with pytest.raises(ValueError, match=r"\['Tripled', 'Dropout', 'AddExtraInput'\] expects 1 extra inputs but got 2"):
        ops.Sequential(Tripled(), nn.Dropout(), ops.AddExtraInput())(x, x, x)
    with pytest.raises(TypeError, match="AddExtraInput expects its extra input to be a tensor but got int"):
        ops.AddExtraInput()(x, 3)
    with pytest.raises(ValueError, match=r"AddExtraInput adds tensors of one shape on one device but got \[2\]"):
        ops.AddExtraInput()(x, torch.ones(3))


def test_wrong_number_of_gradients() -> None:
    class Forgetful(ops.Bias):
        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output, ()

    with pytest.raises(RuntimeError, match="Forgetful has 1 parameters but its backward returned 0 gradients"):
        Forgetful(3)(torch.ones(2, 3)).sum().backward()


# ------------------------------------------------------------------------------------------------- D: requires_grad
class Branching(BasicOperation):
    """x, a copy of it, and the places of its largest values: an extra output that has no gradient."""

    num_extra_outputs = 2

    def fuser_forward_compute(self, input_: Any, **unused: Any) -> Any:
        return input_.clone(), [(input_.clone(), input_.argmax(-1))], [()]

    def fuser_forward_save_ctx(self, basic_op_ctxs: Any, input_: Any, tensors_to_save: Any, **unused: Any) -> None:
        pass

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        return grad_output + basic_op_grad_extra_outputs[0][0], [()], [()]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [ops.MakeExtraOutput, Branching, ops.Identity, ops.Bias])
def test_without_a_graph(mode: Any, kind: Any) -> None:
    """D2: non-leaf inputs and extra outputs; nobody's requires_grad is touched."""
    op = kind(4) if kind is ops.Bias else kind()
    leaf = torch.ones(3, 4, requires_grad=True)
    x = leaf * 2  # not a leaf
    with mode():
        for call in (op, ops.Sequential(ops.Identity(), op)):
            made = call(x)
            outputs = made if isinstance(made, tuple) else (made,)
            assert not any(y.requires_grad for y in outputs)
            assert all(y is not x for y in outputs)
    assert x.requires_grad and not x.is_leaf and leaf.requires_grad
    x.sum().backward()


def test_outputs_get_the_requires_grad_that_autograd_needs() -> None:
    """D3: what a gradient can flow through requires one, an integer or constant extra output does not."""
    x = torch.ones(3, 4)
    y, copied, places = Branching()(x.clone().requires_grad_())
    assert y.requires_grad and copied.requires_grad and not places.requires_grad and places.dtype == torch.int64
    y, copied, _ = ops.Sequential(Branching(), ops.Bias(4))(x)
    assert y.requires_grad and not copied.requires_grad, "nothing before the bias has a gradient"
    y, copied, _ = ops.Sequential(ops.Bias(4), Branching())(x)
    assert y.requires_grad and copied.requires_grad
    for y in ops.Sequential(Branching(), ops.Identity())(x)[:2]:
        assert not y.requires_grad
    leaf = torch.ones(3, 4, requires_grad=True)
    y, extra = ops.MakeExtraOutput()(leaf)
    assert y is not extra and y is not leaf and extra is not leaf
    (2 * y + 3 * extra).sum().backward()
    assert torch.equal(leaf.grad, torch.full((3, 4), 5.0))
    leaf.grad = None
    ops.MakeExtraOutput()(leaf)[1].sum().backward()
    assert torch.equal(leaf.grad, torch.ones(3, 4)), "a branch alone"


def test_the_function_is_told_explicitly() -> None:
    """D1."""
    import inspect

    from te_dist.ops.fuser import _FuserFunction

    assert "set_output_requires_grad" in inspect.signature(_FuserFunction.forward).parameters


def test_an_operation_never_returns_its_input() -> None:
    """D4, also where a user's does."""

    class Lazy(Tripled):
        def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **unused: Any) -> Any:
            return input_, ()

        def op_forward_save_ctx(self, ctx: Any, input_: Tensor, tensors_to_save: Any, **unused: Any) -> None:
            ctx.noted = input_.shape

    x = torch.ones(2, requires_grad=True)
    for op in (Lazy(), ops.Identity(), ops.Dropout(0.0), ops.AllReduce(), ops.AllGather(), ops.ReduceScatter()):
        y = op(x)
        assert y is not x and y.requires_grad and not y.is_leaf
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            made = ops.Sequential(ops.MakeExtraOutput(), ops.MakeExtraOutput())(x)
        assert len({id(t) for t in (*made, x)}) == 4


def test_gradients_of_a_part() -> None:
    """Frozen parameters, inputs without gradient: only what is asked for is computed, and nothing is lost."""
    for name in ("none", "current", "nvfp4"):
        chain = chains(RECIPES[name])["mlp"][0]
        full = run(chain, chain.parameters(), sample(33))
        chain[1].weight.requires_grad_(False)
        part = run(chain, chain.parameters(), sample(33))
        assert part[3] is None
        assert_equal(part[:3] + part[4:], full[:3] + full[4:])
        for p in chain.parameters():
            p.grad = None
        torch.manual_seed(7)
        y = chain(sample(33))
        y.backward(torch.ones_like(y))
        assert chain[3].weight.grad is not None and chain[0].weight.grad is not None
        for p in chain.parameters():
            p.requires_grad_(False)
        assert not chain(sample(33)).requires_grad
        assert chain(sample(33, grad=True)).requires_grad


# ------------------------------------------------------------------------------------------------- autograd
@pytest.mark.parametrize("name", RECIPES)
def test_retained_graph(name: str) -> None:
    chain = chains(RECIPES[name])["residual block"][0]
    x, extra = sample(33, grad=True), sample(33, seed=2)
    wanted = [x, *chain.parameters()]
    y, branch = chain(x, extra)
    loss = y.square().sum() + branch.sum()
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    assert_equal(list(torch.autograd.grad(loss, wanted, retain_graph=True)), list(first))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(loss, x, create_graph=True)[0].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
        loss.backward()


def test_what_backward_writes_into_its_context_is_gone_the_next_time() -> None:
    class Counting(Tripled):
        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            ctx.count = getattr(ctx, "count", 0) + 1
            assert ctx.count == 1
            return grad_output * 3, ()

    x = torch.ones(2, requires_grad=True)
    y = Counting()(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()


def test_nothing_outlives_backward() -> None:
    chain = chains(CURRENT)["mlp"][0]
    x = sample(33, grad=True)
    held = []
    original = ops.LinearChain.fuser_forward_save_ctx

    def watch(self: Any, ctxs: Any, input_: Any, saved: Any, **kwargs: Any) -> None:
        for t in saved[0]:
            if isinstance(t, te_dist.QuantizedStorage):
                held.extend(weakref.ref(inner) for inner in t.inner_tensors())
        original(self, ctxs, input_, saved, **kwargs)

    ops.LinearChain.fuser_forward_save_ctx = watch  # type: ignore[method-assign]
    try:
        y = chain(x)
    finally:
        ops.LinearChain.fuser_forward_save_ctx = original  # type: ignore[method-assign]
    y.backward(torch.ones_like(y))
    gc.collect()
    assert held and all(ref() is None for ref in held)


# ------------------------------------------------------------------------------------------------- extra tensors
def test_channels() -> None:
    """A residual branch inside of one Sequential: the caller sees nothing of it."""
    mlp = [ops.RMSNorm(K, dtype=BF16), linear(K, 96, CURRENT), ops.GELU(), linear(96, K, CURRENT)]
    leave, join = ops.MakeExtraOutput(), ops.AddExtraInput()
    open_ended = filled(ops.Sequential(ops.MakeExtraOutput(), *mlp, ops.AddExtraInput()))
    closed = ops.Sequential(
        leave.set_extra_output_channel(0, "residual", output_to_caller=False),
        *mlp,
        join.set_extra_input_channel(0, "residual"),
    )
    x = sample(33)
    assert_equal(
        run(closed, mlp_params := list(closed.parameters()), x),
        run(lambda t: open_ended(t, t)[0], mlp_params, x),
        "the branch is the input",
    )
    compiled = torch.compile(closed, fullgraph=True, backend="aot_eager")
    assert_equal(run(compiled, mlp_params, x), run(closed, mlp_params, x))
    with pytest.raises(RuntimeError, match="AddExtraInput: its channels are fixed"):
        join.set_extra_input_channel(0, "other")
    seen = ops.Sequential(ops.MakeExtraOutput().set_extra_output_channel(0, "a"), ops.Identity())
    assert len(seen(x)) == 2


def test_channel_errors() -> None:
    make, add = ops.MakeExtraOutput, ops.AddExtraInput
    x = torch.ones(2)
    with pytest.raises(ValueError, match=r"AddExtraInput \(operation 0\) takes an extra input from the channel 'a'"):
        ops.Sequential(add().set_extra_input_channel(0, "a"))(x)
    with pytest.raises(ValueError, match=r"MakeExtraOutput \(operation 0\) writes the channel 'a', which nobody reads"):
        ops.Sequential(make().set_extra_output_channel(0, "a", output_to_caller=False))(x)
    with pytest.raises(ValueError, match=r"MakeExtraOutput \(operation 1\) writes the channel 'a' a second time"):
        ops.Sequential(*[make().set_extra_output_channel(0, "a") for _ in range(2)])(x)
    with pytest.raises(ValueError, match="AddExtraInput has 1 extra inputs and no extra input 1"):
        add().set_extra_input_channel(1, "a")
    with pytest.raises(ValueError, match="expects the name of a channel but got ''"):
        add().set_extra_input_channel(0, "")


def test_op_kwargs() -> None:
    class Times(Tripled):
        def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, by: int = 3, **unused: Any) -> Any:
            return input_ * by, ()

        def op_forward_save_ctx(
            self, ctx: Any, input_: Tensor, tensors_to_save: Any, *, by: int = 3, **unused: Any
        ) -> None:
            ctx.noted = input_.shape

    seq = ops.Sequential(Times(), nn.Identity(), Times())
    x = torch.ones(2)
    assert torch.equal(seq(x), 9 * x) and torch.equal(seq(x, op_kwargs={0: {"by": 2}}), 6 * x)
    assert torch.equal(seq(x, op_kwargs={seq[2]: {"by": 5}, seq[0]: {"by": 1}}), 5 * x)
    assert torch.equal(Times()(x, by=4), 4 * x)
    with pytest.raises(ValueError, match="not in this Sequential"):
        seq(x, op_kwargs={Times(): {"by": 2}})
    with pytest.raises(ValueError, match="op_kwargs names operations that are not among"):
        ops.Sequential(Times())(x, op_kwargs={Times(): {"by": 2}})


def test_hooks() -> None:
    class Hooked(Tripled):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def pre_first_fuser_forward(self) -> None:
            self.calls.append("first")

        def pre_fuser_forward(self, *, requires_grad: bool) -> None:
            self.calls.append(requires_grad)

    op = Hooked()
    seq = ops.Sequential(op)
    seq(torch.ones(2))
    seq(torch.ones(2, requires_grad=True))
    assert op.calls == ["first", False, True]


# ------------------------------------------------------------------------------------------------- Sequential
def test_as_a_list() -> None:
    a, b, c, d = (ops.ConstantScale(float(i)) for i in (2, 3, 5, 7))
    seq = ops.Sequential(a, b)
    x = torch.ones(2)

    def factor() -> float:
        return float(seq(x)[0])

    assert factor() == 6 and len(seq) == 2 and list(seq) == [a, b] and seq[-1] is b
    seq.append(c)
    assert factor() == 30
    seq.insert(1, d)
    assert factor() == 210 and list(seq) == [a, d, b, c]
    assert seq.pop() is c and factor() == 42
    seq[0] = c
    assert factor() == 105
    del seq[1]
    assert factor() == 15 and list(seq.state_dict()) == []
    seq.extend([a, d])
    assert factor() == 210 and float(seq[1:3](x)[0]) == 6 and isinstance(seq[1:3], ops.Sequential)
    del seq[1:]
    assert factor() == 5
    seq += [b]
    assert factor() == 15 and float((seq + ops.Sequential(a))(x)[0]) == 30 and len(seq) == 2
    named = ops.Sequential({"first": a, "second": b})
    assert list(dict(named.named_children())) == ["first", "second"] and float(named(x)[0]) == 6
    with pytest.raises(IndexError, match="Sequential has 2 modules and no index 5"):
        seq[5]
    with pytest.raises(TypeError, match="Sequential expects operations or modules but got int"):
        ops.Sequential(a, 3)
    with pytest.raises(TypeError, match="OperationFuser expects FusibleOperations but got Linear"):
        OperationFuser([nn.Linear(2, 2)])


def test_other_modules_between() -> None:
    torch.manual_seed(0)
    seq = filled(ops.Sequential(linear(K, 96, CURRENT), nn.Tanh(), ops.GELU(), nn.Linear(96, K, dtype=BF16)))
    x = sample(33)
    expected = run(lambda t: seq[3](ops.GELU()(torch.tanh(seq[0](t)))), seq.parameters(), x)
    assert_equal(run(seq, seq.parameters(), x), expected)
    assert "Tanh: no operation, so what is before and after it is apart" in seq.explanation()


def test_fused_again_when_it_changes() -> None:
    seq = chains(CURRENT)["mlp"][0]
    (before,) = seq._current_groups()
    plan = before.plan()
    assert before.plan() is plan and seq._current_groups() == [before]
    assert [type(s.op).__name__ for s in plan.forward] == ["LinearChain"]
    seq.insert(2, ops.Dropout(0.1))
    (after,) = seq._current_groups()
    assert [type(s.op).__name__ for s in after.plan().forward] == [
        "LinearChain", "Dropout", "LinearChain",
    ]  # fmt: skip
    del seq[2]
    seq[1].basic_ops[0].recipe = te_dist.recipe.interned(te_dist.recipe.MXFP8BlockScaling())
    (group,) = seq._current_groups()
    assert [len(s.op.basic_operations) for s in group.plan().forward] == [3, 3]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    mx = te_dist.recipe.MXFP8BlockScaling()
    seq = ops.Sequential(
        ops.MakeExtraOutput(), ops.RMSNorm(K), ops.Linear(K, 96, recipe=CURRENT, name="up"), ops.SiLU(),
        ops.Linear(96, K, bias=False, recipe=mx, name="down"), ops.Dropout(0.1), ops.AddExtraInput(), ops.GELU(),
    )  # fmt: skip
    assert seq.explain() is None
    text = capsys.readouterr().out
    assert text.splitlines() == [
        "te_dist.ops.Sequential: 9 operations",
        "  forward",
        "    0 MakeExtraOutput",
        "    LinearChain(1 RMSNorm, 2 BasicLinear 'up', 3 Bias)",
        "    LinearChain(4 SiLU, 5 BasicLinear 'down')",
        "    6 Dropout",
        "    7 AddExtraInput",
        "    8 GELU",
        "  backward",
        "    8 GELU",
        "    7 AddExtraInput",
        "    6 Dropout",
        "    LinearChain(4 SiLU, 5 BasicLinear 'down')",
        "    BackwardAddRMSNorm(0 MakeExtraOutput, 1 RMSNorm, 2 BasicLinear 'up', 3 Bias)",
        "  not fused",
        "    0 MakeExtraOutput | 1 RMSNorm: MakeExtraOutput copies nothing in the forward; its sum in the backward may "
        "be fused",
        "    3 Bias | 4 SiLU: BasicLinear 'down' has another recipe (MXFP8BlockScaling()) than BasicLinear 'up' "
        f"({CURRENT!r})",
        "    5 BasicLinear 'down' | 6 Dropout: no kernel makes Dropout together with its neighbours",
        "    6 Dropout | 7 AddExtraInput: the sum is written into a product's result, and Dropout is no product",
        "    7 AddExtraInput | 8 GELU: no linear operation follows that would take GELU in",
    ]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: [ops.GELU(cache_quantized_input=True), ops.BasicLinear(K, K)], "keeps its input quantized"),
        (lambda: [ops.LayerNorm((2, K)), ops.BasicLinear(K, K)], "normalizes several dimensions"),
        (lambda: [LegacyTripled(), ops.BasicLinear(K, K)], "LegacyTripled is written against the legacy API"),
        (lambda: [ops.RMSNorm(K), ops.GELU(), ops.BasicLinear(K, K)], "RMSNorm can only be made on the way into"),
        (lambda: [ops.BasicLinear(K, K), ops.AllReduce()], "reduce_in_backward=False fuses"),
        (lambda: [ops.Identity(), ops.Reshape((-1, K))], "no fusion is registered for Identity and Reshape"),
        (lambda: [ops.GroupedLinear(2, K, K), ops.GroupedLinear(3, K, K)], "has 2 groups and GroupedLinear 3"),
    ],
)
def test_reasons(make: Any, reason: str) -> None:
    assert reason in ops.Sequential(*make()).explanation()


# ------------------------------------------------------------------------------------------------- users' fusions
class ScaledTwice(FusedOperation):
    """Two ConstantScales as one, in both passes."""

    def __init__(self, a: ops.ConstantScale, b: ops.ConstantScale) -> None:
        super().__init__([a, b])
        self.scale = a.scale * b.scale

    def fuser_forward_compute(self, input_: Any, **unused: Any) -> Any:
        return input_ * self.scale, [(), ()], [(), ()]

    def fuser_forward_save_ctx(self, basic_op_ctxs: Any, input_: Any, tensors_to_save: Any, **unused: Any) -> None:
        pass

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        return grad_output * self.scale, [(), ()], [(), ()]


class LegacyScaledTwice(ScaledTwice):
    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **unused: Any) -> Any:
        return input_ * self.scale, [(), ()]


def merge_scales(made: type[ScaledTwice]) -> Any:
    def fuse(given: list[Any], *, recipe: Any) -> list[Any]:
        out: list[Any] = []
        for op in given:
            if out and all(type(o) is ops.ConstantScale for o in (op, out[-1])):
                out[-1] = made(out[-1], op)
            else:
                out.append(op)
        return out

    return fuse


@pytest.mark.parametrize("cls", [ScaledTwice, LegacyScaledTwice])
@pytest.mark.parametrize(
    ("register", "prepend", "kinds"),
    [
        (ops.register_forward_fusion, False, (True, False)),
        (ops.register_forward_fusion, True, (True, False)),
        (ops.register_backward_fusion, False, (False, True)),
        (ops.register_backward_fusion, True, (False, True)),
        (ops.register_forward_backward_fusion, False, (True, True)),
        (ops.register_forward_backward_fusion, True, (True, True)),
    ],
)
def test_registered_fusions(register: Any, prepend: bool, kinds: tuple[bool, bool], cls: Any) -> None:
    seq = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(4.0), ops.Identity(), linear(K, 96, CURRENT))
    x = sample(33)
    expected = run(seq, seq.parameters(), x)
    fusion = register(merge_scales(cls), prepend=prepend)
    try:
        plan = seq._current_groups()[0].plan()
        found = [any(type(s.op) is cls for s in steps) for steps in (plan.forward, plan.backward)]
        assert tuple(found) == kinds
        assert_equal(run(seq, seq.parameters(), x), expected)
        if cls is ScaledTwice:
            compiled = torch.compile(seq, fullgraph=True, backend="aot_eager")
            assert_equal(run(compiled, seq.parameters(), x), expected)
    finally:
        ops.unregister_fusion(fusion)
    assert not any(type(s.op) is cls for s in seq._current_groups()[0].plan().forward)


def test_bad_fusions() -> None:
    def loses(given: list[Any], *, recipe: Any) -> list[Any]:
        return given[1:]

    with pytest.raises(TypeError, match="a fusion must be a function"):
        ops.register_forward_fusion("fuse")
    ops.register_forward_fusion(loses)
    try:
        with pytest.raises(RuntimeError, match=r"the fusion .*loses must return operations that stand for the ones"):
            ops.Sequential(ops.Identity(), ops.Identity())(torch.ones(2))
    finally:
        ops.unregister_fusion(loses)
    with pytest.raises(ValueError, match="LinearChain expects operations that make up stages but got"):
        ops.LinearChain([ops.GELU()])
    with pytest.raises(ValueError, match="LinearChain expects linear operations of one recipe"):
        ops.LinearChain([ops.BasicLinear(4, 4), ops.BasicLinear(4, 4, recipe=CURRENT)])
    with pytest.raises(TypeError, match="FusedOperation expects BasicOperations but got Linear"):
        FusedOperation([ops.Linear(2, 2)])
    with pytest.raises(ValueError, match="FusedOperation expects at least one basic operation"):
        FusedOperation([])


# ------------------------------------------------------------------------------------------------- parameters
def test_state_dict() -> None:
    """Each operation's own, delayed scaling's buffers included; a copy goes on as the original."""
    delayed = RECIPES["delayed"]
    chain = chains(delayed)["mlp"][0]
    for s in range(2):
        run(chain, chain.parameters(), sample(33, seed=s))
    state = chain.state_dict()
    assert list(state) == [
        "0.weight", "1.basic_ops.0.weight", "1.basic_ops.0.fp8_scale", "1.basic_ops.0.fp8_amax_history",
        "1.basic_ops.1.bias", "3.basic_ops.0.weight", "3.basic_ops.0.fp8_scale", "3.basic_ops.0.fp8_amax_history",
        "3.basic_ops.1.bias",
    ]  # fmt: skip
    assert "basic_ops.0.weight" in ops.Linear(2, 2).state_dict() and "weight" in ops.BasicLinear(2, 2).state_dict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded = chains(delayed)["mlp"][0]
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    copies = [loaded, copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))]
    expected = run(chain, chain.parameters(), sample(33, seed=5))
    for other in copies:
        assert_equal(run(other, other.parameters(), sample(33, seed=5)), expected)
    plain = chains(None)["mlp"][0]
    plain.load_state_dict({k: v for k, v in state.items() if "fp8" not in k})
    loaded.load_state_dict(plain.state_dict())  # of another recipe: strict, too


def test_meta_device() -> None:
    """Made on meta: filled by to_empty and reset_parameters, or at the first call where the input is."""
    kw: dict[str, Any] = {"device": "meta", "dtype": BF16}
    chain = ops.Sequential(
        ops.RMSNorm(K, **kw), ops.Linear(K, 160, recipe=CURRENT, **kw), ops.SwiGLU(),
        ops.Linear(80, K, recipe=CURRENT, **kw), ops.GroupedLinear(2, K, 32, **kw),
    )  # fmt: skip
    assert all(p.is_meta for p in chain.parameters())
    early = copy.deepcopy(chain).to_empty(device="cpu")
    for op in early:
        for basic in op.basic_operations:
            basic.reset_parameters()
    sizes = torch.tensor([10, 23])
    for seq in (early, chain):
        y = seq(sample(33), sizes)
        assert torch.isfinite(y).all() and y.float().std() > 0
        assert not any(p.is_meta for p in seq.parameters())
        assert torch.equal(seq[0].weight, torch.ones(K, dtype=BF16)) and not seq[1].bias.any()
        bound = K**-0.5
        assert 0.5 * bound < seq[1].weight.abs().max() <= bound
        y.sum().backward()


def test_recipes_by_operation() -> None:
    """An operation's own recipe wins over the scope's; in a disabled scope none counts."""
    own, scoped = te_dist.recipe.MXFP8BlockScaling(), CURRENT
    seq = filled(ops.Sequential(linear(K, 96, own), ops.GELU(), linear(96, K, None)))
    reference = [te_dist.Linear(K, 96, dtype=BF16, recipe=own), te_dist.Linear(96, K, dtype=BF16)]
    for mine, theirs in zip((seq[0], seq[2]), reference, strict=True):
        with torch.no_grad():
            theirs.weight.copy_(mine.weight)
            theirs.bias.copy_(mine.bias)
    x = sample(33)

    def expected(t: Tensor) -> Tensor:
        return reference[1](ops.GELU()(reference[0](t)))

    params = [p for layer in reference for p in layer.parameters()]
    results = []
    for scope in (
        te_dist.autocast(recipe=scoped),
        te_dist.autocast(enabled=False),
        te_dist.autocast(recipe=RECIPES["nvfp4"]),
    ):
        with scope:
            results.append(run(seq, seq.parameters(), x))
            assert_equal(results[-1], run(expected, params, x))
    assert not any(torch.equal(results[0][0], other[0]) for other in results[1:])
    with te_dist.autocast(recipe=scoped):
        quantizer = seq[2].basic_ops[0].get_input_quantizer()
        assert isinstance(quantizer, te_dist.Float8CurrentScalingQuantizer)
        assert isinstance(seq[0].basic_ops[0].get_grad_output_quantizer(), te_dist.MXFP8Quantizer)
    assert seq[2].basic_ops[0].get_input_quantizer() is None and ops.GELU().get_input_quantizer() is None


def test_moving_and_casting() -> None:
    chain = chains(RECIPES["delayed"])["mlp"][0]
    run(chain, chain.parameters(), sample(33))
    chain = chain.float()
    assert chain[1].basic_ops[0].fp8_scale.dtype == torch.float32
    y = chain(sample(33, dtype=torch.float32))
    assert y.dtype == torch.float32


# ------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ops.Sequential(ops.Linear(K, 96), ops.GELU(), ops.Linear(90, K)),
            r"BasicLinear expects an input whose last dimension is 90 but operation 2 \(GELU\) gives 96",
        ),
        (
            lambda: ops.Sequential(ops.Linear(K, 96, bias=False), ops.SwiGLU(), ops.BasicLinear(96, K, name="down")),
            r"BasicLinear 'down' expects an input whose last dimension is 96 but operation 1 \(SwiGLU\) gives 48",
        ),
        (
            lambda: ops.Sequential(ops.BasicLinear(K, 33), ops.SwiGLU()),
            r"SwiGLU gates one half .* even last dimension but operation 0 \(BasicLinear\) gives 33",
        ),
        (
            lambda: ops.Sequential(ops.BasicLinear(K, 96), ops.Bias(95)),
            r"Bias expects an input whose last dimension is 95 but operation 0 \(BasicLinear\) gives 96",
        ),
        (
            lambda: ops.Sequential(ops.RMSNorm(K), ops.LayerNorm(32)),
            r"LayerNorm expects an input whose last dimension is 32 but operation 0 \(RMSNorm\) gives 64",
        ),
        (
            lambda: ops.Sequential(ops.BasicLinear(K, 96), ops.Reshape((-1, 48)), ops.GroupedLinear(2, 96, K)),
            r"GroupedLinear expects an input whose last dimension is 96 but operation 1 \(Reshape\) gives 48",
        ),
    ],
)
def test_neighbours_that_do_not_fit(make: Any, message: str) -> None:
    """Said before anything runs."""
    with pytest.raises(ValueError, match=message):
        make()(torch.ones(4, K))
    with pytest.raises(ValueError, match=message):
        make().explain()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: ops.activation("swish"), ValueError, "te_dist.ops.activation: activation expects one of"),
        (lambda x: type("Odd", (ops.Activation,), {"activation": "odd"})(), ValueError, "Odd: activation expects one"),
        (lambda x: ops.Linear(K, 4)(x[:, :5]), ValueError, r"BasicLinear expects the input's last dimension to be 64"),
        (lambda x: ops.RMSNorm(5)(x), ValueError, r"RMSNorm expects the input's last dimensions to be \[5\]"),
        (lambda x: ops.SwiGLU()(x[:, :5]), ValueError, "SwiGLU gates one half"),
        (lambda x: ops.Linear(K, 4)(x.long()), TypeError, "BasicLinear expects an input of float32"),
        (lambda x: ops.RMSNorm(K)(x.long()), TypeError, "RMSNorm expects an input of float32"),
        (lambda x: ops.Linear(K, 4)([1.0]), TypeError, "BasicLinear expects a tensor but got list"),
        (lambda x: ops.Linear(K, 4)(x.to("meta")), ValueError, "BasicLinear expects the input on cpu"),
        (lambda x: ops.BasicLinear(0, 4), ValueError, "BasicLinear expects in_features to be a positive number"),
        (lambda x: ops.BasicLinear(4, 4, recipe="fp8"), TypeError, "BasicLinear expects recipe to be a te_dist"),
        (lambda x: ops.Quantize(recipe="fp8"), TypeError, "Quantize expects recipe to be a te_dist recipe"),
        (lambda x: ops.BasicLinear(4, 4, userbuffers_options={}), ValueError, "has not built userbuffers_options"),
        (lambda x: ops.BasicLinear(4, 4, colour=1), TypeError, "BasicLinear got an unexpected argument 'colour'"),
        (lambda x: ops.Dropout(1.5), ValueError, "Dropout expects a probability between 0 and 1 but got 1.5"),
        (lambda x: ops.ConstantScale("2"), TypeError, "ConstantScale expects a number but got '2'"),
        (lambda x: ops.Reshape((-1, -1)), ValueError, "Reshape expects sizes of which at most one is -1"),
        (lambda x: ops.Reshape((5, 5))(x), ValueError, r"Reshape cannot make \[5, 5\] of an input of shape \[4, 64\]"),
        (lambda x: ops.Bias(0), ValueError, "Bias expects a positive size but got 0"),
        (lambda x: ops.RMSNorm(()), ValueError, "RMSNorm expects positive sizes"),
        (
            lambda x: ops.GroupedLinear(2, K, 4)(x, torch.tensor([1, 2])),
            ValueError,
            "GroupedLinear expects m_splits that are not negative and add up to the 4 rows",
        ),
        (lambda x: ops.BasicLinear(K, 3, recipe=RECIPES["nvfp4"], name="a")(x), ValueError, "BasicLinear 'a': NVFP4"),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.ones(4, K))


def test_activation_by_name() -> None:
    for name in te_dist.producers.ACTIVATIONS:
        assert ops.activation(name).activation == name
    assert type(ops.activation("swiglu", cache_quantized_input=True)) is ops.SwiGLU


# ------------------------------------------------------------------------------------------------- documentation
def test_the_page_runs() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "ops.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 4
    names: dict[str, Any] = {"__name__": "page"}
    for example in examples:
        exec(compile(example, "docs/ops.md", "exec"), names)
    for name in ("op_forward_compute", "op_forward_save_ctx", "op_forward", "op_backward"):
        assert f"| `{name}(" in page, "C9: the four methods"
    listed = set(re.findall(r"`(\w+)`", page))
    classes = {name for name in ops.__all__ if isinstance(getattr(ops, name), type)}
    frame = {"FusibleOperation", "OperationContext", "OperationFuser", "Activation", "BasicOperation", "FusedOperation"}
    assert classes - frame - {"Sequential"} <= listed, "every operation is on the page"
    shown = re.search(r"mlp\.explain\(\)\n((?:# .*\n)+)", page).group(1)
    assert shown == "".join(f"# {line}\n" for line in names["mlp"].explanation().splitlines())


@pytest.mark.parametrize("module", [ops.op, ops.sequential, ops.linear, ops.basic.activations], ids=str)
def test_docstrings_run(module: Any) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0
