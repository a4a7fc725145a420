"""AddExtraInput and MakeExtraOutput: where residual branches join and leave."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from te_dist.ops.context import OperationContext
from te_dist.ops.op import BasicOperation, Gradients, Saved


class AddExtraInput(BasicOperation):
    """y = x + extra.

    Args:
        in_place: Transformer Engine's hint that memory may be reused. Accepted and not needed: a fused sum is written
            into memory of the fuser's own, and an input is never written to.
    """

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def check(self, x: Any, extra: Tensor) -> None:
        if x.shape != extra.shape or x.device != extra.device:
            raise ValueError(
                f"{self.label()} adds tensors of one shape on one device but got {list(x.shape)} on {x.device} and "
                f"the extra input {list(extra.shape)} on {extra.device}"
            )

    def fuser_forward_compute(
        self, input_: Any, *, basic_op_extra_inputs: list[tuple[Tensor, ...]], **kwargs: Any
    ) -> tuple[Tensor, list[tuple[Tensor, ...]], list[Saved]]:
        extra = basic_op_extra_inputs[0][0]
        self.check(input_, extra)
        return input_ + extra.to(input_.dtype), [()], [()]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Any,
        tensors_to_save: list[Saved],
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        **kwargs: Any,
    ) -> None:
        basic_op_ctxs[0].extra_dtype = basic_op_extra_inputs[0][0].dtype  # type: ignore[attr-defined]

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Tensor, *, basic_op_grad_extra_outputs: list[tuple[Tensor, ...]]
    ) -> tuple[Tensor | None, list[Gradients], list[Gradients]]:
        return grad_output, [()], [(grad_output.to(basic_op_ctxs[0].extra_dtype),)]


class MakeExtraOutput(BasicOperation):
    """y = x, and x once more as an extra output: a tensor of its own over the same memory.

    Args:
        in_place: as for ``AddExtraInput``, of the gradient.
    """

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def fuser_forward_compute(self, input_: Any, **kwargs: Any) -> tuple[Tensor, list[tuple[Tensor, ...]], list[Saved]]:
        return input_.detach(), [(input_.detach(),)], [()]

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[OperationContext], input_: Any, tensors_to_save: list[Saved], **kwargs: Any
    ) -> None:
        pass

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Tensor, *, basic_op_grad_extra_outputs: list[tuple[Tensor, ...]]
    ) -> tuple[Tensor | None, list[Gradients], list[Gradients]]:
        extra = basic_op_grad_extra_outputs[0][0]
        return grad_output + extra.to(grad_output.dtype), [()], [()]
