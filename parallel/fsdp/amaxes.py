"""The amaxes on which the scales of sharded weights depend, reduced over the ranks: all at once, before each forward.

They are computed anew for every forward. Nothing tells reliably whether a weight has changed since the last one (fused
optimizers do not count versions), and the user may step twice, or not at all, or load a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.groups import all_reduce_amax
from te_dist.parallel.fsdp.torch_fsdp import TrainingState, data_parallel_groups
from te_dist.recipe import DelayedScaling, recipe_in_force

if TYPE_CHECKING:
    from te_dist.parallel.fsdp.codec import WeightCodec
    from te_dist.parallel.fsdp.layer import ShardedLayer
    from te_dist.parallel.fsdp.weight import ShardedWeight


def before_forward(layers: Sequence[ShardedLayer]) -> None:
    """For all weights that this forward may gather, and the amax histories of delayed scaling, from which it takes its
    scales."""
    with_gradients = torch.is_grad_enabled()
    with torch.no_grad():
        _before_forward(layers, with_gradients)


def _before_forward(layers: Sequence[ShardedLayer], with_gradients: bool) -> None:
    pairs: list[tuple[ShardedWeight, WeightCodec]] = []
    for owner in layers:
        recipe = owner.recipe(TrainingState.FORWARD)
        for weight, decision in zip(owner.weights, owner.decisions(recipe), strict=True):
            weight.amaxes = weight.amaxes_codec = None
            if decision.codec is not None and decision.codec.amax_count and weight.is_sharded:
                pairs.append((weight, decision.codec))
    _reduce(pairs, _histories(layers))
    for owner in layers:
        if isinstance(owner.forward_recipe, DelayedScaling):
            owner.prepare_scales(owner.forward_recipe, owner.layer.training or with_gradients)


@torch.no_grad()
def reduce_histories(layers: Sequence[ShardedLayer]) -> None:
    """Delayed scaling: what each rank has seen since the last forward began, seen by all. The next forward would do it;
    a checkpoint, which holds one rank's buffers, needs it now."""
    _reduce([], _histories(layers))


def _histories(layers: Sequence[ShardedLayer]) -> list[tuple[ShardedWeight, Tensor]]:
    """The newest line of each history that the ranks are to share."""
    found = []
    for owner in layers:
        recipe, history = recipe_in_force(owner.layer.recipe) or owner.forward_recipe, owner.layer.fp8_amax_history
        if isinstance(recipe, DelayedScaling) and recipe.reduce_amax and history is not None:
            found.append((owner.weights[0], history[0]))
    return found


@torch.no_grad()
def for_gather(weight: ShardedWeight, codec: WeightCodec, state: TrainingState) -> Tensor | None:
    """The amaxes that a weight is quantized with. Those of this forward; where there are none (unshard() by hand, a
    recipe that was scoped inside of the root's forward) its parameter group reduces some now."""
    if not codec.amax_count:
        return None
    by_hand = state == TrainingState.IDLE
    if by_hand or weight.amaxes is None or weight.amaxes_codec is not codec:
        mates = _of_same_group(weight, state)
        first = not by_hand or mates[0][0] is weight  # FSDP2 gathers a group's weights in order
        if first:
            _reduce(mates if by_hand else [p for p in mates if p[0].amaxes_codec is not p[1]], [])
    reduced = weight.amaxes
    assert reduced is not None
    if by_hand:  # the next gather may see other weights
        weight.amaxes = weight.amaxes_codec = None
    return reduced


def _of_same_group(weight: ShardedWeight, state: TrainingState) -> list[tuple[ShardedWeight, WeightCodec]]:
    found = []
    for param in weight.group.fsdp_params:
        mate = getattr(param, "te_dist_weight", None)
        if mate is None:
            continue
        decision = mate.owner.decisions(mate.owner.recipe(state))[mate.owner.weights.index(mate)]
        if decision.codec is not None and decision.codec.amax_count:
            found.append((mate, decision.codec))
    return found


def _join(parts: Sequence[ShardedWeight]) -> None:
    """The amax of a joined weight is the largest of its parts'."""
    pairs = [(p.whole.parts[0].amaxes, p.amaxes) for p in parts if p is not p.whole.parts[0]]
    for first, other in pairs:
        assert first is not None and other is not None
        # Through a kernel, which knows what is larger than a NaN: a one-element tensor is its own amax.
        kernels.amax(other[:1].view(1, 1), first[:1], accumulate=True)
    for first, other in pairs:
        assert first is not None and other is not None
        other[:1].copy_(first[:1])


def _reduce(
    pairs: Sequence[tuple[ShardedWeight, WeightCodec]], histories: Sequence[tuple[ShardedWeight, Tensor]]
) -> None:
    """One collective for each mesh dimension: FSDP's, and that of tensor parallelism for scales of whole tensors."""
    parts: dict[tuple[Any, ...], list[tuple[ShardedWeight, WeightCodec, Tensor]]] = {}
    rows: dict[tuple[Any, ...], list[Tensor]] = {}
    for weight, codec in pairs:
        amaxes = codec.contribution(weight.local()).to(weight.param.device)
        groups = (weight.param.shard_mesh.get_group(), *weight.model_parallel_groups)
        parts.setdefault(groups, []).append((weight, codec, amaxes))
        weight.amaxes, weight.amaxes_codec = amaxes, codec
    _join([weight for weight, codec in pairs if codec.is_part and codec.tensor_amax_count])
    for weight, row in histories:
        rows.setdefault(tuple(data_parallel_groups(weight.param)), []).append(row)
    waiting: dict[Any, list[Tensor]] = {}  # what is reduced over each group
    for groups, members in parts.items():
        waiting.setdefault(groups[0], []).extend(amaxes for _, _, amaxes in members)
        for group in groups[1:]:
            whole = [amaxes[: codec.tensor_amax_count] for _, codec, amaxes in members if codec.tensor_amax_count]
            waiting.setdefault(group, []).extend(whole)
    for groups, tensors in rows.items():
        for group in groups:
            waiting.setdefault(group, []).extend(tensors)
    for group, tensors in waiting.items():
        if group.size() > 1 and tensors:
            all_reduce_amax(tensors, group)
