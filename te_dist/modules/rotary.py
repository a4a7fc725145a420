"""Rotary position embeddings: angles per position, and the rotation of queries and keys by them."""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles for ``rotary_pos_emb``.

    Args:
        dim: of an attention head.
        rotary_percent: the part of a head that is rotated; the rest stays as it is.
        seq_len_interpolation_factor: divide positions by it, to reach beyond the lengths of pretraining.
        rotary_base: the slowest rotation turns by 1 / rotary_base per position.
        interleaved: rotate the pairs (0, 1), (2, 3), ..., not (0, dim/2), (1, dim/2 + 1), ...

    Example:
        >>> import te_dist
        >>> te_dist.RotaryPositionEmbedding(16)(8).shape
        torch.Size([8, 1, 1, 16])
    """

    _place: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        dim = int(dim * rotary_percent)
        if dim < 2 or dim % 2:
            raise ValueError(f"RotaryPositionEmbedding expects an even number of rotated dimensions but got {dim}")
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.dim, self.rotary_base, self.interleaved = dim, rotary_base, interleaved
        # Follows the module from device to device. Frequencies in its place would be rounded by .to(torch.bfloat16)
        # and lost by .to_empty().
        self.register_buffer("_place", torch.empty(0, dtype=torch.int64), persistent=False)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """float32 [max_seq_len, 1, 1, dim]: the angle of each pair's two members at each position."""
        device = self._place.device
        frequencies = self.rotary_base ** (torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / -self.dim)
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=device) + offset
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        angles = positions[:, None] * frequencies
        pairs = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return pairs[:, None, None, :]


def apply_rotary_pos_emb(t: Tensor, angles: Tensor, tensor_format: str = "sbhd", interleaved: bool = False) -> Tensor:
    """Rotate queries or keys, in float32.

    Args:
        t: [s, b, h, d] or, for "bshd", [b, s, h, d].
        angles: [at least s, 1, 1, dim] with dim <= d.
        interleaved: as the angles were made.
    """
    length = t.shape[0] if tensor_format == "sbhd" else t.shape[1]
    if angles.dim() != 4 or angles.shape[0] < length or angles.shape[-1] > t.shape[-1]:
        raise ValueError(
            f"rotary_pos_emb expects angles [at least {length}, 1, 1, at most {t.shape[-1]}] but got "
            f"{list(angles.shape)}"
        )
    angles = angles[:length].float()
    if tensor_format == "bshd":
        angles = angles.transpose(0, 1)
    dim = angles.shape[-1]
    rotated, rest = t[..., :dim].float(), t[..., dim:]
    rotated = rotated * angles.cos() + _quarter_turn(rotated, interleaved) * angles.sin()
    return torch.cat((rotated.to(t.dtype), rest), -1)


def _quarter_turn(t: Tensor, interleaved: bool) -> Tensor:
    """(a, b) -> (-b, a) of each pair."""
    if interleaved:
        first, second = t[..., ::2], t[..., 1::2]
        return torch.stack((-second, first), -1).flatten(-2)
    first, second = t.chunk(2, -1)
    return torch.cat((-second, first), -1)
