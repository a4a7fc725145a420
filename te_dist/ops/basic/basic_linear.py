"""BasicLinear: y = x W^T, on te_dist.pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from te_dist.comm import Comm
from te_dist.modules.linear import InitMethod
from te_dist.modules.parameters import reset_linear
from te_dist.modules.te_options import refuse_unbuilt
from te_dist.ops.basic.collectives import as_comm
from te_dist.ops.context import OperationContext
from te_dist.ops.lowering import Lowered, recipe_for
from te_dist.ops.op import BasicOperation, Gradients, Saved
from te_dist.pipeline.config import CallFlags, LayerSpec, StageSpec, resolve
from te_dist.plan import plan_for
from te_dist.proto import TensorOrQuantized
from te_dist.quantizers import Quantizer
from te_dist.recipe import Recipe


class LinearOperation(BasicOperation):
    """What the operations with a product share; mixed into a ``Lowered``."""

    prepares = True
    spec: LayerSpec
    recipe: Recipe | None

    # Per mode the operands of the role names, in the order of Transformer Engine's quantizers.
    _OPERANDS: ClassVar[dict[str, tuple[str, ...]]] = {"forward": ("x", "weight"), "backward": ("dy",)}

    def num_quantizers(self, mode: str) -> int:
        return len(self._OPERANDS[mode])

    def get_quantizer(self, mode: str, index: int) -> Quantizer | None:
        """Under the recipe in force, with the planes of a training step."""
        flags = CallFlags(True, (True,) * self.spec.param_count)
        stage = resolve(self.spec, recipe_for(self), flags).stages[0]  # type: ignore[arg-type]
        return getattr(stage, self._OPERANDS[mode][index])


def without_fuser(state: dict[str, Any]) -> dict[str, Any]:
    """A module's state without what its copy makes anew."""
    return {**{name: value for name, value in state.items() if name != "_fuser"}, "_channels_locked": False}


class BasicLinear(Lowered, LinearOperation):
    """y = x W^T with quantized x, W and dy, and tensor and sequence parallelism by a Comm.

    Args:
        in_features, out_features: of the whole weight.
        device, dtype: of the weight; device may be "meta".
        tensor_parallel_mode: None, "column" or "row": this rank holds its part of the rows or columns.
        tensor_parallel_group: the ``te_dist.comm.Comm`` over which; None is one process.
        sequence_parallel: x (column) or y (row) is this rank's part of the sequence.
        accumulate_into_main_grad: add the weight's gradient to ``weight.main_grad`` in the product itself.
        recipe: how operands are quantized; None takes the recipe of the surrounding ``te_dist.autocast``, and without
            one nothing is quantized.
        init_method: fills the weight in place, instead of nn.Linear's initialisation.
        name: what error messages and recipes by role call the operation.
        hints: rng_state_tracker_function and userbuffers_options of Transformer Engine, None only: how a collective
            overlaps with a product is up to the Comm.
    """

    takes_quantized = True
    weight: Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Comm | None = None,
        sequence_parallel: bool = False,
        accumulate_into_main_grad: bool = False,
        recipe: Recipe | None = None,
        init_method: InitMethod | None = None,
        name: str | None = None,
        **hints: Any,
    ) -> None:
        super().__init__()
        self.name = name or ""
        label = self.label()
        refuse_unbuilt(label, hints, {"rng_state_tracker_function": None, "userbuffers_options": None})
        for what, size in (("in_features", in_features), ("out_features", out_features)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{label} expects {what} to be a positive number but got {size!r}")
        self.in_features, self.out_features = in_features, out_features
        comm = self._comm(label, tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        self.local_in_features, self.local_out_features = self._local_sizes(label, tensor_parallel_mode, comm.size)
        self._init_method = init_method
        shape = (self.local_out_features, self.local_in_features)
        self.weight = Parameter(torch.empty(shape, device=device, dtype=dtype))
        spec = LayerSpec((StageSpec(name=self.name, comm=comm),), "linear")
        self._init_layer(spec, recipe, fuse_wgrad_accumulation=accumulate_into_main_grad)
        self.reset_parameters()

    @staticmethod
    def _comm(label: str, mode: str | None, group: Comm | None, sequence_parallel: bool) -> Comm:
        comm = as_comm(label, group)
        if mode is None and not sequence_parallel:
            return comm
        if group is None:
            raise ValueError(
                f"{label} expects tensor_parallel_group with tensor_parallel_mode={mode!r}: the Comm that talks to "
                f"the other ranks"
            )
        try:
            return dataclasses.replace(comm, plan=plan_for(mode, sequence_parallel))
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None

    def _local_sizes(self, label: str, mode: str | None, ranks: int) -> tuple[int, int]:
        sizes = {"in_features": self.in_features, "out_features": self.out_features}
        split = {"row": "in_features", "column": "out_features"}.get(mode or "")
        if split is not None:
            if sizes[split] % ranks:
                raise ValueError(
                    f"{label} expects {split} to be a multiple of the {ranks} ranks that share it but got "
                    f"{sizes[split]}"
                )
            sizes[split] //= ranks
        return sizes["in_features"], sizes["out_features"]

    def _label(self) -> str:
        return self.label()

    @property
    def comm(self) -> Comm:
        return self.spec.stages[0].comm

    def reset_parameters(self) -> None:
        self._reset_delayed()
        reset_linear(self.weight, None)
        if self._init_method is not None and self.weight.device.type != "meta":
            with torch.no_grad():
                self._init_method(self.weight)

    def _slots(self) -> list[Tensor | None]:
        return [self.weight, None]

    def _weight_names(self) -> list[list[str]]:
        return [["weight"]]

    def width_after(self, width: int | None, before: str) -> int | None:
        self._expects(width, self.local_in_features, before)
        return self.local_out_features

    # ---------------------------------------------------------------------------------------- forward, backward
    def prepare(self, input_requires_grad: bool, extra_inputs: Sequence[tuple[Tensor, ...]]) -> Any:
        return self.begin(input_requires_grad)

    def op_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        requires_grad: bool,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
        call: Any = None,
        **kwargs: Any,
    ) -> tuple[TensorOrQuantized, Saved]:
        self.check_operand(self.label(), input_, self.local_in_features, self.weight.device)
        return self.compute(self.begin(requires_grad) if call is None else call, input_, None, requires_grad)

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: TensorOrQuantized,
        tensors_to_save: Saved,
        *,
        requires_grad: bool,
        call: Any = None,
        **kwargs: Any,
    ) -> None:
        ctx.save_for_backward(*tensors_to_save)
        ctx.call, ctx.input_shape, ctx.dtype = call, input_.shape, input_.dtype  # type: ignore[attr-defined]

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        dx, dparams = self.gradients(ctx.call, ctx.take_saved(), grad_output, ctx.input_shape, ctx.dtype, None)
        return dx, dparams[:1]

    # ---------------------------------------------------------------------------------------- state
    def __getstate__(self) -> dict[str, Any]:
        return without_fuser(super().__getstate__())

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, recipe={self.recipe!r}"
        return text if self.comm.is_local else f"{text}, comm={self.comm!r}"
