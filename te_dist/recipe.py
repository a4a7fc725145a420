"""Recipes: which quantizer each tensor of a layer gets, as frozen values that survive JSON.

A recipe lives on a module or is scoped with ``autocast``, and is read once at a module's entry. What a module derives
from it, a RecipeState, is rebuilt when the recipe changes by value, also under the same class with other options.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist.delayed_scaling import AMAX_ALGORITHMS, update_scale
from te_dist.formats import DType
from te_dist.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dist.values import Value, interned, value_type

TENSOR_TYPES = ("input", "weight", "output", "grad_output", "grad_input")
BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")


class Format(enum.Enum):
    """FP8 formats of the forward and the gradient tensors."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"  # E4M3 forward, E5M2 gradients

    def dtype(self, is_gradient: bool) -> DType:
        if self is Format.HYBRID:
            return DType.kFloat8E5M2 if is_gradient else DType.kFloat8E4M3
        return DType.kFloat8E4M3 if self is Format.E4M3 else DType.kFloat8E5M2


@dataclasses.dataclass(frozen=True)
class QuantizerRole:
    """The tensor a quantizer is for: the kind of module, the tensor within it, the module's name."""

    module_type: str = "linear"
    tensor_type: str = "input"
    name: str = ""

    def __post_init__(self) -> None:
        if self.tensor_type not in TENSOR_TYPES:
            raise ValueError(f"QuantizerRole expects tensor_type in {TENSOR_TYPES} but got {self.tensor_type!r}")

    @property
    def is_gradient(self) -> bool:
        return self.tensor_type.startswith("grad")


@value_type
@dataclasses.dataclass(frozen=True, kw_only=True)
class MMParams(Value):
    """How one of a layer's three products is computed.

    Attributes:
        use_split_accumulator: add up in float32 (True) or in the tensor core's short accumulator (False, faster).
            None is the default: short for fprop, float32 for dgrad and wgrad. Only per-tensor FP8 has the choice.
        quantized: False runs this one product in high precision, to find out which of them hurts convergence.
    """

    use_split_accumulator: bool | None = None
    quantized: bool = True


@value_type
@dataclasses.dataclass(frozen=True, kw_only=True)
class QParams(Value):
    """Options of one tensor's quantizer that differ from the recipe's; None keeps the recipe's. An option that the
    format does not have must stay None."""

    power_2_scale: bool | None = None
    amax_epsilon: float | None = None
    random_hadamard_transform: bool | None = None
    stochastic_rounding: bool | None = None
    fp4_2d_quantization: bool | None = None


_RECIPES: dict[str, type[Recipe]] = {}
# The class of each field that JSON holds as an object.
_NESTED: dict[str, type] = {
    **dict.fromkeys(("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"), MMParams),
    **dict.fromkeys(("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"), QParams),
}
# What QParams' options are called in the quantizers.
_QUANTIZER_FIELDS = {
    "power_2_scale": "force_pow_2_scales",
    "amax_epsilon": "amax_epsilon",
    "random_hadamard_transform": "with_rht",
    "stochastic_rounding": "stochastic_rounding",
    "fp4_2d_quantization": "with_2d_quantization",
}


@value_type
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Recipe(Value):
    """Base of all recipes.

    Attributes:
        backward_override: None quantizes the backward pass too; "high_precision" runs it on the original operands,
            "dequantized" on the dequantized forward ones.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: options of the three products.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: options of the three operands' quantizers.
    """

    backward_override: str | None = None
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_quant_fwd_inp: QParams = QParams()
    fp8_quant_fwd_weight: QParams = QParams()
    fp8_quant_bwd_grad: QParams = QParams()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _RECIPES[cls.__name__] = cls

    def __post_init__(self) -> None:
        if self.backward_override not in BACKWARD_OVERRIDES:
            raise ValueError(
                f"{type(self).__name__} expects backward_override in {BACKWARD_OVERRIDES} "
                f"but got {self.backward_override!r}"
            )

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        fields = (f for f in dataclasses.fields(self) if f.repr and getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{f.name}={_shown(getattr(self, f.name))}' for f in fields)})"

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        """The quantizer of a tensor. Pure: equal recipes and roles give equal quantizers."""
        raise NotImplementedError(f"{type(self).__name__} must define quantizer")

    def quantizer_for(self, role: QuantizerRole) -> Quantizer:
        """``quantizer(role)`` with the options that this recipe sets for that one operand."""
        made = self.quantizer(role)
        options = {"input": self.fp8_quant_fwd_inp, "weight": self.fp8_quant_fwd_weight}.get(
            role.tensor_type, self.fp8_quant_bwd_grad
        )
        changes = {}
        for option, field in _QUANTIZER_FIELDS.items():
            value = getattr(options, option)
            if value is None:
                continue
            if field not in type(made)._value_fields:
                raise ValueError(f"{type(self).__name__}: {role.tensor_type} has no option {option}: {made!r}")
            changes[field] = value
        return made.replace(**changes) if changes else made

    def to_json(self) -> str:
        """A string from which ``Recipe.from_json`` makes an equal recipe."""
        fields = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return json.dumps({"recipe": type(self).__name__, **fields})

    @staticmethod
    def from_json(text: str) -> Recipe:
        values = json.loads(text)
        name = values.pop("recipe", None) if isinstance(values, dict) else None
        if name not in _RECIPES:
            raise ValueError(f"Recipe.from_json expects a recipe of {sorted(_RECIPES)} but got {name!r}")
        cls = _RECIPES[name]
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{name} has no option {unknown[0]!r}; its options are {sorted(known)}")
        if "fp8_format" in values:
            values["fp8_format"] = Format(values["fp8_format"])
        for field, nested in _NESTED.items():
            if field in values:
                values[field] = nested(**values[field])
        return cls(**values)


def _shown(value: Any) -> str:
    """A function by its name: its repr holds an address, which differs between the ranks of one job."""
    return getattr(value, "__qualname__", None) or repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Value):
        return dataclasses.asdict(value)
    if callable(value):
        raise TypeError("a recipe that holds a function cannot be written as JSON")
    return value


@value_type
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DelayedScaling(Recipe):
    """Per-tensor FP8 with scales from a history of amaxes. Its state lives in a RecipeState."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backward_override is not None:
            raise ValueError("DelayedScaling expects backward_override None: its backward amaxes must be recorded")
        if self.fp8_format is Format.E5M2:
            raise ValueError("DelayedScaling expects fp8_format E4M3 or HYBRID but got E5M2")
        if self.amax_history_len < 1:
            raise ValueError(f"DelayedScaling expects amax_history_len of at least 1 but got {self.amax_history_len}")
        if self.amax_compute_algo not in AMAX_ALGORITHMS:
            raise ValueError(
                f"DelayedScaling expects amax_compute_algo in {AMAX_ALGORITHMS} but got {self.amax_compute_algo!r}"
            )

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        raise TypeError("DelayedScaling's quantizers have live state: RecipeState(recipe, roles) makes them")


@value_type
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Float8CurrentScaling(Recipe):
    """Per-tensor FP8 with the scale of each tensor's own amax."""

    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0
    fp8_format: Format = Format.HYBRID

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return Float8CurrentScalingQuantizer(
            self.fp8_format.dtype(role.is_gradient),
            force_pow_2_scales=self.use_power_2_scales,
            amax_epsilon=self.amax_epsilon,
        )


@value_type
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Float8BlockScaling(Recipe):
    """FP8 with fp32 scales per 1x128 (activations, gradients) and 128x128 block (weights)."""

    use_f32_scales: bool = False
    amax_epsilon: float = 0.0
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = (
            ("fprop", self.x_block_scaling_dim, self.w_block_scaling_dim),
            ("dgrad", self.grad_block_scaling_dim, self.w_block_scaling_dim),
            ("wgrad", self.grad_block_scaling_dim, self.x_block_scaling_dim),
        )
        for product, first, second in pairs:
            if first == second == 2:
                raise ValueError(f"Float8BlockScaling: {product} would multiply 128x128 by 128x128 blocks, which no "
                                 f"GEMM does; make one of the two 1-dimensional")  # fmt: skip

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        dims = {"weight": self.w_block_scaling_dim, "input": self.x_block_scaling_dim}
        return Float8BlockQuantizer(
            self.fp8_format.dtype(role.is_gradient),
            amax_epsilon=self.amax_epsilon,
            force_pow_2_scales=not self.use_f32_scales,
            block_scaling_dim=dims.get(role.tensor_type, self.grad_block_scaling_dim),
        )


@value_type
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MXFP8BlockScaling(Recipe):
    """FP8 with E8M0 scales per 32 values."""

    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return MXFP8Quantizer(
            self.fp8_format.dtype(role.is_gradient),
            with_2d_quantization=self.enable_2d_quantization and role.tensor_type == "weight",
        )


@value_type
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class NVFP4BlockScaling(Recipe):
    """FP4 with two-level scales; Hadamard transform on wgrad's operands, stochastic rounding on gradients, 16x16
    scales on weights, each of which can be turned off."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        is_weight = role.tensor_type == "weight"
        return NVFP4Quantizer(
            with_rht=not self.disable_rht and not is_weight,
            with_2d_quantization=not self.disable_2d_quantization and is_weight,
            stochastic_rounding=not self.disable_stochastic_rounding and role.is_gradient,
        )


@value_type
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class CustomRecipe(Recipe):
    """A function from role to quantizer decides; two CustomRecipes are equal if they hold the same function."""

    qfactory: Callable[[QuantizerRole], Quantizer]

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        made = self.qfactory(role)
        if not isinstance(made, Quantizer):
            raise TypeError(f"CustomRecipe: qfactory must return a Quantizer but returned {made!r} for {role}")
        return made


@value_type
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class NoRecipe(Recipe):
    """High precision. Stands for None where an op wants a recipe."""

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return IdentityQuantizer()


# ------------------------------------------------------------------------------------------------- state
class RecipeState:
    """The quantizers that a module uses under one recipe, and delayed scaling's buffers."""

    scale: Tensor | None  # f32 [roles], delayed scaling only
    amax_history: Tensor | None  # f32 [length, roles]

    def __init__(
        self, recipe: Recipe, roles: Sequence[QuantizerRole], device: torch.device | str | None = None
    ) -> None:
        self.recipe = recipe
        self.roles = tuple(roles)
        self.device = device
        self.scale = self.amax_history = None
        self.quantizers: Mapping[QuantizerRole, Quantizer]
        if isinstance(recipe, DelayedScaling):
            self.scale = torch.ones(len(self.roles), dtype=torch.float32, device=device)
            self.amax_history = torch.zeros(recipe.amax_history_len, len(self.roles), device=device)
            self.quantizers = {
                role: Float8Quantizer(
                    self.scale[i : i + 1],
                    self.amax_history[0, i : i + 1],
                    recipe.fp8_format.dtype(role.is_gradient),
                )
                for i, role in enumerate(self.roles)
            }
        else:
            self.quantizers = {role: recipe.quantizer_for(role) for role in self.roles}

    def updated(self, recipe: Recipe) -> RecipeState:
        """This state if `recipe` equals its own by value, else a new one for the same roles."""
        return self if recipe == self.recipe else RecipeState(recipe, self.roles, self.device)

    def advance(self) -> None:
        """End of a step: new scales from the recorded amaxes. Nothing to do unless scaling is delayed."""
        recipe = self.recipe
        if not isinstance(recipe, DelayedScaling):
            return
        assert self.scale is not None and self.amax_history is not None
        for is_gradient in (False, True):
            columns = [i for i, role in enumerate(self.roles) if role.is_gradient == is_gradient]
            if not columns:
                continue
            index = torch.tensor(columns, device=self.scale.device)
            history, scale = self.amax_history[:, index], self.scale[index]
            update_scale(
                history,
                scale,
                recipe.fp8_format.dtype(is_gradient),
                margin=recipe.margin,
                amax_compute_algo=recipe.amax_compute_algo,
            )
            self.amax_history[:, index] = history
            self.scale[index] = scale


# ------------------------------------------------------------------------------------------------- scope
class _Active:
    """The innermost scope. An object's attributes, because Dynamo follows writes to those; and its own from the start,
    because Dynamo compiles anew once an attribute of the class has become one of the object."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.disabled = False  # inside autocast(enabled=False): a module's own recipe does not count either


_active = _Active()


def recipe_in_force(own: Recipe | None) -> Recipe | None:
    """The recipe of a module that has `own`: its own, else that of the scope; None in a disabled scope."""
    if _active.disabled:
        return None
    return own if own is not None else _active.recipe


def is_scoped() -> bool:
    """Whether some ``autocast`` is active, enabled or not."""
    return _active.recipe is not None or _active.disabled


def active_recipe() -> Recipe | None:
    """The recipe of the innermost ``autocast``, None outside of any or inside a disabled one."""
    return _active.recipe


class autocast:
    """Scope a recipe: modules entered inside use it. Scopes nest; leaving one restores the outer.

    Example:
        >>> import te_dist
        >>> with te_dist.autocast(recipe=te_dist.recipe.MXFP8BlockScaling()):
        ...     te_dist.recipe.active_recipe()
        MXFP8BlockScaling()
    """

    __slots__ = ("_enabled", "_outer", "_recipe")

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"autocast expects a Recipe but got {type(recipe).__name__}")
        self._recipe: Recipe | None = interned(recipe or Float8CurrentScaling()) if enabled else None
        self._enabled = bool(enabled)
        self._outer: list[tuple[Recipe | None, bool]] = []

    def __enter__(self) -> autocast:
        self._outer.append((_active.recipe, _active.disabled))
        _active.recipe = self._recipe
        _active.disabled = not self._enabled
        return self

    def __exit__(self, *exc: object) -> None:
        _active.recipe, _active.disabled = self._outer.pop()
