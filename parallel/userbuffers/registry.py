"""One link for each group and device, made when it is first used, closed before the group is destroyed and at exit."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Any

import torch

from te_dist import torch_compat
from te_dist.groups import GroupLike, resolve_group
from te_dist.parallel.userbuffers.links import Link, MessageLink


class _Links:
    made: dict[tuple[str, torch.device], tuple[Any, Link]] = {}  # noqa: RUF012 (by group and device)
    watches_groups = False


def link_for(group: str, device: torch.device) -> Link:
    """The link over which ranks of a group reach each other. Making one is up to each rank alone."""
    process_group = resolve_group(group, "tp_group")
    known = _Links.made.get((group, device))
    if known is not None and known[0]() is process_group:
        return known[1]
    if not _Links.watches_groups:
        _Links.watches_groups = True
        torch_compat.before_destroying(_close_group)
        atexit.register(close_all)
    made: Any
    if device.type == "cuda":
        from te_dist.parallel.userbuffers.symmetric import SymmetricLink

        made = SymmetricLink(group, device)
    else:
        made = MessageLink(group)
    _Links.made[group, device] = (weakref.ref(process_group), made)
    return made


def _close_group(group: Any) -> None:
    """Of a group that is about to end, or of all."""
    name = getattr(group, "group_name", None)
    for key in list(_Links.made):
        if group is None or key[0] == name:
            close(*key)


def close(group: str, device: torch.device) -> None:
    """Give back the memory of a group's link. All ranks have finished with it."""
    known = _Links.made.pop((group, device), None)
    release = getattr(known[1], "close", None) if known is not None else None
    if release is not None:
        with contextlib.suppress(Exception):  # the driver may be gone before us
            release()


def reserve(group: GroupLike, size: int, device: torch.device | str | None = None) -> None:
    """Have `size` bytes of workspace for overlap over a group, before a CUDA graph is captured. All ranks call this.

    Running the layers once does it as well; on the CPU there is nothing to reserve.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"reserve expects a positive number of bytes but got {size!r}")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    name = str(resolve_group(group, "group").group_name)
    link: Any = link_for(name, torch.device(device))
    if hasattr(link, "reserve"):
        link.reserve(size)


def close_all() -> None:
    _close_group(None)
