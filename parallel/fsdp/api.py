"""fully_shard, and enable_quantized_all_gather for models that somebody else has sharded."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from te_dist.parallel.fsdp.attach import attach, check_layers, check_mode, check_sharded, layers_of
from te_dist.parallel.fsdp.report import AllGatherReport, all_gather_report, note_mode
from te_dist.parallel.fsdp.torch_fsdp import (
    FSDPModule,
    FSDPState,
    groups_of,
    state_of,
    states_under,
    sum_where_nobody_averages,
    torch_fully_shard,
)

M = TypeVar("M", bound=nn.Module)


def fully_shard(
    module: M,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    quantized_all_gather: str = "auto",
    **options: Any,
) -> M:
    """torch's ``fully_shard``, with the weights of te_dist's layers gathered as quantized bytes.

    Parameters, optimizers and state dicts are those of torch's FSDP2: plain high-precision DTensors. What changes is
    what an unsharded weight is: quantized, byte for byte as one process would quantize it, ready for the layer.

    Args:
        module: as for torch: call it on the blocks first, then on the model. Convert, parallelize and compile before.
        mesh, reshard_after_forward, offload_policy, options: as for torch.
        mp_policy: as for torch, but for one default: a ``param_dtype`` without a ``reduce_dtype`` reduces gradients in
            float32 on every torch version. Weights are quantized from the parameter itself, whatever param_dtype says.
        quantized_all_gather: "auto" gathers quantized where it can, ``all_gather_report`` says where it does not;
            "on" raises where it cannot; "off" is torch's fully_shard.

    Example:
        >>> import torch, te_dist
        >>> from te_dist.parallel import fully_shard
        >>> def shard(model):
        ...     for block in model.blocks:
        ...         fully_shard(block)
        ...     return fully_shard(model)
    """
    caller = "fully_shard"
    check_mode(quantized_all_gather, caller)
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller} expects a module but got {type(module).__name__}")
    check_layers(list(layers_of(module, skip=FSDPModule)), quantized_all_gather, caller)
    arguments: dict[str, Any] = {"reshard_after_forward": reshard_after_forward, **options}
    if mesh is not None:
        arguments["mesh"] = mesh
    if offload_policy is not None:
        arguments["offload_policy"] = offload_policy
    if mp_policy is not None:
        if mp_policy.param_dtype is not None and mp_policy.reduce_dtype is None:
            mp_policy = dataclasses.replace(mp_policy, reduce_dtype=torch.float32)
        arguments["mp_policy"] = mp_policy
    torch_fully_shard(module, **arguments)
    state = state_of(module)
    assert state is not None
    sum_where_nobody_averages(state)
    note_mode(state, quantized_all_gather)
    if quantized_all_gather != "off":
        attach(state, _names(module), quantized_all_gather, caller)
    return module


def enable_quantized_all_gather(model: nn.Module, mode: str = "auto") -> AllGatherReport:
    """Gather the weights of te_dist's layers quantized in a model that torch's own ``fully_shard`` was called on.

    For models that a trainer shards (accelerate, Lightning): call it after that, while the model is sharded.

    Args:
        mode: "auto", or "on", which raises where a weight cannot be gathered quantized.

    Returns:
        What each weight does, and why.
    """
    caller = "enable_quantized_all_gather"
    if mode not in ("auto", "on"):
        raise ValueError(f'{caller} expects mode "auto" or "on" but got {mode!r}')
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} expects a module but got {type(model).__name__}")
    states = list(states_under(model))
    if not states:
        raise ValueError(f"{caller} expects a model that fully_shard was called on, but {type(model).__name__} was not")
    names = _names(model)
    for state in states:
        check_layers(_layers_in(state, names), mode, caller)
        check_sharded(state, caller)
    for state in states:
        note_mode(state, mode)
        attach(state, names, mode, caller)
    return all_gather_report(model)


def _names(module: nn.Module) -> dict[nn.Module, str]:
    return {child: name for name, child in module.named_modules()}


def _layers_in(state: FSDPState, names: dict[nn.Module, str]) -> list[Any]:
    """The quantized layers that have a parameter in this state."""
    from te_dist.modules.base import QuantizedLayer

    found: dict[nn.Module, str] = {}
    for group in groups_of(state):
        for param in group.fsdp_params:
            layer = param._module_info.module
            if isinstance(layer, QuantizedLayer):
                found[layer] = names.get(layer, "")
    return [(name, layer) for layer, name in found.items()]
