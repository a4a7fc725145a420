"""Frozen dataclasses as constants of compiled graphs.

``@value_type`` on top of ``@dataclasses.dataclass(frozen=True)`` registers a class with torch, so that its instances
can be arguments of custom ops. Fields hold numbers, strings, enums, dtypes, None, functions, quantizers, other values,
and tuples of those.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, TypeVar

import torch

from te_dist.torch_compat import OpaqueBase, register_value_type

T = TypeVar("T", bound=type)
V = TypeVar("V")


class Value(OpaqueBase):
    """Base of the classes that ``value_type`` registers."""

    def __getstate__(self) -> dict[str, Any]:
        # Strings hash differently in another process.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        names: dict[str, Any] = {}
        return _expression(self, names), names


def value_type(cls: T) -> T:
    if not issubclass(cls, Value) or not dataclasses.is_dataclass(cls):
        raise TypeError(f"value_type expects a frozen dataclass that derives from Value but got {cls!r}")
    _remember_hash(cls)
    register_value_type(cls, [field.name for field in dataclasses.fields(cls)])
    return cls


def interned(value: V) -> V:
    """The first value that was equal to this one. Dynamo guards on identity: of two equal values, in two layers or in
    two steps, each would have its own graph."""
    return value if torch.compiler.is_dynamo_compiling() else _first_equal(value)


@functools.lru_cache(maxsize=4096)
def _first_equal(value: Any) -> Any:
    return value


def _remember_hash(cls: type) -> None:
    """Values are dictionary keys in hot paths, and a dataclass hashes all its fields each time."""
    compute: Any = cls.__hash__

    def __hash__(self: Any) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            known = compute(self)
            object.__setattr__(self, "_hash", known)
        return known

    cls.__hash__ = __hash__  # type: ignore[assignment]


def _global(value: Any, names: dict[str, Any]) -> str:
    """A name under which generated code finds a class or a function."""
    name = f"{value.__module__}.{value.__qualname__}".replace(".", "_").replace("<locals>", "local").replace("<", "_")
    name = name.replace(">", "_")
    while names.setdefault(name, value) is not value:
        name += "_"
    return name


def _expression(value: Any, names: dict[str, Any]) -> str:
    """Python code that makes an equal value."""
    if isinstance(value, Value):
        fields = [f for f in dataclasses.fields(value) if f.init]
        inner = (f"{f.name}={_expression(getattr(value, f.name), names)}" for f in fields)
        return f"{_global(type(value), names)}({', '.join(inner)})"
    if hasattr(value, "__fx_repr__"):  # a quantizer
        text, used = value.__fx_repr__()
        names.update(used)
        return text
    if isinstance(value, enum.Enum):
        return f"{_global(type(value), names)}({value.value!r})"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_expression(item, names)}, " for item in value) + ")"
    if isinstance(value, torch.dtype):
        names["torch"] = torch
        return str(value)
    if (isinstance(value, float) and value != value) or value in (float("inf"), -float("inf")):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if callable(value):
        return _global(value, names)
    raise TypeError(f"a value cannot hold {type(value).__name__}: {value!r}")
