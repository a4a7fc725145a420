"""How a weight travels, and why: decided from the layer, its recipe and its sharding, the same on every rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from te_dist.formats import INPUT_DTYPES
from te_dist.modules.base import QuantizedLayer
from te_dist.parallel.fsdp.codec import WeightCodec
from te_dist.parallel.fsdp.shards import Place, Shards
from te_dist.parallel.fsdp.stack import StackCodec
from te_dist.pipeline.config import CallFlags, LayerSpec, StageConfig, resolve
from te_dist.quantizers import Quantizer
from te_dist.recipe import DelayedScaling, Recipe

How = Literal["quantized", "quantized after", "high precision"]
QUANTIZED: How = "quantized"  # bytes are gathered
AFTERWARDS: How = "quantized after"  # gathered in high precision, then quantized once
PLAIN: How = "high precision"  # gathered in high precision, for the layer to do with it what it wants


@dataclasses.dataclass(frozen=True)
class Decision:
    """How one weight is gathered under one recipe.

    Attributes:
        codec: of a weight whose bytes are gathered.
        quantizer: with all planes that are kept unsharded; None for PLAIN.
        reason: why its bytes are not gathered; "" if they are.
        unsupported: something stands in the way, as opposed to nobody having asked for quantization.
    """

    how: How
    quantizer: Quantizer | None = None
    codec: WeightCodec | None = None
    reason: str = ""
    unsupported: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for decisions that leave the same kind of unsharded weight behind."""
        return self.how, self.quantizer, self.codec is not None and self.codec.delayed

    @property
    def format(self) -> str:
        return "-" if self.quantizer is None else self.quantizer.describe()


@dataclasses.dataclass(frozen=True)
class Portion:
    """What one parameter is of a layer's weights.

    Attributes:
        index: of the weight, in the order of the slots; of a stack, that of the first one.
        shards: of its rows, or of the weights of a stack.
        place: of the parameter's rows in that weight.
        stacked_rows: of each weight of a stack; 0 if it is none.
    """

    index: int
    shards: Shards
    cols: int
    place: Place
    stacked_rows: int = 0

    @property
    def weights(self) -> int:
        return self.shards.rows if self.stacked_rows else 1

    @property
    def is_part(self) -> bool:
        return self.place.whole != self.shards.rows


def weight_slots(layer: QuantizedLayer) -> list[tuple[StageConfig, int]]:
    """(stage, group) of each weight of a layer."""
    config = resolve(layer.spec, None, CallFlags(True, (True,) * layer.spec.param_count))
    return [(stage, group) for stage in config.stages for group in range(stage.spec.weights)]


@functools.lru_cache(maxsize=4096)
def _weight_quantizers(spec: LayerSpec, recipe: Recipe) -> list[tuple[Quantizer | None, str]]:
    """By weight: its quantizer, or None and the reason why the recipe needs the weight in high precision."""
    config = resolve(spec, recipe, CallFlags(True, (True,) * spec.param_count, keep_planes=True))
    found: list[tuple[Quantizer | None, str]] = []
    for stage in config.stages:
        quantizer, reason = stage.weight, ""
        if quantizer is None:
            reason = "the recipe does not quantize the weight"
        elif not stage.fprop:
            reason = "the recipe runs fprop in high precision"
        elif not stage.dgrad and not stage.dequantized_backward:
            reason = "the recipe runs dgrad in high precision"
        elif getattr(quantizer, "stochastic_rounding", False):
            reason = "stochastic rounding of a weight would differ from rank to rank"
        found += [(None if reason else quantizer, reason)] * stage.spec.weights
    return found


@functools.lru_cache(maxsize=4096)
def _codec(quantizer: Quantizer, portion: Portion, delayed: bool) -> WeightCodec:
    """Layers of equal shape share one."""
    if portion.stacked_rows:
        return StackCodec(quantizer, portion.shards, portion.stacked_rows, portion.cols, delayed)
    return WeightCodec(quantizer, portion.shards, portion.cols, delayed, portion.place)


def decide(layer: QuantizedLayer, recipe: Recipe | None, portions: Sequence[Portion]) -> list[Decision]:
    """For each parameter that holds weights of a layer. They travel alike: a layer cannot do with half of its weights
    quantized."""
    if recipe is None:
        return [Decision(PLAIN, reason="no recipe")] * len(portions)
    delayed = isinstance(recipe, DelayedScaling)
    quantizers = _weight_quantizers(layer.spec, recipe)
    made: list[Decision] = []
    for portion in portions:
        quantizer, reason = quantizers[portion.index]
        if quantizer is None:
            return [Decision(PLAIN, reason=reason, unsupported=True)] * len(portions)
        quantizer = quantizer.with_usage(rowwise=True, columnwise=not quantizer.column_from_row)
        if portion.stacked_rows:
            obstacle = WeightCodec.obstacle(quantizer, Shards(portion.stacked_rows, 1, 0))
        else:
            obstacle = WeightCodec.obstacle(quantizer, portion.shards, portion.place)
        if not obstacle:
            made.append(Decision(QUANTIZED, quantizer, _codec(quantizer, portion, delayed)))
        elif portion.is_part or portion.stacked_rows:  # the layer joins what it is given, and quantizes it itself
            return [Decision(PLAIN, reason=obstacle, unsupported=True)] * len(portions)
        else:
            made.append(Decision(AFTERWARDS, quantizer, reason=obstacle, unsupported=True))
    return made


def dtype_obstacle(param: Tensor) -> str:
    if param.dtype not in INPUT_DTYPES:
        return f"its dtype is {str(param.dtype).removeprefix('torch.')}"
    return ""
