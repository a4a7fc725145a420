"""Recipes are values: equal by content, JSON and back, and the state of a module follows them (SPEC E6)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import te_dist
from te_dist.quantizers import Float8CurrentScalingQuantizer, Quantizer
from te_dist.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
    RecipeState,
    active_recipe,
    autocast,
)

ROLES = tuple(QuantizerRole("linear", kind) for kind in ("input", "weight", "grad_output"))
RECIPES = [
    DelayedScaling(),
    DelayedScaling(margin=2, amax_history_len=4, amax_compute_algo="most_recent", fp8_format=Format.E4M3),
    Float8CurrentScaling(),
    Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=1e-6, backward_override="high_precision"),
    Float8BlockScaling(),
    Float8BlockScaling(use_f32_scales=True, w_block_scaling_dim=1),
    MXFP8BlockScaling(),
    MXFP8BlockScaling(enable_2d_quantization=True, fp8_format=Format.HYBRID),
    NVFP4BlockScaling(),
    NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_json_round_trip(recipe: Recipe) -> None:
    back = Recipe.from_json(recipe.to_json())
    assert back == recipe and hash(back) == hash(recipe) and type(back) is type(recipe)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.backward_override = None  # type: ignore[misc]


def test_recipes_differ_by_value() -> None:
    assert len(set(RECIPES)) == len(RECIPES)


def test_quantizers_of_the_roles() -> None:
    current = RecipeState(Float8CurrentScaling(use_power_2_scales=True), ROLES).quantizers
    assert [q.describe() for q in current.values()] == ["e4m3 per tensor", "e4m3 per tensor", "e5m2 per tensor"]
    assert all(q.force_pow_2_scales for q in current.values()), "the argument is used, not a class default"
    block = RecipeState(Float8BlockScaling(), ROLES).quantizers
    assert [q.block_scaling_dim for q in block.values()] == [1, 2, 1]
    assert all(q.force_pow_2_scales for q in block.values())
    mxfp8 = RecipeState(MXFP8BlockScaling(enable_2d_quantization=True), ROLES).quantizers
    assert [q.with_2d_quantization for q in mxfp8.values()] == [False, True, False]
    nvfp4 = list(RecipeState(NVFP4BlockScaling(), ROLES).quantizers.values())
    assert [q.with_rht for q in nvfp4] == [True, False, True]
    assert [q.with_2d_quantization for q in nvfp4] == [False, True, False]
    assert [q.stochastic_rounding for q in nvfp4] == [False, False, True]


def test_state_is_rebuilt_when_the_recipe_changes_by_value() -> None:
    state = RecipeState(Float8CurrentScaling(), ROLES)
    assert state.updated(Float8CurrentScaling()) is state, "an equal recipe keeps the state"
    other = state.updated(Float8CurrentScaling(amax_epsilon=0.5))
    assert other is not state
    assert {q.amax_epsilon for q in other.quantizers.values()} == {0.5}
    assert isinstance(other.updated(MXFP8BlockScaling()).quantizers[ROLES[0]], te_dist.MXFP8Quantizer)


def test_nested_scopes_with_other_options_reach_the_quantizers() -> None:
    """A module that reads the scope at each entry sees the inner options and then the outer ones again."""
    state: RecipeState | None = None
    seen = []

    def module() -> None:
        nonlocal state
        recipe = active_recipe()
        assert recipe is not None
        state = RecipeState(recipe, ROLES) if state is None else state.updated(recipe)
        seen.append(state.quantizers[ROLES[0]].force_pow_2_scales)

    with autocast(recipe=Float8CurrentScaling()):
        module()
        with autocast(recipe=Float8CurrentScaling(use_power_2_scales=True)):
            module()
            with autocast(enabled=False):
                assert active_recipe() is None
            module()
        module()
    assert seen == [False, True, True, False]
    assert active_recipe() is None


def test_scope_is_restored_after_an_error_and_can_be_entered_twice() -> None:
    scope = autocast(recipe=MXFP8BlockScaling())
    with pytest.raises(RuntimeError), scope:
        raise RuntimeError
    assert active_recipe() is None
    with scope, scope:
        assert active_recipe() == MXFP8BlockScaling()
    assert active_recipe() is None
    with autocast():
        assert active_recipe() == Float8CurrentScaling()


def test_scope_inside_a_compiled_graph() -> None:
    quantizers = {recipe: recipe.quantizer(ROLES[0]) for recipe in (Float8CurrentScaling(), MXFP8BlockScaling())}
    first, second = quantizers

    def function(x: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=first):
            y = quantizers[first].quantize(x).dequantize()
            with autocast(recipe=second):
                y = y + quantizers[second].quantize(x).dequantize()
        return y

    torch._dynamo.reset()
    x = torch.randn(32, 64)
    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))
    assert active_recipe() is None


def test_delayed_state_advances() -> None:
    recipe = DelayedScaling(amax_history_len=3)
    state = RecipeState(recipe, ROLES)
    assert state.updated(DelayedScaling(amax_history_len=3)) is state, "its history survives an equal recipe"
    state.quantizers[ROLES[0]].quantize(torch.full((4, 4), 2.0))
    state.quantizers[ROLES[2]].quantize(torch.full((4, 4), 0.5))
    state.advance()
    assert state.scale.tolist() == [448.0 / 2.0, 1.0, 57344.0 / 0.5]
    storage = state.quantizers[ROLES[0]].quantize(torch.full((4, 4), 2.0))
    assert storage._scale_inv.item() == pytest.approx(2.0 / 448.0)
    assert state.amax_history[0].tolist() == [2.0, 0.0, 0.0], "recorded into the row that was cleared"
    RecipeState(MXFP8BlockScaling(), ROLES).advance()


def test_custom_recipe() -> None:
    def factory(role: QuantizerRole) -> te_dist.Quantizer:
        return te_dist.IdentityQuantizer() if role.is_gradient else te_dist.MXFP8Quantizer("e4m3")

    recipe = CustomRecipe(qfactory=factory)
    assert recipe == CustomRecipe(qfactory=factory) != CustomRecipe(qfactory=lambda role: factory(role))
    assert isinstance(recipe.quantizer(ROLES[2]), te_dist.IdentityQuantizer)
    with pytest.raises(TypeError, match="must return a Quantizer but returned None"):
        CustomRecipe(qfactory=lambda role: None).quantizer(ROLES[0])
    with pytest.raises(TypeError, match="function cannot be written"):
        recipe.to_json()


def test_wrong_arguments() -> None:
    for make, message in (
        (lambda: Float8CurrentScaling(backward_override="bf16"), "backward_override in"),
        (lambda: DelayedScaling(backward_override="dequantized"), "backward_override None"),
        (lambda: DelayedScaling(fp8_format=Format.E5M2), "E4M3 or HYBRID"),
        (lambda: DelayedScaling(amax_history_len=0), "at least 1"),
        (lambda: DelayedScaling(amax_compute_algo="median"), "amax_compute_algo in"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=2), "fprop would multiply 128x128"),
        (lambda: QuantizerRole("linear", "activation"), "tensor_type in"),
        (lambda: Recipe.from_json('{"recipe": "MXFP9"}'), "but got 'MXFP9'"),
        (lambda: Recipe.from_json("[1]"), "but got None"),
        (lambda: Recipe.from_json('{"recipe": "MXFP8BlockScaling", "margins": 1}'), "no option 'margins'"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="expects a Recipe but got str"):
        autocast(recipe="fp8")
    with pytest.raises(TypeError, match="RecipeState"):
        DelayedScaling().quantizer(ROLES[0])


def test_a_custom_recipe_names_its_function() -> None:
    """Not its address: logs and configurations of two ranks compare equal."""

    def every_tensor_current(role: QuantizerRole) -> Quantizer:
        return Float8CurrentScalingQuantizer()

    shown = repr(CustomRecipe(qfactory=every_tensor_current))
    assert "every_tensor_current" in shown and "0x" not in shown
