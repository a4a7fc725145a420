"""What forward keeps for backward as a flat list of tensors, and back. The layout follows from the configuration
alone, so a compiled backward needs nothing but the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from te_dist.kernels import as_rows
from te_dist.pipeline.args import StageSaved, TensorOrQuantized
from te_dist.pipeline.config import IDENTITY, NORM, LayerConfig, StageConfig
from te_dist.pipeline.operands import padded_rows
from te_dist.pipeline.shards import GroupRows, saved_rows
from te_dist.quantizers import Quantizer
from te_dist.tensors.storage import QuantizedStorage


def flatten_operand(operand: TensorOrQuantized) -> list[Tensor]:
    return operand.inner_tensors() if isinstance(operand, QuantizedStorage) else [operand]


def assemble(
    tensors: Iterator[Tensor], quantizer: Quantizer, shape: tuple[int, int], dtype: torch.dtype
) -> QuantizedStorage:
    """The storage that `quantizer` makes of a matrix of that shape, around the next tensors."""
    buffers = {name: next(tensors) for name, _, _ in quantizer._layout(shape, dtype)}
    return quantizer.storage_cls._around(buffers, torch.Size(shape), dtype, quantizer)


Shell = tuple[tuple[str, ...], torch.Size, torch.dtype, Quantizer] | bool


def hollow_out(operands: Sequence[TensorOrQuantized | None]) -> tuple[list[Tensor], list[Shell]]:
    """The tensors of the operands, for autograd to hold, and what ``fill_in`` needs to put them together again."""
    tensors: list[Tensor] = []
    shells: list[Shell] = []
    for operand in operands:
        if isinstance(operand, QuantizedStorage):
            names = tuple(operand.inner_names())
            tensors.extend(getattr(operand, name) for name in names)
            shells.append((names, operand.shape, operand.dtype, operand.quantizer))
        else:
            shells.append(operand is not None)
            if operand is not None:
                tensors.append(operand)
    return tensors, shells


def fill_in(shells: Sequence[Shell], tensors: Iterator[Tensor]) -> list[TensorOrQuantized | None]:
    """The inverse of ``hollow_out``."""
    operands: list[TensorOrQuantized | None] = []
    for shell in shells:
        if isinstance(shell, bool):
            operands.append(next(tensors) if shell else None)
        else:
            names, shape, dtype, quantizer = shell
            buffers = {name: next(tensors) for name in names}
            operands.append(quantizer.storage_cls._around(buffers, shape, dtype, quantizer))
    return operands


def flatten_saved(saved: list[StageSaved]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for kept in saved:
        for operand in kept.x or ():
            tensors.extend(flatten_operand(operand))
        tensors.extend(t for t in (kept.produced_from, kept.mean, kept.rstd) if t is not None)
    return tensors


def rebuild_saved(
    config: LayerConfig,
    tensors: Iterator[Tensor],
    rows: int,
    depths: list[int],
    dtype: torch.dtype,
    splits: list[int] | None,
    spread: list[list[GroupRows] | None] | None = None,
) -> list[StageSaved]:
    """The inverse of ``flatten_saved``. `depths`: K of every stage; `spread`: see pipeline/shards.py."""
    result = []
    for index, (stage, depth) in enumerate(zip(config.stages, depths, strict=True)):
        groups = None if spread is None else spread[index]
        kept = StageSaved()
        first = index == 0
        if stage.needs_wgrad and not keeps_input(config, stage, first):
            sizes = splits if stage.spec.groups and splits is not None else [rows]
            if stage.x_saved is None:
                kept.x = [as_rows(next(tensors))]
            else:
                plane = stage.x_saved
                rows_of = [padded_rows(plane, size) for size in sizes] if groups is None else saved_rows(stage, groups)
                kept.x = [assemble(tensors, plane, (size, depth), dtype) for size in rows_of]
        if stage.spec.produce != IDENTITY and stage.needs_dgrad:
            kept.produced_from = None if first else next(tensors)
            if stage.spec.produce == NORM:
                kept.mean = next(tensors) if stage.spec.layer_norm else None
                kept.rstd = next(tensors)
        result.append(kept)
    return result


def keeps_input(config: LayerConfig, stage: StageConfig, first: bool) -> bool:
    """Whether wgrad of this stage reads the layer's own input, in place of something made from it."""
    if not first or stage.spec.produce != IDENTITY:
        return False
    return stage.x_saved is None or config.spec.save_original_input


def needs_input(config: LayerConfig) -> bool:
    """Whether backward needs the layer's own input."""
    first = config.stages[0]
    if first.spec.produce != IDENTITY:
        return first.needs_dgrad
    return first.needs_wgrad and keeps_input(config, first, True)


def saves_norm_output(config: LayerConfig) -> bool:
    """Whether what wgrad reads is the norm's output, which the layer returns as well. It comes first in the flat
    list, and an op, which must not return one tensor twice, leaves it out."""
    first = config.stages[0]
    if config.spec.gathers_norm:  # what wgrad reads is this rank's rows of it
        return False
    return config.spec.return_norm_output and first.needs_wgrad and first.x_saved is None
