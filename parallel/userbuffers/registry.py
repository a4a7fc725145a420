"""One link for each group and device, made when it is first used, closed with the group."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Any

import torch

from te_dist.groups import resolve_group
from te_dist.parallel.userbuffers.links import Link, MessageLink

_links: dict[tuple[str, torch.device], tuple[Any, Link]] = {}


def link_for(group: str, device: torch.device) -> Link:
    """The link over which ranks of a group reach each other. Making one is up to each rank alone."""
    process_group = resolve_group(group, "tp_group")
    known = _links.get((group, device))
    if known is not None and known[0]() is process_group:
        return known[1]
    made: Any
    if device.type == "cuda":
        from te_dist.parallel.userbuffers.symmetric import SymmetricLink

        made = SymmetricLink(group, device)
    else:
        made = MessageLink(group)
    _links[group, device] = (weakref.ref(process_group, lambda _: _forget(group, device)), made)
    return made


def _forget(group: str, device: torch.device) -> None:
    known = _links.get((group, device))
    if known is not None and known[0]() is None:
        close(group, device)


def close(group: str, device: torch.device) -> None:
    """Give back the memory of a group's link. All ranks have finished with it."""
    known = _links.pop((group, device), None)
    release = getattr(known[1], "close", None) if known is not None else None
    if release is not None:
        with contextlib.suppress(Exception):  # the driver may be gone before us
            release()


@atexit.register
def close_all() -> None:
    for group, device in list(_links):
        close(group, device)
