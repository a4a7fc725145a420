"""OperationFuser: a list of operations as one function with one autograd Function around it.

Eager and compiled code run the same steps. Compiled code traces them: the operations of the split API compute with
torch and with te_dist's ops, and their notes for backward are made once, on fake tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist.ops.context import BackwardContext, OperationContext
from te_dist.ops.fusions import flattened, fusions
from te_dist.ops.op import BasicOperation, FusibleOperation
from te_dist.ops.plan import FusionPlan, make_plan, parameters_of
from te_dist.pipeline.saved import fill_in, hollow_out
from te_dist.proto import TensorOrQuantized
from te_dist.recipe import active_recipe
from te_dist.tensors.quantized_tensor import QuantizedTensor, wrap
from te_dist.tensors.storage import QuantizedStorage
from te_dist.torch_compat import constant_in_graphs, release_saved_tensors


def _forward(
    plan: FusionPlan,
    kwargs: list[dict[str, Any]],
    first: int,
    input_grad: bool,
    keep: bool,
    input_: TensorOrQuantized,
    extra_inputs: Sequence[Tensor],
) -> tuple[Any, list[Tensor], list[OperationContext]]:
    """Run the steps: the output, the caller's extra outputs, and the contexts if they are to be kept.

    Args:
        first: the first operation that backward reaches.
        input_grad: whether the gradient of the input is wanted.
        keep: whether there will be a backward.
    """
    x = input_
    count = plan.count
    requires_grad = [keep and i >= first for i in range(count)]
    contexts = [OperationContext(requires_grad[i], i > first or (i == 0 and input_grad and keep)) for i in range(count)]
    given: list[tuple[Tensor, ...]] = [()] * count
    made: dict[tuple[int, int], Tensor] = {}
    if plan.caller_inputs or plan.channels:
        given = _per_operation(plan, extra_inputs)
    for number, step in enumerate(plan.forward):
        op, lo, hi = step.op, step.first, step.last
        if plan.channels:
            for i in range(lo, hi):
                given[i] = tuple(
                    made[plan.channels[i, k]] if (i, k) in plan.channels else tensor
                    for k, tensor in enumerate(given[i])
                )
        if isinstance(x, QuantizedStorage) and not op.takes_quantized:
            x = x.dequantize()
        quantizer = None
        if number + 1 < len(plan.forward) and not torch.compiler.is_compiling():
            follower = plan.forward[number + 1]
            if follower.op.takes_quantized:
                quantizer = follower.op.input_quantizer_of(kwargs[follower.first].get("call"))
        extra_outputs: list[tuple[Tensor, ...]]
        if op._split_forward:
            arguments: dict[str, Any] = {
                "requires_grad": requires_grad[lo:hi],
                "basic_op_extra_inputs": given[lo:hi],
                "prev_op_grad_output_quantizer": None,
                "next_op_input_quantizer": quantizer,
                "basic_op_kwargs": kwargs[lo:hi],
            }
            y, extra_outputs, saved = op.fuser_forward_compute(x, **arguments)
            if keep and requires_grad[hi - 1]:
                op.fuser_forward_save_ctx(contexts[lo:hi], x, saved, **arguments)
        else:
            y, extra_outputs = op.fuser_forward(
                contexts[lo:hi],
                x,
                basic_op_extra_inputs=given[lo:hi],
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=quantizer,
                basic_op_kwargs=kwargs[lo:hi],
            )
        for offset, tensors in enumerate(extra_outputs):
            for k, tensor in enumerate(tensors):
                made[lo + offset, k] = tensor
        x = y
    if x is input_:  # an operation must not return its input: autograd would take one tensor for the other
        x = x.detach()
    outputs = []
    for place in plan.caller_outputs:
        if place not in made:
            raise RuntimeError(f"{plan.basic_ops[place[0]].label()} did not return its extra output {place[1]}")
        outputs.append(made[place])
    return x, outputs, contexts


def _per_operation(plan: FusionPlan, extra_inputs: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """The caller's extra inputs by operation; None where a channel will bring one."""
    given: list[list[Any]] = [[None] * op.num_extra_inputs for op in plan.basic_ops]
    for (i, k), tensor in zip(plan.caller_inputs, extra_inputs, strict=True):
        given[i][k] = tensor
    return [tuple(tensors) for tensors in given]


def _backward(
    plan: FusionPlan, first: int, contexts: list[Any], grad_output: Tensor, grad_extra_outputs: Sequence[Any]
) -> tuple[Tensor | None, list[Any], list[Any]]:
    """The gradients of the input, of the caller's extra inputs, and of the parameters of every operation."""
    grads: dict[tuple[int, int], Any] = dict(zip(plan.caller_outputs, grad_extra_outputs, strict=True))
    of_inputs: dict[tuple[int, int], Any] = {}
    of_params: list[Any] = [None] * plan.count
    grad: Any = grad_output
    for step in reversed(plan.backward):
        op, lo, hi = step.op, step.first, step.last
        if hi <= first:
            grad = None
            break
        extra = [tuple(grads[i, k] for k in range(plan.basic_ops[i].num_extra_outputs)) for i in range(lo, hi)]
        grad, params, inputs = op.fuser_backward(contexts[lo:hi], grad, basic_op_grad_extra_outputs=extra)
        for offset, values in enumerate(params):
            of_params[lo + offset] = values
        for offset, values in enumerate(inputs):
            for k, value in enumerate(values):
                place = (lo + offset, k)
                source = plan.channels.get(place)
                if source is None:
                    of_inputs[place] = value
                elif value is not None:
                    known = grads.get(source)
                    grads[source] = value if known is None else known + value
    return grad, [of_inputs.get(place) for place in plan.caller_inputs], of_params


class _FuserFunction(torch.autograd.Function):
    """The steps of a plan under autograd.

    `set_output_requires_grad` says that results are new under autograd, and that those which nothing in here can have
    a gradient for are to be marked so. Without a graph (no_grad, inference_mode) the steps run without this Function,
    and nobody touches requires_grad of tensors that may be non-leaves of somebody else's graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: FusionPlan,
        set_output_requires_grad: bool,
        kwargs: list[dict[str, Any]],
        first: int,
        input_grad: bool,
        places: list[int] | None,
        *given: Tensor,
    ) -> Any:
        tensors = given if places is None else [given[place] for place in places]
        extra_inputs = tensors[1 : 1 + len(plan.caller_inputs)]
        x = _entering(tensors[0])
        out, extra_outputs, contexts = _forward(plan, kwargs, first, input_grad, True, x, extra_inputs)
        saved: list[Tensor] = []
        shells = []
        for context in contexts:
            held, shell = hollow_out(context.to_save)
            saved.extend(held)
            shells.append(shell)
            context.to_save = ()
        ctx.save_for_backward(*saved)
        ctx.contexts, ctx.shells, ctx.plan, ctx.first, ctx.places = contexts, shells, plan, first, places
        ctx.param_counts = [len(parameters_of(op)) for op in plan.basic_ops]
        if set_output_requires_grad:
            constant = [
                tensor
                for (i, _), tensor in zip(plan.caller_outputs, extra_outputs, strict=True)
                if i < first or not tensor.is_floating_point()
            ]
            if constant:
                ctx.mark_non_differentiable(*constant)
        if isinstance(out, QuantizedStorage):
            out = wrap(out)
        return (out, *extra_outputs) if extra_outputs else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *grad_extra_outputs: Tensor) -> Any:
        plan: FusionPlan = ctx.plan
        tensors = iter(ctx.saved_tensors)
        contexts = [
            BackwardContext(context, fill_in(shell, tensors))
            for context, shell in zip(ctx.contexts, ctx.shells, strict=True)
        ]
        if not torch.compiler.is_compiling():
            release_saved_tensors(ctx)  # each operation frees what it has used, unless the graph is retained
        dx, of_inputs, of_params = _backward(plan, ctx.first, contexts, grad_output, grad_extra_outputs)
        grads: list[Any] = []
        for op, count, values in zip(plan.basic_ops, ctx.param_counts, of_params, strict=True):
            if values is None:
                grads.extend([None] * count)
                continue
            if len(values) != count:
                raise RuntimeError(
                    f"{op.label()} has {count} parameters but its backward returned {len(values)} gradients for them"
                )
            grads.extend(values)
        results = [dx, *of_inputs, *grads]
        if ctx.places is not None:
            results = _summed(results, ctx.places)
        return None, None, None, None, None, None, *results


def _unique(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The tensors without repetitions, and where each is among them. Dynamo wants none in a Function's arguments, but
    a residual branch may be the input itself, and two operations may share a weight."""
    unique: list[Tensor] = []
    places = []
    for tensor in tensors:
        place = len(unique)
        for i, known in enumerate(unique):
            if known is tensor:
                place = i
        if place == len(unique):
            unique.append(tensor)
        places.append(place)
    return unique, places


def _summed(gradients: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """The gradients of the unique tensors."""
    sums: list[Any] = [None] * (max(places) + 1)
    for gradient, place in zip(gradients, places, strict=True):
        if gradient is not None:
            known = sums[place]
            sums[place] = gradient if known is None else known + gradient
    return sums


def _entering(input_: Tensor) -> Any:
    return input_.quantized_storage if isinstance(input_, QuantizedTensor) else input_


class OperationFuser:
    """Runs a list of operations, fused.

    Args:
        ops: basic operations, or fused ones, which stand for their basic operations.
    """

    def __init__(self, ops: Sequence[FusibleOperation]) -> None:
        for op in ops:
            if not isinstance(op, FusibleOperation):
                raise TypeError(f"OperationFuser expects FusibleOperations but got {type(op).__name__}")
        self._basic_ops = flattened(ops)
        if not self._basic_ops:
            raise ValueError("OperationFuser expects at least one operation")
        self._plan: FusionPlan | None = None
        self._started = False
        self._warned = False
        self.__eager: Any = None

    @property
    def num_extra_inputs(self) -> int:
        """How many extra inputs the caller passes."""
        return sum(op.num_extra_inputs - len(op._extra_input_channels) for op in self._basic_ops)

    # ---------------------------------------------------------------------------------------- the plan
    def plan(self) -> FusionPlan:
        """The plan for the recipe in force: made at the first call, and again when something has changed."""
        recipe = active_recipe() if fusions.depend_on_recipe else None
        plan = self._plan
        if plan is None or plan.is_stale(recipe):
            plan = self._plan = make_plan(self._basic_ops, recipe)
        return plan

    @constant_in_graphs
    def _plan_while_tracing(self, version: int) -> None:
        self.plan()

    def _plan_of_call(self) -> FusionPlan:
        if not torch.compiler.is_compiling():
            return self.plan()
        for op in self._basic_ops:  # what a graph depends on, read so that it is guarded
            _ = op.recipe
        if fusions.depend_on_recipe:
            _ = active_recipe()
        self._plan_while_tracing(fusions.version)
        assert self._plan is not None
        return self._plan

    def _start(self, input_: Tensor) -> None:
        """Before the first forward: parameters on the meta device are made where the input is."""
        for op in self._basic_ops:
            if any(p.is_meta for p in op.parameters()):
                if input_.is_meta:
                    continue
                op.to_empty(device=input_.device)
                op.reset_parameters()
            op.pre_first_fuser_forward()
        self._started = True

    # ---------------------------------------------------------------------------------------- a call
    def __call__(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        op_kwargs: Mapping[BasicOperation, Mapping[str, Any]] | None = None,
    ) -> Any:
        """The output, or a tuple of it and the extra outputs.

        Args:
            extra_inputs: those of the first operation that has some, then of the next, ...
            op_kwargs: for a basic operation, keyword arguments of its forward.
        """
        plan = self._plan_of_call()
        if torch.compiler.is_compiling() and plan.legacy:
            return self._outside_of_graph(plan)(input, extra_inputs, op_kwargs)
        if torch.compiler.is_compiling() and plan.forward[-1].op.returns_storage:
            raise ValueError(
                f"{plan.basic_ops[-1].label()} is the last operation, and a compiled graph cannot return a quantized "
                f"tensor; let another operation follow"
            )
        return self._run(plan, input, extra_inputs, op_kwargs)

    def _run(self, plan: FusionPlan, input: Tensor, extra_inputs: Sequence[Tensor], op_kwargs: Any) -> Any:
        self._check(plan, input, extra_inputs)
        if not self._started and not torch.compiler.is_compiling():
            self._start(input)
        device_type = input.device.type
        if device_type != "meta" and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            if input.dtype != dtype and not isinstance(input, QuantizedTensor):
                input = input.to(dtype)
            with torch.autocast(device_type, enabled=False):
                return self._run_in(plan, input, extra_inputs, op_kwargs)
        return self._run_in(plan, input, extra_inputs, op_kwargs)

    def _run_in(self, plan: FusionPlan, input: Tensor, extra_inputs: Sequence[Tensor], op_kwargs: Any) -> Any:
        params = [parameters_of(op) for op in plan.basic_ops]
        first = self._first_with_gradient(plan, input, extra_inputs, params)
        keep = first < plan.count
        input_grad = keep and first == 0 and input.requires_grad
        kwargs: list[dict[str, Any]] = [{}] * plan.count
        if op_kwargs:
            kwargs = self._kwargs(plan, op_kwargs)
        for i in plan.hooked:
            plan.basic_ops[i].pre_fuser_forward(requires_grad=i >= first)
        if plan.preparing:
            given = _per_operation(plan, extra_inputs) if plan.caller_inputs or plan.channels else [()] * plan.count
            for step in plan.preparing:
                lo = step.first
                wanted = keep and (lo > first or (lo == 0 and input_grad))
                call = step.op.prepare(wanted, given[lo : step.last])
                kwargs[lo] = {**kwargs[lo], "call": call}
        if keep:
            tensors: list[Tensor] = [input, *extra_inputs, *[p for each in params for p in each]]
            places = None
            if torch.compiler.is_compiling():
                tensors, places = _unique(tensors)
            return _FuserFunction.apply(plan, True, kwargs, first, input_grad, places, *tensors)
        out, extra_outputs, _ = _forward(plan, kwargs, first, False, False, _entering(input), extra_inputs)
        if isinstance(out, QuantizedStorage):
            out = wrap(out)
        return (out, *extra_outputs) if extra_outputs else out

    def _first_with_gradient(
        self, plan: FusionPlan, input: Tensor, extra_inputs: Sequence[Tensor], params: list[list[Tensor]]
    ) -> int:
        if not torch.is_grad_enabled():
            return plan.count
        if input.requires_grad:
            return 0
        first = plan.count
        for (i, _), tensor in zip(plan.caller_inputs, extra_inputs, strict=True):
            if tensor.requires_grad:
                first = min(first, i)
        for i, each in enumerate(params[:first]):
            for p in each:
                if p.requires_grad:
                    return i
        return first

    def _kwargs(self, plan: FusionPlan, op_kwargs: Mapping[Any, Mapping[str, Any]]) -> list[dict[str, Any]]:
        kwargs: list[dict[str, Any]] = [{} for _ in plan.basic_ops]
        known = 0
        for i, op in enumerate(plan.basic_ops):
            if op in op_kwargs:
                kwargs[i] = dict(op_kwargs[op])
                known += 1
        if known != len(op_kwargs):
            raise ValueError(f"op_kwargs names operations that are not among {[op.label() for op in plan.basic_ops]}")
        return kwargs

    def _check(self, plan: FusionPlan, input: Tensor, extra_inputs: Sequence[Tensor]) -> None:
        op = plan.basic_ops[0]
        if not isinstance(input, Tensor):
            raise TypeError(f"{op.label()} expects a tensor but got {type(input).__name__}")
        if isinstance(input, QuantizedTensor) and not plan.forward[0].op.takes_quantized:
            raise TypeError(
                f"{op.label()} expects an unquantized tensor but got one quantized by "
                f"{input.quantized_storage.quantizer!r}; dequantize() it"
            )
        if len(extra_inputs) != len(plan.caller_inputs):
            takers = [plan.basic_ops[i].label() for i, _ in plan.caller_inputs]
            raise ValueError(
                f"{', '.join(o.label() for o in plan.basic_ops)}: expects {len(plan.caller_inputs)} extra inputs"
                f"{' (for ' + ', '.join(takers) + ')' if takers else ''} but got {len(extra_inputs)}"
            )
        for (i, _), tensor in zip(plan.caller_inputs, extra_inputs, strict=True):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{plan.basic_ops[i].label()} expects its extra input to be a tensor but got "
                    f"{type(tensor).__name__}"
                )

    # ---------------------------------------------------------------------------------------- legacy operations
    def _why_outside(self, plan: FusionPlan) -> str:
        return (
            f"te_dist.ops: {', '.join(plan.legacy)} defines the legacy op_forward, whose context cannot be made while "
            f"tracing, so its operations run outside of the compiled graph; define op_forward_compute and "
            f"op_forward_save_ctx to have them inside"
        )

    def _outside_of_graph(self, plan: FusionPlan) -> Any:
        self._make_eager(self._why_outside(plan))
        return self.__eager

    @constant_in_graphs
    def _make_eager(self, reason: str) -> None:
        def eager(input: Tensor, extra_inputs: Sequence[Tensor], op_kwargs: Any) -> Any:
            if not self._warned:
                self._warned = True
                warnings.warn(reason, stacklevel=2)
            return self._run(self.plan(), input, extra_inputs, op_kwargs)

        if self.__eager is None:
            self.__eager = torch.compiler.disable(eager, reason=reason)
