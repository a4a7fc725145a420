"""Norms of rows that are spread over ranks: the gradients of their parameters are summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

import te_dist
from te_dist.groups import GroupLike
from te_dist.modules import parameters
from te_dist.modules.parameters import local_part
from te_dist.parallel.mappings import copy_to_tensor_parallel
from te_dist.parallel.modules import device_type_of, distribute_parameter, mesh_of


class _SequenceParallelNorm(nn.Module):
    """A norm that sees this rank's rows: the gradients of its parameters are summed over the ranks."""

    _group = ""
    weight: Any
    bias: Any

    def _set_parallel(self, mesh: DeviceMesh, sums: bool = True) -> None:
        """`sums`: the rows are spread; else every rank sees them all, and has the whole gradient."""
        if mesh.size() == 1:
            return
        for name in list(self._parameters):
            distribute_parameter(self, name, mesh, Replicate())
        self._group = str(mesh.get_group().group_name) if sums else ""

    def _gain_and_bias(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = self._summed(self.weight), self._summed(self.bias)
        assert weight is not None
        return weight.view(-1), None if bias is None else bias.view(-1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        parameters.spread_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _summed(self, param: Tensor | None) -> Tensor | None:
        param = local_part(param)
        return param if param is None or not self._group else copy_to_tensor_parallel(param, self._group)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            zero_centered = getattr(self, "zero_centered_gamma", False)
            for name, value in (("weight", 0.0 if zero_centered else 1.0), ("bias", 0.0)):
                if self._parameters.get(name) is not None:
                    local_part(self._parameters[name]).fill_(value)


class TorchLayerNorm(_SequenceParallelNorm, nn.LayerNorm):
    """torch's own LayerNorm of rows that are spread over ranks; ``parallelize`` makes these."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (self._summed(p) for p in (self.weight, self.bias))
        return nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class TorchRMSNorm(_SequenceParallelNorm, nn.RMSNorm):
    """torch's own RMSNorm of rows that are spread over ranks; ``parallelize`` makes these."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self._summed(self.weight), self.eps)


class LayerNorm(_SequenceParallelNorm, te_dist.LayerNorm):
    """te_dist.LayerNorm of rows that are spread over ranks, with sequence_parallel=True and tp_group."""

    def __init__(
        self, *args: Any, sequence_parallel: bool = False, tp_group: GroupLike | None = None, **options: Any
    ) -> None:
        te_dist.LayerNorm.__init__(self, *args, **options)
        _construct_norm(self, sequence_parallel, tp_group)


class RMSNorm(_SequenceParallelNorm, te_dist.RMSNorm):
    """te_dist.RMSNorm of rows that are spread over ranks, with sequence_parallel=True and tp_group."""

    def __init__(
        self, *args: Any, sequence_parallel: bool = False, tp_group: GroupLike | None = None, **options: Any
    ) -> None:
        te_dist.RMSNorm.__init__(self, *args, **options)
        _construct_norm(self, sequence_parallel, tp_group)


def _construct_norm(norm: Any, sequence_parallel: bool, tp_group: GroupLike | None) -> None:
    if sequence_parallel and tp_group is None:
        raise ValueError(
            f"{type(norm).__name__}: sequence_parallel expects tp_group, over which the gradients are summed"
        )
    if sequence_parallel and tp_group is not None:
        norm._set_parallel(mesh_of(tp_group, device_type_of(norm)))


_NORMS: dict[type, type] = {
    te_dist.LayerNorm: LayerNorm,
    te_dist.RMSNorm: RMSNorm,
    nn.LayerNorm: TorchLayerNorm,
    nn.RMSNorm: TorchRMSNorm,
}


def make_sequence_parallel(module: Any, mesh: DeviceMesh, sums: bool = True) -> None:
    """Turn a norm into one of rows that are spread over the ranks, in place; without `sums` every rank has them all."""
    module.__class__ = _NORMS.get(type(module), type(module))
    module._set_parallel(mesh, sums)


def can_be_sequence_parallel(module: nn.Module) -> bool:
    return type(module) in _NORMS or type(module) in _NORMS.values()
