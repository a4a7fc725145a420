"""Checkpoints of sharded models, on torch's distributed checkpoint (DCP): plain tensors under the model's own names.

A checkpoint is a folder ``step_<n>``. It is written under another name and renamed when every rank is done, so a run
that is killed while it saves leaves the checkpoint before it untouched, and never one that looks complete but is not.
One that is saved a second time steps aside under a third name, where it is found if the run is killed right then.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from te_dist.parallel.fsdp.amaxes import reduce_histories
from te_dist.parallel.fsdp.state import sharded_layers

_PARTIAL, _REPLACED = ".partial", ".replaced"
_NAME = re.compile(rf"step_(\d+)({re.escape(_REPLACED)})?")


@dataclasses.dataclass
class PendingSave:
    """A save that goes on while training does. ``wait()`` returns the finished folder; call it before the next save.
    Every rank must."""

    path: Path
    _saved: Future[Any] | None
    _group: Any

    def wait(self) -> Path:
        if self._saved is not None:
            self._saved.result()
            _publish(self.path, self._group)
            self._saved = None
        return self.path


def save_checkpoint(
    folder: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    *,
    asynchronous: bool = False,
    process_group: Any = None,
) -> PendingSave:
    """Save a model, sharded or not, with its optimizer and what `extra` holds (tensors, numbers, strings).

    What is saved are plain high-precision tensors: ``load_checkpoint`` takes it with another number of ranks, another
    tensor parallel size, another recipe or none, and so does torch's own DCP.

    Args:
        folder: of all checkpoints of the run, visible to all ranks.
        asynchronous: return as soon as the tensors are copied; see ``PendingSave``. The ranks talk to each other
            meanwhile, on a gloo group of their own: on that of the training, messages would meet.
        process_group: of the ranks that save; all of them by default.
    """
    path = _checked(folder, step)
    reduce_histories(sharded_layers(model))
    state = _state(model, optimizer)
    if extra is not None:
        state["extra"] = dict(extra)
    partial = path.with_name(path.name + _PARTIAL)
    if _is_first(process_group) and partial.exists():  # what a killed run has left
        shutil.rmtree(partial)
    _barrier(process_group)
    if asynchronous and dist.is_initialized():
        saved: Any = dcp.async_save(state, checkpoint_id=partial, process_group=_background_group(process_group))
        future = saved if isinstance(saved, Future) else saved.upload_completion
        return PendingSave(path, future, process_group)
    dcp.save(state, checkpoint_id=partial, process_group=process_group, no_dist=not dist.is_initialized())
    _publish(path, process_group)
    return PendingSave(path, None, process_group)


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    process_group: Any = None,
) -> int:
    """Load the newest complete checkpoint of a folder, or that of `step`; returns its step.

    The model may be sharded in another way than the saved one, and may have another recipe. Amax histories of delayed
    scaling that the checkpoint lacks start anew. Values of `extra` are replaced by the saved ones, in place.
    """
    found = latest_checkpoint(folder) if step is None else step
    if found is None:
        raise FileNotFoundError(f"load_checkpoint: no complete checkpoint in {os.fspath(folder)!r}")
    path = _checked(folder, found)
    if not path.is_dir():
        path = path.with_name(path.name + _REPLACED)
    if not path.is_dir():
        raise FileNotFoundError(f"load_checkpoint: no complete checkpoint of step {found} in {os.fspath(folder)!r}")
    state = _state(model, optimizer)
    known = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    model_state = state["model"]
    for name in [name for name in model_state if f"model.{name}" not in known and name.endswith(_DELAYED)]:
        del model_state[name]
    if extra is not None:
        state["extra"] = dict(extra)
    dcp.load(state, checkpoint_id=path, process_group=process_group, no_dist=not dist.is_initialized())
    missing = {name: value for name, value in _state(model, None)["model"].items() if name not in model_state}
    set_state_dict(
        model,
        [] if optimizer is None else optimizer,
        model_state_dict={**missing, **model_state},
        optim_state_dict=state.get("optimizer", {}),
    )
    if extra is not None:
        extra.update(state["extra"])
    return found


def latest_checkpoint(folder: str | os.PathLike[str]) -> int | None:
    """The step of the newest complete checkpoint; None if there is none."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    steps = [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]
    return max(steps, default=None)


_DELAYED = ("fp8_scale", "fp8_amax_history")


def _checked(folder: str | os.PathLike[str], step: int) -> Path:
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"a checkpoint's step is expected to be a number from 0 on but is {step!r}")
    return Path(folder) / f"step_{step}"


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, [] if optimizer is None else optimizer)
    state: dict[str, Any] = {"model": model_state}
    if optimizer is not None:
        state["optimizer"] = optimizer_state
    return state


_background_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _background_group(group: Any) -> Any:
    """A group of the same ranks that training does not use. Made once."""
    whole = dist.group.WORLD if group is None else group
    if whole not in _background_groups:
        _background_groups[whole] = dist.new_group(dist.get_process_group_ranks(whole), backend="gloo")
    return _background_groups[whole]


def _publish(path: Path, group: Any) -> None:
    """Every rank has written its part: give the folder its name."""
    _barrier(group)
    if _is_first(group):
        replaced = path.with_name(path.name + _REPLACED)
        if path.exists():  # the same step again
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(path, replaced)
        os.rename(path.with_name(path.name + _PARTIAL), path)
        shutil.rmtree(replaced, ignore_errors=True)
    _barrier(group)


def _is_first(group: Any) -> bool:
    return not dist.is_initialized() or dist.get_rank(group) == 0


def _barrier(group: Any) -> None:
    if dist.is_initialized():
        dist.barrier(group=group)
