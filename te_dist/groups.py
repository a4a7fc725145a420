"""The one place that resolves process groups and reduces amaxes over them.

A group is given per call, as a ProcessGroup, a one-dimensional DeviceMesh, or a c10d group name. Nothing keeps one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_dist import torch_compat, transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    GroupLike = ProcessGroup | DeviceMesh | str
else:
    GroupLike = Any

_NON_GROUP_MEMBER = -100  # what torch.distributed.new_group returns on ranks outside of the group


@cache
def _group_types() -> tuple[type, ...]:
    return torch_compat.process_group_types()


def holds_group(value: object) -> bool:
    """Whether `value` is a process group or a mesh, or a container that holds one."""
    if isinstance(value, _group_types()):
        return True
    if isinstance(value, dict):
        return any(holds_group(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return any(holds_group(item) for item in value)
    return False


def resolve_group(group: GroupLike, argument: str = "amax_reduction_group") -> ProcessGroup:
    """The ProcessGroup behind `group`; ValueError if this rank is not in it, TypeError if it is no group."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise ValueError(f"{argument} was given, but torch.distributed is not initialized")
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{argument} expects a DeviceMesh with one dimension but got {group}; "
                f"index it by a dimension's name first"
            )
        if group.get_coordinate() is None:
            raise ValueError(f"{argument}: this rank is not a member of {group}")
        group = group.get_group()
    elif isinstance(group, str):
        try:
            group = torch_compat.group_by_name(group)
        except LookupError as error:
            raise ValueError(f"{argument}: no process group is named {group!r} here") from error
    if type(group) is int and group == _NON_GROUP_MEMBER:
        raise ValueError(f"{argument}: this rank is not a member of the group it was given")
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{argument} expects a ProcessGroup, a DeviceMesh with one dimension or a group name "
            f"but got {type(group).__name__}"
        )
    if torch.distributed.get_rank(group) < 0:
        raise ValueError(f"{argument}: this rank is not a member of group {group.group_name!r}")
    return group


def group_name(group: GroupLike | None) -> str:
    """The c10d name of a group, which is what compiled graphs carry; "" for None."""
    if group is None:
        return ""
    if isinstance(group, str):
        if not group:
            raise ValueError("a process group's name cannot be empty; pass None for no group")
        return group
    return str(resolve_group(group).group_name)


def all_reduce_amax(amaxes: Sequence[Tensor], group: GroupLike) -> None:
    """Replace every amax by its maximum over the group, in place, in one collective.

    The reduction runs on the bits as integers: for magnitudes that is the same order, and it keeps a NaN that one
    rank holds, which a floating-point maximum drops on some backends. Every rank must call this, also with an
    empty shard, whose amax is 0.
    """
    process_group = resolve_group(group)
    if len(amaxes) == 1:
        transport.all_reduce(amaxes[0].view(torch.int32), process_group, maximum=True, payload="amax").wait()
        return
    together = torch.cat([amax.view(torch.int32) for amax in amaxes])
    transport.all_reduce(together, process_group, maximum=True, payload="amax").wait()
    for amax, reduced in zip(amaxes, together.split([amax.numel() for amax in amaxes]), strict=True):
        amax.view(torch.int32).copy_(reduced)
