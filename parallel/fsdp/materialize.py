"""materialize: from the meta device to the values that one process would have initialised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def materialize(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Give a model on the meta device memory, and initialise it, whatever shards its parameters are.

    Each module's ``reset_parameters`` runs on whole parameters, one module at a time, and each rank keeps its part. So
    the values are those of one process, if all ranks' generators start alike (``torch.manual_seed``) and the modules
    are initialised in the order in which they were made, as ``nn.Module.modules`` has them.

    Args:
        model: after parallelize and fully_shard, or before.
        device: where to; the mesh's device for sharded parameters by default.

    Example:
        >>> import torch, te_dist
        >>> from te_dist.parallel import materialize
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> materialize(model, "cpu")[0].weight.is_meta
        False
    """
    place = torch.device(device) if device is not None else _device_of(model)
    for name, module in model.named_modules():
        own = [*module._parameters.items(), *module._buffers.items()]
        if any(t is not None and t.is_meta for _, t in own) and not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"materialize expects every module with parameters or buffers of its own to have reset_parameters, but "
                f"{name or 'the model'!r}, a {type(module).__name__}, has none"
            )
    was_meta = {id(m) for m in model.modules() if any(p.is_meta for p in m.parameters(recurse=False))}
    was_meta |= {id(m) for m in model.modules() if any(b.is_meta for b in m.buffers(recurse=False))}
    model.to_empty(device=place)
    seen: set[int] = set()
    for module in model.modules():
        if id(module) in was_meta:
            _initialise(module, place, seen)
    return model


def _initialise(module: nn.Module, device: torch.device, seen: set[int]) -> None:
    """Run reset_parameters with whole parameters in the place of the sharded ones, and keep this rank's part."""
    sharded: dict[str, Any] = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
    for name, p in sharded.items():
        whole = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device), requires_grad=p.requires_grad)
        module._parameters[name] = whole
    try:
        module.reset_parameters()  # type: ignore[operator]
        made = {name: module._parameters[name] for name in sharded}
    finally:
        module._parameters.update(sharded)
    with torch.no_grad():
        for name, p in sharded.items():
            if id(p) not in seen:  # a tied parameter is initialised with its first owner, as in one process
                seen.add(id(p))
                value: Any = made[name]
                p._local_tensor.copy_(local_part_of(value.detach(), p))


def local_part_of(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a whole tensor, as `like` is cut: first by tensor parallelism, whose parts FSDP2 cuts."""
    mesh = like.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    part = whole
    for dim in reversed(range(mesh.ndim)):
        placement = like.placements[dim]
        along = getattr(placement, "dim", None)
        if placement.is_replicate() or along is None:
            continue
        chunks = list(part.chunk(mesh.size(dim), along))
        at = coordinate[dim]
        part = chunks[at] if at < len(chunks) else part.narrow(along, 0, 0)
    return part


def _device_of(model: nn.Module) -> torch.device:
    for p in model.parameters():
        if isinstance(p, DTensor):
            kind = p.device_mesh.device_type
            return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    raise ValueError("materialize expects device for a model without sharded parameters")
