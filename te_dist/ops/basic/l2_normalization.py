"""L2Normalization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist.dynamo import operations
from te_dist.modules.te_options import ANYTHING, refuse_unbuilt
from te_dist.ops.context import OperationContext
from te_dist.ops.op import BasicOperation, Gradients, Saved


class L2Normalization(BasicOperation):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension; no parameters.

    Args:
        eps: added to the sum of squares.
        hints: seq_length and micro_batch_size of Transformer Engine, which change nothing.
    """

    def __init__(self, *, eps: float = 1e-6, **hints: Any) -> None:
        super().__init__()
        refuse_unbuilt("L2Normalization", hints, {"seq_length": ANYTHING, "micro_batch_size": ANYTHING})
        self.eps = float(eps)

    def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **kwargs: Any) -> tuple[Tensor, Saved]:
        compute = torch.ops.te_dist.l2norm_forward if torch.compiler.is_compiling() else operations.l2norm_forward
        out, scale = compute(input_, self.eps)
        return out, (input_, scale) if requires_grad else ()

    def op_forward_save_ctx(self, ctx: OperationContext, input_: Tensor, tensors_to_save: Saved, **kwargs: Any) -> None:
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        x, scale = ctx.saved_tensors
        compute = torch.ops.te_dist.l2norm_backward if torch.compiler.is_compiling() else operations.l2norm_backward
        return compute(grad_output, x, scale), ()

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
