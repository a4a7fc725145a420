"""Dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist.dynamo import operations
from te_dist.ops.context import OperationContext
from te_dist.ops.op import BasicOperation, Gradients, Saved


class Dropout(BasicOperation):
    """Each element is zero with probability `p` in training mode, and the others are scaled by 1 / (1 - p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"Dropout expects a probability between 0 and 1 but got {p!r}")
        self.p = float(p)

    def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **kwargs: Any) -> tuple[Tensor, Saved]:
        if not self.training or self.p == 0.0:
            return input_.detach(), ()
        compute = torch.ops.te_dist.dropout_forward if torch.compiler.is_compiling() else operations.dropout_forward
        out, mask = compute(input_, self.p)
        return out, (mask,)

    def op_forward_save_ctx(self, ctx: OperationContext, input_: Tensor, tensors_to_save: Saved, **kwargs: Any) -> None:
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        if not ctx.saved_tensors:
            return grad_output, ()
        (mask,) = ctx.saved_tensors
        return operations.dropout_apply(grad_output, mask, self.p), ()

    def extra_repr(self) -> str:
        return f"p={self.p}"
