"""Vocabulary over ranks: embedding and cross entropy of which no rank ever has the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from te_dist import groups
from te_dist.groups import GroupLike
from te_dist.modules import parameters
from te_dist.modules.parameters import local_part
from te_dist.parallel.collectives import _ranks_of
from te_dist.parallel.mappings import (
    _rank_in,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from te_dist.parallel.modules import distribute_parameter, mesh_of, part_of
from te_dist.parallel.sequence import shard_sizes

REDUCTIONS = ("mean", "sum", "none")


class VocabParallelEmbedding(nn.Embedding):
    """nn.Embedding of which each rank has a range of tokens.

    Args:
        num_embeddings, embedding_dim, others: as for nn.Embedding, of the whole.
        tp_group: over which the tokens are spread.
        sequence_parallel: return this rank's share of the first dimension, which the ranks must divide evenly.

    Initialisation is that of nn.Embedding on one process. The weight is a DTensor, Shard(0).
    """

    _group = ""
    sequence_parallel = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *args: Any,
        tp_group: GroupLike | None = None,
        sequence_parallel: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, *args, **options)
        if tp_group is not None:
            self._set_parallel(mesh_of(tp_group, self.weight.device.type), sequence_parallel)

    def _set_parallel(self, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        if self.max_norm is not None or self.sparse or self.scale_grad_by_freq:
            raise ValueError("VocabParallelEmbedding expects max_norm, sparse and scale_grad_by_freq to be off")
        if mesh.size() == 1:
            return
        distribute_parameter(self, "weight", mesh, Shard(0))
        self._group = str(mesh.get_group().group_name)
        self.sequence_parallel = sequence_parallel

    def forward(self, tokens: Tensor) -> Tensor:
        if not self._group:
            return super().forward(tokens)
        weight = local_part(self.weight)
        first, last = _own_range(self.num_embeddings, self._group)
        here = (tokens >= first) & (tokens < last)
        padding = None
        if self.padding_idx is not None and first <= self.padding_idx < last:
            padding = self.padding_idx - first
        if last > first:
            local = torch.where(here, tokens - first, 0)
            found = nn.functional.embedding(local, weight, padding)
            found = torch.where(here[..., None], found, torch.zeros((), dtype=found.dtype, device=found.device))
        else:  # more ranks than tokens: nothing to find here, but gradients want a path
            found = weight.sum() + weight.new_zeros((*tokens.shape, self.embedding_dim))
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel(found, self._group)
        return reduce_from_tensor_parallel(found, self._group)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        parameters.spread_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def reset_parameters(self) -> None:
        if not self._group:
            super().reset_parameters()
            return
        spread = self.weight
        assert isinstance(spread, DTensor)
        whole = torch.empty(spread.shape, dtype=spread.dtype, device=spread.to_local().device)
        self._parameters["weight"], group = nn.Parameter(whole), self._group
        self._group = ""
        try:
            super().reset_parameters()
            with torch.no_grad():
                if not whole.is_meta:
                    made = part_of(self.weight, spread.device_mesh, spread.placements)
                    spread.to_local().copy_(made)
        finally:
            self._parameters["weight"], self._group = spread, group  # type: ignore[assignment]


def _own_range(size: int, group: str) -> tuple[int, int]:
    ranks, rank = _ranks_of(group), _rank_in(group)
    parts = shard_sizes(size, ranks)
    first = sum(parts[:rank])
    return first, first + parts[rank]


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target], token by token. Three small all-reduces: maxima, sums, the targets' logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: str, smoothing: float, ignore: int, size: int) -> Any:
        first, last = _own_range(size, group)
        values = logits.float()
        largest = values.amax(-1) if last > first else values.new_full(target.shape, -torch.inf)
        largest = torch.ops.te_dist.all_reduce_max(largest, group)
        values = values - largest[..., None]
        powers = values.exp()
        here = (target >= first) & (target < last)
        local = torch.where(here, target - first, 0)
        picked = values.new_zeros(target.shape)
        if last > first:
            picked = torch.where(here, values.gather(-1, local[..., None])[..., 0], picked)
        # One collective for the three sums.
        sums = torch.stack([powers.sum(-1), picked, values.sum(-1)])
        total, chosen, everything = torch.ops.te_dist.all_reduce(sums, group, None).unbind(0)
        log_total = total.log()
        loss = log_total - chosen
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_total - everything / size)
        counted = target != ignore
        loss = torch.where(counted, loss, torch.zeros_like(loss))
        ctx.save_for_backward(powers / total[..., None], local, here, counted)
        ctx.constants = (logits.dtype, smoothing, size)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        softmax, local, here, counted = ctx.saved_tensors
        dtype, smoothing, size = ctx.constants
        gradient = softmax.clone()
        if softmax.shape[-1]:
            hit = torch.where(here, 1.0 - smoothing, 0.0)
            gradient = gradient.scatter_add(-1, local[..., None], -hit[..., None].to(gradient.dtype))
            if smoothing:
                gradient = gradient - smoothing / size
        scale = torch.where(counted, dloss.float(), torch.zeros_like(dloss, dtype=torch.float32))
        return (gradient * scale[..., None]).to(dtype), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: GroupLike,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """torch.nn.functional.cross_entropy of logits whose last dimension is spread over the group, in float32.

    Args:
        logits: [..., this rank's share of the vocabulary], as a column-parallel layer returns them.
        target: [...] of token numbers, the same on all ranks.
        vocab_size: of the whole, if the ranks do not have equal shares.
        label_smoothing, ignore_index: as for cross_entropy.
        reduction: "mean" over the tokens that are not ignored, "sum", or "none".
    """
    name = groups.group_name(group)
    if reduction not in REDUCTIONS:
        raise ValueError(f"vocab_parallel_cross_entropy expects reduction in {REDUCTIONS} but got {reduction!r}")
    if tuple(logits.shape[:-1]) != tuple(target.shape):
        raise ValueError(
            f"vocab_parallel_cross_entropy expects a target for each row of logits {list(logits.shape)} but got shape "
            f"{list(target.shape)}"
        )
    size = logits.shape[-1] * _ranks_of(name) if vocab_size is None else vocab_size
    first, last = _own_range(size, name)
    if logits.shape[-1] != last - first:
        raise ValueError(
            f"vocab_parallel_cross_entropy expects this rank to have {last - first} of {size} logits but got "
            f"{logits.shape[-1]}"
        )
    loss = _CrossEntropy.apply(logits, target, name, label_smoothing, ignore_index, size)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (target != ignore_index).sum()
