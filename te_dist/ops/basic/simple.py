"""Identity, Reshape, ConstantScale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from te_dist.ops.context import OperationContext
from te_dist.ops.op import BasicOperation, Gradients, Saved


class Identity(BasicOperation):
    """y = x."""

    def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **kwargs: Any) -> tuple[Tensor, Saved]:
        return input_.detach(), ()  # another tensor: results and arguments are never the same

    def op_forward_save_ctx(self, ctx: OperationContext, input_: Tensor, tensors_to_save: Saved, **kwargs: Any) -> None:
        pass

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        return grad_output, ()


class Reshape(BasicOperation):
    """y = x.reshape(shape).

    Args:
        shape: of the result; one size may be -1.
    """

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        if not all(isinstance(size, int) for size in self.shape) or sum(size == -1 for size in self.shape) > 1:
            raise ValueError(f"Reshape expects sizes of which at most one is -1 but got {self.shape}")
        self._known = math.prod(size for size in self.shape if size != -1)

    def width_after(self, width: int | None, before: str) -> int | None:
        return self.shape[-1] if self.shape and self.shape[-1] != -1 else None

    def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **kwargs: Any) -> tuple[Tensor, Saved]:
        known = self._known
        if input_.numel() != known and (-1 not in self.shape or known == 0 or input_.numel() % known):
            raise ValueError(f"Reshape cannot make {list(self.shape)} of an input of shape {list(input_.shape)}")
        return input_.detach().reshape(self.shape), ()

    def op_forward_save_ctx(self, ctx: OperationContext, input_: Tensor, tensors_to_save: Saved, **kwargs: Any) -> None:
        ctx.input_shape = input_.shape  # type: ignore[attr-defined]

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        return grad_output.reshape(ctx.input_shape), ()

    def extra_repr(self) -> str:
        return f"{self.shape}"


class ConstantScale(BasicOperation):
    """y = scale * x.

    Args:
        scale: a number, no parameter.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise TypeError(f"ConstantScale expects a number but got {scale!r}")
        self.scale = float(scale)

    def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **kwargs: Any) -> tuple[Tensor, Saved]:
        return input_ * self.scale, ()

    def op_forward_save_ctx(self, ctx: OperationContext, input_: Tensor, tensors_to_save: Saved, **kwargs: Any) -> None:
        pass

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        return grad_output * self.scale, ()

    def extra_repr(self) -> str:
        return f"{self.scale}"
