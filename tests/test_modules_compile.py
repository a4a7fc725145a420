"""Layers inside torch.compile(fullgraph=True): equal to eager bit for bit, and compiled once.

On a GPU with inductor. On a CPU, where that takes long, with the same graphs run op by op, and inductor for a few."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
from cases import varied
from module_cases import LAYERS, RECIPES, F, K, assert_equal, change_weights, step
from module_cases import make as make_on_cpu
from module_cases import sample as sample_on_cpu
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import te_dist
from te_dist import torch_compat
from te_dist.modules import compiled_call, scopes

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


BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}
where = "cpu"  # the device of the test that runs


@pytest.fixture(autouse=True)
def _fresh_dynamo(device: str) -> Iterator[None]:
    global where
    where = device
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Rounded to bf16 where eager code rounds: inductor by itself keeps what it fuses in float32.
    with torch._inductor.config.patch(emulate_precision_casts=True):
        yield
    torch._dynamo.reset()


def make(*args: Any, **options: Any) -> nn.Module:
    return make_on_cpu(*args, **options).to(where)


def sample(*lead: int, grad: bool = False, **options: Any) -> Tensor:
    return sample_on_cpu(*lead, **options).to(where).requires_grad_(grad)


def gradient_for(y: Tensor) -> Tensor:
    return varied(tuple(y.shape), y.dtype, seed=9).to(y.device)


class Compiled:
    """A compiled call of a layer, with the layer's parameters, and how many graphs were made for it."""

    def __init__(self, layer: nn.Module, function: Any = None, **options: Any) -> None:
        self.counter = torch._dynamo.testing.CompileCounterWithBackend(options.pop("backend", BACKENDS[where]))
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
            y.backward(gradient_for(y))
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
    skip, write = torch.ones(1, device=where), torch.zeros(1, device=where)
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


def test_scopes_have_their_attributes_from_the_start() -> None:
    """Dynamo compiles anew when an attribute of a class becomes one of its object: once per process, so that the tests
    above see it only if they are the first to enter a scope."""
    assert set(vars(type(te_dist.recipe._active)())) == {"recipe", "disabled"}
    assert set(vars(type(scopes.scope)())) == {"depth"}


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
            with torch.autocast(where, dtype=torch.bfloat16):
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
        return torch.relu(layer(x * 1.5))

    if how == "reentrant":
        return checkpoint(block, x, use_reentrant=True)
    if how == "selective":
        context = functools.partial(create_selective_checkpoint_contexts, save_products)
        return checkpoint(block, x, use_reentrant=False, context_fn=context)
    return checkpoint(block, x, use_reentrant=False)


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(layer(x * 1.5))


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


@pytest.mark.parametrize(("kind", "recipe"), [("linear", "nvfp4"), ("layernorm_mlp", "current"), ("linear", "none")])
@pytest.mark.parametrize("kept_by", ["frozen_weights", "is_first_microbatch"])
def test_kept_weights_and_checkpointing_in_the_graph(kind: str, recipe: str, kept_by: str) -> None:
    """A graph may change no attribute there, so that nothing is kept: equal to eager code, which does keep."""
    eager, layer = make(kind, recipe), make(kind, recipe)

    def recomputed(x: Tensor, *flags: bool) -> Tensor:
        return checkpoint(layer, x, *flags, use_reentrant=False)

    compiled = Compiled(layer, recomputed)
    for s in range(3):
        scope = te_dist.frozen_weights() if kept_by == "frozen_weights" else contextlib.nullcontext()
        with scope:
            for m in range(2):
                x, flags = sample(33, seed=2 * s + m), [] if kept_by == "frozen_weights" else [m == 0]
                assert_equal(step(compiled, x, *flags), step(eager, x, *flags), f"step {s}.{m}")
        change_weights(eager), change_weights(layer)


def test_what_cannot_be_kept_is_refused() -> None:
    layer = make("linear", "delayed")
    compiled = Compiled(layer, lambda x: checkpoint(layer, x, use_reentrant=False))
    with te_dist.frozen_weights(), pytest.raises(Exception, match="is_first_microbatch instead"):
        compiled(sample(33, grad=True))


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
            torch.autograd.backward(out, [gradient_for(t) for t in out])
            results.append([*[t.detach() for t in out], x.grad, *[p.grad for p in layer.parameters()]])
        assert_equal(*results, str(chosen))
        torch._dynamo.reset()


def test_backward_twice() -> None:
    for recipe in ("mxfp8", "nvfp4"):
        layer = make("linear", recipe)
        x = sample(33, grad=True)
        y = Compiled(layer)(x)
        dy = gradient_for(y)
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
        Compiled(make("linear", "mxfp8"))(torch.ones(4, 3, device=where))


@some
def test_fakes_agree_with_the_ops(kind: str, recipe: str) -> None:
    """torch's own checker on the ops of one step: schema, and fake results against real ones."""
    layer = make(kind, recipe)
    params = [None if p is None else p.detach() for p in layer._slots()]
    grads = [True, *[p is not None for p in params]]
    flags, known, kept, (saves_input, *_), (count, *_), delayed, seeded = compiled_call._call_constants(
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
        amaxes = torch.zeros(layer.spec.scale_count, device=where)
        check(ops.update_weights, params, weights, amaxes, scales, None, *constants)
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


def test_torch_can_carry_the_values() -> None:
    assert torch_compat.supports_value_types()


# ------------------------------------------------------------------------------------------------- block by block
class Block(nn.Module):
    """What a model repeats, with a layer of every kind in it."""

    def __init__(self, index: int, recipe: Any, checkpoints: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"recipe": recipe, "dtype": torch.bfloat16, "device": where}
        self.checkpoints = checkpoints
        self.norm = te_dist.RMSNorm(K, dtype=torch.bfloat16, device=where)
        self.first = te_dist.LayerNormLinear(K, K, name=f"layers.{index}.first", **options)
        self.second = te_dist.Linear(K, K, name=f"layers.{index}.second", **options)
        self.mlp = te_dist.LayerNormMLP(K, F, name=f"layers.{index}.mlp", **options)
        self.experts = te_dist.GroupedLinear(2, K, K, name=f"layers.{index}.experts", **options)

    def body(self, x: Tensor) -> Tensor:
        x = self.second(self.first(self.norm(x)))
        return x + self.experts(self.mlp(x), [16, 16])

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)


@pytest.mark.parametrize(
    ("recipe", "checkpoints", "scoped"),
    [("current", False, False), ("delayed", False, True), ("delayed", True, True), ("nvfp4", True, False)],
)
def test_equal_blocks_share_their_graphs(recipe: str, checkpoints: bool, scoped: bool) -> None:
    """torch gives up after eight graphs of one function, and a model has more layers than that."""
    torch.manual_seed(3)
    made = RECIPES[recipe]()
    blocks = nn.Sequential(*[Block(i, None if scoped else made, checkpoints) for i in range(10)])
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block.compile(fullgraph=True, backend=counter)
    for s in range(2):
        with te_dist.autocast(enabled=scoped, recipe=made) if scoped else contextlib.nullcontext():
            torch.manual_seed(s)
            y = blocks(sample(32, seed=s))
        y.backward(gradient_for(y))
        assert counter.frame_count <= 2, "one for an input that needs no gradient, one for all others"


def test_operations_beside_a_layer() -> None:
    """A chain of te_dist.ops may have the description and the recipe of a layer, but has no parameters of its own."""
    recipe = RECIPES["delayed"]()
    chain = te_dist.ops.Sequential(te_dist.ops.Linear(K, K)).to(where, torch.bfloat16)
    eager, compiled = make("linear", "none"), Compiled(make("linear", "none"))
    for s in range(2):
        x = sample(32, seed=s)
        with te_dist.autocast(recipe=recipe):
            chain(x)
            assert_equal(step(compiled, x), step(eager, x), f"step {s}")
    assert_same_state(compiled.layer, eager)
    alike = [type(layer) for layer in scopes.layers if layer.traced_spec is eager.traced_spec]
    assert len(set(alike)) > 1, "the chain is among those of this description"
