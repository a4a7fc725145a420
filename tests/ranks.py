"""A pool of rank processes that stays alive across tests: a test sends it a function, every rank runs it.

A rank that raises ends the call at once with its traceback; a hang ends it at the timeout with every rank's stack.
After either the pool is closed, because a process group is not usable after a failure; the next test gets a new one.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import queue
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from patience import HUNG


def processes() -> Any:
    """Makes processes that start in no time (see warm.py). On a GPU machine they start from nothing: a process that has
    asked for a GPU cannot be forked."""
    if torch.cuda.is_available() or sys.platform != "linux":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    # A fork server does not know this process's sys.path, and must not have threads: NumPy's BLAS would start some.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with _environment(PYTHONPATH=path, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Processes started inside have these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(rank: int, world: int, folder: str, inbox: Any, outbox: Any) -> None:
    # A file of its own for the stack that the parent asks for when this rank hangs, and that a fatal signal leaves.
    stacks = open(os.path.join(folder, f"stack{rank}"), "w")  # noqa: SIM115 (lives as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=HUNG / 2),  # says more than the parent can, and so before it
    )
    while (job := inbox.get()) is not None:
        number, fn, args = job
        if "cuda" in args:  # several ranks on one GPU
            torch.cuda.set_device(0)
        torch.manual_seed(0)
        try:
            outbox.put((number, rank, None, fn(rank, world, *args)))
        except BaseException:
            outbox.put((number, rank, traceback.format_exc(), None))
    dist.destroy_process_group()


class RankPool:
    """`world` gloo processes; ``run(fn, *args)`` calls ``fn(rank, world, *args)`` on each and returns the results."""

    def __init__(self, world: int, folder: Path) -> None:
        context = processes()
        self.world, self.folder, self.number = world, folder, 0
        self.outbox = context.Queue()
        self.inboxes = [context.Queue() for _ in range(world)]
        self.processes = [
            context.Process(target=_serve, args=(rank, world, str(folder), inbox, self.outbox), daemon=True)
            for rank, inbox in enumerate(self.inboxes)
        ]
        for process in self.processes:
            process.start()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = HUNG) -> list[Any]:
        self.number += 1
        for inbox in self.inboxes:
            inbox.put((self.number, fn, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self.world:
            try:
                number, rank, error, value = self.outbox.get(timeout=0.2)
            except queue.Empty:
                if self._dead():
                    self._fail(f"rank(s) died, exit codes {self._dead()}\n{self._left_stacks()}")
                if time.monotonic() > deadline:
                    self._fail(f"no answer from rank(s) {self._missing(results)} in {timeout} s\n{self._stacks()}")
                continue
            if number != self.number:
                continue
            if error:
                time.sleep(0.5)
                if self._dead():  # what this one raised may be no more than that
                    error += f"\nrank(s) died, exit codes {self._dead()}\n{self._left_stacks()}"
                others = f"\nmeanwhile:\n{self._stacks()}" if "imeout" in error or "imed out" in error else ""
                self._fail(f"[rank {rank}] {error}{others}")
            results[rank] = value
        return [results[rank] for rank in range(self.world)]

    def _dead(self) -> dict[int, int | None]:
        return {rank: process.exitcode for rank, process in enumerate(self.processes) if not process.is_alive()}

    def _missing(self, results: dict[int, Any]) -> list[int]:
        return [rank for rank in range(self.world) if rank not in results]

    def _stacks(self) -> str:
        for process in self.processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._left_stacks()

    def _left_stacks(self) -> str:
        return "\n".join(f"[rank {rank}]\n{(self.folder / f'stack{rank}').read_text()}" for rank in range(self.world))

    def _fail(self, message: str) -> None:
        self.close()
        raise AssertionError(message)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def what_was_said(serve: Callable[..., None], folder: Path, *args: Any, world: int = 2) -> list[tuple[str, float]]:
    """Run ``serve(rank, folder, *args)`` in as many processes that may end as they like, and must end. What those that
    have said something said, by rank, and how many seconds passed until then; see ``say``."""
    context = processes()
    started = [context.Process(target=serve, args=(rank, str(folder), *args), daemon=True) for rank in range(world)]
    for process in started:
        process.start()
    for process in started:
        process.join(HUNG)
        alive = process.is_alive()
        process.kill()
        process.join()
        assert not alive, f"a process has not ended in {HUNG} s"
    texts = [path.read_text().partition(" ") for path in sorted(folder.glob("said*"))]
    return [(said, float(seconds)) for seconds, _, said in texts]


def say(folder: str, rank: int, said: str, seconds: float, together: int = 1) -> NoReturn:
    """The last words of a process, which stays until so many have said theirs: that it ends must not end the others."""
    last = Path(folder, f"last{rank}")
    last.write_text(f"{seconds} {said}")
    last.rename(Path(folder, f"said{rank}"))
    until = time.monotonic() + HUNG / 2
    while len(list(Path(folder).glob("said*"))) < together and time.monotonic() < until:
        time.sleep(0.05)
    os._exit(0)
