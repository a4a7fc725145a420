"""Quantize: from here on, the tensor is what its quantized form holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist.dynamo.operations import quantizer_of, rounded
from te_dist.ops.context import OperationContext
from te_dist.ops.op import BasicOperation, Gradients, Saved
from te_dist.pipeline.operands import padded_rows
from te_dist.proto import TensorOrQuantized
from te_dist.quantizers import Quantizer
from te_dist.recipe import DelayedScaling, Recipe, recipe_in_force
from te_dist.tensors.storage import QuantizedStorage
from te_dist.values import interned


class Quantize(BasicOperation):
    """Quantizes the tensor in forward, its gradient in backward, or both; without a recipe neither.

    A linear operation that follows takes the quantized tensor as its operand, and one that fuses with this operation
    quantizes by itself what it would have got. Any other operation sees the values that the quantized form holds.

    Args:
        forward, backward: what to quantize.
        recipe: None takes that of the surrounding ``te_dist.autocast``.
    """

    takes_quantized = True
    returns_storage = True

    def __init__(
        self, forward: bool = True, backward: bool = False, *, recipe: Recipe | None = None, name: str | None = None
    ) -> None:
        super().__init__()
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"Quantize expects recipe to be a te_dist recipe or None but got {recipe!r}")
        self.in_forward, self.in_backward = bool(forward), bool(backward)
        self.recipe = interned(recipe)
        self.name = name or ""

    def _recipe(self) -> Recipe | None:
        recipe = recipe_in_force(self.recipe)
        if isinstance(recipe, DelayedScaling):
            raise ValueError(
                f"{self.label()} keeps no scales of its own, which DelayedScaling would need; only before a linear "
                f"operation, which has some, it can quantize under that recipe"
            )
        return recipe

    def op_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        requires_grad: bool,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
        **kwargs: Any,
    ) -> tuple[TensorOrQuantized, Saved]:
        if isinstance(input_, QuantizedStorage):
            return input_, ()
        if not self.in_forward:
            return input_.detach(), ()
        quantizer = next_op_input_quantizer
        if quantizer is None:
            recipe = self._recipe()
            if recipe is None:
                return input_.detach(), ()
            if torch.compiler.is_compiling():
                return torch.ops.te_dist.rounded(input_.detach(), recipe, "input", self.name), ()
            quantizer = quantizer_of(recipe, "input", self.name)
        elif padded_rows(quantizer, input_.shape[:-1].numel()) != input_.shape[:-1].numel():
            return input_.detach(), ()  # the product pads and quantizes
        return input_.detach() if quantizer is None else quantizer.quantize(input_.detach()), ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: TensorOrQuantized, tensors_to_save: Saved, **kwargs: Any
    ) -> None:
        ctx.recipe = self._recipe() if self.in_backward else None  # type: ignore[attr-defined]

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        if ctx.recipe is None:
            return grad_output, ()
        compute = torch.ops.te_dist.rounded if torch.compiler.is_compiling() else rounded
        return compute(grad_output, ctx.recipe, "grad_output", self.name), ()

    def extra_repr(self) -> str:
        return f"forward={self.in_forward}, backward={self.in_backward}"
