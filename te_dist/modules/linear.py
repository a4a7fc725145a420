"""te_dist.Linear: torch.nn.Linear whose products run on quantized operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.dynamo.linear import LinearPlan, plan_of, traced_linear
from te_dist.modules.base import QuantizedLayer
from te_dist.modules.parameters import local_part
from te_dist.modules.scopes import scope
from te_dist.modules.split_parameters import SplitParameters
from te_dist.pipeline.config import LayerConfig, LayerSpec, StageSpec
from te_dist.pipeline.lean import LeanLinear, LeanPlan, fits
from te_dist.recipe import Recipe

InitMethod = Callable[[Tensor], Any]


class Linear(SplitParameters, QuantizedLayer, torch.nn.Linear):
    """y = x W^T + b with quantized x, W and dy. Parameters, names and initialisation are nn.Linear's.

    Args:
        in_features, out_features, bias, device, dtype: as for nn.Linear. device may be "meta".
        recipe: how operands are quantized; None takes the recipe of the surrounding ``te_dist.autocast``, and without
            one the layer computes like nn.Linear.
        params_dtype: another name of dtype.
        init_method: fills the weight in place, instead of nn.Linear's initialisation.
        return_bias: do not add the bias; return (y, bias).
        parameters_split: names, or a dict of names to rows: the weight is held as ``<name>_weight`` parameters.
        fuse_wgrad_accumulation: add the weight's gradient to ``weight.main_grad`` in the product itself.
        delay_wgrad_compute: compute the weight's gradient when ``backward_dw()`` is called.
        save_original_input: keep x itself for backward, not its quantized copy: for inputs that are alive anyway.
        name: what error messages and recipes by role call the layer.

    Example:
        >>> import torch, te_dist
        >>> layer = te_dist.Linear(64, 32, recipe=te_dist.recipe.Float8CurrentScaling())
        >>> layer(torch.ones(8, 64)).shape
        torch.Size([8, 32])
    """

    _lean: LeanPlan | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
        params_dtype: torch.dtype | None = None,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        self._init_method: InitMethod | None = None
        torch.nn.Linear.__init__(self, in_features, out_features, bias, device, dtype or params_dtype)
        if init_method is not None:
            self._init_method = init_method
            self.reset_parameters()
        self.return_bias = return_bias
        self._split_parameters(parameters_split, out_features, fuse_wgrad_accumulation)
        spec = linear_spec(bias and not return_bias, name or "", save_original_input)
        self._init_layer(
            spec,
            recipe,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
        )

    def reset_parameters(self) -> None:
        self._reset_delayed()
        if getattr(self, "parameter_splits", None):
            self._reset_parts(self._init_method)
            return
        torch.nn.Linear.reset_parameters(self)
        weight = self.weight
        if self._init_method is not None and weight.device.type != "meta":
            with torch.no_grad():
                self._init_method(weight)

    def _slots(self) -> list[Tensor | None]:
        weight, bias = self._weight_and_bias()
        return [weight, None if self.return_bias else bias]

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        skip_weight_update: Tensor | None = None,
    ) -> Any:
        """
        Args:
            inp: [..., in_features].
            is_first_microbatch: True quantizes the weight and keeps it, False reuses it, None keeps nothing.
            skip_weight_update: float32 [1] on the device; if it is not 0, the kept weight stays as it is.
        """
        if not torch.compiler.is_compiling():  # in this order: a compiled graph must not depend on the plan
            plan = self._lean
            if plan is not None and self._takes_the_lean_way(plan, inp, is_first_microbatch, skip_weight_update):
                if not plan.delayed:
                    return LeanLinear.apply(plan, inp, self.weight, self.bias)
                state = (self.fp8_amax_history, self.fp8_scale, self._fp8_largest)
                return LeanLinear.apply(plan, inp, self.weight, self.bias, *state)
        elif is_first_microbatch is None and skip_weight_update is None and self._is_plain():
            traced = self._traced_plan(inp)
            if traced is not None:
                return traced_linear(inp, self.weight, self.bias, traced)
        out = self._run(inp, is_first_microbatch, skip_weight_update)
        return (out, self._returned_bias()) if self.return_bias else out

    def _returned_bias(self) -> Tensor | None:
        return local_part(self._weight_and_bias()[1])

    def _takes_the_lean_way(
        self, plan: LeanPlan, inp: Tensor, is_first_microbatch: bool | None, skip_weight_update: Tensor | None
    ) -> bool:
        return (
            is_first_microbatch is None
            and skip_weight_update is None
            and scope.depth == 0
            and torch.is_grad_enabled()
            and fits(plan, self._recipe_of_call(), inp, self.weight, self.bias)
            and not torch.is_autocast_enabled("cuda")
            and kernels.functions(plan.device) is not None
            and (not plan.delayed or self._delayed_is_ready(plan.recipe))
        )

    def _is_plain(self) -> bool:
        special = self.return_bias or self.parameter_splits or self.fuse_wgrad_accumulation
        return not special and self.wgrad_store is None

    def _traced_plan(self, inp: Tensor) -> LinearPlan | None:
        """The plan of a call in a compiled graph; None takes the layer's op."""
        weight, bias = self.weight, self.bias
        usual = scope.depth == 0 and not self._is_watched and type(inp) is Tensor and type(weight) is torch.nn.Parameter
        if not usual or torch.is_autocast_enabled(inp.device.type) or inp.device != weight.device:
            return None
        if inp.dim() == 0 or inp.shape[-1] != self.in_features or inp.numel() == 0:
            return None
        on = torch.is_grad_enabled()
        grads = (
            on and inp.requires_grad,
            on and weight.requires_grad,
            on and bias is not None and bias.requires_grad,
        )
        dtypes = (inp.dtype, weight.dtype, None if bias is None else bias.dtype)
        sizes = (self.out_features, self.in_features)
        recipe = self._recipe_of_call()
        return plan_of(self._spec_for(recipe), recipe, inp.device, dtypes, sizes, grads)

    def _config_made(self, config: LayerConfig, inp: Tensor) -> None:
        """Called when the chain has run in a new configuration: perhaps the next call need not take it."""
        if self._is_plain() and not config.flags.gathered and type(inp) is Tensor:
            self._lean = LeanPlan.of(config, self._configs_recipe, self.weight, self.bias, inp) or self._lean

    def extra_repr(self) -> str:
        bias = bool(self._parts("bias")) if self.parameter_splits else self.bias is not None
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"
        if self.parameter_splits:
            text += f", parameters_split={self.parameter_splits}"
        return f"{text}, recipe={self.recipe!r}"


def linear_spec(has_bias: bool, name: str, save_original_input: bool = False) -> LayerSpec:
    return LayerSpec((StageSpec(has_bias=has_bias),), "linear", name, save_original_input=save_original_input)
