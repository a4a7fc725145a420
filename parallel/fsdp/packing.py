"""Several byte vectors as one: FSDP2 takes no more than that from a rank that is alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

_ALIGNMENT = 256  # of each part


def packed(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    out = parts[0].new_zeros(packed_size([part.numel() for part in parts]))
    for part, place in zip(parts, unpacked(out, [part.numel() for part in parts]), strict=True):
        place.copy_(part)
    return out


def unpacked(whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of the parts, whose sizes are given."""
    parts, at = [], 0
    for size in sizes:
        parts.append(whole.view(-1)[at : at + size])
        at += _room(size)
    return parts


def packed_size(sizes: Sequence[int]) -> int:
    return sizes[0] if len(sizes) == 1 else sum(map(_room, sizes))


def _room(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
