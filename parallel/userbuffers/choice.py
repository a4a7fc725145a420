"""overlap="off" | "auto" | "require": which layers overlap, decided once and by all ranks together."""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from te_dist.groups import resolve_group
from te_dist.modules.base import QuantizedLayer
from te_dist.parallel.comm import TensorParallel
from te_dist.parallel.userbuffers.capability import OverlapUnavailable, probe
from te_dist.parallel.userbuffers.comm import Overlapped
from te_dist.parallel.userbuffers.methods import LayerMethods, read_table, table_name
from te_dist.plan import Move

OFF, AUTO, REQUIRE = "off", "auto", "require"
CHOICES = (OFF, AUTO, REQUIRE)
Choice = str | Mapping[str, str]
Config = Mapping[str, Any] | str | Path | None

NO_ROWS = "without sequence_parallel there is no all-gather or reduce-scatter to overlap"
SHARED = 'its input is gathered by the block around it (a plan\'s "gather"), for several layers'


class _Known:
    """What groups were found to lack, so that they are asked once. By group and device."""

    reasons: dict[tuple[str, torch.device], tuple[Any, str]] = {}  # noqa: RUF012


def why_not(group: str, device: torch.device) -> str:
    """Why a group cannot overlap, "" if it can: asked of all ranks together the first time."""
    process_group = resolve_group(group, "tp_group")
    known = _Known.reasons.get((group, device))
    if known is None or known[0]() is not process_group:
        known = _Known.reasons[group, device] = (weakref.ref(process_group), probe(group, device))
    return known[1]


def check_choice(overlap: Choice) -> None:
    given = overlap.values() if isinstance(overlap, Mapping) else [overlap]
    for value in given:
        if value not in CHOICES:
            raise ValueError(f"overlap expects {CHOICES}, or name patterns to those, but got {value!r}")


def set_overlap(model: nn.Module, overlap: Choice = AUTO, config: Config = None) -> nn.Module:
    """Let the parallel layers of a model overlap their communication with their products, in place.

    ``parallelize(..., overlap=..)`` does this at its end. Call it yourself after Transformer Engine's constructors or
    torch's ``parallelize_module``, before ``torch.compile``, and on all ranks.

    Args:
        overlap: "auto" overlaps what can be, and warns once where nothing can; "require" raises OverlapUnavailable, on
            all ranks, where a layer cannot; "off". Or name patterns (as of fnmatch) of layers to those: the first that
            matches counts, and layers that none matches stay as they are.
        config: how each product overlaps; keys as in Transformer Engine's ub_cfgs and Megatron-LM's YAML files
            ("qkv_fprop", .. "fc2_wgrad"), or the path of such a file. See docs/overlap.md.

    Example:
        >>> import te_dist
        >>> from te_dist.parallel import set_overlap
        >>> layer = te_dist.Linear(64, 64)
        >>> set_overlap(layer, "require") is layer  # one process has nothing to overlap
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"set_overlap expects a module but got {type(model).__name__}")
    check_choice(overlap)
    return apply_overlap(model, overlap, read_table(config))


def apply_overlap(model: nn.Module, overlap: Choice, table: Mapping[str, LayerMethods]) -> nn.Module:
    """``set_overlap`` with a choice and a table that were checked."""
    warned: set[str] = set()
    refused: list[str] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer) or not layer.spec.communicates:
            continue
        label = name or layer.spec.name or type(layer).__name__
        choice = _choice_of(overlap, label)
        if choice is None:
            continue
        reason = "" if choice != OFF else "off"
        if not reason:
            reason = _why_not_layer(layer)
            if reason and choice == REQUIRE:
                refused.append(f"{label}: {reason}")
            elif reason and reason not in warned and layer.spec.group_name:
                warned.add(reason)
                _warn(layer.spec.group_name, f"{label} does not overlap: {reason}")
        _set_layer(layer, label, None if reason else table, reason)
    if refused:
        raise OverlapUnavailable("overlap='require' cannot be met: " + "; ".join(refused))
    return model


def overlapped(comm: TensorParallel, overlap: str = AUTO, config: Config = None) -> TensorParallel:
    """A Comm that overlaps, for te_dist.ops: ``ops.Linear(.., tensor_parallel_group=overlapped(comm))``.

    Args:
        comm: of ``TensorParallel.of(group, None)``; operations bring their own moves.
        overlap, config: as for ``set_overlap``. Layers are named "column" and "row" in the config.
    """
    check_choice(overlap)
    if not isinstance(comm, TensorParallel):
        raise TypeError(f"overlapped expects a TensorParallel but got {type(comm).__name__}")
    table = read_table(config)
    if overlap == OFF or comm.size == 1:
        return comm
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    reason = why_not(comm.group, device)
    if reason and overlap == REQUIRE:
        raise OverlapUnavailable(f"overlap='require' cannot be met: {reason}")
    if reason:
        _warn(comm.group, reason)
        return comm
    return Overlapped.around(comm, table["column"], table["row"])


def _choice_of(overlap: Choice, name: str) -> str | None:
    if isinstance(overlap, str):
        return overlap
    return next((choice for pattern, choice in overlap.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _why_not_layer(layer: Any) -> str:
    if getattr(layer, "_takes_gathered", False):
        return SHARED
    if not layer.spec.shards_rows:
        return NO_ROWS
    return why_not(layer.spec.group_name, _device_of(layer))


def _device_of(layer: nn.Module) -> torch.device:
    """Where the layer will run: on the kind of device that its mesh is of, also if it is on the meta device yet."""
    param: Any = next(layer.parameters())
    kind = param.device_mesh.device_type if hasattr(param, "device_mesh") else param.device.type
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _warn(group: str, reason: str) -> None:
    """Once: all ranks have come to the same answer, and the first of them says it."""
    if resolve_group(group, "tp_group").rank() == 0:
        warnings.warn(f"te_dist: overlap='auto' leaves communication as it is: {reason}", stacklevel=4)


def _set_layer(layer: Any, label: str, table: Mapping[str, LayerMethods] | None, reason: str) -> None:
    stages = []
    for stage in layer.spec.stages:
        comm = stage.comm
        if isinstance(comm, TensorParallel) and comm.shards_rows:
            plain = TensorParallel(**{f.name: getattr(comm, f.name) for f in dataclasses.fields(TensorParallel)})
            is_row = comm.plan.y is Move.REDUCE_SCATTER
            methods = {} if table is None else {
                "row" if is_row else "column": table[table_name(label, stage.name, is_row)]
            }  # fmt: skip
            comm = Overlapped.around(plain, **methods)
        stages.append(dataclasses.replace(stage, comm=comm))
    layer.spec = dataclasses.replace(layer.spec, stages=tuple(stages))
    layer.__dict__["_overlap_reason"] = reason
    layer._reset_caches()
