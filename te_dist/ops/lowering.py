"""From operations to te_dist.pipeline: a linear operation, or a chain of them, as one layer of stages.

A Lowered is a QuantizedLayer, with its recipes, workspaces, delayed scaling and compiled calls, that leaves autograd to
the fuser: ``begin`` prepares a call outside of it, ``compute`` and ``gradients`` run inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist import delayed_scaling, kernels
from te_dist.dynamo.layer import backward_op, forward_op
from te_dist.formats import INPUT_DTYPES
from te_dist.modules.base import QuantizedLayer
from te_dist.modules.compiled_call import CompiledCall, by_host_or_device, is_checkpointed, trains_with_seeds
from te_dist.modules.delayed import Recomputed
from te_dist.modules.gathered import check_gathered, note_recomputation
from te_dist.modules.scopes import scope
from te_dist.pipeline.config import IDENTITY, LayerSpec
from te_dist.pipeline.forward import layer_forward
from te_dist.pipeline.function import (
    LayerCall,
    backward_args,
    backward_call,
    draw_seeds,
    forward_args,
    forward_call,
)
from te_dist.pipeline.saved import flatten_saved
from te_dist.pipeline.shards import out_lead, rows_per_entry
from te_dist.proto import TensorOrQuantized
from te_dist.quantizers import Quantizer
from te_dist.recipe import DelayedScaling, Recipe, recipe_in_force
from te_dist.tensors.gathered import GatheredWeight, stand_in
from te_dist.tensors.storage import QuantizedStorage
from te_dist.torch_compat import constant_in_graphs, hidden_from_modes, in_backward

Saved = tuple[TensorOrQuantized | None, ...]
Splits = list[int] | Tensor | None


@dataclasses.dataclass(slots=True)
class EagerCall(LayerCall):
    """A call of the pipeline."""

    frame: Any = None


class AmaxRows:
    """The newest rows of several histories, read like the one tensor of them side by side: what a chain of linear
    operations sees goes straight to the operation that it belongs to."""

    def __init__(self, histories: Sequence[Tensor]) -> None:
        rows = [history[0] for history in histories]
        self._places = [(row, i) for row in rows for i in range(row.shape[0])]

    def __getitem__(self, where: slice) -> Tensor:
        row, at = self._places[where.start]
        return row[at : at + 1]


class Lowered(QuantizedLayer):
    """A layer of the pipeline whose parameters and state belong to operations."""

    def _init_layer(self, spec: LayerSpec, recipe: Recipe | None, **options: Any) -> None:
        super()._init_layer(spec, recipe, **options)
        self._is_parallel = spec.communicates

    def begin(self, input_grad: bool, splits: Splits = None) -> Any:
        """Everything of a call that comes before it: the configuration, quantized weights, scales."""
        recipe = self._recipe_of_call()
        params = self._slots()
        gathered = self._gathered(params)
        caching = gathered is None and scope.depth > 0  # frozen_weights; a gathered weight is its own workspace
        update = not (caching and self._workspace_fresh)
        on = torch.is_grad_enabled()
        grads = [input_grad] + [on and p is not None and p.requires_grad for p in params]
        if torch.compiler.is_compiling():
            caching = caching and not is_checkpointed()
            on_device = isinstance(splits, Tensor)
            call: Any = self._begin_compiled(recipe, params, grads, caching, update, None, on_device, gathered)
            call.any_grad = any(grads)
            call.seeded = call.draws_seeds or (
                not any(grads) and self.training and trains_with_seeds(call.spec, recipe)
            )
        else:
            call = self._begin_eager(
                recipe, params, tuple(grads), caching, update, isinstance(splits, Tensor), gathered
            )
        if caching:
            self._workspace_fresh = True
        return call

    def _begin_eager(
        self,
        recipe: Recipe | None,
        params: list[Tensor | None],
        grads: tuple[bool, ...],
        caching: bool,
        update: bool,
        device_splits: bool,
        gathered: list[GatheredWeight | None] | None,
    ) -> EagerCall:
        if gathered is not None:
            check_gathered(self._label(), recipe, gathered)
        config = self._config_of(recipe, params, grads, caching, device_splits, gathered=gathered is not None)
        if gathered is not None:
            note_recomputation(config, gathered)
        call = EagerCall(config, [], torch.float32, None, None)  # type: ignore[arg-type]
        # Activation checkpointing runs forward again inside backward: on the workspace that it had made.
        update = update and not (caching and in_backward())
        self._fill_call(call, recipe, params, caching, update, gathered=gathered)
        if self.fuse_wgrad_accumulation and config.flags.any_grad:
            self._main_grads(call, params, False)
        return call

    def input_quantizer_of(self, call: Any) -> Quantizer | None:
        """What the first product's operand may come quantized by."""
        if not isinstance(call, EagerCall) or call.config.delayed:
            return None  # the linear operation advances its scales when its own turn comes
        stage = call.config.stages[0]
        if stage.spec.produce != IDENTITY or stage.spec.groups or not stage.fprop or not stage.spec.comm.is_local:
            return None
        return None if call.config.spec.save_original_input else stage.x

    # ---------------------------------------------------------------------------------------- forward
    def compute(self, call: Any, x: TensorOrQuantized, splits: Splits, keep: bool) -> tuple[Tensor, Saved]:
        """y, and what backward needs."""
        if isinstance(call, CompiledCall):
            assert isinstance(x, Tensor)
            return self._compute_compiled(call, x, splits, keep)
        params = self._slots()
        call.out_dtype, call.lead = x.dtype, x.shape[:-1]
        call.splits, call.offsets = by_host_or_device(splits)
        if self._is_parallel:
            call.unit = rows_per_entry(x.shape)
        if isinstance(x, QuantizedStorage):
            call.x = self._quantized_input(call.config, x)
        else:
            call.x = kernels.as_rows(x)
        config = call.config
        weight = params[config.stages[0].weight_slot]
        # Drawn here and not in begin(): in the order in which the operations run, as compiled code does.
        if config.draws_seed or (
            not config.flags.any_grad and self.training and trains_with_seeds(self.spec, config.recipe)
        ):
            assert weight is not None
            call.seeds = draw_seeds(self.spec, weight)
        saved: Saved = ()
        if keep and config.flags.any_grad:
            result, operands, call.frame = forward_call(call, x.dtype, params)
            saved = (*operands, *flatten_saved(result.saved))
        else:
            result = layer_forward(forward_args(call, params))
        lead = out_lead(config, call.lead, result.out.shape[0]) if self._is_parallel else call.lead
        return result.out.view(*lead, result.out.shape[1]), saved

    def _compute_compiled(self, call: Any, x: Tensor, splits: Splits, keep: bool) -> tuple[Tensor, Saved]:
        slots = self._slots()
        params = [None if p is None else stand_in(p) if isinstance(p, GatheredWeight) else p.detach() for p in slots]
        sizes, offsets = by_host_or_device(splits)
        op = forward_op(call.saves[2], call.seeded)
        made = op(
            x, params, call.weights, call.scales, sizes or [], offsets, call.spec, call.recipe, call.flags, x.dtype
        )
        seeds = made[-1] if call.seeded else None
        saved = made[1:-1] if call.seeded else made[1:]
        if call.delayed:
            if call.records:
                self._record_compiled(call.histories, saved[0])
            saved = saved[1:]
        if not keep or not call.any_grad:
            return made[0], ()
        kept = [call.weights[i] for i in call.kept]
        given = x if call.saves[0] else None
        return made[0], (given, seeds, call.scales, offsets, *call.histories, *kept, *params, *saved)

    # ---------------------------------------------------------------------------------------- backward
    def gradients(
        self,
        call: Any,
        tensors: list[Any],
        dy: Any,  # a tensor or, in eager code, a producer of one
        x_shape: Sequence[int],
        x_dtype: torch.dtype,
        splits: Splits,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """dx, and the gradients of the slots. Consumes `tensors`."""
        if isinstance(call, CompiledCall):
            return self._gradients_compiled(call, tensors, dy, x_shape, x_dtype, splits)
        count = 4 + sum(1 + stage.spec.weights for stage in call.config.stages)
        operands, rest = iter(tensors[:count]), iter(tensors[count:])
        args = backward_args(call, call.frame, operands, rest, dy)
        tensors.clear()
        del operands, rest, dy
        result = backward_call(call, call.frame, args)
        dx = result.dx
        return None if dx is None else dx.view(x_shape), result.dparams

    def _gradients_compiled(
        self,
        call: Any,
        tensors: list[Any],
        dy: Any,  # a tensor or, in eager code, a producer of one
        x_shape: Sequence[int],
        x_dtype: torch.dtype,
        splits: Splits,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        flags, spec = call.flags, call.spec
        x, seeds, scales, offsets = tensors[:4]
        at = 4 + len(call.histories)
        histories = tensors[4:at]
        kept, params = tensors[at : at + len(call.kept)], tensors[at + len(call.kept) :]
        params, saved = params[: len(flags.param_grads)], params[len(flags.param_grads) :]
        rows = 1
        for size in x_shape[:-1]:
            rows = rows * size
        sizes, _ = by_host_or_device(splits)
        made = backward_op(self._is_parallel)(
            dy, None, x, list(params), list(kept), list(saved), scales, seeds, sizes or [],
            offsets, spec, call.recipe, flags, x_dtype, rows,
        )  # fmt: skip
        if call.delayed:
            self._record_compiled(histories, made[-1], of_forward=False)
        dx = None
        position = 0
        if flags.input_grad:
            dx = made[0].view(x_shape)
            position = 1
        dparams: list[Tensor | None] = []
        for wanted in flags.param_grads:
            dparams.append(made[position] if wanted else None)
            position += 1 if wanted else 0
        return dx, dparams

    # ---------------------------------------------------------------------------------------- checks
    def check_operand(self, label: str, x: TensorOrQuantized, depth: int, device: torch.device) -> None:
        """Said with the name of the operation that is given `x`."""
        if x.dtype not in INPUT_DTYPES:
            raise TypeError(
                f"{label} expects an input of float32, float16 or bfloat16 but got "
                f"{str(x.dtype).removeprefix('torch.')}"
            )
        if len(x.shape) == 0 or x.shape[-1] != depth:
            raise ValueError(f"{label} expects the input's last dimension to be {depth} but got shape {list(x.shape)}")
        if x.device != device:
            raise ValueError(
                f"{label} expects the input on {device}, where its parameters are, but got it on {x.device}"
            )


class ChainLayer(Lowered):
    """Several linear operations as one layer. Delayed scaling's state stays with them.

    Args:
        spec: the stages.
        linears: for each stage the operation with the weight.
        slots: for each slot the operation and the name of its parameter, or None.
    """

    def __init__(
        self, spec: LayerSpec, linears: Sequence[Lowered], slots: Sequence[tuple[torch.nn.Module, str] | None]
    ) -> None:
        super().__init__()
        # Not as submodules: the operations belong to whoever composed them.
        object.__setattr__(self, "linears", tuple(linears))
        object.__setattr__(self, "_places", tuple(slots))
        self._init_layer(spec, linears[0].recipe, fuse_wgrad_accumulation=linears[0].fuse_wgrad_accumulation)

    linears: tuple[Lowered, ...]
    _places: tuple[tuple[torch.nn.Module, str] | None, ...]

    def _label(self) -> str:
        return " and ".join(linear._label() for linear in self.linears)

    def _slots(self) -> list[Tensor | None]:
        return [None if place is None else getattr(place[0], place[1]) for place in self._places]

    def begin(self, input_grad: bool, splits: Splits = None) -> Any:
        if self.training != self.linears[0].training:  # torch 2.11 takes no assignment inside of a checkpoint
            self.training = self.linears[0].training
        return super().begin(input_grad, splits)

    def _gathered(self, params: Sequence[Tensor | None]) -> list[GatheredWeight | None] | None:
        found = super()._gathered(params)
        if found is None:
            return None
        for place, param in zip(self._places, found, strict=True):
            if param is None and place is not None and place[1].startswith("weight") and place[0] in self.linears:
                raise RuntimeError(
                    f"{self._label()}: FSDP2 gathers some of the weights quantized and {place[1]} of "
                    f"{place[0]._label()} in high precision (te_dist.parallel.all_gather_report says why), but they "
                    f"run as one; shard them with quantized_all_gather='off'"
                )
        return found

    @constant_in_graphs
    def _note_traced_recomputation(self) -> None:
        for linear in self.linears:
            linear._note_traced_recomputation()

    def _ensure_delayed(self, recipe: DelayedScaling) -> None:
        """Nothing of its own."""

    def _delayed_call(
        self, call: LayerCall, recipe: Recipe | None, update: bool, recomputed: Recomputed | None
    ) -> None:
        assert isinstance(recipe, DelayedScaling)
        scales, histories = [], []
        records = (call.config.flags.any_grad or self.training) and not in_backward()
        for linear in self.linears:
            history = linear.fp8_amax_history
            if history is None or linear._fp8_largest is None or history.shape[0] != recipe.amax_history_len:
                linear._ensure_delayed(recipe)
                history = linear.fp8_amax_history
            scale, largest = linear.fp8_scale, linear._fp8_largest
            assert history is not None and scale is not None and largest is not None
            if records and update:
                with hidden_from_modes():
                    delayed_scaling.advance(history, scale, largest, recipe.margin, recipe.amax_compute_algo)
            scales.append(scale)
            histories.append(history)
        call.scales = torch.cat(scales)  # a copy: the next microbatch may advance them before this one's backward
        newest: Any = AmaxRows(histories)
        call.amaxes = newest if records else torch.zeros_like(call.scales)
        call.grad_amaxes = newest

    def _scales_compiled(self, recipe: DelayedScaling, advances: bool) -> tuple[Tensor, list[Tensor]]:
        parts = [linear._scales_compiled(recipe, advances) for linear in self.linears]
        return torch.cat([scales for scales, _ in parts]), [history for _, (history,) in parts]


def recipe_for(op: QuantizedLayer) -> Recipe | None:
    """The recipe that an operation would use now."""
    return recipe_in_force(op.recipe)
