"""Which operations are replaced by fused ones: a list of functions, ours and the user's, and how they are applied.

A fusion is a function ``(ops, *, recipe) -> ops``: it gets a list of operations and returns one in which some runs of
them are replaced by FusedOperations. There are three kinds, for the forward, for the backward, and for both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from te_dist.ops.op import BasicOperation, FusibleOperation
from te_dist.recipe import Recipe

Fusion = Callable[..., Sequence[FusibleOperation]]


@dataclasses.dataclass
class Fusions:
    """The registered functions in the order in which they are applied. `version` counts changes."""

    forward: list[Fusion] = dataclasses.field(default_factory=list)
    backward: list[Fusion] = dataclasses.field(default_factory=list)
    both: list[Fusion] = dataclasses.field(default_factory=list)
    # The user's, that want to see the operations before any other fusion has.
    early_forward: list[Fusion] = dataclasses.field(default_factory=list)
    early_backward: list[Fusion] = dataclasses.field(default_factory=list)
    version: int = 0


fusions = Fusions()


def _register(target: list[Fusion], function: Fusion, first: bool) -> Fusion:
    if not callable(function):
        raise TypeError(f"a fusion must be a function (ops, *, recipe) -> ops but got {function!r}")
    target.insert(0 if first else len(target), function)
    fusions.version += 1
    return function


def register_forward_fusion(function: Fusion, prepend: bool = False) -> Fusion:
    """Apply `function` to the operations of a forward pass.

    Args:
        function: ``(ops, *, recipe) -> ops``.
        prepend: apply it before all others, to the basic operations as the user wrote them.
    """
    return _register(fusions.early_forward if prepend else fusions.forward, function, prepend)


def register_backward_fusion(function: Fusion, prepend: bool = False) -> Fusion:
    """As ``register_forward_fusion``, for the backward pass. The operations come in forward order."""
    return _register(fusions.early_backward if prepend else fusions.backward, function, prepend)


def register_forward_backward_fusion(function: Fusion, prepend: bool = False) -> Fusion:
    """As ``register_forward_fusion``, for fused operations that replace both passes."""
    return _register(fusions.both, function, prepend)


def unregister_fusion(function: Fusion) -> None:
    """Take a fusion off every list it is on."""
    for each in (fusions.forward, fusions.backward, fusions.both, fusions.early_forward, fusions.early_backward):
        each[:] = [registered for registered in each if registered is not function]
    fusions.version += 1


def flattened(ops: Sequence[FusibleOperation]) -> list[BasicOperation]:
    return [basic for op in ops for basic in op.basic_operations]


def _applied(functions: Sequence[Fusion], ops: list[FusibleOperation], recipe: Recipe | None) -> list[FusibleOperation]:
    for function in functions:
        made = list(function(list(ops), recipe=recipe))
        if [id(op) for op in flattened(made)] != [id(op) for op in flattened(ops)]:
            name = getattr(function, "__qualname__", repr(function))
            raise RuntimeError(
                f"the fusion {name} must return operations that stand for the ones it got, in their order: it got "
                f"{[op.label() for op in flattened(ops)]} and returned {[op.label() for op in flattened(made)]}"
            )
        ops = made
    return ops


def fuse(
    basic_ops: Sequence[BasicOperation], recipe: Recipe | None
) -> tuple[list[FusibleOperation], list[FusibleOperation]]:
    """The operations of the forward and of the backward pass, both in forward order."""
    plain: list[FusibleOperation] = list(basic_ops)
    forward: list[FusibleOperation] = _applied(fusions.early_forward, plain, recipe)
    backward: list[FusibleOperation] = _applied(fusions.early_backward, plain, recipe)
    forward, backward = _fused_in_both(forward, backward, recipe)
    return _applied(fusions.forward, forward, recipe), _applied(fusions.backward, backward, recipe)


def _fused_in_both(
    forward: list[FusibleOperation], backward: list[FusibleOperation], recipe: Recipe | None
) -> tuple[list[FusibleOperation], list[FusibleOperation]]:
    """Joint fusions see the runs of basic operations that no earlier fusion has touched in either pass."""
    untouched = {id(op) for op in forward if not op.is_fused_op} & {id(op) for op in backward if not op.is_fused_op}
    replaced: dict[int, FusibleOperation] = {}  # first basic operation of a run -> what stands for it
    run: list[FusibleOperation] = []
    for op in [*forward, None]:
        if op is not None and id(op) in untouched:
            run.append(op)
            continue
        for made in _applied(fusions.both, run, recipe):
            replaced.update(dict.fromkeys(map(id, made.basic_operations), made))
        run = []
    return _with(forward, replaced), _with(backward, replaced)


def _with(ops: list[FusibleOperation], replaced: dict[int, FusibleOperation]) -> list[FusibleOperation]:
    made: list[FusibleOperation] = []
    for op in ops:
        new = replaced.get(id(op), op)
        if not made or made[-1] is not new:
            made.append(new)
    return made


def windows(ops: Sequence[FusibleOperation], match: Callable[[list[Any]], tuple[int, FusibleOperation] | None]) -> list[
    FusibleOperation
]:  # fmt: skip
    """Walk over the operations; `match` looks at those from here on and says how many it replaces by what."""
    made: list[FusibleOperation] = []
    at = 0
    while at < len(ops):
        found = match(list(ops[at:]))
        if found is None:
            made.append(ops[at])
            at += 1
        else:
            made.append(found[1])
            at += found[0]
    return made
