"""Layers inside torch.compile(fullgraph=True): equal to eager bit for bit, and compiled once."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from cases import varied
from module_cases import LAYERS, RECIPES, assert_equal, change_weights, make, sample, step
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import te_dist
from te_dist import torch_compat
from te_dist.modules import base

everything = pytest.mark.parametrize(("kind", "recipe"), [(kind, name) for name in sorted(RECIPES) for kind in LAYERS])
# Each recipe and each layer, live state and seeds with more than one.
some = pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("linear", "none"),
        ("linear", "delayed"),
        ("linear", "nvfp4"),
        ("layernorm_linear", "current"),
        ("layernorm_linear", "custom"),
        ("layernorm_mlp", "block"),
        ("layernorm_mlp", "delayed"),
        ("layernorm_mlp", "mxfp8"),
    ],
)
few = pytest.mark.parametrize(
    ("kind", "recipe"), [("linear", "delayed"), ("layernorm_linear", "current"), ("layernorm_mlp", "nvfp4")]
)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Compiled:
    """A compiled call of a layer, with the layer's parameters, and how many graphs were made for it."""

    def __init__(self, layer: nn.Module, function: Any = None, **options: Any) -> None:
        self.counter = torch._dynamo.testing.CompileCounterWithBackend(options.pop("backend", "aot_eager"))
        self.call = torch.compile(function or layer, backend=self.counter, fullgraph=True, **options)
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.call(*args, **kwargs)

    def parameters(self) -> Any:
        return self.layer.parameters()

    @property
    def graphs(self) -> int:
        return self.counter.frame_count


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    for name in ("fp8_scale", "fp8_amax_history"):
        mine, theirs = getattr(a, name), getattr(b, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert torch.equal(mine, theirs), name


@everything
def test_steps(kind: str, recipe: str) -> None:
    """Four steps, delayed scaling's state included, and one graph for all of them."""
    eager, compiled = make(kind, recipe), Compiled(make(kind, recipe))
    for s in range(4):
        x = sample(33, seed=s)
        assert_equal(step(compiled, x), step(eager, x), f"step {s}")
    assert_same_state(compiled.layer, eager)
    assert compiled.graphs == 1


@few
def test_no_grad_eval_and_back(kind: str, recipe: str) -> None:
    eager, compiled = make(kind, recipe), Compiled(make(kind, recipe))
    x = sample(33)

    def flip() -> None:
        for train in (True, False, True, False):
            eager.train(train), compiled.layer.train(train)
            if train:
                assert_equal(step(compiled, x), step(eager, x))
            else:
                with torch.no_grad():
                    y = compiled(x)
                    assert torch.equal(y, eager(x)) and not y.requires_grad

    flip()
    graphs = compiled.graphs
    flip()
    assert compiled.graphs == graphs
    assert_same_state(compiled.layer, eager)


@few
def test_inputs_without_grad_and_frozen_weights(kind: str, recipe: str) -> None:
    for trainable in (True, False):
        results = []
        for wrap in (lambda layer: layer, Compiled):
            layer = make(kind, recipe)
            for name, p in layer.named_parameters():
                p.requires_grad_(trainable or name.endswith("bias"))
            torch.manual_seed(7)
            y = wrap(layer)(sample(33))
            y.backward(varied(tuple(y.shape), y.dtype, seed=9))
            results.append([y.detach(), *[p.grad for p in layer.parameters()]])
        assert_equal(*results)
        torch._dynamo.reset()


@some
def test_caching(kind: str, recipe: str) -> None:
    """A10: is_first_microbatch inside the graph, on workspaces that stay where they are."""
    eager, compiled = make(kind, recipe), Compiled(make(kind, recipe))
    where = None
    for s in range(4):
        for flag in (True, False, False):
            x = sample(33, seed=s)
            assert_equal(step(compiled, x, flag), step(eager, x, flag), f"step {s}, {flag}")
        for layer in (eager, compiled.layer):
            change_weights(layer)
        buffers = compiled.layer._workspaces
        pointers = None if buffers is None else [t.data_ptr() for t in buffers]
        assert where is None or pointers == where
        where = pointers
        if s == 1:
            graphs = compiled.graphs
    assert compiled.graphs == graphs, "no new graph after the second step"
    assert_same_state(compiled.layer, eager)


@few
def test_caching_reuses_the_old_weight(kind: str, recipe: str) -> None:
    layer = make(kind, recipe).eval()
    compiled = Compiled(layer)
    with torch.no_grad():
        first = compiled(sample(33), True)
        change_weights(layer)
        assert torch.equal(compiled(sample(33), False), first)
        assert torch.equal(layer(sample(33), False), first), "eager code finds the workspace that compiled code made"
        expected = make(kind, recipe)
        change_weights(expected)
        expected = expected(sample(33))
        assert torch.equal(compiled(sample(33), True), expected)
        change_weights(layer)
        assert torch.equal(layer(sample(33), False), expected)
        assert not torch.equal(layer(sample(33), True), expected)
        assert torch.equal(compiled(sample(33), False), layer(sample(33), False)), "and the other way round"


@pytest.mark.parametrize("kind", ["linear", "layernorm_mlp"])
def test_skip_flag_in_the_graph(kind: str) -> None:
    layer = make(kind, "mxfp8")
    compiled = Compiled(layer)
    skip, write = torch.ones(1), torch.zeros(1)
    with torch.no_grad():
        compiled(sample(33), True)
        first = compiled(sample(33), False, write)
        change_weights(layer)
        assert torch.equal(compiled(sample(33), False, skip), first)
        assert not torch.equal(compiled(sample(33), False, write), first)


@pytest.mark.parametrize(("kind", "recipe"), [("linear", "nvfp4"), ("layernorm_mlp", "current")])
def test_frozen_weights(kind: str, recipe: str) -> None:
    eager, compiled = make(kind, recipe), Compiled(make(kind, recipe))
    for s in range(4):
        with te_dist.frozen_weights():
            for m in range(2):
                x = sample(33, seed=10 * s + m)
                expected = step(eager, x)
                assert_equal(step(compiled, x), expected, f"step {s}.{m}")
        for layer in (eager, compiled.layer):
            change_weights(layer)
        if s == 1:
            graphs = compiled.graphs
    assert compiled.graphs == graphs


@some
def test_dynamic_batch(kind: str, recipe: str) -> None:
    """One graph for the first size, one for all others: multiples of the blocks, and not."""
    eager, compiled = make(kind, recipe), Compiled(make(kind, recipe))
    for rows in (144, 130, 160, 257, 199):
        x = sample(rows)
        assert_equal(step(compiled, x), step(eager, x), str(rows))
    assert compiled.graphs <= 2
    for rows in (33, 16, 48, 7):
        x = sample(rows)
        assert_equal(step(compiled, x), step(eager, x), str(rows))
    # torch tells a dimension of 1 from all others, and up to 128 rows have one block of 1x128 scales in a column.
    assert compiled.graphs <= (3 if recipe == "block" else 2)
    assert_same_state(compiled.layer, eager)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_marked_dynamic_batch(recipe: str) -> None:
    layer = make("linear", recipe)
    compiled = Compiled(layer)
    for rows in (32, 16, 80):
        x = sample(rows, 3)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))
    assert compiled.graphs == 1


# ------------------------------------------------------------------------------------------------- scopes
@some
def test_a_scope_made_anew_on_every_step(kind: str, recipe: str) -> None:
    """Recipes that are equal but not identical do not compile anew."""
    eager, compiled = make(kind), Compiled(make(kind))

    def run(layer: Any) -> Any:
        def scoped(x: Tensor, *args: Any) -> Tensor:
            made = RECIPES[recipe]()
            with te_dist.autocast(enabled=made is not None, recipe=made):
                return layer(x, *args)

        scoped.parameters = layer.parameters
        return scoped

    for s in range(4):
        x = sample(33, seed=s)
        assert_equal(step(run(compiled), x), step(run(eager), x), f"step {s}")
    assert compiled.graphs == 1
    for s in range(4):
        for flag in (True, False):
            x = sample(33, seed=s)
            assert_equal(step(run(compiled), x, flag), step(run(eager), x, flag), f"cached step {s}")
        if s == 1:
            graphs = compiled.graphs
    assert compiled.graphs == graphs


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_a_scope_inside_the_graph(recipe: str) -> None:
    eager = make("layernorm_linear")
    made = RECIPES[recipe]()

    def function(layer: nn.Module, x: Tensor) -> Tensor:
        with te_dist.autocast(enabled=made is not None, recipe=made):
            return layer(x)

    layer = make("layernorm_linear")
    compiled = Compiled(layer, functools.partial(function, layer))
    reference = functools.partial(function, eager)
    reference.parameters = eager.parameters
    for s in range(3):
        assert_equal(step(compiled, sample(33, seed=s)), step(reference, sample(33, seed=s)))
    assert compiled.graphs == 1


def test_another_recipe_is_another_graph() -> None:
    layer = make("linear")
    compiled = Compiled(layer)
    for _ in range(2):
        for recipe in ("current", "mxfp8", "block"):
            with te_dist.autocast(recipe=RECIPES[recipe]()), torch.no_grad():
                assert torch.equal(compiled(sample(33)), make("linear", recipe)(sample(33))), recipe
    assert compiled.graphs == 3


@pytest.mark.parametrize("recipe", ["none", "custom", "mxfp8"])
def test_autocast_of_torch(recipe: str) -> None:
    """float32 parameters under bf16: cast alike, also where they stay unquantized."""
    eager, compiled = (make("layernorm_mlp", recipe, dtype=torch.float32) for _ in range(2))
    compiled = Compiled(compiled)

    def run(layer: Any) -> Any:
        def inside(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return layer(x)

        inside.parameters = layer.parameters
        return inside

    x = sample(33, dtype=torch.float32)
    assert_equal(step(run(compiled), x), step(run(eager), x))


# ------------------------------------------------------------------------------------------------- checkpointing
def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    wanted = "te_dist::layer_forward" in str(op) or "te_dist.layer_forward" in str(op)
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(layer: nn.Module, how: str, x: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        return torch.tanh(layer(x * 1.5))

    if how == "reentrant":
        return checkpoint(block, x, use_reentrant=True)
    if how == "selective":
        context = functools.partial(create_selective_checkpoint_contexts, save_products)
        return checkpoint(block, x, use_reentrant=False, context_fn=context)
    return checkpoint(block, x, use_reentrant=False)


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(layer(x * 1.5))


@some
@pytest.mark.parametrize("how", ["reentrant", "not_reentrant", "selective"])
def test_checkpointing_in_eager(kind: str, recipe: str, how: str) -> None:
    layers_ = [make(kind, recipe) for _ in range(2)]
    runs = [functools.partial(plain, layers_[0]), functools.partial(checkpointed, layers_[1], how)]
    for run, layer in zip(runs, layers_, strict=True):
        run.parameters = layer.parameters
    for s in range(3):
        results = [step(run, sample(33, seed=s)) for run in runs]
        assert_equal(*results, f"step {s}")
    assert_same_state(*layers_)


@few
@pytest.mark.parametrize("how", ["not_reentrant", "selective"])
def test_checkpointing_in_the_graph(kind: str, recipe: str, how: str) -> None:
    eager, layer = make(kind, recipe), make(kind, recipe)
    compiled = Compiled(layer, functools.partial(checkpointed, layer, how))
    reference = functools.partial(plain, eager)
    reference.parameters = eager.parameters
    for s in range(3):
        assert_equal(step(compiled, sample(33, seed=s)), step(reference, sample(33, seed=s)), f"step {s}")
    assert_same_state(layer, eager)


@few
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_compiled_layers(kind: str, recipe: str, reentrant: bool) -> None:
    """The recomputation runs a graph inside backward, and must not advance delayed scaling once more."""
    eager, compiled = make(kind, recipe), Compiled(make(kind, recipe))

    def run(x: Tensor) -> Tensor:
        return checkpoint(compiled, x, use_reentrant=reentrant)

    run.parameters = compiled.parameters
    for s in range(3):
        assert_equal(step(run, sample(33, seed=s)), step(eager, sample(33, seed=s)), f"step {s}")
    assert_same_state(compiled.layer, eager)


@pytest.mark.parametrize("recipe", ["none", "delayed", "nvfp4"])
def test_layernorm_mlp_that_checkpoints_itself(recipe: str) -> None:
    eager, compiled = make("layernorm_mlp", recipe), Compiled(make("layernorm_mlp", recipe, checkpoint=True))
    for s in range(3):
        assert_equal(step(compiled, sample(33, seed=s)), step(eager, sample(33, seed=s)), f"step {s}")
    assert_same_state(compiled.layer, eager)


# ------------------------------------------------------------------------------------------------- options, errors
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [("linear", "none"), ("linear", "nvfp4"), ("layernorm_linear", "delayed"), ("layernorm_mlp", "none")],
)
def test_options(kind: str, recipe: str) -> None:
    options: list[dict[str, Any]] = [{"return_bias": True}, {"bias": False}]
    if kind == "linear":
        options += [{"save_original_input": True}, {"parameters_split": ("a", "b")}]
    else:
        options += [{"normalization": "RMSNorm", "zero_centered_gamma": True}, {"return_layernorm_output": True}]
    for chosen in options:
        results = []
        for wrap in (lambda layer: layer, Compiled):
            layer = make(kind, recipe, **chosen)
            torch.manual_seed(7)
            x = sample(33, grad=True)
            out = wrap(layer)(x)
            out = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None and t.requires_grad]
            torch.autograd.backward(out, [varied(tuple(t.shape), t.dtype, seed=9) for t in out])
            results.append([*[t.detach() for t in out], x.grad, *[p.grad for p in layer.parameters()]])
        assert_equal(*results, str(chosen))
        torch._dynamo.reset()


def test_backward_twice() -> None:
    for recipe in ("mxfp8", "nvfp4"):
        layer = make("linear", recipe)
        x = sample(33, grad=True)
        y = Compiled(layer)(x)
        dy = varied(tuple(y.shape), y.dtype, seed=9)
        first = torch.autograd.grad(y, [x, layer.weight], dy, retain_graph=True)
        assert_equal(list(torch.autograd.grad(y, [x, layer.weight], dy)), list(first))


@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_what_only_eager_code_can_do_is_refused(option: str) -> None:
    layer = make("linear", "mxfp8", name="head", **{option: True})
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    with pytest.raises(Exception, match=option):
        Compiled(layer)(sample(4))


def test_shapes_that_cannot_be_are_refused_while_tracing() -> None:
    with pytest.raises(Exception, match="last dimension"):
        Compiled(make("linear", "mxfp8"))(torch.ones(4, 3))


@some
def test_fakes_agree_with_the_ops(kind: str, recipe: str) -> None:
    """torch's own checker on the ops of one step: schema, and fake results against real ones."""
    layer = make(kind, recipe)
    params = [None if p is None else p.detach() for p in layer._slots()]
    grads = [True, *[p is not None for p in params]]
    flags, known, kept, (saves_input, *_), (count, *_), delayed, seeded = base._call_constants(
        layer.spec, layer.recipe, False, None, False, False, (), None, None, False, False, *grads
    )
    ops, scales, x = torch.ops.te_dist, layer.fp8_scale, sample(33)
    constants = (layer.spec, known, flags)

    def check(op: Any, *args: Any) -> Any:
        tests = ("test_schema",) if op is ops.layer_forward_seeded else ("test_schema", "test_faketensor")
        torch.library.opcheck(op.default, args, test_utils=tests)  # a seeded op draws anew, which a comparison sees
        return op(*args)

    weights = check(ops.quantize_weights, params, scales, *constants)[:count] if count else []
    if count:
        check(ops.update_weights, params, weights, torch.zeros(layer.spec.scale_count), scales, None, *constants)
    forward = ops.layer_forward_seeded if seeded else ops.layer_forward
    made = check(forward, x, params, weights, scales, [], None, *constants, x.dtype)
    seeds = made.pop() if seeded else None
    saved = made[2 if delayed else 1 :]
    dy = torch.ones_like(made[0])
    kept_weights = [weights[i] for i in kept]
    given = x if saves_input else None
    rest = (scales, seeds, [], None, *constants, x.dtype, 33)
    check(ops.layer_backward, dy, None, given, params, kept_weights, saved, *rest)


# ------------------------------------------------------------------------------------------------- other backends
@pytest.mark.parametrize(("kind", "recipe"), [("layernorm_mlp", "nvfp4"), ("linear", "delayed")])
def test_inductor(kind: str, recipe: str) -> None:
    eager, compiled = make(kind, recipe), Compiled(make(kind, recipe), backend="inductor")
    for s in range(3):
        assert_equal(step(compiled, sample(33, seed=s), s == 0), step(eager, sample(33, seed=s), s == 0), f"step {s}")
    assert_same_state(compiled.layer, eager)


@pytest.mark.cuda
@everything
def test_cuda_graph(kind: str, recipe: str) -> None:
    """A captured forward and backward equals eager, with the weight update decided at replay by a flag."""
    layer, eager = make(kind, recipe).cuda(), make(kind, recipe).cuda()
    static_x, skip = sample(64).cuda().requires_grad_(), torch.zeros(1, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(static_x, True, skip).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    for p in [static_x, *layer.parameters()]:
        p.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(static_x, True, skip)
        y.sum().backward()
    if recipe in ("delayed", "nvfp4"):  # state that moves on, and seeds: compared with themselves
        graph.replay()
        assert all(t.isfinite().all() for t in (y, static_x.grad, *[p.grad for p in layer.parameters()]))
        return
    x = sample(64, seed=5).cuda().requires_grad_()
    with torch.no_grad():
        static_x.copy_(x)
    graph.replay()
    expected = eager(x)
    expected.sum().backward()
    assert_equal([y, static_x.grad], [expected, x.grad])
    skip.fill_(1)
    change_weights(layer)
    graph.replay()
    if recipe != "none":
        assert torch.equal(y, expected), "the flag kept the quantized weight"


@pytest.mark.cuda
@everything
def test_reduce_overhead(kind: str, recipe: str) -> None:
    eager, layer = make(kind, recipe).cuda(), make(kind, recipe).cuda()
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for s in range(4):
        x = sample(64, seed=s).cuda()
        results = []
        for run, owner in ((compiled, layer), (eager, eager)):
            torch.manual_seed(7)
            torch.compiler.cudagraph_mark_step_begin()
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            y.backward(varied(tuple(y.shape), y.dtype, seed=9).cuda())
            results.append([t.detach().clone() for t in (y, leaf.grad, *[p.grad for p in owner.parameters()])])
            owner.zero_grad()
        if recipe == "nvfp4":  # a graph's random state is its own
            assert_equal(results[0][:1], results[1][:1])
        else:
            assert_equal(*results, f"step {s}")


def test_torch_can_carry_the_values() -> None:
    assert torch_compat.supports_value_types()
