"""What a layer is to the rest of PyTorch: an nn.Linear by name and type, whose state moves, saves and loads."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from module_cases import LAYERS, RECIPES, F, K, N, assert_equal, make, sample, step
from torch import nn

import te_dist
from te_dist.recipe import DelayedScaling

recipes = pytest.mark.parametrize("recipe", sorted(RECIPES))
layers = pytest.mark.parametrize("kind", LAYERS)
DELAYED = ["fp8_scale", "fp8_amax_history"]


# ------------------------------------------------------------------------------------------------- names
@recipes
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_is_an_nn_linear(recipe: str, bias: bool) -> None:
    layer, plain = make("linear", recipe, bias=bias), nn.Linear(K, N, bias=bias)
    assert isinstance(layer, nn.Linear)
    assert [n for n, _ in layer.named_parameters()] == [n for n, _ in plain.named_parameters()]
    extra = DELAYED if recipe == "delayed" else []
    assert list(layer.state_dict()) == list(plain.state_dict()) + extra
    assert all(type(t) is torch.Tensor for t in layer.state_dict().values())
    assert (layer.in_features, layer.out_features) == (K, N)
    assert repr(RECIPES[recipe]()) in repr(layer)


def test_initialisation_is_nn_linears() -> None:
    torch.manual_seed(3)
    plain = nn.Linear(K, N)
    torch.manual_seed(3)
    layer = te_dist.Linear(K, N)
    assert torch.equal(layer.weight, plain.weight) and torch.equal(layer.bias, plain.bias)
    custom = te_dist.Linear(K, N, init_method=lambda w: nn.init.constant_(w, 0.25))
    assert torch.equal(custom.weight, torch.full((N, K), 0.25))


def test_names_of_the_others() -> None:
    norm = ["layer_norm_weight", "layer_norm_bias"]
    assert list(make("layernorm_linear").state_dict()) == [*norm, "weight", "bias"]
    mlp = ["fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
    assert list(make("layernorm_mlp").state_dict()) == [*norm, *mlp]
    shapes = {name: tuple(p.shape) for name, p in make("layernorm_mlp").named_parameters()}
    assert shapes["fc1_weight"] == (2 * F, K) and shapes["fc2_weight"] == (K, F)
    assert list(make("layernorm_linear", normalization="RMSNorm", bias=False).state_dict()) == [norm[0], "weight"]


# ------------------------------------------------------------------------------------------------- loading
@recipes
def test_a_checkpoint_of_nn_linear_loads(recipe: str) -> None:
    plain, layer = nn.Linear(K, N, dtype=torch.bfloat16), make("linear", recipe)
    layer.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(layer.weight, plain.weight) and torch.equal(layer.bias, plain.bias)
    back = nn.Linear(K, N, dtype=torch.bfloat16)
    state = {name: t for name, t in layer.state_dict().items() if name not in DELAYED}
    back.load_state_dict(state, strict=True)
    assert torch.equal(back.weight, plain.weight)


@recipes
@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_in_a_model(recipe: str, assign: bool) -> None:
    """Nested, with Transformer Engine's _extra_state beside the parameters, which is not ours and not an error."""
    model = nn.Sequential(make("layernorm_linear", recipe), nn.ReLU())
    state = {f"0.{name}": t.clone() for name, t in make("layernorm_linear", seed=5).state_dict().items()}
    state["0._extra_state"] = io.BytesIO(b"te")
    given = dict(state)
    result = model.load_state_dict(given, strict=True, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert given.keys() == state.keys(), "the caller's dict is not touched"
    assert torch.equal(model[0].weight, state["0.weight"])
    with pytest.raises(RuntimeError, match="_extra_state2"):
        model.load_state_dict(state | {"0._extra_state2": torch.ones(1)}, strict=True)
    del state["0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing.*0\.weight"):
        model.load_state_dict(state, strict=True)


@layers
@recipes
def test_torch_save_and_load_with_weights_only(kind: str, recipe: str, tmp_path: Path) -> None:
    layer = make(kind, recipe)
    step(layer, sample(32), True)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    other = make(kind, recipe, seed=9)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_equal(step(other, sample(32)), step(layer, sample(32)))


# ------------------------------------------------------------------------------------------------- copies
def copies(layer: nn.Module) -> dict[str, nn.Module]:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return {
        "deepcopy": copy.deepcopy(layer),
        "pickle": pickle.loads(pickle.dumps(layer)),
        "torch.save": torch.load(file, weights_only=False),
    }


@layers
@recipes
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_independent(kind: str, recipe: str, how: str) -> None:
    layer = make(kind, recipe, name="here")
    step(layer, sample(32), True)
    copied = copies(layer)[how]
    assert copied.recipe == layer.recipe and copied.spec == layer.spec
    assert copied._workspaces is None, "a cache is not copied"
    expected = step(make_like(kind, recipe), sample(32))
    assert_equal(step(copied, sample(32)), expected)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert_equal(step(layer, sample(32)), expected)
    assert_equal(step(layer, sample(32), False)[:1], step(layer, sample(32), False)[:1])
    with te_dist.frozen_weights():  # a copy takes part in the scope
        zero = copied(sample(32))
        assert torch.equal(copied(sample(32)), zero)
    with torch.no_grad():
        for p in copied.parameters():
            p.fill_(0.5)
    with te_dist.frozen_weights():
        assert not torch.equal(copied(sample(32)), zero)


def make_like(kind: str, recipe: str) -> nn.Module:
    """The layer of the test above at the moment of the copy."""
    layer = make(kind, recipe)
    step(layer, sample(32))
    return layer


# ------------------------------------------------------------------------------------------------- delayed scaling
def trained(recipe: DelayedScaling | None = None, steps: int = 3) -> nn.Module:
    layer = make("linear", recipe or DelayedScaling(amax_history_len=4))
    for s in range(steps):
        step(layer, sample(32, seed=s))
    return layer


def test_delayed_scaling_round_trip() -> None:
    layer = trained()
    assert layer.fp8_amax_history.count_nonzero() == 3 * 3
    other = make("linear", "delayed", seed=4)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.fp8_scale, layer.fp8_scale)
    for s in range(3):
        assert_equal(step(other, sample(32, seed=s)), step(layer, sample(32, seed=s)))


def test_delayed_scaling_buffers_made_lazily() -> None:
    """Under a scope the buffers appear with the first call; a checkpoint that has them loads before that."""
    layer = make("linear")
    assert list(layer.state_dict()) == ["weight", "bias"]
    state = trained().state_dict()
    layer.load_state_dict(state, strict=True)
    assert torch.equal(layer.fp8_scale, state["fp8_scale"])
    expected = step(trained(), sample(32))
    with te_dist.autocast(recipe=DelayedScaling(amax_history_len=4)):
        assert_equal(step(layer, sample(32)), expected)
    fresh = make("linear")
    with te_dist.autocast(recipe=DelayedScaling(amax_history_len=4)):
        step(fresh, sample(32))
    assert list(fresh.state_dict()) == ["weight", "bias", *DELAYED]
    fresh.load_state_dict(state, strict=True)
    fresh.load_state_dict(make("linear").state_dict(), strict=True)
    assert torch.equal(fresh.fp8_scale, state["fp8_scale"]), "a checkpoint without them leaves them"


@layers
def test_evaluation_leaves_delayed_scaling_alone(kind: str) -> None:
    layer = make(kind, "delayed")
    for s in range(2):
        step(layer, sample(32, seed=s))
    before = [layer.fp8_scale.clone(), layer.fp8_amax_history.clone()]
    layer.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            layer(sample(32) * 100)
            layer(sample(32) * 100, True)
    assert_equal([layer.fp8_scale, layer.fp8_amax_history], before)


@pytest.mark.parametrize(("old", "new"), [(4, 8), (8, 2), (2, 1)])
def test_delayed_scaling_history_of_another_length(old: int, new: int) -> None:
    layer = trained(DelayedScaling(amax_history_len=old))
    other = make("linear", DelayedScaling(amax_history_len=new))
    other.load_state_dict(layer.state_dict(), strict=True)
    newest = other.fp8_amax_history[0].clone()
    with torch.no_grad():
        other.eval()(sample(32))
    assert other.fp8_amax_history.shape == (new, 3)
    assert torch.equal(other.fp8_amax_history[0], newest), "the newest amaxes stay"
    assert all(t.isfinite().all() for t in step(other, sample(32)))


# ------------------------------------------------------------------------------------------------- moving
@layers
@recipes
@pytest.mark.parametrize("how", ["to", "half", "float", "bfloat16"])
def test_casting_a_layer(kind: str, recipe: str, how: str) -> None:
    """Parameters change their dtype, delayed scaling's float32 state does not."""
    layer = make(kind, recipe)
    step(layer, sample(32), True)
    scales = None if layer.fp8_scale is None else layer.fp8_scale.clone()
    history = None if layer.fp8_amax_history is None else layer.fp8_amax_history.clone()
    dtype = {"to": torch.float16, "half": torch.float16, "float": torch.float32}.get(how, torch.bfloat16)
    layer = layer.to(dtype) if how == "to" else getattr(layer, how)()
    assert all(p.dtype == dtype for p in layer.parameters())
    if scales is not None:
        assert torch.equal(layer.fp8_scale, scales) and torch.equal(layer.fp8_amax_history, history)
        assert layer.fp8_scale.dtype == torch.float32
    assert layer._workspaces is None, "quantized from other weights"
    results = step(layer, sample(32, dtype=dtype), False)
    assert results[0].dtype == dtype and all(t.isfinite().all() for t in results)
    assert results[-1].dtype == dtype


@layers
@recipes
def test_from_meta(kind: str, recipe: str) -> None:
    """to_empty + reset_parameters, to_empty + load_state_dict: nothing is left uninitialised."""
    expected = step(make(kind, recipe), sample(32))
    for how in ("reset", "load"):
        layer = make_meta(kind, recipe)
        assert all(t.is_meta for t in [*layer.parameters(), *layer.buffers()])
        layer.to_empty(device="cpu")
        for tensor in layer.parameters():
            tensor.data.fill_(torch.nan)
        if how == "load":
            state = {n: t for n, t in make(kind, recipe).state_dict().items() if n not in DELAYED}
            layer.load_state_dict(state, strict=True)
            assert_equal(step(layer, sample(32)), expected)
        else:
            torch.manual_seed(0)
            layer.reset_parameters()
            torch.manual_seed(0)
            plain = make_plain(kind, recipe)
            assert_equal(list(layer.parameters()), list(plain.parameters()))
            assert_equal(step(layer, sample(32)), step(plain, sample(32)))


def make_plain(kind: str, recipe: str, **options: object) -> nn.Module:
    made = RECIPES[recipe]()
    if kind == "layernorm_mlp":
        return te_dist.LayerNormMLP(K, F, recipe=made, dtype=torch.bfloat16, activation="swiglu", **options)
    cls = te_dist.Linear if kind == "linear" else te_dist.LayerNormLinear
    return cls(K, N, recipe=made, dtype=torch.bfloat16, **options)


def make_meta(kind: str, recipe: str) -> nn.Module:
    return make_plain(kind, recipe, device="meta")


@layers
def test_reset_parameters_starts_over(kind: str) -> None:
    """Also delayed scaling: garbage from to_empty on a device, or the history of another training."""
    layer = make(kind, "delayed")
    step(layer, sample(32))
    step(layer, sample(32))
    for buffer in layer.buffers():
        buffer.fill_(torch.nan)
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    plain = make_plain(kind, "delayed")
    for _ in range(2):
        assert_equal(step(layer, sample(32)), step(plain, sample(32)))


@pytest.mark.cuda
@layers
@recipes
def test_to_the_gpu_and_back(kind: str, recipe: str) -> None:
    layer = make(kind, recipe)
    step(layer, sample(32), True)
    layer.cuda()
    assert all(t.is_cuda for t in [*layer.parameters(), *layer.buffers()])
    first = step(layer, sample(32).cuda(), True)
    assert all(t.is_cuda for t in first)
    layer.cpu()
    assert all(t.isfinite().all() and not t.is_cuda for t in step(layer, sample(32), False))


@recipes
def test_weights_moved_by_hand(recipe: str) -> None:
    """.data of another dtype: the workspace made from the old weight does not serve the new one."""
    layer = make("linear", recipe)
    step(layer, sample(32), True)
    layer.weight.data, layer.bias.data = layer.weight.data.float(), layer.bias.data.float()
    plain = make("linear", recipe)
    step(plain, sample(32))
    plain.float()
    x = sample(32, dtype=torch.float32)
    if recipe != "delayed":  # whose scales move on with True, and stay with False
        assert_equal(step(layer, x, False), step(plain, x))
