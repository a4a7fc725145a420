"""LinearChain: a run of norms, activations, linear operations and biases as one chain of pipeline stages.

    [norm or activation] [Quantize] [AllGather] linear [Bias] [ReduceScatter or AllReduce]     one stage, repeated

What the norm or activation makes is quantized on the way into the product; what the product's backward needs is kept
quantized; gathers move quantized bytes: all of it is what te_dist.pipeline does for the modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist.comm import Comm
from te_dist.ops.basic import (
    Activation,
    AllGather,
    AllReduce,
    BasicLinear,
    Bias,
    GroupedLinear,
    Quantize,
    ReduceScatter,
)
from te_dist.ops.basic.norm import Norm
from te_dist.ops.context import OperationContext
from te_dist.ops.fused_op import FusedOperation
from te_dist.ops.fusions import windows
from te_dist.ops.lowering import ChainLayer
from te_dist.ops.op import BasicOperation, FusibleOperation, Gradients, Saved
from te_dist.pipeline.config import ACTIVATION, IDENTITY, NORM, LayerSpec, StageSpec
from te_dist.plan import Move
from te_dist.proto import TensorOrQuantized
from te_dist.quantizers import Quantizer
from te_dist.recipe import Recipe

AnyLinear = BasicLinear | GroupedLinear


@dataclasses.dataclass
class StageOps:
    """The operations of one stage. `ops`: all of them, in order."""

    linear: AnyLinear
    ops: list[BasicOperation]
    producer: Norm | Activation | None = None
    bias: Bias | None = None
    gather: AllGather | None = None
    reduce: ReduceScatter | AllReduce | None = None

    def comm(self) -> Comm:
        comm = self.linear.spec.stages[0].comm
        for collective in (self.gather, self.reduce):
            if collective is None:
                continue
            # The group of the collective, and the moves of both.
            plan = comm.plan
            if collective is self.gather:
                plan = dataclasses.replace(plan, x=Move.ALL_GATHER, dx=Move.REDUCE_SCATTER)
            elif isinstance(collective, ReduceScatter):
                plan = dataclasses.replace(plan, y=Move.REDUCE_SCATTER, dy=Move.ALL_GATHER)
            else:
                plan = dataclasses.replace(plan, y=Move.ALL_REDUCE)
            comm = dataclasses.replace(collective.comm, plan=plan)
        return comm

    def spec(self) -> StageSpec:
        options: dict[str, Any] = {"produce": IDENTITY}
        if isinstance(self.producer, Norm):
            norm = self.producer
            options = {
                "produce": NORM,
                "layer_norm": norm.is_layer_norm,
                "eps": norm.eps,
                "zero_centered": norm.zero_centered_gamma,
            }
        elif self.producer is not None:
            options = {"produce": ACTIVATION, "activation": self.producer.activation}
        own = self.linear.spec.stages[0]
        has_bias = self.bias is not None or own.has_bias
        return StageSpec(name=self.linear.name, has_bias=has_bias, comm=self.comm(), groups=own.groups, **options)

    def places(self) -> list[tuple[torch.nn.Module, str] | None]:
        """Where the parameters of the stage's slots are."""
        found: list[tuple[torch.nn.Module, str] | None] = []
        if isinstance(self.producer, Norm):
            found += [(self.producer, "weight"), (self.producer, "bias") if self.producer.is_layer_norm else None]
        if isinstance(self.linear, GroupedLinear):
            groups = range(self.linear.num_gemms)
            found += [(self.linear, f"weight{i}") for i in groups]
            found += [(self.linear, f"bias{i}") if self.linear.use_bias else None for i in groups]
            return found
        return [*found, (self.linear, "weight"), None if self.bias is None else (self.bias, "bias")]


def _quantizes_for_linear(op: BasicOperation) -> bool:
    return isinstance(op, Quantize) and op.in_forward and not op.in_backward and op.recipe is None


def match_stage(ops: Sequence[FusibleOperation], at: int) -> StageOps | None:
    """The stage that starts at operation `at`, if there is one."""

    def peek(*kinds: type) -> Any:
        return ops[at] if at < len(ops) and isinstance(ops[at], kinds) else None

    start = at
    producer = peek(Norm, Activation)
    if producer is not None:
        if isinstance(producer, Norm) and len(producer.normalized_shape) > 1:
            return None
        if isinstance(producer, Activation) and producer.cache_quantized_input:
            return None
        at += 1
    if at < len(ops) and not ops[at].is_fused_op and _quantizes_for_linear(ops[at]):  # type: ignore[arg-type]
        at += 1
    gather = peek(AllGather)
    at += gather is not None
    linear = peek(BasicLinear, GroupedLinear)
    if linear is None:
        return None
    at += 1
    communicates = not linear.spec.stages[0].comm.is_local
    grouped = isinstance(linear, GroupedLinear)
    if grouped and (linear.single_grouped_weight or linear.single_grouped_bias):
        return None
    if gather is not None and (communicates or grouped):
        return None
    found = StageOps(linear, [], producer, gather=gather)
    if not grouped and peek(Bias) is not None:
        found.bias = ops[at]  # type: ignore[assignment]
        at += 1
    elif not grouped and not communicates and gather is None:
        reduce = peek(ReduceScatter, AllReduce)
        # Row parallelism sends a gradient that all ranks have, so it is not summed again.
        if reduce is not None and not (isinstance(reduce, AllReduce) and reduce.reduce_in_backward):
            found.reduce = reduce
            at += 1
    found.ops = list(ops[start:at])  # type: ignore[arg-type]
    return found


class LinearChain(FusedOperation):
    """One or more linear operations, with what goes into them and their biases, as one layer of the pipeline.

    Args:
        basic_ops: operations that make up whole stages.
    """

    prepares = True

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__(basic_ops)
        stages: list[StageOps] = []
        at = 0
        while at < len(basic_ops):
            stage = match_stage(basic_ops, at)
            if stage is None:
                names = [op.label() for op in basic_ops]
                raise ValueError(f"{type(self).__name__} expects operations that make up stages but got {names}")
            stages.append(stage)
            at += len(stage.ops)
        self.stages = stages
        linears = [stage.linear for stage in stages]
        if any(linear.recipe is not linears[0].recipe for linear in linears):
            raise ValueError(
                f"{type(self).__name__} expects linear operations of one recipe but got "
                f"{[linear.recipe for linear in linears]}"
            )
        spec = LayerSpec(tuple(stage.spec() for stage in stages), "linear")
        places = [place for stage in stages for place in stage.places()]
        # Beside the module tree: the operations own parameters and state.
        object.__setattr__(self, "layer", ChainLayer(spec, linears, places))
        self._entry: Any = stages[0].producer or stages[0].linear
        self._splitting = [
            (index, op) for index, op in enumerate(self.basic_operations) if isinstance(op, GroupedLinear)
        ]
        self._gradient_slots = self._slots_by_operation()

    layer: ChainLayer

    def _slots_by_operation(self) -> list[list[int]]:
        """For every basic operation the slots of its parameters, in their order. Stage by stage, because an operation
        may occur in several."""
        found: list[list[int]] = []
        first = 0
        for stage in self.stages:
            places = stage.places()
            slot_of = {(id(place[0]), place[1]): first + i for i, place in enumerate(places) if place is not None}
            for op in stage.ops:
                names = [name for name, parameter in op._parameters.items() if parameter is not None]
                found.append([slot_of[id(op), name] for name in names])
            first += len(places)
        return found

    @property
    def takes_quantized(self) -> bool:  # type: ignore[override]
        return self.stages[0].producer is None

    def input_quantizer_of(self, call: Any) -> Quantizer | None:
        return self.layer.input_quantizer_of(call)

    # ---------------------------------------------------------------------------------------- rows of groups
    def _split_sizes(self, extra: Sequence[tuple[Tensor, ...]]) -> Tensor | None:
        """The one tensor of sizes that all grouped operations were given."""
        found: Tensor | None = None
        for index, op in self._splitting:
            sizes = extra[index][0]
            if found is None:
                found = sizes
            elif sizes is not found:
                host = sizes.device.type == "cpu" and found.device.type == "cpu"
                if torch.compiler.is_compiling() or not host or not torch.equal(sizes, found):
                    raise ValueError(
                        f"{op.label()} got other split_sizes than {self._splitting[0][1].label()} before it, with "
                        f"which it is fused; pass the same tensor to both"
                    )
        return found

    def prepare(self, input_requires_grad: bool, extra_inputs: Sequence[tuple[Tensor, ...]]) -> Any:
        sizes = self._split_sizes(extra_inputs)
        on_device = sizes is not None and self._splitting[0][1].stays_on_device(sizes)
        return self.layer.begin(input_requires_grad, sizes if on_device else None)

    def _splits(self, extra: Sequence[tuple[Tensor, ...]], kwargs: Sequence[dict[str, Any]], x: Any) -> Any:
        if not self._splitting:
            return None
        sizes = self._split_sizes(extra)
        assert sizes is not None
        index, op = self._splitting[0]
        return op.sizes(sizes, kwargs[index].get("m_splits"), x)

    # ---------------------------------------------------------------------------------------- forward
    def fuser_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[TensorOrQuantized, list[tuple[Tensor, ...]], list[Saved]]:
        self._check_entry(input_)
        splits = self._splits(basic_op_extra_inputs, basic_op_kwargs, input_)
        out, saved = self.layer.compute(basic_op_kwargs[0]["call"], input_, splits, requires_grad[-1])
        nothing: list[Any] = [()] * len(requires_grad)
        return out, nothing, [saved, *nothing[1:]]

    def _check_entry(self, x: Any) -> None:
        entry = self._entry
        linear = self.stages[0].linear
        if isinstance(entry, Norm):
            entry.check_input(x)
            depth, device = entry.size, entry.weight.device
        else:
            depth = linear.in_features if isinstance(linear, GroupedLinear) else linear.local_in_features
            if isinstance(entry, Activation) and entry.gated:
                depth *= 2
            weight = linear.weight0 if isinstance(linear, GroupedLinear) else linear.weight
            device = weight.device  # type: ignore[assignment]
        self.layer.check_operand(entry.label(), x, depth, device)

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        tensors_to_save: list[Saved],
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> None:
        ctx: Any = basic_op_ctxs[0]
        ctx.save_for_backward(*tensors_to_save[0])
        ctx.call, ctx.input_shape, ctx.dtype = basic_op_kwargs[0]["call"], input_.shape, input_.dtype
        ctx.m_splits = None
        if self._splitting:
            index, op = self._splitting[0]
            sizes = self._split_sizes(basic_op_extra_inputs)
            assert sizes is not None
            ctx.m_splits = op.host_sizes(sizes, basic_op_kwargs[index].get("m_splits"), input_)  # type: ignore[arg-type]

    # ---------------------------------------------------------------------------------------- backward
    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[tuple[Tensor, ...]]
    ) -> tuple[Tensor | None, list[Gradients], list[Gradients]]:
        ctx = basic_op_ctxs[0]
        dx, dparams = self.layer.gradients(
            ctx.call, ctx.take_saved(), grad_output, ctx.input_shape, ctx.dtype, ctx.m_splits
        )
        params: list[Gradients] = [[dparams[slot] for slot in slots] for slots in self._gradient_slots]
        return dx, params, [(None,) * op.num_extra_inputs for op in self.basic_operations]

    # ---------------------------------------------------------------------------------------- the pattern
    @staticmethod
    def fuse_forward_backward_ops(
        ops: Sequence[FusibleOperation], *, recipe: Recipe | None = None, **unused: Any
    ) -> list[FusibleOperation]:
        return windows(ops, _match_chain)


def _match_chain(ops: list[FusibleOperation]) -> tuple[int, FusibleOperation] | None:
    stages: list[StageOps] = []
    at = 0
    while (stage := match_stage(ops, at)) is not None:
        if stages and why_not_chained(stages[-1], stage):
            break
        stages.append(stage)
        at += len(stage.ops)
    if at < 2:  # a lone linear operation runs by itself
        return None
    basic: list[BasicOperation] = [op for stage in stages for op in stage.ops]
    grouped = [isinstance(stage.linear, GroupedLinear) for stage in stages]
    if all(grouped) and len(stages) > 1:
        return at, ForwardGroupedMLP(basic)
    return at, LinearChain(basic)


def why_not_chained(before: StageOps, after: StageOps) -> str:
    """Why two stages cannot be one chain; "" if they can."""
    a, b = before.linear, after.linear
    if a.recipe is not b.recipe:
        return f"{b.label()} has another recipe ({b.recipe!r}) than {a.label()} ({a.recipe!r})"
    if a.fuse_wgrad_accumulation != b.fuse_wgrad_accumulation:
        return f"only one of {a.label()} and {b.label()} accumulates into main_grad"
    if isinstance(a, GroupedLinear) != isinstance(b, GroupedLinear):
        return "only one of them has groups"
    if isinstance(a, GroupedLinear) and isinstance(b, GroupedLinear) and a.num_gemms != b.num_gemms:
        return f"{a.label()} has {a.num_gemms} groups and {b.label()} {b.num_gemms}"
    return ""


class ForwardGroupedMLP(LinearChain):
    """Grouped linear operations with what is between them, as the experts of a mixture are: GroupedLinear, activation,
    GroupedLinear. All get the same split_sizes."""
