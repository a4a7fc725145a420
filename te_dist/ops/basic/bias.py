"""Bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from te_dist.dynamo import operations
from te_dist.ops.context import OperationContext
from te_dist.ops.op import BasicOperation, Gradients, Saved


class Bias(BasicOperation):
    """y = x + bias over the last dimension.

    Args:
        size: of the last dimension.
        device, dtype: of the parameter; device may be "meta".
    """

    bias: Parameter

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"Bias expects a positive size but got {size!r}")
        self.size = size
        self.bias = Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.bias.zero_()

    def width_after(self, width: int | None, before: str) -> int | None:
        self._expects(width, self.size, before)
        return self.size

    def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **kwargs: Any) -> tuple[Tensor, Saved]:
        self._expects(input_.shape[-1], self.size, "the input")
        return input_ + self.bias.to(input_.dtype), ()

    def op_forward_save_ctx(self, ctx: OperationContext, input_: Tensor, tensors_to_save: Saved, **kwargs: Any) -> None:
        ctx.bias_grad = self.bias.requires_grad  # type: ignore[attr-defined]
        ctx.bias_dtype = self.bias.dtype  # type: ignore[attr-defined]

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        if not ctx.bias_grad:
            return grad_output, (None,)
        compute = torch.ops.te_dist.column_sums if torch.compiler.is_compiling() else operations.column_sums
        return grad_output, (compute(grad_output, ctx.bias_dtype),)

    def extra_repr(self) -> str:
        return f"{self.size}"
