"""Checkpoints: torch's DCP in a folder that gets its name only when it is whole.

    run_dir/checkpoints/step-00000100/   __0_0.distcp ... .metadata   checkpoint.json
    run_dir/checkpoints/.partial-step-00000200/                       a save that was killed: never loaded

checkpoint.json lists every file with its size and checksum, so a damaged checkpoint is known before it is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from te_dist.launch.runtime import World
from te_dist.modules.delayed import DELAYED_BUFFERS

MARKER = "checkpoint.json"
PREFIX, PARTIAL = "step-", ".partial-"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be loaded: which one, which file, and what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stood when it was saved."""

    step: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint folder that carries its marker."""

    path: Path
    progress: Progress
    config: dict[str, Any]
    files: dict[str, tuple[int, int]]  # name -> (bytes, crc32)


def folder_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def _sync(path: Path) -> None:
    """On the disk, not only in the system's memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------- save
def save(
    run_dir: Path,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    config: dict[str, Any],
    keep: int = 0,
) -> Path:
    """Write a whole checkpoint, or leave the ones that are there as they are. All ranks call it."""
    folder = folder_of(run_dir)
    name = f"{PREFIX}{progress.step:08d}"
    final, partial = folder / name, folder / f"{PARTIAL}{name}"
    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(stale)
    world.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    histories = {_of_rank(world.rank, name): model_state.pop(name) for name in _history_names(model_state)}
    error: str | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP speaks of missing process groups, and of its own future
            dcp.save(
                {"model": model_state, "optimizer": optimizer_state, "histories": histories},
                checkpoint_id=str(partial),
                no_dist=not world.is_distributed,
            )
        mine = [p for p in partial.iterdir() if p.name.startswith(f"__{world.rank}_")]
        files = {p.name: (p.stat().st_size, _crc32(p)) for p in mine}
        for path in mine:
            _sync(path)
    except Exception as failure:
        files, error = {}, f"rank {world.rank}: {type(failure).__name__}: {failure}"
    if (problem := world.together(error)) is not None:
        raise CheckpointError(f"the checkpoint of step {progress.step} could not be written: {problem}")
    gathered = world.gather(files)
    if world.is_first:
        merged = {name: entry for part in gathered for name, entry in part.items()}
        metadata = partial / ".metadata"
        merged[metadata.name] = (metadata.stat().st_size, _crc32(metadata))
        marker = {"step": progress.step, "tokens": progress.tokens, "config": config, "files": merged}
        (partial / MARKER).write_text(json.dumps(marker, indent=1))
        _sync(partial / MARKER)
        _sync(partial)
        if final.exists():  # the same step again, after a resume from an older one
            shutil.rmtree(final)
        partial.rename(final)
        _sync(folder)
        _remove_old(folder, keep)
    world.barrier()
    return final


def _remove_old(folder: Path, keep: int) -> None:
    existing = sorted(p for p in folder.glob(f"{PREFIX}*") if (p / MARKER).exists())
    for path in existing[: max(0, len(existing) - keep)] if keep > 0 else []:
        shutil.rmtree(path)


# ------------------------------------------------------------------------------------------------- find
def read_marker(path: Path) -> Found:
    try:
        marker = json.loads((path / MARKER).read_text())
        files = {name: (int(size), int(crc)) for name, (size, crc) in marker["files"].items()}
        return Found(path, Progress(marker["step"], marker["tokens"]), marker["config"], files)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is no checkpoint of te-dist train: it is no folder with a {MARKER}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MARKER} is damaged: {error}") from None


def _damage(found: Found, world: World) -> str | None:
    """What is wrong with the files; ranks share the reading of them."""
    for name, (size, crc) in sorted(found.files.items())[world.rank :: world.size]:
        path = found.path / name
        if not path.exists():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, not {size}"
        if _crc32(path) != crc:
            return f"{path} is damaged (its checksum is not the one that was saved)"
    return None


def find(run_dir: Path, resume: str, world: World) -> tuple[Found | None, list[str]]:
    """The checkpoint to start from, and warnings about newer ones that are damaged.

    "no" finds none, "auto" the newest whole one of the run, a path that one. Raises CheckpointError if there are
    checkpoints but none is whole: to start from scratch then must be asked for.
    """
    if resume == "no":
        return None, []
    if resume != "auto":
        return _whole(Path(resume), world), []
    paths = world.from_first(sorted(folder_of(run_dir).glob(f"{PREFIX}*"), reverse=True) if world.is_first else [])
    problems: list[str] = []
    for path in paths:
        try:
            return _whole(path, world), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(
            f"no checkpoint in {folder_of(run_dir)} is whole: {'; '.join(problems)}. Choose another run_dir, or "
            f"restore one of them"
        )
    return None, []


def _whole(path: Path, world: World) -> Found:
    marker: Found | str
    try:
        marker = read_marker(path)
    except CheckpointError as error:
        marker = str(error)
    problem = world.together(marker if isinstance(marker, str) else _damage(marker, world))
    if problem is not None:
        raise CheckpointError(problem)
    assert isinstance(marker, Found)
    return marker


# ------------------------------------------------------------------------------------------------- load
def _history_names(model_state: dict[str, Any]) -> list[str]:
    """Delayed scaling's buffers, which every rank has its own of: ranks see different data."""
    return [name for name in model_state if name.rpartition(".")[2] in DELAYED_BUFFERS]


def _of_rank(rank: int, name: str) -> str:
    return f"rank{rank}/{name}"


def _saved_histories(model_state: dict[str, Any], found: Found, world: World) -> dict[str, Any]:
    """What to load them from: this rank's, or the first one's where there were other ranks. Where the checkpoint is
    of another recipe or of another length of history there is nothing to load, and delayed scaling starts over."""
    saved = dcp.FileSystemReader(str(found.path)).read_metadata().state_dict_metadata
    chosen: dict[str, Any] = {}
    for name in _history_names(model_state):
        for rank in (world.rank, 0):
            key = _of_rank(rank, name)
            if getattr(saved.get(f"histories.{key}"), "size", None) == model_state[name].shape:
                chosen[key] = model_state[name]
                break
        del model_state[name]
    return chosen


def load(found: Found, world: World, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Into a model and optimizer that may be laid out over other ranks than those that saved."""
    optimizers: Any = optimizer if optimizer is not None else []
    model_state, optimizer_state = get_state_dict(model, optimizers)
    state: dict[str, Any] = {"model": model_state}
    if optimizer is not None:
        state["optimizer"] = optimizer_state
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state["histories"] = _saved_histories(model_state, found, world)
            dcp.load(state, checkpoint_id=str(found.path), no_dist=not world.is_distributed)
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{found.path} does not fit this model: {type(error).__name__}: {reason[-1] if reason else ''}"
        ) from error
    loaded = {name.partition("/")[2]: value for name, value in state["histories"].items()}
    set_state_dict(
        model, optimizers, model_state_dict={**state["model"], **loaded}, optim_state_dict=state.get("optimizer", {})
    )
