"""FusionPlan: what a fuser has worked out about its operations, once, for many calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from te_dist.ops.fusions import fuse, fusions
from te_dist.ops.op import BasicOperation, FusibleOperation
from te_dist.recipe import Recipe


class Step:
    """An operation of a pass, and the basic operations [first, last) it stands for."""

    def __init__(self, op: FusibleOperation, first: int) -> None:
        self.op = op
        self.first = first
        self.last = first + len(op.basic_operations)


@dataclasses.dataclass(eq=False)
class FusionPlan:
    """
    Attributes:
        forward, backward: the steps of the passes, both in forward order.
        caller_inputs: (operation, index) of each extra input that the caller passes, in order.
        caller_outputs: (operation, index) of each extra output that the caller gets, in order.
        channels: (operation, index) of an extra input -> that of the extra output it takes.
        legacy: the operations that cannot be compiled.
    """

    basic_ops: list[BasicOperation]
    forward: list[Step]
    backward: list[Step]
    caller_inputs: list[tuple[int, int]]
    caller_outputs: list[tuple[int, int]]
    channels: dict[tuple[int, int], tuple[int, int]]
    legacy: list[str]
    hooked: list[int]
    preparing: list[Step]
    recipes: list[Recipe | None]
    version: int
    recipe: Recipe | None
    count: int

    def is_stale(self, recipe: Recipe | None) -> bool:
        if self.version != fusions.version or self.recipe is not recipe:
            return True
        return any(op.recipe is not known for op, known in zip(self.basic_ops, self.recipes, strict=True))


def make_plan(basic_ops: Sequence[BasicOperation], recipe: Recipe | None) -> FusionPlan:
    ops = list(basic_ops)
    check_widths(ops)
    forward, backward = fuse(ops, recipe)
    caller_inputs, caller_outputs, channels = _extra_tensors(ops)
    steps = _steps(forward)
    return FusionPlan(
        basic_ops=ops,
        forward=steps,
        backward=_steps(backward),
        caller_inputs=caller_inputs,
        caller_outputs=caller_outputs,
        channels=channels,
        legacy=[step.op.label() for step in steps if not step.op._split_forward],
        hooked=[i for i, op in enumerate(ops) if type(op).pre_fuser_forward is not BasicOperation.pre_fuser_forward],
        preparing=[step for step in steps if step.op.prepares],
        recipes=[op.recipe for op in ops],
        version=fusions.version,
        recipe=recipe,
        count=len(ops),
    )


def _steps(ops: Sequence[FusibleOperation]) -> list[Step]:
    steps: list[Step] = []
    for op in ops:
        steps.append(Step(op, steps[-1].last if steps else 0))
    return steps


def parameters_of(op: BasicOperation) -> list[Tensor]:
    """As ``list(op.parameters())``, without its generators where there are no submodules."""
    if op._modules:
        return list(op.parameters())
    return [p for p in op._parameters.values() if p is not None]


def check_widths(ops: Sequence[BasicOperation]) -> None:
    """Neighbours that cannot be: found before anything runs."""
    width: int | None = None
    before = "the input"
    for index, op in enumerate(ops):
        after = op.width_after(width, before)
        before = f"operation {index} ({op.label()})"
        width = after


def _extra_tensors(ops: Sequence[BasicOperation]) -> tuple[Any, Any, Any]:
    inputs: list[tuple[int, int]] = []
    outputs: list[tuple[int, int]] = []
    channels: dict[tuple[int, int], tuple[int, int]] = {}
    named: dict[str, tuple[int, int]] = {}
    hidden: dict[tuple[int, int], str] = {}
    for i, op in enumerate(ops):
        for k in range(op.num_extra_inputs):
            channel = op._extra_input_channels.get(k)
            if channel is None:
                inputs.append((i, k))
            elif channel in named:
                channels[i, k] = named[channel]
                hidden.pop(named[channel], None)
            else:
                raise ValueError(
                    f"{op.label()} (operation {i}) takes an extra input from the channel {channel!r}, which no "
                    f"operation before it writes"
                )
        for k in range(op.num_extra_outputs):
            channel, to_caller = op._extra_output_channels.get(k, ("", True))
            if channel in named:
                raise ValueError(f"{op.label()} (operation {i}) writes the channel {channel!r} a second time")
            if channel:
                named[channel] = (i, k)
            if to_caller:
                outputs.append((i, k))
            else:
                hidden[i, k] = channel
        op._channels_locked = True
    for (i, _), channel in hidden.items():
        raise ValueError(f"{ops[i].label()} (operation {i}) writes the channel {channel!r}, which nobody reads")
    return inputs, outputs, channels
