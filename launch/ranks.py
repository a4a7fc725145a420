"""Ranks on this machine, started as torchrun starts them, but ended with what a person can read."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from te_dist.launch.config import ConfigError

# Until training listens to signals itself, Ctrl-C ends a rank that is still importing without a traceback. Before its
# first line, it waits: see _blocked_for_ranks.
#
# A launcher that is interrupted between two ranks knows of none, and one that is killed can end none: they would wait
# for it, and hold its terminal, until their timeout. So Linux ends them with it (prctl's PR_SET_PDEATHSIG). SIGTERM
# would not let them save: the kernel sends it once for each thread of the launcher, and the second one means at once.
_RANK = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != {launcher}:
        os._exit(1)
def leave(*_):
    if os.environ["RANK"] == "0":
        os.write(2, {farewell!r})
    os._exit(130)
signal.signal(signal.SIGINT, leave)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGINT}})
from {module} import main
from te_dist.launch import runtime
runtime.leave(main())
"""
SECONDS_TO_SAVE = "600"  # torchrun kills what is left 30 s after a signal, in the middle of a large checkpoint


def run_ranks(module: str, arguments: list[str], ranks: int, restarts: int = 0, farewell: str = "") -> int:
    """Run ``module.main(arguments)`` in `ranks` processes. A signal goes to all of them, and they may save.

    Args:
        farewell: the line that the first rank says if Ctrl-C comes before the module listens to signals itself.

    Returns:
        their exit code; 128 + n if signal n ended them, or this process was told to end by it.
    """
    if ranks < 1 or restarts < 0:
        raise ConfigError(f"expects at least 1 rank and 0 restarts but got {ranks} and {restarts}")
    if "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ:
        raise ConfigError("this process is a rank of torchrun already: start ranks with one of the two")
    # One thread each, as torchrun would say with a warning: the ranks share this machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SECONDS_TO_SAVE)
    _quiet()
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts), "--no-python"]
    line = f"{farewell}\n" if farewell else ""
    rank = _RANK.format(module=module, farewell=line.encode(), launcher=os.getpid())
    program = [sys.executable, "-c", rank, *arguments]
    try:
        with _blocked_for_ranks():
            torchrun.run(torchrun.parse_args([*options, *program]))
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        return _blame(failed)
    return 0


@contextmanager
def _blocked_for_ranks() -> Iterator[None]:
    """Start processes with Ctrl-C blocked, which they inherit: a Python that meets it before its first line says "Fatal
    Python error" and more. Here, a thread takes it in the place of the main one, where handlers run as ever."""
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()


def _quiet() -> None:
    """torchrun's own words of a signal or a failure, a page of them: what matters is said by the ranks and below."""
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _blame(failed: ChildFailedError) -> int:
    """A rank that ended by itself has said why; of one that was killed only its launcher knows."""
    rank, failure = failed.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        print(f"te-dist: rank {rank} was ended by {name}, and with it the job", file=sys.stderr, flush=True)
        return 128 - failure.exitcode
    return failure.exitcode
