"""ParallelStyle classes, for torch's own ``parallelize_module``.

They differ from torch's in what travels: te_dist's layers exchange quantized bytes inside of themselves, so inputs and
outputs stay plain tensors with the shapes of te_dist.parallel's table, and no layout conversions are declared.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from te_dist.parallel.comm import COLUMN, ROW
from te_dist.parallel.embedding import VocabParallelEmbedding
from te_dist.parallel.modules import ParallelOptions, make_parallel, make_te_dist
from te_dist.parallel.plans import _apply_sequence
from te_dist.parallel.userbuffers.choice import Config, apply_overlap, check_choice
from te_dist.parallel.userbuffers.methods import read_table


class _LayerStyle(ParallelStyle):
    mode = COLUMN

    def __init__(
        self,
        *,
        sequence_parallel: bool = False,
        keep_gathered: bool = False,
        reduce_dtype: torch.dtype | None = None,
        amax: str = "global",
        overlap: str = "off",
        overlap_config: Config = None,
    ) -> None:
        super().__init__()
        self.options = ParallelOptions(sequence_parallel, keep_gathered, reduce_dtype, amax)
        check_choice(overlap)
        self.overlap, self.table = overlap, read_table(overlap_config)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is nn.Linear:
            make_te_dist(module, "")
        make_parallel(module, device_mesh, self.mode, self.options)
        return module if self.overlap == "off" else apply_overlap(module, self.overlap, self.table)


class ColwiseParallel(_LayerStyle):
    """Out features over the ranks; also of te_dist.LayerNormMLP, MultiheadAttention and TransformerLayer as a whole.

    Args:
        sequence_parallel: the input is this rank's share of the first dimension.
        keep_gathered, reduce_dtype, amax: see ``te_dist.parallel.TensorParallel``.
        overlap, overlap_config: see ``te_dist.parallel.set_overlap``. torch does not tell a style what its module is
            called, so that a table finds plain layers under "column" and "row".
    """


class RowwiseParallel(_LayerStyle):
    """In features over the ranks, or the tokens of an nn.Embedding. Arguments as for ``ColwiseParallel``; with
    sequence_parallel the result is this rank's share of the first dimension."""

    mode = ROW

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Embedding):
            module.__class__ = VocabParallelEmbedding
            module._set_parallel(device_mesh, self.options.sequence_parallel)  # type: ignore[operator]
            return module
        return super()._apply(module, device_mesh)


class SequenceParallel(ParallelStyle):
    """A norm (or a module without parameters) on this rank's share of the first dimension; its gradients are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _apply_sequence(module, device_mesh, type(module).__name__)
        return module
