"""The one door to collectives: every one that te_dist starts passes here.

Three things happen on the way, none of which costs more than a look at an attribute where it is off:

- ``recorder``: te_dist.parallel.comm_report counts what goes over the wire;
- agreement: before ranks exchange data they compare what they are about to exchange. gloo ends the process when two
  ranks bring different sizes, NCCL hangs; here every rank raises RanksDisagree, which shows what each of them brought.
  Where the host waits for each collective anyway (gloo) this happens every time, elsewhere when a shape is new;
- failure: a rank that raises, or is gone, ends those that wait for it with the cause, not with a timeout: see
  te_dist.failures.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from te_dist import failures, torch_compat
from te_dist.failures import RankFailed, RanksDisagree

T = TypeVar("T")
Record = tuple[str, str, str, int, str, str, str]  # kind, group, dtype, bytes, layer, phase, payload

AGREEMENT = ("always", "once", "off")
_TEXT_BYTES = 512  # of a rank's description, exchanged only where ranks disagree
_LOOK_SECONDS = 0.2  # between two looks for other ranks' failures while a collective is waited for


class _State:
    """What is going on in this process."""

    def __init__(self) -> None:
        self.recorder: Callable[[Record], None] | None = None
        self.layer = ""
        self.phase = ""
        # None: "always" where the host waits anyway, else "once".
        self.agreement: str | None = os.environ.get("TE_DIST_CHECK_RANKS") or None
        if self.agreement is not None and self.agreement not in AGREEMENT:
            raise ValueError(f"TE_DIST_CHECK_RANKS expects one of {AGREEMENT} but got {self.agreement!r}")
        self.agreed: set[Any] = set()
        self.started: dict[str, int] = {}  # collectives so far, by group
        self.has_hook = False


state = _State()


# ------------------------------------------------------------------------------------------------- layers
@contextlib.contextmanager
def layer_scope(layer: str, phase: str, group: str) -> Iterator[None]:
    """What is started inside belongs to this layer; an error inside is told to the other ranks."""
    before = state.layer, state.phase
    state.layer, state.phase = layer, phase
    try:
        yield
    except BaseException as error:
        announce_failure(group, error)
        raise
    finally:
        state.layer, state.phase = before


# ------------------------------------------------------------------------------------------------- waiting
class Pending(Generic[T]):
    """A collective under way. ``wait()`` returns its result; every Pending must be waited for."""

    __slots__ = ("_finish", "_group", "_kept", "_polls", "_what", "_work")

    def __init__(
        self,
        work: Any,
        finish: Callable[[], T],
        group: Any = None,
        polls: bool = False,
        what: What | None = None,
        kept: Any = None,
    ) -> None:
        self._work, self._finish, self._group = work, finish, group
        self._polls, self._what, self._kept = polls, what, kept

    def wait(self) -> T:
        if self._work is not None and self._what is not None:
            _wait(self._work, self._group, self._polls, self._what)
            self._work = None
        return self._finish()


class Done(Pending[T]):
    """A result that was there at once."""

    __slots__ = ("_result",)

    def __init__(self, result: T) -> None:
        self._work, self._result = None, result

    def wait(self) -> T:
        return self._result


def _start(begin: Callable[..., Any], group: Any, polls: bool, what: What, *args: Any) -> Any:
    """``begin(group, *args)``; a backend that already knows a connection to be broken says so here, not at the wait."""
    try:
        return begin(group, *args)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _failed(group, polls, what, error) from error


def _wait(work: Any, group: Any, polls: bool, what: What) -> None:
    """Until the collective is done. Where that blocks the host, it looks for other ranks' failures meanwhile."""
    try:
        if polls:
            _poll(work, group, what)
        work.wait()
    except RankFailed:
        raise
    except RuntimeError as error:
        raise _failed(group, polls, what, error) from error


def _poll(work: Any, group: Any, what: What) -> None:
    for _ in range(20):  # small messages are there in no time; more would take the processor from other ranks
        if work.is_completed():
            return
    pause, start = 5e-5, time.monotonic()
    look_at = start + _LOOK_SECONDS
    while not work.is_completed():
        time.sleep(pause)
        pause = min(pause * 1.2, 2e-3)
        if time.monotonic() > look_at:
            look_at = time.monotonic() + _LOOK_SECONDS
            cause = failures.look(group)
            if cause and not work.is_completed():
                raise RankFailed(_sentence(group, what, cause), cause, group.group_name)


# ------------------------------------------------------------------------------------------------- failure
def announce_failure(group_name: str, error: BaseException) -> None:
    """Tell the ranks of a group that this one will not come. Never raises."""
    if group_name:
        where = f" in {state.layer} ({state.phase})" if state.layer else ""
        failures.announce(group_name, state.started.get(group_name, 0), error, where)


def _failed(group: Any, polls: bool, what: What, error: RuntimeError) -> RankFailed:
    """A backend's error with its cause, which the others are told: not every rank's own connections are broken."""
    said = f"the backend says: {error}"
    cause = failures.find_cause(group, polls)
    failures.give_up(group, state.started.get(group.group_name, 0), cause or said)
    whole = f"{cause}; {said}" if cause else said
    return RankFailed(_sentence(group, what, whole), cause or said, group.group_name)


def _sentence(group: Any, what: What, cause: str) -> str:
    return f"te_dist: {_text(what)} over group {group.group_name!r} cannot end on rank {group.rank()}: {cause}"


def _tell_before_dying(group_name: str) -> None:
    """An error that ends the process is told to the others, who see no more than a closed connection otherwise."""
    if state.has_hook:
        return
    state.has_hook = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        for name in list(state.started):
            announce_failure(name, error)
        before(kind, error, trace)

    sys.excepthook = hook


# ------------------------------------------------------------------------------------------------- agreement
# A collective as its ranks compare it: kind, payload, layer, phase, and dtype and shape of every tensor.
What = tuple[str, str, str, str, tuple[tuple[torch.dtype, torch.Size], ...]]


@functools.lru_cache(maxsize=8192)
def _text(what: What) -> str:
    kind, payload, layer, phase, tensors = what
    shapes = ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in tensors)
    return f"{kind} of {shapes}{f' [{payload}]' if payload else ''}{f' in {layer} ({phase})' if layer else ''}"


@functools.lru_cache(maxsize=8192)
def _fingerprint(what: What) -> int:
    return int.from_bytes(hashlib.blake2b(_text(what).encode(), digest_size=8).digest(), "little", signed=True)


# By group, which must not be kept alive: what hangs on one ends with it.
_host_waits: weakref.WeakKeyDictionary[Any, dict[str, bool]] = weakref.WeakKeyDictionary()


def _blocks_host(group: Any, device_type: str) -> bool:
    """Whether the host waits for a collective of this group, as with gloo."""
    known = _host_waits.setdefault(group, {})
    waits = known.get(device_type)
    if waits is None:
        waits = known[device_type] = torch_compat.backend_of(group, torch.device(device_type)) == "gloo"
    return waits


def agree(group: Any, device: torch.device, what: What) -> None:
    """Raise RanksDisagree on every rank of the group unless all of them are about to do the same."""
    mode = state.agreement
    if mode is None:
        mode = "always" if _blocks_host(group, device.type) else "once"
    if mode == "off":
        return
    key = (group.group_name, what)
    if mode == "once" and key in state.agreed:
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    polls = _blocks_host(group, device.type)
    mine = torch.tensor([_fingerprint(what)], dtype=torch.int64, device=device)
    everyone = torch.empty(group.size(), dtype=torch.int64, device=device)
    _record("check", group, mine, "agreement")
    _wait(_start(torch_compat.start_all_gather, group, polls, what, [everyone], [mine]), group, polls, what)
    if len(set(everyone.tolist())) == 1:
        state.agreed.add(key)
        return
    padded = _text(what).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
    said = torch.tensor(list(padded), dtype=torch.uint8, device=device)
    texts = torch.empty(group.size() * _TEXT_BYTES, dtype=torch.uint8, device=device)
    _wait(_start(torch_compat.start_all_gather, group, polls, what, [texts], [said]), group, polls, what)
    shown = [bytes(row.tolist()).decode(errors="replace").strip() for row in texts.view(-1, _TEXT_BYTES)]
    lines = "".join(f"\n  rank {rank}: {line}" for rank, line in enumerate(shown))
    raise RanksDisagree(
        f"te_dist: the ranks of group {group.group_name!r} are about to do different things; they expect equal layers, "
        f"shapes and recipes but got{lines}",
        group.group_name,
    )


# ------------------------------------------------------------------------------------------------- collectives
def _record(kind: str, group: Any, tensor: Tensor | Sequence[Tensor], payload: str) -> None:
    recorder = state.recorder
    if recorder is not None:
        tensors = [tensor] if isinstance(tensor, Tensor) else tensor
        dtype = "+".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors))
        size = sum(t.numel() * t.element_size() for t in tensors)
        recorder((kind, str(group.group_name), dtype, size, state.layer, state.phase, payload))


def _begin(
    kind: str, group: Any, tensors: Sequence[Tensor], payload: str, device: torch.device | None = None
) -> tuple[bool, What]:
    name = group.group_name
    _tell_before_dying(name)
    what = (kind, payload, state.layer, state.phase, tuple([(t.dtype, t.shape) for t in tensors]))
    device = tensors[0].device if device is None else device
    agree(group, device, what)
    state.started[name] = state.started.get(name, 0) + 1
    _record(kind, group, tensors, payload)
    return _blocks_host(group, device.type), what


def begin_exchange(kind: str, group: Any, tensors: Sequence[Tensor], device: torch.device, payload: str) -> What:
    """Announce a collective that te_dist.parallel.userbuffers carries out by itself: ranks agree, and it is counted.

    Args:
        tensors: what this rank hands over; on the meta device where it is yet to be computed.
    """
    return _begin(kind, group, tensors, payload, device)[1]


def all_gather(inputs: Sequence[Tensor], group: Any, payload: str = "") -> Pending[list[Tensor]]:
    """Every input gathered along its first dimension, all of them in one call. Shapes are the same on all ranks."""
    inputs = [t.contiguous() for t in inputs]
    polls, what = _begin("all_gather", group, inputs, payload)
    ranks = group.size()
    if all(t.numel() == 0 for t in inputs):
        return Done([t.new_empty((ranks * t.shape[0], *t.shape[1:])) for t in inputs])
    if len(inputs) == 1 or not polls:
        outputs = [t.new_empty((ranks * t.shape[0], *t.shape[1:])) for t in inputs]
        work = _start(torch_compat.start_all_gather, group, polls, what, outputs, list(inputs))
        return Pending(work, lambda: outputs, group, polls, what, inputs)
    # gloo has no coalesced call for every device; it would copy into one buffer as well.
    packed = torch.cat([t.view(-1).view(torch.uint8) for t in inputs])
    together = packed.new_empty(ranks * packed.numel())
    work = _start(torch_compat.start_all_gather, group, polls, what, [together], [packed])
    sizes = [t.numel() * t.element_size() for t in inputs]

    def unpack() -> list[Tensor]:
        parts = together.view(ranks, -1).split(sizes, 1)
        made = [part.clone(memory_format=torch.contiguous_format).view(-1) for part in parts]
        return [m.view(t.dtype).view(ranks * t.shape[0], *t.shape[1:]) for m, t in zip(made, inputs, strict=True)]

    return Pending(work, unpack, group, polls, what, packed)


def all_reduce(tensor: Tensor, group: Any, *, maximum: bool = False, payload: str = "") -> Pending[Tensor]:
    """Sum (or maximum) over the ranks, in place."""
    from torch.distributed import ReduceOp

    polls, what = _begin("all_reduce", group, [tensor], payload)
    if tensor.numel() == 0:
        return Done(tensor)
    operation = ReduceOp.MAX if maximum else ReduceOp.SUM
    work = _start(torch_compat.start_all_reduce, group, polls, what, tensor, operation)
    return Pending(work, lambda: tensor, group, polls, what, tensor)


def reduce_scatter(whole: Tensor, group: Any, payload: str = "") -> Pending[Tensor]:
    """Sum over the ranks; this rank's slice of the first dimension, which the number of ranks divides."""
    from torch.distributed import ReduceOp

    whole = whole.contiguous()
    polls, what = _begin("reduce_scatter", group, [whole], payload)
    out = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    if whole.numel() == 0:
        return Done(out)
    if polls:
        # What gloo does itself; but that work of its own cannot be asked whether it is done.
        total = whole.clone()
        work = _start(torch_compat.start_all_reduce, group, polls, what, total, ReduceOp.SUM)
        return Pending(work, lambda: out.copy_(total.chunk(group.size())[group.rank()]), group, polls, what, total)
    work = _start(torch_compat.start_reduce_scatter, group, polls, what, out, whole)
    return Pending(work, lambda: out, group, polls, what, whole)


# ------------------------------------------------------------------------------------------------- messages
_FIRST_TAG = 1 << 20  # above those that a user's own messages over the group are likely to have
_TAGS = 1 << 20


class _Watched:
    """A message that another thread waits for: a message of gloo cannot be asked whether it is there."""

    __slots__ = ("done", "error", "work")

    def __init__(self, work: Any) -> None:
        self.work, self.done = work, threading.Event()
        self.error: BaseException | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class Messages:
    """Messages between the ranks of a group that belong to one exchange; see ``begin_exchange`` for `what`.

    All ranks start their exchanges over a group in the same order, by which their messages find each other. The host
    waits: this is for gloo, and for tensors on the CPU. Tensors belong to the exchange until ``finish``.
    """

    def __init__(self, group: Any, what: What) -> None:
        self._group, self._what = group, what
        number = state.started.get(group.group_name, 0)
        self._tag = _FIRST_TAG + number % _TAGS
        self._queue: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._sent: list[_Watched] = []
        self._kept: list[Tensor] = []
        self._thread: threading.Thread | None = None

    def send(self, rank: int, tensor: Tensor) -> None:
        if tensor.numel():
            tensor = tensor.contiguous()
            self._kept.append(tensor)
            self._sent.append(self._begin(torch_compat.start_send, rank, tensor))

    def receive(self, rank: int, tensor: Tensor) -> _Watched | None:
        """What to ``wait`` for; `tensor` is contiguous."""
        if not tensor.numel():
            return None
        watched = self._begin(torch_compat.start_receive, rank, tensor)
        self._watch(watched)
        return watched

    def wait(self, message: _Watched | None) -> None:
        if message is None:
            return
        try:
            _wait(message, self._group, True, self._what)
        except BaseException:
            self._queue.put(None)  # nobody waits for the rest
            raise

    def _begin(self, begin: Callable[..., Any], rank: int, tensor: Tensor) -> _Watched:
        try:
            return _Watched(_start(begin, self._group, True, self._what, tensor, rank, self._tag))
        except BaseException:
            self._queue.put(None)
            raise

    def finish(self) -> None:
        """Until everything that was sent has left; all that was to be received has been waited for."""
        for message in self._sent:
            self._watch(message)
        for message in self._sent:
            self.wait(message)
        self._queue.put(None)
        self._sent.clear()
        self._kept.clear()

    def _watch(self, message: _Watched) -> None:
        self._queue.put(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._waits, daemon=True, name="te_dist messages")
            self._thread.start()

    def _waits(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                message.work.wait()
            except BaseException as error:
                message.error = error
            message.done.set()
