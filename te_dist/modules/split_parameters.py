"""parameters_split: one weight that is held as several parameters, as checkpoints with separate q, k and v want it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist.modules.parameters import like_parameter, local_part, reset_linear


class SplitParameters:
    """For modules with `weight` [N, K] and `bias` [N] or None: the parts are ``<name>_weight`` and ``<name>_bias``.

    Attributes:
        parameter_splits: rows of each part by name, in order; empty if nothing is split.
    """

    parameter_splits: dict[str, int]
    _first_parts: tuple[tuple[int, str], ...]
    _WEIGHT_SLOT = 0

    def _split_parameters(
        self: Any, split: Sequence[str] | Mapping[str, int] | None, rows: int, fuse_wgrad_accumulation: bool
    ) -> None:
        self.parameter_splits = sizes = split_sizes(type(self).__name__, split, rows)
        if not sizes:
            return
        if fuse_wgrad_accumulation:
            raise ValueError(
                f"{type(self).__name__}: fuse_wgrad_accumulation writes one weight's main_grad and expects no "
                f"parameters_split but got {list(sizes)}"
            )
        for kind in ("weight", "bias"):
            whole = getattr(self, kind)
            self.register_parameter(kind, None)
            if whole is not None:
                for name, part in zip(sizes, whole.detach().split(list(sizes.values())), strict=True):
                    self.register_parameter(f"{name}_{kind}", torch.nn.Parameter(part.clone()))
        self._first_parts = ((self._WEIGHT_SLOT, self._weight_names()[0][0]),)

    def _weight_names(self) -> list[list[str]]:
        return [[f"{name}_weight" for name in self.parameter_splits] or ["weight"]]

    def _parts(self: Any, kind: str) -> list[Tensor]:
        parts = [getattr(self, f"{name}_{kind}", None) for name in self.parameter_splits]
        return [part for part in parts if part is not None]

    def _weight_and_bias(self: Any) -> tuple[Tensor, Tensor | None]:
        """As the products read them; of a split layer, made for each call."""
        if not self.parameter_splits:
            return self.weight, self.bias
        weights, biases = self._parts("weight"), self._parts("bias")
        if self._is_parallel:
            weights, biases = ([local_part(part) for part in parts] for parts in (weights, biases))
        return torch.cat(weights), torch.cat(biases) if biases else None

    def _reset_parts(self: Any, init_method: Callable[[Tensor], Any] | None) -> None:
        biases = self._parts("bias") or [None] * len(self.parameter_splits)
        with torch.no_grad():
            for weight, bias in zip(self._parts("weight"), biases, strict=True):
                reset_linear(weight, bias)
                if init_method is not None and weight.device.type != "meta":
                    init_method(weight)

    def _add_gradient(self: Any, param: Tensor, slot: int, gradient: Tensor) -> None:
        """A delayed weight gradient: of a split layer, each part gets its rows."""
        parts = self._parts("weight") if self.parameter_splits else [param]
        sizes = [local_part(part).shape[0] for part in parts]
        for part, rows in zip(parts, gradient.split(sizes), strict=True):
            if part.requires_grad:
                rows = like_parameter(rows.clone(), part)
                part.grad = rows if part.grad is None else part.grad + rows


def split_sizes(module: str, split: Sequence[str] | Mapping[str, int] | None, rows: int) -> dict[str, int]:
    """Rows by name; a sequence of names splits evenly."""
    if not split:
        return {}
    if isinstance(split, Mapping):
        sizes = {name.rstrip("_"): int(size) for name, size in split.items()}
    else:
        if rows % len(split):
            raise ValueError(f"{module}: parameters_split into {len(split)} does not divide out_features {rows}")
        sizes = {name.rstrip("_"): rows // len(split) for name in split}
    if sum(sizes.values()) != rows:
        raise ValueError(f"{module}: parameters_split expects sizes that add up to out_features {rows} but got {sizes}")
    return sizes
