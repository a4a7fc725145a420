"""What a layer does with weights that were gathered quantized (tensors/gathered.py), beside multiplying them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.modules import parameters
from te_dist.pipeline.config import LayerConfig
from te_dist.recipe import Recipe
from te_dist.tensors.gathered import GatheredWeight, has_memory
from te_dist.torch_compat import saves_through_hooks

Gathered = Sequence[GatheredWeight | None]  # by slot


def gathered_weights(params: Sequence[Any]) -> list[GatheredWeight | None] | None:
    """The gathered weights among a layer's parameters, also those inside of a DTensor; None if there are none. Taken
    from the parameters themselves: a compiled graph can read attributes of those, not of what to_local() makes."""
    local: list[Any] = [param._local_tensor if parameters.is_spread(param) else param for param in params]
    found = [param if isinstance(param, GatheredWeight) else None for param in local]
    for param in found:
        if param is not None:
            return found
    return None


def check_gathered(label: str, recipe: Recipe | None, gathered: Gathered) -> None:
    """Raise unless the gathered weights are there, and were quantized under the recipe of this call."""
    for param in gathered:
        if param is None:
            continue
        gathering = param.gathering
        if gathering.recipe is not recipe and gathering.recipe != recipe:
            raise RuntimeError(
                f"{label}: {gathering.name} was gathered for {gathering.recipe!r} but the layer is called under "
                f"{recipe!r}; enter te_dist.autocast before the FSDP module's forward or unshard()"
            )
        if not has_memory(param.quantized_storage):
            raise RuntimeError(
                f"{label}: forward reads {gathering.name}, which is not unsharded. If activation checkpointing "
                f"computes this layer again, its first forward must run under it too"
            )


def note_recomputation(config: LayerConfig, gathered: Gathered) -> None:
    """Tell the gatherer if backward will compute this forward again, and so read the row plane there too."""
    if all(stage.derives_column for stage in config.stages) or not expects_recomputation():
        return
    for param in gathered:
        if param is not None:
            param.gathering.recomputed = True


def expects_recomputation() -> bool:
    """Whether this forward looks like one that activation checkpointing runs: it keeps what autograd saves through
    hooks, or (its reentrant kind) it has no gradients. It may be something else: then backward gathers too much."""
    return not torch.is_grad_enabled() or saves_through_hooks()


def record_gathered_amaxes(config: LayerConfig, gathered: Gathered, amaxes: Tensor | None) -> None:
    """Delayed scaling: what quantizing a weight here would have recorded."""
    assert amaxes is not None
    for slot, index in gathered_slots(config)[1]:
        param = gathered[slot]
        assert param is not None
        # Through a kernel: a one-element tensor is its own amax.
        amax = param.weight_amaxes[param.group : param.group + 1]
        kernels.amax(amax.view(1, 1), amaxes[index : index + 1], accumulate=True)


def gathered_slots(config: LayerConfig) -> tuple[list[tuple[int, str]], list[tuple[int, int]]]:
    """(slot, name) of each buffer of the weights, in the order of flatten_weights; (slot, scale index) of each weight
    under delayed scaling."""
    buffers, scales = [], []
    for stage in config.stages:
        for group in range(stage.spec.weights):
            slot = stage.weight_slot + group
            assert stage.weight is not None
            buffers += [(slot, name) for name in stage.weight._describe_buffers((32, 32))]
            scales.append((slot, stage.scale_index("weight", group)))
    return buffers, scales if config.delayed else []
