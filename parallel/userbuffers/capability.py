"""Whether the ranks of a group can overlap: every rank looks at itself, and all of them decide together."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from te_dist import torch_compat, transport
from te_dist.groups import resolve_group

_TEXT_BYTES = 256  # of what a rank says about itself


class OverlapUnavailable(RuntimeError):
    """overlap="require" was given, and the ranks lack what it takes."""


def missing_here(group: Any, device: torch.device) -> str:
    """What this rank lacks; "" if nothing. Looks at this rank only."""
    if device.type == "cpu":
        backend = torch_compat.backend_of(group, device)
        return "" if backend == "gloo" else f"messages between processes on the CPU go over gloo, not over {backend}"
    if device.type != "cuda":
        return f"there is no way to overlap on {device.type}"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return torch_compat.missing_symmetric_memory(device)


def _place(device: torch.device) -> str:
    """Host and device of this rank."""
    index = torch.cuda.current_device() if device.type == "cuda" and torch.cuda.is_available() else 0
    return f"{socket.gethostname()}/{index}"


def missing_between(places: list[str], device: torch.device) -> str:
    """What the ranks lack together, given the host and device of each."""
    if device.type != "cuda":
        return ""
    hosts = {place.rpartition("/")[0] for place in places}
    if len(hosts) > 1:
        return f"symmetric memory is within one machine, and the ranks are on {sorted(hosts)}"
    if len(set(places)) < len(places) and os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") != "1":
        return (
            f"several ranks use one device ({', '.join(places)}), which symmetric memory refuses unless "
            f"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
        )
    return ""


def _unreachable(places: list[str], device: torch.device) -> str:
    """Which of the ranks' devices this one's cannot read."""
    mine = int(_place(device).rpartition("/")[2])
    others = {int(place.rpartition("/")[2]) for place in places} - {mine}
    blocked = [other for other in sorted(others) if not torch.cuda.can_device_access_peer(mine, other)]
    return f"GPU {mine} has no peer access to GPU(s) {blocked}" if blocked else ""


def probe(group_name: str, device: torch.device) -> str:
    """Why the ranks of a group cannot overlap; "" if they can. All ranks call this, and all get the same answer."""
    group = resolve_group(group_name, "tp_group")
    try:
        missing = missing_here(group, device)
    except Exception as error:
        missing = f"{type(error).__name__}: {error}"
    said = _exchanged(f"{_place(device)}|{missing}", group, device)
    places, lacks = zip(*(text.split("|", 1) for text in said), strict=True)
    why = _reasons(list(lacks)) or missing_between(list(places), device)
    if why or device.type != "cuda":
        return why
    why = _reasons(_exchanged(_unreachable(list(places), device), group, device))
    if why:
        return why
    # Everything looks right: so try, all ranks together, what the first step would do.
    try:
        from te_dist.parallel.userbuffers.registry import link_for

        link_for(group_name, device).prepare()  # type: ignore[attr-defined]
        failed = ""
    except Exception as error:
        failed = f"symmetric memory: {type(error).__name__}: {error}"
    return _reasons(_exchanged(failed, group, device))


def _reasons(lacks: list[str]) -> str:
    """One sentence: who lacks what."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(lacks):
        if text:
            ranks.setdefault(text, []).append(rank)
    return "; ".join(f"rank(s) {where}: {text}" for text, where in ranks.items())


def _exchanged(text: str, group: Any, device: torch.device) -> list[str]:
    """What every rank says."""
    mine = torch.tensor(list(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)), dtype=torch.uint8)
    if not (device.type == "cuda" and torch.cuda.is_available()):
        device = torch.device("cpu")
    everyone = transport.all_gather([mine.to(device)], group, "capability").wait()[0]
    return [bytes(row.tolist()).decode(errors="replace").rstrip() for row in everyone.view(-1, _TEXT_BYTES)]
