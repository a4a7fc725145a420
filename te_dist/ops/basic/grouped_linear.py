"""GroupedLinear: one product per group of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist import modules
from te_dist.modules.linear import InitMethod
from te_dist.modules.te_options import refuse_unbuilt
from te_dist.ops.basic.basic_linear import LinearOperation, without_fuser
from te_dist.ops.context import OperationContext
from te_dist.ops.lowering import Lowered
from te_dist.ops.op import Gradients, Saved
from te_dist.ops.plan import parameters_of
from te_dist.recipe import Recipe


class GroupedLinear(Lowered, modules.GroupedLinear, LinearOperation):
    """y_i = x_i W_i^T + b_i for the groups of rows x_0, x_1, ...; ``te_dist.GroupedLinear`` as an operation.

    Its extra input is split_sizes: an integer tensor [num_groups] with the rows of each group, on the CPU or on the
    device. The keyword argument m_splits of a call, a list of numbers, takes its place where it is given.

    Args:
        num_groups: number of groups.
        in_features, out_features, bias, device, dtype, single_grouped_weight, single_grouped_bias, recipe,
            init_method, name: as for ``te_dist.GroupedLinear``.
        accumulate_into_main_grad: as for ``BasicLinear``.
    """

    num_extra_inputs = 1

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        recipe: Recipe | None = None,
        init_method: InitMethod | None = None,
        name: str | None = None,
        **hints: Any,
    ) -> None:
        refuse_unbuilt(
            "GroupedLinear",
            hints,
            {"rng_state_tracker_function": None, "delay_wgrad_compute": False, "scale_bias": False},
        )
        modules.GroupedLinear.__init__(
            self,
            num_groups,
            in_features,
            out_features,
            bias=bias,
            recipe=recipe,
            dtype=dtype,
            device=device,
            init_method=init_method,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            name=name,
        )
        self.name, self.num_groups = name or "", num_groups

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        return LinearOperation.forward(self, input, *extra_inputs, **kwargs)

    def _label(self) -> str:
        return self.label()

    def width_after(self, width: int | None, before: str) -> int | None:
        self._expects(width, self.in_features, before)
        return self.out_features

    # ---------------------------------------------------------------------------------------- the rows of groups
    def stays_on_device(self, split_sizes: Tensor, m_splits: Sequence[int] | None = None) -> bool:
        """Whether the host will not look at the sizes."""
        return m_splits is None and (split_sizes.device.type != "cpu" or self._keep_splits_on_device)

    def sizes(self, split_sizes: Tensor, m_splits: Sequence[int] | None, x: Tensor) -> list[int] | Tensor:
        return self._splits(split_sizes if m_splits is None else m_splits, x)

    def prepare(self, input_requires_grad: bool, extra_inputs: Sequence[tuple[Tensor, ...]]) -> Any:
        sizes = extra_inputs[0][0]
        return self.begin(input_requires_grad, sizes if self.stays_on_device(sizes) else None)

    # ---------------------------------------------------------------------------------------- forward, backward
    def fuser_forward_compute(
        self,
        input_: Any,
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        basic_op_kwargs: list[dict[str, Any]],
        **kwargs: Any,
    ) -> tuple[Tensor, list[tuple[Tensor, ...]], list[Saved]]:
        options = basic_op_kwargs[0]
        self.check_operand(self.label(), input_, self.in_features, next(iter(self._weights())).device)
        splits = self.sizes(basic_op_extra_inputs[0][0], options.get("m_splits"), input_)
        out, saved = self.compute(options["call"], input_, splits, requires_grad[0])
        return out, [()], [saved]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Any,
        tensors_to_save: list[Saved],
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        basic_op_kwargs: list[dict[str, Any]],
        **kwargs: Any,
    ) -> None:
        ctx: Any = basic_op_ctxs[0]
        ctx.save_for_backward(*tensors_to_save[0])
        ctx.call, ctx.input_shape, ctx.dtype = basic_op_kwargs[0]["call"], input_.shape, input_.dtype
        ctx.m_splits = self.host_sizes(basic_op_extra_inputs[0][0], basic_op_kwargs[0].get("m_splits"), input_)

    def host_sizes(self, split_sizes: Tensor, m_splits: Sequence[int] | None, x: Tensor) -> list[int] | None:
        """The sizes that backward needs as numbers; None if the device alone knows them."""
        if self.stays_on_device(split_sizes, m_splits):
            return None
        sizes = self.sizes(split_sizes, m_splits, x)
        assert isinstance(sizes, list)
        return sizes

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Tensor, *, basic_op_grad_extra_outputs: list[tuple[Tensor, ...]]
    ) -> tuple[Tensor | None, list[Gradients], list[Gradients]]:
        ctx = basic_op_ctxs[0]
        dx, dparams = self.gradients(ctx.call, ctx.take_saved(), grad_output, ctx.input_shape, ctx.dtype, ctx.m_splits)
        return dx, [self.own_gradients(dparams)], [(None,)]

    def own_gradients(self, dparams: Sequence[Tensor | None]) -> Gradients:
        """From gradients by slot, one per group, to those of the parameters."""
        weights, biases = list(dparams[: self.num_gemms]), list(dparams[self.num_gemms :])
        made: list[Tensor | None] = []
        for values, single, there in (
            (weights, self.single_grouped_weight, True),
            (biases, self.single_grouped_bias, self.use_bias),
        ):
            if not there:
                continue
            if not single:
                made.extend(values)
            else:
                made.append(torch.stack([v for v in values if v is not None]) if values[0] is not None else None)
        assert len(made) == len(parameters_of(self))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return without_fuser(super().__getstate__())
