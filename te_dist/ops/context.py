"""OperationContext: what an operation's forward leaves for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from te_dist.proto import TensorOrQuantized


class OperationContext:
    """One operation's notes of one forward. Tensors and storages go through ``save_for_backward``, so that autograd
    can free them; everything else is an attribute.

    Attributes:
        requires_grad: whether backward will reach this operation.
        input_requires_grad: whether the gradient of the operation's input is wanted.
    """

    saved_tensors: Sequence[Any]

    def __init__(self, requires_grad: bool = True, input_requires_grad: bool = True) -> None:
        self.requires_grad = requires_grad
        self.input_requires_grad = input_requires_grad
        self.to_save: tuple[TensorOrQuantized | None, ...] = ()

    def save_for_backward(self, *tensors: TensorOrQuantized | None) -> None:
        """Keep tensors, quantized storages or None; ``saved_tensors`` has them in backward, in this order."""
        self.to_save = tensors

    def take_saved(self) -> list[Any]:
        """The saved tensors, let go of by the context: whoever takes them can free each after its last use."""
        taken, self.saved_tensors = list(self.saved_tensors), ()
        return taken


class BackwardContext(OperationContext):
    """The same notes as one backward sees them. Made anew for each, so that a second backward over a retained graph
    finds them as the first one did, whatever that one wrote into its own."""

    def __init__(self, forward: OperationContext, saved_tensors: Sequence[Any]) -> None:
        self._forward = forward
        self.saved_tensors = saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)
