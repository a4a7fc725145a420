"""What every part of a layer may read of it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import Tensor

from te_dist.modules.scopes import layers
from te_dist.pipeline.config import LayerSpec
from te_dist.recipe import CustomRecipe, Recipe
from te_dist.values import interned

_INDEX = re.compile(r"(?<![^.])[0-9]+(?![^.])")


def shared_name(name: str) -> str:
    """"layers.3.fc1" -> "layers.*.fc1", which is the same in every block."""
    return _INDEX.sub("*", name)


class LayerState(torch.nn.Module):
    """The root of the classes that make up a QuantizedLayer.

    Attributes:
        recipe: the layer's own recipe; None takes that of the surrounding ``te_dist.autocast``.
        spec: the layer's fixed description.
        traced_spec: what compiled code sees of it. Equal blocks of a model, compiled one by one, share a graph only if
            their layers have one description: "layers.3.fc1" is "layers.*.fc1" there.
    """

    traced_spec: LayerSpec
    recipe: Recipe | None
    _is_watched = False  # by a monitor
    # te_dist.parallel has given this layer's stages a Comm and its parameters a place on a mesh.
    _is_parallel = False
    # (slot, parameter) of each weight that is joined from several parameters, with the first of them, or that is one of
    # several in a parameter.
    _first_parts: tuple[tuple[int, str], ...] = ()

    @property
    def spec(self) -> LayerSpec:
        return self._spec

    @spec.setter
    def spec(self, spec: LayerSpec) -> None:
        self._spec = interned(spec)
        self.traced_spec = interned(dataclasses.replace(spec, name=shared_name(spec.name)))

    def _spec_for(self, recipe: Recipe | None) -> LayerSpec:
        """What a call under this recipe bakes into a graph. A function that is told a layer's name wants all of it, and
        so does a monitor."""
        return self._spec if self._is_watched or isinstance(recipe, CustomRecipe) else self.traced_spec

    def _alike(self) -> list[Any]:
        """The layers of this kind and description, this one included: each may run a graph that was traced for another.
        Other kinds may keep their parameters and their state elsewhere (te_dist.ops)."""
        return [layer for layer in layers if layer.traced_spec is self.traced_spec and type(layer) is type(self)]

    def _label(self) -> str:
        name = getattr(self, "spec", None) and self.spec.name
        return f"{type(self).__name__} {name!r}" if name else type(self).__name__

    def _slots(self) -> list[Tensor | None]:
        """The parameters in the order of the spec's slots."""
        raise NotImplementedError(f"{type(self).__name__} must define _slots")

    def _weight_names(self) -> list[list[str]]:
        """For each weight, in the order of the slots, the parameter that holds it, or those whose rows it is joined
        from."""
        raise NotImplementedError(f"{type(self).__name__} must define _weight_names")
