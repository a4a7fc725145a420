"""FusedOperation: several basic operations at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist.ops.op import BasicOperation, FusibleOperation


class FusedOperation(FusibleOperation):
    """Several basic operations at once. A subclass defines fuser_forward_compute and fuser_forward_save_ctx (or the
    legacy fuser_forward) if it replaces their forward, and fuser_backward if it replaces their backward.

    Args:
        basic_ops: the operations it stands for, in order. The parameters stay theirs.
    """

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        if not basic_ops:
            raise ValueError(f"{type(self).__name__} expects at least one basic operation")
        for op in basic_ops:
            if not isinstance(op, BasicOperation):
                raise TypeError(f"{type(self).__name__} expects BasicOperations but got {type(op).__name__}")
        self.basic_ops = torch.nn.ModuleList(basic_ops)
        self._basic = list(basic_ops)

    @property
    def is_fused_op(self) -> bool:
        return True

    @property
    def basic_operations(self) -> list[BasicOperation]:
        return self._basic

    def forward(self, input: Tensor, *extra_inputs: Tensor, basic_op_kwargs: Sequence[Any] | None = None) -> Any:
        """The operations alone: the output, or a tuple of it and the extra outputs."""
        op_kwargs = None
        if basic_op_kwargs is not None:
            op_kwargs = dict(zip(self._basic, basic_op_kwargs, strict=True))
        return self._own_fuser()(input, *extra_inputs, op_kwargs=op_kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_fuser", "_basic"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._basic = list(self.basic_ops)  # type: ignore[arg-type]
