"""monitor: what quantization does to the tensors of a model, measured while it trains.

In a sampled step every operand is looked at where it is quantized, whatever way leads there: eager, compiled, tensor
parallel, recomputed. All numbers stay on the device until the step ends; then two collectives bring the ranks
together. In all other steps nothing of this exists but one look at an attribute that is None.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_dist import kernels, torch_compat
from te_dist.formats import E2M1_MAX, FP8_MAX, DType
from te_dist.groups import GroupLike, resolve_group
from te_dist.modules.base import QuantizedLayer
from te_dist.pipeline.config import OPERANDS, CallFlags, LayerConfig, StageConfig, resolve
from te_dist.pipeline.operands import observer
from te_dist.pipeline.weights import weight_quantizer
from te_dist.producers import Plain, Producer
from te_dist.quantizers import NVFP4Quantizer, Quantizer
from te_dist.recipe import Recipe
from te_dist.tensors.storage import QuantizedStorage

Statistics = dict[str, dict[str, dict[str, float]]]  # layer -> role -> statistic -> value
Log = str | Path | Callable[[int, Statistics], None]

# (code of the largest value, the value, the half step beyond it from which on a value is cut off, relative to it)
_LARGEST = {
    DType.kFloat8E4M3: (0x7E, FP8_MAX[DType.kFloat8E4M3], 16.0 / 448.0),
    DType.kFloat8E5M2: (0x7B, FP8_MAX[DType.kFloat8E5M2], 4096.0 / 57344.0),
    DType.kFloat4E2M1: (0x77, E2M1_MAX, 1.0 / 6.0),
}
_SUMS = ("count", "underflow", "saturated", "signal", "noise")
_MAXIMA = ("amax", "scale_max", "minus_scale_min")


def _element_type(quantizer: Quantizer) -> DType | None:
    """None for formats that this file does not know, such as Identity and a user's own."""
    if isinstance(quantizer, NVFP4Quantizer):
        return DType.kFloat4E2M1
    found = getattr(quantizer, "fp8_dtype", None)
    return found if found in _LARGEST else None


def _one_plane(storage: QuantizedStorage) -> QuantizedStorage:
    """The plane that dequantize reads."""
    quantizer = storage.quantizer.layout_quantizer()
    return storage._planes_of(quantizer.with_usage(rowwise=storage.has_rowwise, columnwise=not storage.has_rowwise))


def _largest_values(storage: QuantizedStorage, code: int) -> Tensor:
    """[M, K]: the largest magnitude that each element could have had under the scale that it got."""
    plane = _one_plane(storage)
    data = (set(plane.ROW_BUFFERS) | set(plane.COLUMN_BUFFERS)) & {
        "_data", "_transpose", "_rowwise_data", "_columnwise_data"
    }  # fmt: skip
    buffers = {}
    for name in plane.inner_names():
        buffer = getattr(plane, name)
        buffers[name] = torch.full_like(buffer, code) if name in data else buffer
    full = type(plane)(buffers, shape=plane.shape, dtype=plane.dtype, quantizer=plane.quantizer)
    return full.dequantize(dtype=torch.float32).view(plane.matrix_shape)


def measure(x: Tensor, storage: QuantizedStorage) -> tuple[Tensor, Tensor] | None:
    """(sums, maxima) of one quantization, on the device; None for formats without codes of their own."""
    kind = _element_type(storage.quantizer)
    if kind is None or x.numel() == 0:
        return None
    code, largest_code_value, half_step = _LARGEST[kind]
    rows = x.shape[0]
    exact = x.float()
    magnitude = exact.abs()
    made = storage.dequantize(dtype=torch.float32).view(storage.matrix_shape)[:rows]
    present = magnitude > 0
    transformed = not storage.has_rowwise and getattr(storage.quantizer, "with_rht", False)
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    saturated, scale_max, minus_scale_min = zero, zero, zero - torch.inf
    if not transformed:  # what a Hadamard transform mixes has no scale of its own
        largest = _largest_values(storage, code)[:rows].abs()
        # A block whose own scale became 0 has lost its values to underflow.
        saturated = ((magnitude > largest * (1.0 + half_step)) & (largest > 0)).sum(dtype=torch.float64)
        scale = largest / largest_code_value
        scale_max = torch.where(present, scale, 0.0).max().double()
        minus_scale_min = -torch.where(present, scale, torch.inf).min().double()
    sums = torch.stack(
        [
            present.sum(dtype=torch.float64),
            (present & (made == 0)).sum(dtype=torch.float64),
            saturated,
            exact.square().sum(dtype=torch.float64),
            (exact - made).square().sum(dtype=torch.float64),
        ]
    )
    return sums, torch.stack([magnitude.max().double(), scale_max, minus_scale_min])


class Monitor:
    """What ``te_dist.monitor`` returns. ``step()`` after each training step; ``close()`` at the end."""

    def __init__(self, model: nn.Module, every: int, log: Log | None, group: GroupLike | None) -> None:
        self.every, self.log, self.group = every, log, group
        self.steps = 0
        self.last: Statistics = {}
        self._layers = _named_layers(model)
        if not self._layers:
            raise ValueError(f"monitor expects a model with te_dist layers but {type(model).__name__} has none")
        self._keys = {
            (layer.spec.name, stage.name, operand): index
            for index, (layer, stage, operand) in enumerate(
                (layer, stage, operand)
                for layer in self._layers.values()
                for stage in layer.spec.stages
                for operand in OPERANDS
            )
        }
        self._titles = [
            (".".join(filter(None, (name, stage.name))), operand)
            for name, layer in self._layers.items()
            for stage in layer.spec.stages
            for operand in OPERANDS
        ]
        self._recipes: dict[str, Recipe] = {}
        self._plans: list[tuple[Any, Any]] = []
        self._sums: Tensor | None = None
        self._maxima: Tensor | None = None
        self._is_on = False
        self._warned = False
        for layer in self._layers.values():
            layer._is_watched = True
        torch_compat.allow_graphs(8 + 2 * len(self._layers))
        self._turn_on()

    # ---------------------------------------------------------------------------------------- sampling
    def step(self) -> Statistics | None:
        """A training step is over. Returns its statistics if it was sampled."""
        self.steps += 1
        statistics: Statistics | None = None
        if self._is_on:
            self._turn_off()
            self._look_at_weights()
            statistics = self.last = self._statistics()
            self._write(statistics)
        if self.steps % self.every == 0:
            self._turn_on()
        return statistics

    def close(self) -> None:
        self._turn_off()
        for layer in self._layers.values():
            layer._is_watched = False

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _turn_on(self) -> None:
        if observer.see is not None:
            raise RuntimeError("monitor: another monitor is sampling this step; close it first")
        device = next(iter(self._layers.values())).parameters().__next__().device
        self._sums = torch.zeros(len(self._keys), len(_SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(self._keys), len(_MAXIMA), dtype=torch.float64, device=device)
        self._maxima[:, _MAXIMA.index("minus_scale_min")] = -torch.inf
        # The lean way through Linear quantizes by itself; the chain gives the same bits.
        self._plans = [(layer, layer._lean) for layer in self._layers.values() if getattr(layer, "_lean", None)]
        for layer, _ in self._plans:
            layer._lean = None
        observer.see = self._see
        self._is_on = True

    def _turn_off(self) -> None:
        if not self._is_on:
            return
        observer.see = None
        self._is_on = False
        for layer, plan in self._plans:
            layer._lean = plan
        self._plans = []

    @torch.no_grad()
    def _see(
        self, config: LayerConfig, stage: StageConfig, operand: str, source: Producer, made: QuantizedStorage
    ) -> None:
        index = self._keys.get((config.spec.name, stage.spec.name, operand))
        if index is None or not config.flags.any_grad:  # another model's, or evaluation
            return
        if config.recipe is not None:
            self._recipes[config.spec.name] = config.recipe
        self._add(index, kernels.materialize(source), made)

    def _add(self, index: int, x: Tensor, made: QuantizedStorage) -> None:
        measured = measure(x, made)
        if measured is None:
            return
        assert self._sums is not None and self._maxima is not None
        self._sums[index] += measured[0]
        self._maxima[index] = torch.maximum(self._maxima[index], measured[1])

    # ---------------------------------------------------------------------------------------- weights
    @torch.no_grad()
    def _look_at_weights(self) -> None:
        """Quantized here once more, whole: a gathered or cached one has lost what it was made from."""
        for layer in self._layers.values():
            recipe = self._recipes.get(layer.spec.name)
            if recipe is None:
                continue
            config = resolve(layer.spec, recipe, CallFlags(True, (True,) * layer.spec.param_count))
            params = layer._slots()
            scratch = None if layer.fp8_scale is None else torch.zeros_like(layer.fp8_scale)
            for stage in config.stages:
                for group in range(stage.spec.weights):
                    weight = params[stage.weight_slot + group]
                    quantizer = weight_quantizer(config, stage, layer.fp8_scale, scratch, group)
                    if weight is None or quantizer is None:
                        continue
                    whole = kernels.as_rows(_whole(weight))
                    made = quantizer.quantize_produced(Plain(whole), whole.shape)
                    self._add(self._keys[layer.spec.name, stage.spec.name, "weight"], whole, made)

    # ---------------------------------------------------------------------------------------- results
    def _statistics(self) -> Statistics:
        assert self._sums is not None and self._maxima is not None
        self._reduce(self._sums, self._maxima)
        table: Statistics = {}
        for (layer, operand), sums, maxima in zip(
            self._titles, self._sums.tolist(), self._maxima.tolist(), strict=True
        ):
            count, underflow, saturated, signal, noise = sums
            if count == 0:
                continue
            amax, scale_max, minus_scale_min = maxima
            table.setdefault(layer, {})[operand] = {
                "underflow_percent": 100.0 * underflow / count,
                "saturation_percent": 100.0 * saturated / count,
                "sqnr_db": _decibel(signal, noise),
                "scale_min": -minus_scale_min if math.isfinite(minus_scale_min) else 0.0,
                "scale_max": scale_max,
                "amax": amax,
            }
        if not table and not self._warned:
            self._warned = True
            warnings.warn(
                "monitor: a sampled step quantized nothing that could be seen: no layer has a recipe, or the step was "
                "replayed from a CUDA graph",
                stacklevel=3,
            )
        return table

    def _reduce(self, sums: Tensor, maxima: Tensor) -> None:
        if self.group is None and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        group = None if self.group is None else resolve_group(self.group, "group")
        torch.distributed.all_reduce(sums, torch.distributed.ReduceOp.SUM, group)
        torch.distributed.all_reduce(maxima, torch.distributed.ReduceOp.MAX, group)

    def _write(self, statistics: Statistics) -> None:
        if self.log is None:
            return
        if callable(self.log):
            self.log(self.steps, statistics)
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        entry = {"event": "quantization", "time": round(time.time(), 3), "step": self.steps, "layers": statistics}
        with Path(self.log).open("a") as file:
            file.write(json.dumps(entry) + "\n")


def monitor(model: nn.Module, every: int = 100, log: Log | None = None, *, group: GroupLike | None = None) -> Monitor:
    """Measure what quantization does to inputs, weights and gradients of te_dist's layers, every so many steps.

    For each layer and role (input, weight, grad_output): underflow_percent (values that became 0),
    saturation_percent (values cut off at the largest), sqnr_db (signal to quantization noise), scale_min and scale_max
    (of what a code is multiplied with), amax. Over all ranks. Call ``step()`` after every training step; the first one
    is sampled. Weights are looked at as they are then.

    A sampled step costs a few passes over every operand, and at its end a wait for the device; other steps cost
    nothing. It changes no result. Steps that replay a CUDA graph cannot be looked into. Blocks that are compiled one by
    one share no graph while a monitor is open, since each layer is to be told from the others: compiling takes longer.

    Args:
        every: 100 samples steps 1, 101, 201, ...
        log: a JSONL file that rank 0 appends to, or a function of (step, statistics).
        group: the ranks to bring together; all of them by default.

    Example:
        >>> import torch, te_dist
        >>> layer = te_dist.Linear(64, 64, recipe=te_dist.recipe.Float8CurrentScaling(), name="fc")
        >>> with te_dist.monitor(layer, every=10) as watch:
        ...     layer(torch.randn(32, 64, requires_grad=True)).sum().backward()
        ...     statistics = watch.step()
        >>> sorted(statistics["fc"])
        ['grad_output', 'input', 'weight']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"monitor expects a module but got {type(model).__name__}")
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"monitor expects every to be a number of steps of at least 1 but got {every!r}")
    return Monitor(model, every, log, group)


def _named_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """The layers by the names they have inside their calls; those without one, or with another's, get their place."""
    found: dict[str, QuantizedLayer] = {}
    for place, module in model.named_modules():
        if not isinstance(module, QuantizedLayer):
            continue
        name = module.spec.name
        if not name or name in found:
            name = place or type(module).__name__
            module.spec = dataclasses.replace(module.spec, name=name)
            module._configs, module._configs_recipe = {}, None
            if getattr(module, "_lean", None) is not None:
                vars(module)["_lean"] = None
        found[name] = module
    return found


def _whole(weight: Tensor) -> Tensor:
    if not hasattr(weight, "full_tensor"):  # no DTensor: neither sharded nor tensor parallel
        return weight.detach()
    # torch warns that two axes take two gathers; here that is what was asked for.
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return torch_compat.whole_tensor(weight).detach()
    finally:
        logger.setLevel(before)


def _decibel(signal: float, noise: float) -> float:
    """At most 999, which stands for no noise at all: JSON has no infinity."""
    if noise <= 0:
        return 999.0
    return 10.0 * math.log10(signal / noise) if signal > 0 else 0.0
