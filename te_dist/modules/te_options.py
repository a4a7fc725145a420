"""Arguments of Transformer Engine that te_dist has not built: accepted where they change nothing, else refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANYTHING = object()  # a hint: whatever the value, the result is the same
EITHER = (True, False)


def refuse_unbuilt(label: str, given: Mapping[str, Any], harmless: Mapping[str, Any]) -> None:
    """Raise for an argument that would have to change something.

    Args:
        label: what the message calls the module.
        given: the arguments as they were passed.
        harmless: per known argument the value, or a tuple of values, that asks for nothing.
    """
    for name, value in given.items():
        if name not in harmless:
            raise TypeError(f"{label} got an unexpected argument {name!r}")
        allowed = harmless[name]
        if allowed is ANYTHING:
            continue
        choices = allowed if isinstance(allowed, tuple) else (allowed,)
        if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
            shown = " or ".join(repr(choice) for choice in choices)
            raise ValueError(f"{label} has not built {name}={value!r}; it expects {name} to be {shown}")
