"""Ops, defined without torch.library.custom_op.

A custom_op checks at every call that no result aliases an argument, and passes through two more Python layers: half of
what a small layer costs inside a compiled graph. Here the function itself is the kernel, and with kernels and products
switched off it is its own fake, so the two cannot drift apart. The rule stays: results are fresh tensors
(tests/test_modules_compile.py runs torch.library.opcheck on the ops).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dist import kernels

_library = torch.library.Library("te_dist", "FRAGMENT")


def pure_op(name: str, tags: Sequence[torch.Tag] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: an op te_dist::`name` that mutates nothing and has no gradient of its own."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        def fake(*args: Any) -> Any:
            with kernels.shapes_only():
                return function(*args)

        _define(name, function, fake, (), tags)
        return function

    return define


def mutating_op(name: str, mutates: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: an op te_dist::`name` that writes to the arguments of these names and returns nothing."""

    def define(function: Callable[..., None]) -> Callable[..., None]:
        _define(name, function, lambda *args: None, mutates, ())
        return function

    return define


def _define(
    name: str, function: Callable[..., Any], fake: Callable[..., Any], mutates: Sequence[str], tags: Sequence[torch.Tag]
) -> None:
    _library.define(name + torch.library.infer_schema(function, mutates_args=mutates), tags=tuple(tags))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"te_dist::{name}", fake, lib=_library)
