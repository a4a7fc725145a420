"""Quantized weights that are kept over microbatches: quantize_weight (SPEC A2 - A7), and the modules around it."""

from __future__ import annotations

import inspect

import pytest
import torch
from cases import assert_same_storage, varied
from module_cases import LAYERS, QUANTIZED, RECIPES, assert_equal, change_weights, make, sample, step, weights_of
from torch import nn

import te_dist
from te_dist.pipeline import function as pipeline_function
from te_dist.pipeline import weights as pipeline_weights
from te_dist.pipeline.weights import quantize_weight
from te_dist.recipe import Float8CurrentScaling, MMParams

STATE = {"scale": torch.tensor([2.0]), "amax": torch.zeros(1)}
FORMATS = {
    "delayed": lambda **kw: te_dist.Float8Quantizer(torch.tensor([2.0]), torch.zeros(1), "e4m3", **kw),
    "current": lambda **kw: te_dist.Float8CurrentScalingQuantizer("e4m3", **kw),
    "block": lambda **kw: te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=2, **kw),
    "mxfp8": lambda **kw: te_dist.MXFP8Quantizer("e4m3", **kw),
    "nvfp4": lambda **kw: te_dist.NVFP4Quantizer(with_2d_quantization=True, **kw),
}
SHAPE = (96, 64)
formats = pytest.mark.parametrize("name", sorted(FORMATS))


def weight(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(varied(SHAPE, dtype, seed))


def pointers(storage: te_dist.QuantizedStorage) -> list[int]:
    return [t.data_ptr() for t in storage.inner_tensors()]


# ------------------------------------------------------------------------------------------------- the function
def test_signature() -> None:
    names = ["tensor", "quantizer", "workspace", "update_workspace", "skip_update_flag", "cache"]
    assert list(inspect.signature(quantize_weight).parameters) == names


@formats
def test_miss(name: str) -> None:
    """A4: quantized; kept only if asked for."""
    w, quantizer = weight(), FORMATS[name]()
    expected = FORMATS[name]().quantize(w)
    out, kept = quantize_weight(w, quantizer, cache=True)
    assert out is kept
    assert_same_storage(out, expected, name)
    assert all(not t.requires_grad and t.grad_fn is None for t in out.inner_tensors()), "A7: detached"
    out, kept = quantize_weight(w, quantizer)
    assert kept is None
    assert_same_storage(out, expected, name)


@formats
def test_hit_updates_in_place(name: str) -> None:
    """A3."""
    quantizer = FORMATS[name]()
    _, workspace = quantize_weight(weight(), quantizer, cache=True)
    before = pointers(workspace)
    out, kept = quantize_weight(weight(1), quantizer, workspace, update_workspace=True, cache=True)
    assert out is workspace and kept is None and pointers(workspace) == before
    assert_same_storage(out, FORMATS[name]().quantize(weight(1)), name)


@formats
def test_hit_without_update_reuses(name: str) -> None:
    quantizer = FORMATS[name]()
    _, workspace = quantize_weight(weight(), quantizer, cache=True)
    out, kept = quantize_weight(weight(1), quantizer, workspace, update_workspace=False, cache=True)
    assert out is workspace and kept is None
    assert_same_storage(out, FORMATS[name]().quantize(weight()), name)


@formats
@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_skip_flag_decides_in_the_kernel(name: str, update: bool, flag: float) -> None:
    """A3: with a flag the call is made whatever update_workspace says, and the flag alone decides."""
    quantizer = FORMATS[name]()
    _, workspace = quantize_weight(weight(), quantizer, cache=True)
    out, kept = quantize_weight(weight(1), quantizer, workspace, update, torch.tensor([flag]), True)
    assert out is workspace and kept is None
    assert_same_storage(out, FORMATS[name]().quantize(weight(0 if flag else 1)), name)


@formats
@pytest.mark.parametrize(
    "flag", [torch.ones(1, dtype=torch.int32), torch.tensor([True]), torch.ones(2), torch.ones(0), True], ids=str
)
def test_a_wrong_skip_flag_is_refused(name: str, flag: object) -> None:
    """The kernel reads it as float32 [1] through a pointer, so anything else would be garbage."""
    quantizer = FORMATS[name]()
    _, workspace = quantize_weight(weight(), quantizer, cache=True)
    with pytest.raises((TypeError, ValueError), match="skip_update_flag"):
        quantize_weight(weight(1), quantizer, workspace, True, flag, True)


@formats
@pytest.mark.parametrize("held", ["row", "column"])
def test_missing_plane_is_a_miss(name: str, held: str) -> None:
    """A5: for all formats."""
    have, want = FORMATS[name](rowwise=held == "row", columnwise=held == "column"), FORMATS[name]()
    _, workspace = quantize_weight(weight(), have, cache=True)
    bytes_before = [t.clone() for t in workspace.inner_tensors()]
    for wanted in (want, want.with_usage(rowwise=held != "row", columnwise=held != "column")):
        out, kept = quantize_weight(weight(1), wanted, workspace, update_workspace=False, cache=True)
        assert out is kept and out is not workspace
        assert (out.has_rowwise, out.has_columnwise) == (wanted.rowwise, wanted.columnwise)
        assert_same_storage(out, FORMATS[name]().with_usage(
            rowwise=wanted.rowwise, columnwise=wanted.columnwise).quantize(weight(1)), name)  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(workspace.inner_tensors(), bytes_before, strict=True))


@formats
@pytest.mark.parametrize("wanted", ["row", "column"])
def test_more_planes_than_needed_are_a_hit_and_stay_consistent(name: str, wanted: str) -> None:
    both = FORMATS[name]()
    _, workspace = quantize_weight(weight(), both, cache=True)
    one = both.with_usage(rowwise=wanted == "row", columnwise=wanted == "column")
    out, kept = quantize_weight(weight(1), one, workspace, cache=True)
    assert out is workspace and kept is None
    assert_same_storage(workspace, FORMATS[name]().quantize(weight(1)), "the other plane is not left behind")


@pytest.mark.parametrize("have", sorted(FORMATS))
@pytest.mark.parametrize("want", sorted(FORMATS))
def test_another_format_is_a_miss(have: str, want: str) -> None:
    per_tensor = {"delayed", "current"}
    if have == want or {have, want} == per_tensor:  # one layout: the workspace serves either
        return
    _, workspace = quantize_weight(weight(), FORMATS[have](), cache=True)
    out, kept = quantize_weight(weight(), FORMATS[want](), workspace, update_workspace=False, cache=True)
    assert out is kept and out is not workspace
    assert_same_storage(out, FORMATS[want]().quantize(weight()), want)


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (FORMATS["current"](), te_dist.Float8CurrentScalingQuantizer("e5m2")),
        (FORMATS["current"](), te_dist.Float8CurrentScalingQuantizer("e4m3", force_pow_2_scales=True)),
        (FORMATS["block"](), te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=1)),
        (FORMATS["mxfp8"](), te_dist.MXFP8Quantizer("e4m3", with_2d_quantization=True)),
        (FORMATS["nvfp4"](), te_dist.NVFP4Quantizer()),
    ],
    ids=lambda q: q.describe(),
)
def test_the_same_class_with_other_options_is_a_miss(have: te_dist.Quantizer, want: te_dist.Quantizer) -> None:
    _, workspace = quantize_weight(weight(), have, cache=True)
    out, kept = quantize_weight(weight(), want, workspace, update_workspace=False, cache=True)
    assert out is kept and out is not workspace
    assert_same_storage(out, want.quantize(weight()), want.describe())


@formats
def test_another_shape_dtype_or_device_is_a_miss(name: str) -> None:
    quantizer = FORMATS[name]()
    _, workspace = quantize_weight(weight(), quantizer, cache=True)
    other = nn.Parameter(varied((64, 96), torch.bfloat16))
    out, kept = quantize_weight(other, quantizer, workspace, update_workspace=False, cache=True)
    assert out is kept and out.shape == other.shape
    out, kept = quantize_weight(weight(dtype=torch.float32), quantizer, workspace, update_workspace=False, cache=True)
    assert out is kept and out.dtype == torch.float32
    moved = workspace.to(device="meta")
    out, kept = quantize_weight(weight(), quantizer, moved, update_workspace=False, cache=True)
    assert out is kept and out.device.type == "cpu"


@pytest.mark.cuda
@formats
def test_a_workspace_on_the_cpu_does_not_serve_a_weight_on_the_gpu(name: str) -> None:
    quantizer = FORMATS[name]()
    _, workspace = quantize_weight(weight(), quantizer, cache=True)
    if name == "delayed":
        quantizer = quantizer.replace(scale=quantizer.scale.cuda(), amax=quantizer.amax.cuda())
    out, kept = quantize_weight(weight().cuda(), quantizer, workspace, update_workspace=False, cache=True)
    assert out is kept and out.device.type == "cuda"


@formats
def test_a_quantized_weight_passes_through(name: str) -> None:
    """A6: a primary quantized weight, or the storage that FSDP2 has gathered."""
    storage = FORMATS[name]().quantize(weight())
    other = FORMATS["mxfp8" if name != "mxfp8" else "block"]()
    for given in (storage, FORMATS[name]().make_tensor(weight().detach())):
        out, kept = quantize_weight(given, other, None, True, None, True)
        assert kept is None
        assert out is getattr(given, "quantized_storage", given)


def test_no_quantizer_leaves_the_weight() -> None:
    w = weight()
    out, kept = quantize_weight(w, None, cache=True)
    assert out is w and kept is None


# ------------------------------------------------------------------------------------------------- the modules
def outputs(layer: nn.Module, flag: bool | None) -> list[torch.Tensor]:
    return step(layer, sample(48), flag)


def storages(layer: nn.Module) -> list[torch.Tensor]:
    assert layer._workspaces is not None
    return layer._workspaces


def reset_delayed(layer: nn.Module) -> None:
    """Delayed scaling's scales as at the start, so that two runs can be compared."""
    if layer.fp8_scale is not None:
        layer.fp8_scale.fill_(1)
        layer.fp8_amax_history.zero_()


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("kind", LAYERS)
def test_first_microbatch_true_false_none(kind: str, recipe: str) -> None:
    layer = make(kind, recipe)
    uncached = outputs(layer, None)
    assert layer._workspaces is None, "None keeps nothing"
    reset_delayed(layer)
    first = outputs(layer, True)
    assert_equal(first, uncached, "cached equals uncached")
    where = [t.data_ptr() for t in storages(layer)]
    old_bytes = [t.clone() for t in storages(layer)]

    change_weights(layer)
    again = outputs(layer, False)
    assert all(torch.equal(a, b) for a, b in zip(storages(layer), old_bytes, strict=True))
    if recipe != "none":
        assert_equal(again[:1], outputs(layer, False)[:1])
        if recipe != "delayed":
            assert_equal(again[:2], first[:2], "False reuses the old weight, in forward and in dgrad")
    reset_delayed(layer)
    changed = outputs(layer, None)
    assert not torch.equal(changed[0], first[0])
    assert all(torch.equal(a, b) for a, b in zip(storages(layer), old_bytes, strict=True)), "None touches no workspace"
    reset_delayed(layer)
    assert_equal(outputs(layer, True), changed, "True quantizes anew")
    assert [t.data_ptr() for t in storages(layer)] == where, "in place"


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("kind", LAYERS)
def test_one_workspace_per_weight(kind: str, recipe: str) -> None:
    """A8: both planes of every weight, whatever the first call needed, so that a workspace made in eval serves
    training."""
    layer = make(kind, recipe)
    expected = outputs(make(kind, recipe), None)
    with torch.no_grad():
        layer(sample(48), True)
    if recipe != "none":
        assert len(storages(layer)) >= 2 * len(weights_of(layer))
    where = [t.data_ptr() for t in storages(layer)]
    assert_equal(outputs(layer, False), expected)
    assert [t.data_ptr() for t in storages(layer)] == where


@pytest.mark.parametrize("product", ["fp8_gemm_fprop", "fp8_gemm_dgrad"])
def test_a_workspace_is_made_whichever_product_is_quantized(product: str) -> None:
    """With one product in high precision, a call that does not need the workspace must not leave an empty one."""
    layer = make("linear", Float8CurrentScaling(**{product: MMParams(quantized=False)}))
    with torch.no_grad():
        layer(sample(48), True)
    first = outputs(layer, True)
    change_weights(layer)
    again = outputs(layer, False)
    index = 1 if product == "fp8_gemm_fprop" else 0  # what reads the quantized weight: dx or y
    assert torch.equal(again[index], first[index]), "False reuses the old weight"


def test_a_workspace_made_in_inference_mode_serves_training() -> None:
    for recipe in QUANTIZED:
        layer = make("linear", recipe)
        with torch.inference_mode():
            layer(sample(48), True)
        expected = outputs(make("linear", recipe), None)
        assert_equal(outputs(layer, False), expected, recipe)
        reset_delayed(layer)
        assert_equal(outputs(layer, True), expected, recipe)


def test_a_new_workspace_replaces_one_that_does_not_serve() -> None:
    """A7: also when there was one before, of another shape or dtype."""
    layer = make("linear", "mxfp8")
    outputs(layer, True)
    layer.weight = nn.Parameter(layer.weight.detach()[:32].clone())
    layer.bias = nn.Parameter(layer.bias.detach()[:32].clone())
    first = outputs(layer, True)
    change_weights(layer)
    assert_equal(outputs(layer, False)[:2], first[:2], "the new one was kept")


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_skip_weight_update(kind: str, flag: bool | None) -> None:
    """The flag on the device decides, and asks for a workspace by itself."""
    layer = make(kind, "mxfp8")
    skip, write = torch.ones(1), torch.zeros(1)
    first = step(layer, sample(48), flag, skip_weight_update=write)
    change_weights(layer)
    assert_equal(step(layer, sample(48), flag, skip_weight_update=skip)[:2], first[:2], "kept")
    expected = step(make_changed(kind), sample(48))
    assert_equal(step(layer, sample(48), flag, skip_weight_update=write)[:2], expected[:2], "written")


def make_changed(kind: str) -> nn.Module:
    layer = make(kind, "mxfp8")
    change_weights(layer)
    return layer


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("kind", LAYERS)
def test_frozen_weights_equal_uncached(kind: str, recipe: str) -> None:
    cached, plain = make(kind, recipe), make(kind, recipe)
    batches = [sample(32, seed=s) for s in range(3)]
    cached.eval(), plain.eval()
    with torch.no_grad():  # delayed scaling moves on with every training step, and once per scope: compared below
        expected = [plain(x) for x in batches]
        with te_dist.frozen_weights():
            assert_equal([cached(x) for x in batches], expected)
    cached.train(), plain.train()
    if recipe == "delayed":
        batches = batches[:1]
    expected_steps = [step(plain, x) for x in batches]
    with te_dist.frozen_weights():
        for x, expected_step in zip(batches, expected_steps, strict=True):
            assert_equal(step(cached, x), expected_step)


@pytest.mark.parametrize("kind", LAYERS)
def test_frozen_weights_quantize_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(kind, "mxfp8")
    written = 0
    original = te_dist.MXFP8Quantizer._quantize_into

    def count(self, x, out, *args):
        nonlocal written
        written += tuple(out.shape) in {tuple(w.shape) for w in weights_of(layer)}
        return original(self, x, out, *args)

    monkeypatch.setattr(te_dist.MXFP8Quantizer, "_quantize_into", count)
    x = sample(33)  # no weight has 33 rows
    with te_dist.frozen_weights():
        for _ in range(3):
            layer(x).sum().backward()
        with te_dist.frozen_weights(), torch.no_grad():
            layer(x)
        layer(x)
    assert written == len(weights_of(layer))
    layer(x)
    assert written == 2 * len(weights_of(layer)), "not kept after the scope"


@pytest.mark.parametrize("kind", LAYERS)
def test_frozen_weights_are_stale_after_leaving(kind: str) -> None:
    layer = make(kind, "current")
    x = sample(32)
    with te_dist.frozen_weights():
        first = layer(x)
        with te_dist.frozen_weights():
            assert torch.equal(layer(x), first)
        change_weights(layer)  # a broken promise shows that leaving the inner scope did not end the outer one
        assert torch.equal(layer(x), first)
    changed = make(kind, "current")
    change_weights(changed)
    expected = changed(x)
    assert not torch.equal(expected, first)
    assert torch.equal(layer(x), expected), "outside"
    with te_dist.frozen_weights():
        assert torch.equal(layer(x), expected), "a new scope"


def test_frozen_weights_end_with_an_exception() -> None:
    layer, x = make("linear", "current"), sample(32)
    with pytest.raises(RuntimeError, match="stop"), te_dist.frozen_weights():
        first = layer(x)
        raise RuntimeError("stop")
    change_weights(layer)
    assert not torch.equal(layer(x), first)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)])
@pytest.mark.parametrize("kind", LAYERS)
def test_microbatches_and_optimizer_steps(kind: str, optimizer) -> None:
    """Nothing is keyed on a tensor's _version, which fused AdamW does not bump: three steps of two microbatches."""

    def train(mode: str) -> list[torch.Tensor]:
        layer = make(kind, "mxfp8", dtype=torch.float32)
        opt = optimizer(layer.parameters(), lr=0.05)
        outs = []
        for s in range(3):
            opt.zero_grad()
            with te_dist.frozen_weights() if mode == "frozen" else torch.enable_grad():
                for m in range(2):
                    x = sample(32, dtype=torch.float32, seed=10 * s + m)
                    y = layer(x, {"first": m == 0}.get(mode))
                    y.square().mean().backward()
                    outs.append(y.detach())
            opt.step()
        return outs + [p.detach() for p in layer.parameters()]

    plain = train("plain")
    assert_equal(train("first"), plain, "is_first_microbatch")
    assert_equal(train("frozen"), plain, "frozen_weights")
    assert not torch.equal(plain[0], plain[2])


def test_version_counters_are_not_read() -> None:
    layer, x = make("linear", "current"), sample(32)
    first = layer(x, True)
    layer.weight.data.mul_(-3)  # .data: no version is bumped
    updated = layer(x, True)
    assert not torch.equal(updated, first)
    with torch.no_grad():
        layer.weight.add_(0)  # a version is bumped, but False means reuse
    before = [t.clone() for t in storages(layer)]
    assert torch.equal(layer(x, False), updated)
    assert all(torch.equal(a, b) for a, b in zip(storages(layer), before, strict=True))


def test_a_recipe_that_changes_by_value_makes_another_workspace() -> None:
    layer, x = make("linear"), sample(32)
    for _ in range(2):
        for recipe in ("current", "mxfp8", "nvfp4"):
            for flag in (True, False):
                with te_dist.autocast(recipe=RECIPES[recipe]()):  # equal, not identical
                    assert torch.equal(layer(x, flag), make("linear", recipe)(x)), recipe
    with te_dist.autocast(recipe=RECIPES["nvfp4"]()):
        where = [t.data_ptr() for t in storages(layer)]
        layer(x, True)
        assert [t.data_ptr() for t in storages(layer)] == where, "an equal recipe updates in place"


# ------------------------------------------------------------------------------------------------- autograd
@pytest.mark.parametrize("cached", [None, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_no_module_reaches_autograd(kind: str, cached: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A1, A7: neither as an argument nor inside one; and one gradient slot per input."""
    layer = make(kind, "mxfp8")
    seen = []
    apply = pipeline_function.EagerLayer.apply

    def spy(*args):
        seen.append(args)
        return apply(*args)

    monkeypatch.setattr(pipeline_function.EagerLayer, "apply", spy)
    x = sample(32, grad=True)
    y = layer(x, cached)
    (args,) = seen
    call, *tensors = args
    for value in (*tensors, *(getattr(call, name) for name in call.__slots__)):
        assert not isinstance(value, nn.Module)
    assert all(t is None or isinstance(t, torch.Tensor) for t in tensors)
    node = y.grad_fn
    assert len(node.next_functions) == sum(t is not None for t in args[1:])
    y.sum().backward()
    for tensor in tensors:
        if tensor is not None:
            assert tensor.grad is not None and tensor.grad.shape == tensor.shape


def test_workspaces_are_outside_of_autograd() -> None:
    layer = make("layernorm_mlp", "current")
    layer(sample(32), True)
    assert len(storages(layer)) == 2 * 3
    assert all(not t.requires_grad and t.grad_fn is None for t in storages(layer))
    assert not any("workspace" in name for name in layer.state_dict())


@pytest.mark.parametrize("flag", [None, True])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_recomputation(recipe: str, flag: bool | None) -> None:
    """A8: LayerNormMLP(checkpoint=True) equals the plain one, delayed scaling's state included, over steps."""
    plain, checkpointed = make("layernorm_mlp", recipe), make("layernorm_mlp", recipe, checkpoint=True)
    for s in range(4):
        x = sample(48, seed=s)
        assert_equal(step(checkpointed, x, flag), step(plain, x, flag), f"step {s}")
    if recipe == "delayed":
        assert torch.equal(plain.fp8_scale, checkpointed.fp8_scale)
        assert torch.equal(plain.fp8_amax_history, checkpointed.fp8_amax_history)
        assert plain.fp8_amax_history[0].min() > 0, "every operand was recorded"


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_recomputation_under_a_scoped_recipe(recipe: str) -> None:
    """backward runs outside of the scope, and must recompute under the recipe that forward had."""
    plain, checkpointed = make("layernorm_mlp"), make("layernorm_mlp", checkpoint=True)

    def run(layer: nn.Module) -> list[torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if recipe == "none":
                return layer(x)
            with te_dist.autocast(recipe=RECIPES[recipe]()):
                return layer(x)

        forward.parameters = layer.parameters
        return step(forward, sample(48))

    assert_equal(run(checkpointed), run(plain))


@pytest.mark.parametrize("flag", [None, True])
def test_recomputation_leaves_the_workspace_alone(flag: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A8: the recomputed forward caches nothing that the first one did not."""
    layer = make("layernorm_mlp", "mxfp8", checkpoint=True)
    y = layer(sample(48, grad=True), flag)
    kept = layer._workspaces
    bytes_before = None if kept is None else [t.clone() for t in kept]
    y.sum().backward()
    assert layer._workspaces is kept
    if kept is not None:
        assert all(torch.equal(a, b) for a, b in zip(kept, bytes_before, strict=True))


def test_delayed_scaling_recomputes_with_the_scales_of_its_own_forward() -> None:
    """Two forwards, then two backwards: the second forward has moved the scales before the first is recomputed."""

    def run(checkpoint: bool) -> list[torch.Tensor]:
        layer = make("layernorm_mlp", "delayed", checkpoint=checkpoint)
        flat = sample(48).sign()
        spiky = flat.clone()
        spiky[:, 0] = 100.0  # a norm's output with eight times the amax of the flat one's
        step(layer, flat)
        xs = [x.requires_grad_() for x in (spiky, flat)]
        ys = [layer(x) for x in xs]
        for y in ys:
            y.sum().backward()
        return [*ys, *[x.grad for x in xs], layer.fp8_scale, layer.fp8_amax_history]

    assert_equal(run(True), run(False))


def test_the_helper_is_where_modules_find_it() -> None:
    assert pipeline_weights.quantize_weight is quantize_weight
