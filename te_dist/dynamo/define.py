"""Pure ops, defined without torch.library.custom_op.

A custom_op checks at every call that no result aliases an argument, and passes through two more Python layers: half of
what a small layer costs inside a compiled graph. Here the function itself is the kernel. The rule stays: results are
fresh tensors (tests/test_modules_compile.py runs torch.library.opcheck on the ops).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_library = torch.library.Library("te_dist", "FRAGMENT")


class PureOp:
    """What ``pure_op`` returns: the function, and the place to register its fake."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(f"te_dist::{self.name}", fake, lib=_library)
        return fake


def pure_op(name: str, tags: Sequence[torch.Tag] = ()) -> Callable[[Callable[..., Any]], PureOp]:
    """Decorator: an op te_dist::`name` that mutates nothing and has no gradient of its own."""

    def define(function: Callable[..., Any]) -> PureOp:
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=tuple(tags))
        _library.impl(name, function, "CompositeExplicitAutograd")
        return PureOp(name, function)

    return define
