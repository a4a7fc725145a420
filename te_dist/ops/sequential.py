"""Sequential: operations one after the other, fused where they can be."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from te_dist.ops.explain import explain_plan
from te_dist.ops.fuser import OperationFuser
from te_dist.ops.op import BasicOperation, FusibleOperation
from te_dist.torch_compat import constant_in_graphs

# Every Sequential: those that are alike share compiled graphs.
sequentials: weakref.WeakSet[Sequential] = weakref.WeakSet()


class Sequential(torch.nn.Module):
    """As nn.Sequential. Runs of operations are fused; other modules may stand between them and run as they are.

    Operations with extra inputs take them from the call, in order, and extra outputs are returned after the output.

    Args:
        modules: operations and modules, or one mapping of names to them.

    Example:
        >>> import torch, te_dist
        >>> from te_dist import ops
        >>> mlp = ops.Sequential(
        ...     ops.RMSNorm(64), ops.Linear(64, 256, bias=False), ops.SwiGLU(), ops.Linear(128, 64, bias=False)
        ... )
        >>> mlp.explain()
        te_dist.ops.Sequential: 4 operations
          forward
            LinearChain(0 RMSNorm, 1 BasicLinear, 2 SwiGLU, 3 BasicLinear)
          backward: the same, in reverse
        >>> with te_dist.autocast(recipe=te_dist.recipe.MXFP8BlockScaling()):
        ...     mlp(torch.ones(32, 64)).shape
        torch.Size([32, 64])
    """

    def __init__(self, *modules: torch.nn.Module | Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self._groups: list[OperationFuser | torch.nn.Module] = []
        self._grouped: tuple[int, ...] = ()  # ids of the modules that the groups were made of
        self._version = 0
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            named: Iterable[tuple[str, Any]] = modules[0].items()
        else:
            named = ((str(index), module) for index, module in enumerate(modules))
        for name, module in named:
            self.add_module(name, self._checked(module))
        sequentials.add(self)

    def _checked(self, module: Any) -> torch.nn.Module:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"Sequential expects operations or modules but got {type(module).__name__}")
        return module

    # ---------------------------------------------------------------------------------------- as a list
    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def _name(self, index: int) -> str:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Sequential has {len(self)} modules and no index {index}")
        return list(self._modules)[index]

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return type(self)(dict(list(self._modules.items())[index]))  # type: ignore[arg-type]
        return self._modules[self._name(index)]

    def __setitem__(self, index: int, module: torch.nn.Module) -> None:
        self._modules[self._name(index)] = self._checked(module)
        self._version += 1

    def __delitem__(self, index: int | slice) -> None:
        kept = list(self)
        del kept[index]
        self._replace(kept)

    def _replace(self, modules: Iterable[torch.nn.Module]) -> None:
        """Numbered anew, as nn.Sequential does."""
        modules = [self._checked(module) for module in modules]
        self._modules.clear()
        for position, module in enumerate(modules):
            self.add_module(str(position), module)
        self._version += 1

    def append(self, module: torch.nn.Module) -> Sequential:
        return self.extend([module])

    def extend(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        for module in modules:
            name = len(self)
            while str(name) in self._modules:
                name += 1
            self.add_module(str(name), self._checked(module))
        self._version += 1
        return self

    def insert(self, index: int, module: torch.nn.Module) -> Sequential:
        modules = list(self)
        modules.insert(index, self._checked(module))
        self._replace(modules)
        return self

    def pop(self, index: int = -1) -> torch.nn.Module:
        module = self[index]
        del self[index]
        return module

    def __add__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        return Sequential(*self, *other)

    def __iadd__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        return self.extend(other)

    # ---------------------------------------------------------------------------------------- groups
    def _group(self) -> None:
        """Runs of operations become fusers, other modules stay."""
        groups: list[OperationFuser | torch.nn.Module] = []
        run: list[FusibleOperation] = []
        for module in self:
            if isinstance(module, FusibleOperation):
                run.append(module)
                continue
            groups += [OperationFuser(run)] if run else []
            run = []
            groups.append(module)
        groups += [OperationFuser(run)] if run else []
        # A fuser keeps its plan while its operations stay.
        known = {tuple(map(id, g._basic_ops)): g for g in self._groups if isinstance(g, OperationFuser)}
        self._groups = [
            known.get(tuple(map(id, g._basic_ops)), g) if isinstance(g, OperationFuser) else g for g in groups
        ]
        self._grouped = tuple(map(id, self._modules.values()))

    @constant_in_graphs
    def _group_while_tracing(self, version: int) -> None:
        """Also for others with the same operations: they may share this one's graph, which guards on the groups and
        their plans. One after the other would be one graph after the other."""
        kinds = [type(module) for module in self]
        for other in sequentials:
            if other is self or [type(module) for module in other] == kinds:
                for group in other._current_groups():
                    if isinstance(group, OperationFuser):
                        group.plan()

    def _current_groups(self) -> list[OperationFuser | torch.nn.Module]:
        if self._grouped != tuple(map(id, self._modules.values())):
            self._group()
        return self._groups

    def forward(
        self, input: Tensor, *extra_inputs: Tensor, op_kwargs: Mapping[Any, Mapping[str, Any]] | None = None
    ) -> Any:
        """The output, or a tuple of it and the extra outputs.

        Args:
            extra_inputs: those of the first operation that takes some, then of the next, ...
            op_kwargs: keyword arguments for the forward of an operation, by the operation or its index in here.
        """
        if torch.compiler.is_compiling():
            self._group_while_tracing(self._version)
            groups = self._groups
        else:
            groups = self._current_groups()
        by_op = None if op_kwargs is None else self._kwargs_by_op(op_kwargs)
        if len(groups) == 1 and isinstance(groups[0], OperationFuser):
            return groups[0](input, *extra_inputs, op_kwargs=by_op)
        return self._forward_groups(groups, input, extra_inputs, by_op)

    def _forward_groups(
        self, groups: list[Any], x: Tensor, extra_inputs: tuple[Tensor, ...], op_kwargs: Mapping[Any, Any] | None
    ) -> Any:
        wanted = [group.num_extra_inputs if isinstance(group, OperationFuser) else 0 for group in groups]
        if len(extra_inputs) != sum(wanted):
            names = [type(module).__name__ for module in self]
            raise ValueError(f"Sequential of {names} expects {sum(wanted)} extra inputs but got {len(extra_inputs)}")
        extra_outputs: list[Tensor] = []
        used = at = 0
        for group, count in zip(groups, wanted, strict=True):
            if not isinstance(group, OperationFuser):
                x = group(x)
                continue
            own = None
            if op_kwargs is not None:
                own = {op: kwargs for op, kwargs in op_kwargs.items() if any(op is b for b in group._basic_ops)}
                used += len(own)
            result = group(x, *extra_inputs[at : at + count], op_kwargs=own)
            at += count
            if isinstance(result, tuple):
                x = result[0]
                extra_outputs.extend(result[1:])
            else:
                x = result
        if op_kwargs is not None and used != len(op_kwargs):
            raise ValueError("op_kwargs names operations that are not in this Sequential")
        return (x, *extra_outputs) if extra_outputs else x

    def _kwargs_by_op(self, op_kwargs: Mapping[Any, Mapping[str, Any]]) -> dict[BasicOperation, Mapping[str, Any]]:
        made = {}
        for key, kwargs in op_kwargs.items():
            op = self[key] if isinstance(key, int) else key
            basic = op.basic_operations if isinstance(op, FusibleOperation) else []
            if len(basic) != 1 and not (basic and isinstance(op, FusibleOperation)):
                raise ValueError(f"op_kwargs expects operations of this Sequential, or their indices, but got {key!r}")
            made[basic[0]] = kwargs
        return made

    # ---------------------------------------------------------------------------------------- words
    def explanation(self) -> str:
        """The fused steps of both passes, and why neighbours were not fused."""
        groups = self._current_groups()
        count = sum(len(g._basic_ops) for g in groups if isinstance(g, OperationFuser))
        lines = [f"te_dist.ops.Sequential: {count} operations"]
        first = 0
        for group in groups:
            if isinstance(group, OperationFuser):
                lines += explain_plan(group.plan(), first)
                first += len(group._basic_ops)
            else:
                lines.append(f"  {type(group).__name__}: no operation, so what is before and after it is apart")
        return "\n".join(lines)

    def explain(self) -> None:
        """Print ``explanation()``."""
        print(self.explanation())

    # ---------------------------------------------------------------------------------------- copies
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": [], "_grouped": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        sequentials.add(self)
