"""A warning for people who told te_dist what to do and then prepared their model without it."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from accelerate import Accelerator
from torch import nn

from te_dist.launch.accelerate.plugin import environment_keys
from te_dist.modules.base import QuantizedLayer

_MARK = "_te_dist_warns"


def warn_if_unused() -> None:
    """Where the environment speaks to te_dist, let a stock prepare() look whether anybody listens."""
    if not environment_keys() or hasattr(Accelerator.prepare, _MARK):
        return
    stock = Accelerator.prepare

    @functools.wraps(stock)
    def prepare(self: Accelerator, *args: Any, **options: Any) -> Any:
        for arg in args:
            if isinstance(arg, nn.Module) and not any(isinstance(m, QuantizedLayer) for m in arg.modules()):
                keys = ", ".join(sorted(environment_keys()))
                if keys:
                    warnings.warn(
                        f"{keys} is set, but this Accelerator does not use te_dist: {type(arg).__name__} is trained "
                        f"unquantized. Use TEDistAccelerator or te_dist.launch.accelerate.prepare(accelerator, ...)",
                        stacklevel=2,
                    )
        return stock(self, *args, **options)

    setattr(prepare, _MARK, True)
    Accelerator.prepare = prepare
