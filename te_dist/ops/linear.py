"""Linear: BasicLinear and Bias under one name."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

from te_dist.comm import Comm
from te_dist.ops.basic import BasicLinear, Bias
from te_dist.ops.fused_op import FusedOperation
from te_dist.ops.op import BasicOperation
from te_dist.recipe import Recipe


class Linear(FusedOperation):
    """y = x W^T + b.

    The parameters belong to the two basic operations: ``basic_ops.0.weight`` and ``basic_ops.1.bias``. With
    tensor_parallel_mode="row" the bias is whole on every rank and added once, after the reduction.

    Args:
        in_features, out_features, bias, device, dtype: as for nn.Linear. The bias starts at zero.
        tensor_parallel_mode, tensor_parallel_group, sequence_parallel, accumulate_into_main_grad, recipe, options:
            as for ``BasicLinear``.

    Example:
        >>> import torch, te_dist
        >>> linear = te_dist.ops.Linear(64, 32, recipe=te_dist.recipe.MXFP8BlockScaling())
        >>> linear(torch.ones(8, 64)).shape
        torch.Size([8, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Comm | None = None,
        sequence_parallel: bool = False,
        accumulate_into_main_grad: bool = False,
        recipe: Recipe | None = None,
        **options: Any,
    ) -> None:
        linear = BasicLinear(
            in_features,
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            accumulate_into_main_grad=accumulate_into_main_grad,
            recipe=recipe,
            **options,
        )
        basic_ops: list[BasicOperation] = [linear]
        if bias:
            basic_ops.append(Bias(linear.local_out_features, device=device, dtype=dtype))
        super().__init__(basic_ops)

    def reset_parameters(self) -> None:
        for op in self.basic_operations:
            op.reset_parameters()

    @property
    def weight(self) -> Parameter:
        return self.basic_ops[0].weight  # type: ignore[return-value]

    @property
    def bias(self) -> Parameter | None:
        return self.basic_ops[1].bias if len(self.basic_ops) > 1 else None  # type: ignore[return-value]
