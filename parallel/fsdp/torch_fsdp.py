"""The one file that names torch's private FSDP2 classes; tests/test_fsdp_contract.py pins what is used of them.

Tried with torch 2.11 and 2.13. What differs between versions is looked up here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ExtensionsData, FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Shard

from te_dist.parallel.fsdp.shards import Shards
from te_dist.torch_compat import backend_of

__all__ = [
    "DTensor",
    "ExtensionsData",
    "FSDPMeshInfo",
    "FSDPModule",
    "FSDPParam",
    "FSDPParamGroup",
    "FSDPState",
    "ShardedState",
    "TrainingState",
    "free_memory",
    "give_memory",
    "groups_of",
    "model_parallel_groups",
    "reshards_after_forward",
    "reshards_to_other_mesh",
    "shards_of",
    "state_of",
    "states_under",
    "sum_where_nobody_averages",
    "torch_fully_shard",
]


def state_of(module: nn.Module) -> FSDPState | None:
    """The FSDP2 state of a module that fully_shard was called on."""
    return torch_fully_shard.state(module) if isinstance(module, FSDPModule) else None  # type: ignore[attr-defined]


def groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    """Its parameter groups: torch 2.11 has one or none, later versions a list."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    one = state._fsdp_param_group
    return [] if one is None else [one]


def sum_where_nobody_averages(state: FSDPState) -> None:
    """gloo with CUDA tensors, as several ranks on one GPU have it: FSDP2 would ask it for NCCL's average."""
    for group in groups_of(state):
        mesh = group.mesh_info.mesh
        if group.device.type == "cuda" and backend_of(mesh.get_group(mesh.ndim - 1), group.device) == "gloo":
            group.force_sum_reduction_for_comms = True


def states_under(root: nn.Module) -> Iterator[FSDPState]:
    """Each FSDP2 state of the module and those inside it, once."""
    seen: set[int] = set()
    for module in root.modules():
        state = state_of(module)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield state


def reshards_after_forward(group: FSDPParamGroup) -> bool:
    return group.post_forward_mesh_info is not None


def reshards_to_other_mesh(group: FSDPParamGroup) -> bool:
    """reshard_after_forward=<number>: what forward leaves behind is a shard over fewer ranks."""
    return group.post_forward_mesh_info is not None and group.post_forward_mesh_info is not group.mesh_info


def shards_of(param: FSDPParam) -> Shards:
    """How its rows are cut."""
    mesh = param.shard_mesh
    return Shards(param._orig_size[0], mesh.size(), mesh.get_local_rank())


def model_parallel_groups(param: FSDPParam) -> list[Any]:
    """The process groups over which a parameter is sharded beside FSDP's: those of tensor parallelism."""
    sharded: DTensor = param.sharded_param  # type: ignore[assignment]
    mesh = sharded.device_mesh
    own = param.mesh_info.mesh.ndim  # FSDP's dimensions come first
    placements = sharded.placements
    return [mesh.get_group(dim) for dim in range(own, mesh.ndim) if isinstance(placements[dim], Shard)]


def data_parallel_groups(param: FSDPParam) -> list[Any]:
    """All of FSDP's own process groups: the shards', and the replicas' where there are some."""
    mesh = param.mesh_info.mesh
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


def give_memory(tensor: torch.Tensor) -> None:
    """Memory for a tensor that may have lost it."""
    size = tensor.numel() * tensor.itemsize
    storage = tensor.untyped_storage()
    if storage.size() != size:
        storage.resize_(size)


def free_memory(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if storage.size() != 0:
        storage.resize_(0)
