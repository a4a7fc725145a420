"""frozen_weights: a scope in which the user promises that no weight changes."""

from __future__ import annotations

import weakref
from typing import Any


class _Scope:
    """Whether some frozen_weights() is active. An object's attribute, because Dynamo follows writes to those; and its
    own from the start, because Dynamo compiles anew once an attribute of the class has become one of the object."""

    def __init__(self) -> None:
        self.depth = 0


scope = _Scope()
# Every layer: entering and leaving the scope makes their workspaces stale.
layers: weakref.WeakSet[Any] = weakref.WeakSet()


class frozen_weights:
    """Inside, each layer quantizes its weights once and reuses them: for microbatches of one step, or for evaluation.

    The user promises that no weight changes inside. Results are bit-equal to those without the scope, but for training
    under delayed scaling, whose scales then advance once per scope and not with every call.

    Example:
        >>> import torch, te_dist
        >>> layer = te_dist.Linear(32, 32, recipe=te_dist.recipe.MXFP8BlockScaling())
        >>> x = torch.ones(4, 32)
        >>> with te_dist.frozen_weights():
        ...     same = torch.equal(layer(x), layer(x))
        >>> same
        True
    """

    def __enter__(self) -> frozen_weights:
        if scope.depth == 0:
            _make_stale()
        scope.depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        scope.depth -= 1
        if scope.depth == 0:
            _make_stale()


def _make_stale() -> None:
    for layer in layers:
        layer._workspace_fresh = False
