"""Random streams: one that all ranks share, and one that each rank has for itself.

What all ranks hold whole must be dropped out alike on all of them; what is spread over ranks must not repeat the same
pattern on each. ``seed_streams`` makes both, and te_dist's parallel layers choose: attention dropout (heads are
spread) and, under sequence parallelism, hidden dropout (rows are spread) draw from the rank's own stream, all else
from torch's default generator, which is to be seeded alike on all ranks. The seeds of stochastic rounding follow the
same rule without any of this: they are drawn from the default generator and mixed with the rank where a gradient is
spread. The signs of the Hadamard transform are constants.

Inside a compiled graph there is one generator, and ``rank_stream`` has no effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from te_dist.groups import GroupLike, resolve_group

_OFFSET = 2718  # as Megatron-LM spaces its tensor parallel seeds


class RankStream:
    """The state of a rank's own generators; ``fork()`` makes torch draw from them."""

    def __init__(self) -> None:
        self.states: dict[str, torch.Tensor] = {}

    @property
    def is_seeded(self) -> bool:
        return bool(self.states)

    def seed(self, seed: int) -> None:
        with _kept_states():
            torch.manual_seed(seed)
            self.states = _states()

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        """Draw from the rank's own stream inside. `name` is there for callers of Megatron's tracker."""
        before = _states()
        _set_states(self.states)
        try:
            yield
        finally:
            self.states = _states()
            _set_states(before)

    def get_states(self) -> dict[str, torch.Tensor]:
        """For checkpoints."""
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = dict(states)


def _states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


@contextlib.contextmanager
def _kept_states() -> Iterator[None]:
    before = _states()
    try:
        yield
    finally:
        _set_states(before)


own = RankStream()


def seed_streams(seed: int, group: GroupLike) -> RankStream:
    """Seed torch's generators alike on all ranks of a tensor parallel group, and each rank's own stream differently.

    Call it after the CUDA device is set, where there is one.

    Returns:
        The rank's own stream, whose states belong into a checkpoint that is to continue exactly.
    """
    rank = resolve_group(group, "group").rank()
    if torch.cuda.is_available():
        torch.cuda.init()
    torch.manual_seed(seed)
    own.seed(seed + _OFFSET + rank)
    return own


def rank_stream(get_tracker: Any = None) -> contextlib.AbstractContextManager[Any]:
    """Inside, torch draws from the rank's own stream; nothing changes if that was never seeded, or while compiling."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    if get_tracker is not None:
        return get_tracker().fork()
    return own.fork() if own.is_seeded else contextlib.nullcontext()
