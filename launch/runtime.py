"""The processes of a run: this one's place among them, its device, and the few things they agree on."""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from te_dist.launch.config import ConfigError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class World:
    """Where this process stands. Without torchrun: rank 0 of 1, and no process group."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.size > 1

    # ------------------------------------------------------------------------------------------- agreement
    def agree_any(self, flag: int) -> int:
        """The largest of the ranks' flags. On the CPU: it costs no wait for the device."""
        if not self.is_distributed:
            return flag
        value = torch.tensor([flag], dtype=torch.int64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value.item())

    def mean(self, value: torch.Tensor) -> float:
        value = value.detach().float().clone()
        if self.is_distributed:
            dist.all_reduce(value, op=dist.ReduceOp.SUM)
            value /= self.size
        return float(value.item())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.is_distributed:
            dist.barrier()

    def from_first(self, value: Any) -> Any:
        """Rank 0's value."""
        if not self.is_distributed:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def attempt(self, work: Callable[[], T]) -> T:
        """Do something that may fail on one rank; then it fails on all of them, with that rank's reason."""
        value: T | None = None
        error = None
        try:
            value = work()
        except (ConfigError, OSError) as failure:
            error = str(failure)
        if (error := self.together(error)) is not None:
            raise ConfigError(error)
        return value  # type: ignore[return-value]

    def together(self, errors: str | None) -> str | None:
        """The first error of any rank, so that all of them stop where one cannot go on."""
        return next((error for error in self.gather(errors) if error), None)


def world_size_from_environment() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(name: str, local_rank: int) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device cuda, but torch sees no CUDA device; `te-dist doctor` says more")
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def start(device_name: str, timeout: int) -> World:
    """Join the processes that torchrun started; alone without it. A process group that exists already is used."""
    rank, size = int(os.environ.get("RANK", "0")), world_size_from_environment()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    device = choose_device(device_name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1 and not dist.is_initialized():
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # NCCL refuses two ranks on one GPU; gloo takes CUDA tensors too, slowly.
        nccl = device.type == "cuda" and local_size <= torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(
            backend,
            store=_store(limit),
            rank=rank,
            world_size=size,
            timeout=limit,
            device_id=device if nccl else None,
        )
    return World(rank, size, local_rank, device)


def _store(limit: datetime.timedelta) -> dist.Store:
    """Where the ranks meet. On one node torchrun keeps the store over a restart, and with it the addresses of the
    processes that died: every attempt gets a corner of its own. (Nodes may count their attempts differently.)"""
    store, _, _ = next(dist.rendezvous("env://", timeout=limit))
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return store
    return dist.PrefixStore(f"te_dist/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def stop() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


_LOST_OUTPUT = 120  # Python's own exit code where its last lines could not be written


def leave(code: int) -> NoReturn:
    """End this process with an exit code; a rank of several without Python's last steps.

    Threads end, exit handlers run and output is written as ever. But gloo's threads outlive ``destroy_process_group``
    where DTensor keeps the group, and one that is late still holds its last tensors. If it lets go of them while Python
    takes itself apart, the process dies of SIGABRT ("terminate called without an active exception"), and a run that is
    done counts as failed.
    """
    if world_size_from_environment() == 1:
        raise SystemExit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # what multiprocessing ends its processes with, too
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:  # ValueError: somebody has closed it
            code = _LOST_OUTPUT
            os.write(2, f"the last output of this process could not be written: {error}\n".encode())
    os._exit(code)


def step_seed(seed: int, step: int, dp_rank: int) -> int:
    """What a step's random numbers start from. Derived, not carried on: a resumed run needs no saved generator."""
    digest = hashlib.blake2b(f"{seed}:{step}:{dp_rank}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
