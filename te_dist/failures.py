"""Failures: what the ranks of a job tell each other, through its store, once one of them cannot go on.

A rank that raises leaves a note, and those that wait for it end with that note. A rank that was killed leaves none: its
neighbours' backend sees a broken connection, all others would wait until the timeout. So the first to see it asks who
is still there, which every rank that waits anywhere answers, and leaves what it has found as a note of its own.

te_dist.transport says when to look, and when to tell.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from te_dist import torch_compat

GRACE_SECONDS = 2.0  # for the other ranks to say why, or that they are there, once a backend has failed
_PAUSE_SECONDS = 0.05  # between two looks meanwhile
_LETTERS = 2000  # of a note

_TROUBLE = "te_dist/trouble"  # set in the store from the first failure of the job on: until then, one look at it is all
_noted: set[tuple[str, int]] = set()  # where this rank has failed: group and number of collectives


class RanksDisagree(RuntimeError):
    """The ranks of a group were about to start different collectives."""

    def __init__(self, text: str, group_name: str = "") -> None:
        super().__init__(text)
        self.group_name = group_name  # all of whose ranks raise this


class RankFailed(RuntimeError):
    """A collective cannot end because another rank has failed or is gone."""

    def __init__(self, text: str, cause: str = "", group_name: str = "") -> None:
        super().__init__(text)
        self.cause = cause or text
        self.group_name = group_name  # whose other ranks know the cause


# ------------------------------------------------------------------------------------------------- telling
def _raised(group_name: str, rank: int) -> str:
    return f"te_dist/failed/{group_name}/{rank}"


def _gave_up(group_name: str, rank: int) -> str:
    return f"te_dist/gave_up/{group_name}/{rank}"


def _alive(global_rank: int) -> str:
    return f"te_dist/alive/{global_rank}"


def announce(group_name: str, number: int, error: BaseException, where: str = "") -> None:
    """Tell the ranks of a group that this one will not come.

    Args:
        number: of the collectives that this rank has started over the group.
        where: in which layer, as the note says it.
    """
    if getattr(error, "group_name", None) == group_name or (group_name, number) in _noted:
        return  # they know
    with contextlib.suppress(Exception):
        rank = torch.distributed.get_rank(torch_compat.group_by_name(group_name))
        if isinstance(error, RankFailed):  # what went wrong went wrong elsewhere
            _leave(_gave_up(group_name, rank), number, error.cause)
        else:
            _leave(_raised(group_name, rank), number, f"{type(error).__name__}{where}: {error}")
            _noted.add((group_name, number))


def give_up(group: Any, number: int, cause: str) -> None:
    """Tell the ranks of a group that this one goes no further, for a reason that is not its own."""
    with contextlib.suppress(Exception):
        _leave(_gave_up(group.group_name, group.rank()), number, cause)


def _leave(key: str, number: int, text: str) -> None:
    store = torch_compat.default_store()
    if store is not None:
        store.set(key, f"{number}|{text}"[:_LETTERS])
        store.set(_TROUBLE, "1")  # last: who sees it finds the note


# ------------------------------------------------------------------------------------------------- asking
def look(group: Any) -> str:
    """For who waits for a collective of the group: why it will not end, or "". Says that this rank is there."""
    with contextlib.suppress(Exception):
        store = torch_compat.default_store()
        if store is not None and store.check([_TROUBLE]):
            store.add(_alive(torch.distributed.get_rank()), 1)
            return _notes(store, group)
    return ""


def find_cause(group: Any, they_look: bool = True) -> str:
    """Why a backend has failed: what other ranks have said, or who gives no sign of life; "" if that is not known.

    Args:
        they_look: whether ranks that wait for a collective of this group ``look``; else silence says nothing.
    """
    store = torch_compat.default_store()
    if store is None:
        return ""
    try:
        ranks = torch.distributed.get_process_group_ranks(group)
        silent = [r for r in range(len(ranks)) if r != group.rank()]
        before = {r: store.add(_alive(ranks[r]), 0) for r in silent}
        store.set(_TROUBLE, "1")
        # Counted, not timed: after a while in which the whole machine stood still, the others get their chance, too.
        for _ in range(round(GRACE_SECONDS / _PAUSE_SECONDS)):
            if cause := look(group):
                return cause
            silent = [r for r in silent if store.add(_alive(ranks[r]), 0) == before[r]]
            if not silent:
                return ""
            time.sleep(_PAUSE_SECONDS)
    except RuntimeError as error:
        return f"the store of the job is out of reach, as when the process that holds it has ended ({error})"
    except (KeyError, ValueError):  # a group that is being destroyed; the backend's own error is what counts
        return ""
    if not they_look:
        return ""
    return f"rank(s) {silent} gave no sign of life: their process has ended or is stuck outside of te_dist"


def _notes(store: Any, group: Any) -> str:
    """What other ranks have said about their end, unless this one has failed at the same place and went on. One that
    gave up for another's sake is quoted where that other one said nothing."""
    raised: list[str] = []
    gave_up: list[str] = []
    name = group.group_name
    for rank in range(group.size()):
        if rank == group.rank():
            continue
        for key, found, verb in ((_raised, raised, "raised"), (_gave_up, gave_up, "gave up:")):
            if not store.check([key(name, rank)]):
                continue
            number, _, text = store.get(key(name, rank)).decode(errors="replace").partition("|")
            if (name, int(number)) not in _noted:
                found.append(f"rank {rank} {verb} {text}")
    return "; ".join(raised or gave_up[:1])
