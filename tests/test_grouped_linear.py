"""GroupedLinear: each group as a layer of its own, and all of them when only the device knows the groups."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from cases import varied
from gemm_cases import SQNR, sqnr
from layer_cases import FLOORS, OVERRIDES, RECIPES, assert_close, assert_equal, compiled, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import te_dist
from te_dist.pipeline import device_groups
from te_dist.tensors.quantized_tensor import wrap

IN, OUT, GROUPS = 48, 32, 4
# An empty group, no multiple of any block, one row, whole blocks.
SPLITS = ([7, 0, 33, 24], [16, 32, 0, 16], [1, 62, 1, 0])
ALL = {**RECIPES, **OVERRIDES}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def layer(recipe: Any, **options: Any) -> te_dist.GroupedLinear:
    torch.manual_seed(3)
    made = te_dist.GroupedLinear(
        GROUPS, IN, OUT, recipe=recipe, **{"dtype": torch.bfloat16, "name": "experts", **options}
    )
    with torch.no_grad():  # groups of different size, so that a scale of another group cannot pass
        for name, param in made.named_parameters():
            factors = torch.exp2(torch.arange(GROUPS) * 3.0 - 4)
            param.mul_(
                factors.view(-1, *[1] * (param.dim() - 1)) if name in ("weight", "bias") else factors[int(name[-1])]
            )
    return made


def data(splits: list[int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    x, dy = (varied((sum(splits), size), dtype, seed) for seed, size in ((1, IN), (2, OUT)))
    for t in (x, dy):
        for i, part in enumerate(t.split(splits)):
            part.mul_(2.0 ** (2 * i - 3))
    return x.requires_grad_(), dy


def on_device(module: te_dist.GroupedLinear) -> te_dist.GroupedLinear:
    module._keep_splits_on_device = True
    return module


# ------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("name", sorted(ALL))
def test_equals_a_linear_per_group(name: str, splits: list[int]) -> None:
    """Bit for bit, over two steps (delayed scaling has scales only in the second)."""
    grouped = layer(ALL[name])
    single = torch.nn.ModuleList(te_dist.Linear(IN, OUT, recipe=ALL[name], dtype=torch.bfloat16) for _ in range(GROUPS))
    for i, linear in enumerate(single):
        linear.load_state_dict({k: grouped.state_dict()[f"{k}{i}"] for k in ("weight", "bias")}, strict=False)
    x, dy = data(splits)
    for _ in range(2):
        actual = run(grouped, x, splits, dy=dy)
        expected = run(
            single, x, dy=dy, call=lambda x: torch.cat([f(p) for f, p in zip(single, x.split(splits), strict=True)])
        )
        renamed = {n: expected[".".join((n[-1], n[:-1]))] if n not in ("y", "dx") else expected[n] for n in actual}
        assert_equal(actual, renamed)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_close_to_plain_autograd(name: str) -> None:
    """The reference is not our code: nn.functional.linear per group in fp64."""
    grouped, splits = layer(RECIPES[name]), [33, 0, 64, 31]
    x, dy = data(splits)
    if name == "delayed":
        run(grouped, x, splits, dy=dy)
    exact = copy.deepcopy(grouped).double()

    def reference(x: Tensor) -> Tensor:
        parts = x.split(splits)
        return torch.cat(
            [
                torch.nn.functional.linear(part, getattr(exact, f"weight{i}"), getattr(exact, f"bias{i}"))
                for i, part in enumerate(parts)
            ]
        )

    expected = run(exact, x.double(), dy=dy.double(), call=reference)
    actual = run(grouped, x, splits, dy=dy)
    empty = [n for n, value in expected.items() if not value.any()]
    assert empty == ["weight1", "bias1"]
    assert not any(actual.pop(n).any() for n in empty)
    # One group at a time: the largest would hide the others.
    for key in ("y", "dx"):
        for i, (a, e) in enumerate(zip(actual.pop(key).split(splits), expected.pop(key).split(splits), strict=True)):
            assert len(a) == 0 or sqnr(a, e) > FLOORS[name], (key, i, sqnr(a, e))
    assert_close(actual, {n: v for n, v in expected.items() if n not in empty}, FLOORS[name])


def test_delayed_scaling_has_a_scale_per_group() -> None:
    grouped, splits = layer(RECIPES["delayed"], bias=False), SPLITS[0]
    x, dy = data(splits)
    run(grouped, x, splits, dy=dy)
    seen = grouped.fp8_amax_history[0].view(3, GROUPS)
    amaxes = [
        torch.stack([part.float().abs().amax() if part.numel() else torch.tensor(0.0) for part in parts])
        for parts in (x.detach().split(splits), list(grouped.parameters()), dy.split(splits))
    ]
    assert torch.equal(seen, torch.stack(amaxes))


def test_group_of_rows_by_leading_dimensions() -> None:
    grouped, splits = layer(RECIPES["mxfp8"]), SPLITS[0]
    x, _ = data(splits)
    assert torch.equal(grouped(x.view(4, 16, IN), splits).view(64, OUT), grouped(x, splits))


# ------------------------------------------------------------------------------------------------- compiled
@pytest.mark.parametrize("name", sorted(ALL))
def test_compiled_equals_eager(name: str) -> None:
    eager = layer(ALL[name], single_grouped_weight=name in ("mxfp8", "delayed"), dtype=torch.float32)
    twin, call = compiled(eager)
    x, dy = data(SPLITS[0])
    for _ in range(2):
        assert_equal(run(twin, x, SPLITS[0], dy=dy, call=call), run(eager, x, SPLITS[0], dy=dy))
    with torch.no_grad():
        assert torch.equal(call(x, SPLITS[0]), eager(x, SPLITS[0]))


def test_other_splits_do_not_compile_again() -> None:
    eager = layer(RECIPES["mxfp8"])
    twin = copy.deepcopy(eager)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(twin, fullgraph=True, backend=counter)
    for i, splits in enumerate(([7, 2, 9, 4], [3, 5, 10, 6], [12, 8, 33, 5], [2, 21, 6, 6], [40, 3, 3, 50])):
        x, dy = data(splits)
        assert_equal(run(twin, x, splits, dy=dy, call=call), run(eager, x, splits, dy=dy))
        if i == 2:  # constant, symbolic sizes, symbolic rows as well
            frames = counter.frame_count
    assert counter.frame_count == frames <= 3


# ------------------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("call", ["eager", "compiled"])
@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_cached_weights_equal_fresh_ones(name: str, call: str) -> None:
    plain = layer(RECIPES[name])
    cached, function = compiled(plain) if call == "compiled" else (copy.deepcopy(plain), None)
    for first, splits in ((True, SPLITS[0]), (False, SPLITS[1])):
        x, dy = data(splits)
        expected = run(plain, x, splits, dy=dy)
        assert_equal(run(cached, x, splits, first, dy=dy, call=function), expected)
    with torch.no_grad():
        cached.weight2.zero_()
    x, dy = data(SPLITS[1])
    assert torch.equal(run(cached, x, SPLITS[1], False, dy=dy, call=function)["y"], expected["y"]), "reused"
    assert not torch.equal(run(cached, x, SPLITS[0], True, dy=dy, call=function)["y"], expected["y"]), "made again"


def test_frozen_weights_and_no_grad() -> None:
    grouped, splits = layer(RECIPES["nvfp4"]), SPLITS[0]
    x, dy = data(splits)
    expected = run(grouped, x, splits, dy=dy)
    with torch.no_grad():
        assert torch.equal(grouped(x, splits), expected["y"])
    for name in ("weight2", "bias0"):
        grouped.get_parameter(name).requires_grad_(False)
        expected.pop(name)
    assert_equal(run(grouped, x, splits, dy=dy), expected)
    grouped.requires_grad_(False)
    assert_equal(run(grouped, x, splits, dy=dy), {n: expected[n] for n in ("y", "dx")})
    twin, call = compiled(grouped)
    assert_equal(run(twin, x, splits, dy=dy, call=call), {n: expected[n] for n in ("y", "dx")})


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("path", ["host", "device"])
def test_wgrad_scheduling(single: bool, path: str) -> None:
    """Accumulated into main_grad, put off, or from the input itself: the same gradients."""
    splits: Any = SPLITS[0] if path == "host" else torch.tensor(SPLITS[0])
    forms = {"single_grouped_weight": single, "single_grouped_bias": single}

    def make(**options: Any) -> te_dist.GroupedLinear:
        made = layer(RECIPES["current"], **forms, **options)
        return on_device(made) if path == "device" else made

    x, dy = data(SPLITS[0])
    expected = run(make(), x, splits, dy=dy)
    weights = {n: g for n, g in expected.items() if n.startswith("weight")}
    rest = {n: g for n, g in expected.items() if n not in weights}
    assert_equal(run(make(save_original_input=True), x, splits, dy=dy), expected)

    fused = make(fuse_wgrad_accumulation=True)
    for name in weights:
        fused.get_parameter(name).main_grad = torch.ones_like(fused.get_parameter(name), dtype=torch.float32)
    assert_equal(run(fused, x, splits, dy=dy), rest)
    for name, gradient in weights.items():
        # The bf16 gradient was rounded once; adding to float32 is not.
        made = fused.get_parameter(name).main_grad - 1
        assert sqnr(made, gradient.double()) > SQNR[torch.bfloat16]

    for name in weights:  # what is there is overwritten where the weight says so
        fused.get_parameter(name).overwrite_main_grad = True
    run(fused, x, splits, dy=dy)
    for name, gradient in weights.items():
        made = fused.get_parameter(name).main_grad
        assert sqnr(made, gradient.double()) > SQNR[torch.bfloat16], name

    delayed = make(delay_wgrad_compute=True)
    assert_equal(run(delayed, x, splits, dy=dy), rest)
    assert delayed.need_backward_dw()
    delayed.backward_dw()
    assert not delayed.need_backward_dw()
    assert_equal({n: delayed.get_parameter(n).grad for n in weights}, weights)


def test_main_grad_is_asked_for() -> None:
    grouped = layer(None, fuse_wgrad_accumulation=True, single_grouped_weight=True)
    with pytest.raises(ValueError, match=r"GroupedLinear 'experts'.*main_grad"):
        grouped(data(SPLITS[0])[0], SPLITS[0])


def test_checkpointing_and_return_bias() -> None:
    grouped, splits = layer(RECIPES["nvfp4"]), SPLITS[0]
    x, dy = data(splits)
    expected = run(grouped, x, splits, dy=dy)
    again = run(
        grouped, x, splits, dy=dy, call=lambda *a: torch.utils.checkpoint.checkpoint(grouped, *a, use_reentrant=False)
    )
    assert_equal(again, expected)
    apart = layer(RECIPES["nvfp4"], return_bias=True)
    y, biases = apart(x, splits)
    assert [b is p for b, p in zip(biases, (getattr(apart, f"bias{i}") for i in range(GROUPS)), strict=True)] == [
        True
    ] * 4
    summed = torch.cat([part.float() + b for part, b in zip(y.split(splits), biases, strict=True)])
    assert sqnr(summed, expected["y"].double()) > SQNR[torch.bfloat16] - 3, "two roundings"
    assert layer(None, return_bias=True, single_grouped_bias=True)(x, splits)[1].shape == (GROUPS, OUT)


# ------------------------------------------------------------------------------------------------- state
@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("source", [False, True])
def test_state_dicts_of_either_form(source: bool, target: bool) -> None:
    saved, loaded = (
        layer(None, single_grouped_weight=single, single_grouped_bias=single, **options)
        for single, options in ((source, {}), (target, {"device": "meta"}))
    )
    assert sorted(saved.state_dict()) == (["bias", "weight"] if source else sorted(
        f"{n}{i}" for n in ("bias", "weight") for i in range(GROUPS)))  # fmt: skip
    outer = torch.nn.Sequential(loaded.to_empty(device="cpu"))
    outer.load_state_dict({f"0.{k}": v for k, v in {**saved.state_dict(), "_extra_state": torch.empty(0)}.items()})
    x, _ = data(SPLITS[0])
    assert torch.equal(outer[0](x, SPLITS[0]), saved(x, SPLITS[0]))
    loaded.reset_parameters()
    bound = IN**-0.5
    assert all(0.5 * bound < p.detach().abs().max() <= bound for p in loaded.parameters())


def test_missing_groups_are_reported() -> None:
    state = layer(None).state_dict()
    del state["weight2"]
    with pytest.raises(RuntimeError, match="weight"):
        layer(None, single_grouped_weight=True).load_state_dict(state)


# ------------------------------------------------------------------------------------------------- device splits
class NoHostReads(TorchDispatchMode):
    """Refuses what would make a GPU's host wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero, torch.ops.aten.is_nonzero,
        ), func  # fmt: skip
        return func(*args, **(kwargs or {}))


def planes_of(recipe: Any, role: str, t: Tensor, columnwise: bool = False) -> Tensor:
    """The values that the device path multiplies: a plane of the whole tensor, rounded to bf16."""
    if recipe is None:
        return t.double()
    quantizer = recipe.quantizer_for(te_dist.QuantizerRole("grouped_linear", role))
    storage = quantizer.with_usage(rowwise=not columnwise, columnwise=columnwise).quantize(t.detach())
    return storage.dequantize(dtype=torch.bfloat16).double()


@pytest.mark.parametrize("name", ["none", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_device_splits_compute_what_is_documented(name: str, splits: list[int]) -> None:
    recipe = RECIPES[name] if name != "nvfp4" else te_dist.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)
    grouped = on_device(layer(recipe))
    x, dy = data(splits)
    with NoHostReads():
        actual = run(grouped, x, torch.tensor(splits), dy=dy)
    xs, dys = (planes_of(recipe, role, t).split(splits) for role, t in (("input", x), ("grad_output", dy)))
    expected: dict[str, Any] = {"y": [], "dx": []}
    for i, (rows, grads) in enumerate(zip(xs, dys, strict=True)):
        weight, bias = getattr(grouped, f"weight{i}").detach(), getattr(grouped, f"bias{i}").detach()
        expected["y"].append(rows @ planes_of(recipe, "weight", weight).t() + bias.double())
        expected["dx"].append(grads @ planes_of(recipe, "weight", weight, columnwise=True))
        expected[f"weight{i}"] = grads.t() @ rows
        expected[f"bias{i}"] = dy.split(splits)[i].double().sum(0)
    for key in ("y", "dx"):
        expected[key] = torch.cat(expected[key])
    # One rounding to bf16, for y a second one when the bias is added.
    for key, value in expected.items():
        assert actual[key].any() == value.any(), key
        assert not value.any() or sqnr(actual[key], value) > SQNR[torch.bfloat16] - 3, key


@pytest.mark.parametrize("name", sorted(ALL))
def test_device_splits_compiled(name: str) -> None:
    eager = on_device(layer(ALL[name]))
    twin, call = compiled(eager)
    x, dy = data(SPLITS[0])
    splits = torch.tensor(SPLITS[0], dtype=torch.int32)
    for _ in range(2):
        assert_equal(run(twin, x, splits, dy=dy, call=call), run(eager, x, splits, dy=dy))
    other = torch.tensor(SPLITS[1], dtype=torch.int32)
    assert_equal(run(twin, x, other, dy=dy, call=call), run(eager, x, other, dy=dy))


def test_device_splits_through_the_e4m3_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where offsets may be read, the loop stands in for torch's kernel."""
    recipe = te_dist.recipe.Float8CurrentScaling(fp8_format=te_dist.recipe.Format.E4M3)
    grouped = on_device(layer(recipe))
    x, dy = data(SPLITS[0])
    splits = torch.tensor(SPLITS[0])
    without = run(grouped, x, splits, dy=dy)
    asked = []
    monkeypatch.setattr(device_groups, "_has_kernel", lambda kind, a, weights: asked.append(kind) or True)
    with_kernel = run(grouped, x, splits, dy=dy)
    assert asked == ["fprop", "dgrad"]
    # bf16 rounds e4m3 * scale: the operands of one of the two differ by that.
    assert_close(with_kernel, {n: v for n, v in without.items()}, SQNR[torch.bfloat16] - 6)
    precise = te_dist.recipe.Float8CurrentScaling(
        fp8_format=te_dist.recipe.Format.E4M3, fp8_gemm_fprop=te_dist.recipe.MMParams(use_split_accumulator=True)
    )
    asked.clear()
    run(on_device(layer(precise)), x, splits, dy=dy)
    assert asked == ["dgrad"], "the kernel's fprop does not add up in float32"


def test_odd_sizes_on_the_device() -> None:
    """Sizes that no kernel takes are filled up with zeros."""
    grouped = on_device(te_dist.GroupedLinear(3, 22, 10, dtype=torch.bfloat16, recipe=RECIPES["mxfp8"]))
    x, dy, splits = torch.randn(20, 22).bfloat16().requires_grad_(), torch.randn(20, 10).bfloat16(), [3, 0, 17]
    actual = run(grouped, x, torch.tensor(splits), dy=dy)
    grouped._keep_splits_on_device = False
    expected = run(grouped, x, splits, dy=dy)
    for name in ("y", "dx", "bias0", "bias2"):  # row scales: only wgrad reads other planes
        assert sqnr(actual[name], expected[name].double()) > SQNR[torch.bfloat16] - 6, name


@pytest.mark.parametrize("name", sorted(ALL))
def test_no_rows_at_all(name: str) -> None:
    x, dy = torch.empty(0, IN, dtype=torch.bfloat16, requires_grad=True), torch.empty(0, OUT, dtype=torch.bfloat16)
    grouped = layer(ALL[name])
    expected = run(grouped, x, [0] * GROUPS, dy=dy)
    assert expected["y"].shape == (0, OUT) and not any(value.any() for value in expected.values())
    assert_equal(run(on_device(grouped), x, torch.zeros(GROUPS, dtype=torch.int64), dy=dy), expected)


def test_offsets_that_do_not_fit_stop_the_device() -> None:
    grouped = on_device(layer(None))
    for splits in ([7, 0, 33, 23], [70, -6, 0, 0]):
        with pytest.raises(RuntimeError, match=r"add up to the 64 rows"):
            grouped(data(SPLITS[0])[0], torch.tensor(splits))


@pytest.mark.cuda
@pytest.mark.parametrize("name", sorted(ALL))
def test_on_a_gpu_nothing_is_read(name: str) -> None:
    grouped = layer(ALL[name]).cuda()
    x, dy = (t.detach().cuda() for t in data(SPLITS[0]))
    x.requires_grad_()
    splits = torch.tensor(SPLITS[0]).cuda()
    run(grouped, x, splits, dy=dy)  # compiles, allocates, warns
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = run(grouped, x, splits, dy=dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = run(grouped, x, SPLITS[0], dy=dy)
    # Two quantized results against each other: twice the noise is 3 dB, and scales of all groups together, up to a
    # factor of two from a group's own, are another 2.
    floor = FLOORS.get(name, 10.0) - 5
    names = ["y", "dx"] if name in ("block", "mxfp8", "none", "dequantized") else ["y"]
    assert_close({n: actual[n] for n in names}, {n: expected[n].cpu() for n in names}, floor)


# ------------------------------------------------------------------------------------------------- refusals
def test_splits_as_tensors_and_tuples() -> None:
    grouped, splits = layer(RECIPES["current"]), SPLITS[0]
    x, _ = data(splits)
    expected = grouped(x, splits)
    for given in (tuple(splits), torch.tensor(splits), torch.tensor(splits, dtype=torch.int32)):
        assert torch.equal(grouped(x, given), expected)


@pytest.mark.parametrize(
    ("splits", "error", "message"),
    [
        ([7, 0, 33], ValueError, r"GroupedLinear 'experts' expects m_splits .* 4 groups but got 3: \[7, 0, 33\]"),
        ([7, 0, 33, 23], ValueError, r"'experts'.*add up to the 64 rows of the input but got .* add up to 63"),
        ([7, -1, 34, 24], ValueError, r"'experts'.*not negative.*\[7, -1, 34, 24\]"),
        (torch.tensor([7, 0, 33]), ValueError, r"'experts'.*shape \[4\] but got torch.int64 \[3\]"),
        (torch.tensor([7.0, 0, 33, 24]), ValueError, r"'experts'.*int32 or int64.*float32"),
        ([7.0, 0, 33, 24], TypeError, r"'experts'.*list of numbers"),
        (64, TypeError, r"'experts'.*list of numbers or an integer tensor but got 64"),
    ],
)
def test_bad_splits(splits: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layer(None)(data(SPLITS[0])[0], splits)


def test_other_refusals() -> None:
    x, _ = data(SPLITS[0])
    quantized = wrap(te_dist.MXFP8Quantizer("e4m3").quantize(x.detach()))
    with pytest.raises(TypeError, match=r"'experts' expects an unquantized input.*MXFP8Quantizer"):
        layer(RECIPES["mxfp8"])(quantized, SPLITS[0])
    with pytest.raises(ValueError, match=r"'experts' expects the input's last dimension to be 48 but got shape"):
        layer(None)(x[:, :40], SPLITS[0])
    with pytest.raises(ValueError, match=r"'experts' expects a bfloat16 input where m_splits is on the device"):
        on_device(layer(None))(x.float(), torch.tensor(SPLITS[0]))
    with torch.autocast("cpu", torch.bfloat16):
        assert on_device(layer(None))(x.float(), torch.tensor(SPLITS[0])).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"num_gemms to be a positive number but got 0"):
        te_dist.GroupedLinear(0, 8, 8)
    with pytest.raises(ValueError, match=r"NVFP4 packs two values a byte and expects in_features to be even"):
        te_dist.GroupedLinear(1, 7, 8, recipe=RECIPES["nvfp4"])(torch.ones(2, 7), [2])
