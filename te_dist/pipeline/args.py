"""The arguments of forward and backward, by name. Slots: a misspelt field raises AttributeError.

Everything below works on matrices [M, K]; leading dimensions are folded at the autograd boundary. Operands come in
lists with one entry per group; a dense layer has one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from te_dist.pipeline.config import LayerConfig
from te_dist.tensors.storage import QuantizedStorage

TensorOrQuantized = Tensor | QuantizedStorage


@dataclasses.dataclass(slots=True)
class FwdArgs:
    # tensors
    x: TensorOrQuantized  # [M, K]
    params: list[Tensor | None]  # by slot: norm weight and bias, weights, biases, of every stage
    weights: list[list[TensorOrQuantized]]  # by stage and group: what the GEMMs read, quantized or not
    # configuration: requires-grad flags, quantizers, parallelism
    config: LayerConfig
    # numerics
    out_dtype: torch.dtype
    scales: Tensor | None = None  # delayed scaling: f32 [scale_count]
    amaxes: Tensor | None = None  # delayed scaling: f32 [scale_count], raised to what is seen
    # groups
    splits: list[int] | None = None  # rows of each group
    offsets: Tensor | None = None  # int32 [groups] on the device, where each group ends: in place of splits
    unit: int = 1  # rows per entry of the input's first dimension


@dataclasses.dataclass(slots=True)
class StageSaved:
    """What a stage keeps for backward."""

    x: list[TensorOrQuantized] | None = None  # wgrad's operands; None if it is the layer's own input, or not needed
    produced_from: Tensor | None = None  # the input of an inner norm or activation; None: the layer's own
    mean: Tensor | None = None
    rstd: Tensor | None = None


@dataclasses.dataclass(slots=True)
class FwdResult:
    out: Tensor  # [M, N]
    norm_output: Tensor | None
    saved: list[StageSaved]


@dataclasses.dataclass(slots=True)
class BwdArgs:
    # tensors
    dy: Tensor  # [M, N]
    dnorm_output: Tensor | None  # gradient of the norm's output where that was returned
    x: TensorOrQuantized | None  # the layer's input, where backward needs it
    params: list[Tensor | None]  # as in FwdArgs; None where backward does not need one
    weights: list[list[TensorOrQuantized]]  # by stage and group: dgrad's operands; empty where there is no dgrad
    saved: list[StageSaved]
    # configuration
    config: LayerConfig
    # numerics
    x_dtype: torch.dtype
    param_dtypes: list[torch.dtype | None]
    scales: Tensor | None = None
    amaxes: Tensor | None = None
    seeds: Tensor | None = None  # int64 [stages, 2]: stochastic rounding
    # wgrad scheduling
    main_grads: list[Tensor | None] | None = None  # by slot: where wgrad accumulates instead of returning
    overwrite_main_grads: frozenset[int] = frozenset()  # slots whose main_grad is written, not added to
    wgrad_store: list[object] | None = None  # where delayed products wait
    # groups
    splits: list[int] | None = None
    offsets: Tensor | None = None
    # rows that are spread over ranks: by stage and group, see pipeline/shards.py
    rows: list[list[Any] | None] | None = None


@dataclasses.dataclass(slots=True)
class BwdResult:
    dx: Tensor | None
    dparams: list[Tensor | None]
