"""Layers that are made of layers: attention with its heads spread over the ranks, and the transformer layer."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import te_dist
from te_dist.groups import GroupLike
from te_dist.parallel.comm import COLUMN, ROW
from te_dist.parallel.modules import _PARALLEL, ParallelOptions, device_type_of, make_parallel, mesh_of
from te_dist.parallel.norms import make_sequence_parallel
from te_dist.parallel.rng import rank_stream


class MultiheadAttention(te_dist.MultiheadAttention):
    """te_dist.MultiheadAttention with its heads spread over the ranks: qkv column parallel, proj row parallel.

    Args:
        set_parallel_mode: spread the weights; without it tp_group and sequence_parallel have no effect.
        get_rng_state_tracker: returns a tracker whose ``fork()`` is entered for attention dropout.
        others: as for ``te_dist.MultiheadAttention`` and ``te_dist.parallel.Linear``.
    """

    _get_tracker: Any = None

    def __init__(
        self,
        *args: Any,
        set_parallel_mode: bool = False,
        tp_group: GroupLike | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        keep_gathered: bool = False,
        reduce_dtype: torch.dtype | None = None,
        amax: str = "global",
        get_rng_state_tracker: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._get_tracker = get_rng_state_tracker
        choices = ParallelOptions(sequence_parallel, keep_gathered, reduce_dtype, amax)
        _construct_composed(self, set_parallel_mode, tp_group, tp_size, choices)

    def _set_parallel(self, mesh: DeviceMesh, mode: str, options: ParallelOptions) -> None:
        if self.num_gqa_groups % mesh.size():
            raise ValueError(
                f"{self._label} expects the {mesh.size()} ranks to divide its {self.num_gqa_groups} key and value heads"
            )
        if self.fuse_qkv_params and not self.qkv_weight_interleaved:
            raise ValueError(
                f"{self._label} expects fuse_qkv_params=False or qkv_weight_interleaved=True: of one weight with all "
                f"queries before all keys no rank can have whole heads"
            )
        for name, inner_mode in (("layernorm_qkv", COLUMN), ("qkv", COLUMN), ("proj", ROW)):
            if hasattr(self, name):
                make_parallel(getattr(self, name), mesh, inner_mode, options)
        self._ranks = mesh.size()

    def _random_stream(self) -> contextlib.AbstractContextManager[Any]:
        drops = self._ranks > 1 and self.training and self.attention_dropout > 0
        return rank_stream(self._get_tracker) if drops else contextlib.nullcontext()


class TransformerLayer(te_dist.TransformerLayer):
    """te_dist.TransformerLayer over the ranks of a group. Arguments as for ``MultiheadAttention`` here."""

    _get_tracker: Any = None
    _spreads_rows = False

    def __init__(
        self,
        *args: Any,
        set_parallel_mode: bool = False,
        tp_group: GroupLike | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        keep_gathered: bool = False,
        reduce_dtype: torch.dtype | None = None,
        amax: str = "global",
        get_rng_state_tracker: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._get_tracker = get_rng_state_tracker
        choices = ParallelOptions(sequence_parallel, keep_gathered, reduce_dtype, amax)
        _construct_composed(self, set_parallel_mode, tp_group, tp_size, choices)

    def _set_parallel(self, mesh: DeviceMesh, mode: str, options: ParallelOptions) -> None:
        make_parallel(self.self_attention, mesh, mode, options)
        self.self_attention._get_tracker = self._get_tracker
        make_parallel(self.layernorm_mlp, mesh, mode, options)
        if self.layernorm is not None:
            make_sequence_parallel(self.layernorm, mesh, sums=options.sequence_parallel)
        self._spreads_rows = options.sequence_parallel and mesh.size() > 1

    def _random_stream(self) -> contextlib.AbstractContextManager[Any]:
        drops = self._spreads_rows and self.training and self.hidden_dropout > 0
        return rank_stream(self._get_tracker) if drops else contextlib.nullcontext()


def _construct_composed(
    module: Any, set_parallel_mode: bool, tp_group: GroupLike | None, tp_size: int, options: ParallelOptions
) -> None:
    if not set_parallel_mode or (tp_group is None and tp_size == 1):
        return
    if tp_group is None:
        raise ValueError(
            f"{module._label} expects tp_group where tp_size is {tp_size}; make the process group before the module"
        )
    mesh = mesh_of(tp_group, device_type_of(module))
    if tp_size not in (1, mesh.size()):
        raise ValueError(f"{module._label} got tp_size {tp_size} but tp_group has {mesh.size()} ranks")
    module._set_parallel(mesh, COLUMN, options)


_PARALLEL[te_dist.MultiheadAttention] = MultiheadAttention
_PARALLEL[te_dist.TransformerLayer] = TransformerLayer
