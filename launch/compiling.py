"""torch.compile of a model's blocks: one graph for all that are alike."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from te_dist import torch_compat
from te_dist.modules.base import QuantizedLayer


def compile_blocks(blocks: list[nn.Module]) -> None:
    """torch.compile every block; blocks that are alike share one graph, however many there are."""
    share_specs(blocks)
    for block in blocks:
        block.compile(fullgraph=True)


def share_specs(blocks: Iterable[nn.Module]) -> None:
    """Let equal layers of different blocks be the same in a graph.

    What a layer is, its spec, is a constant of a graph that only the same object matches. So equal specs become one
    object, under a name that fits every block: "layers.*.layernorm_mlp".
    """
    blocks = list(blocks)
    shared: dict[Any, Any] = {}
    for layer in (layer for block in blocks for layer in block.modules() if isinstance(layer, QuantizedLayer)):
        spec = dataclasses.replace(layer.spec, name=re.sub(r"(?<![^.])\d+(?![^.])", "*", layer.spec.name))
        layer.spec = shared.setdefault(spec, spec)
    torch_compat.allow_graphs(4 * len(blocks))  # where recipes differ; in training and evaluation


def longest_stack(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model that does not say which they are."""
    stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(stacks, key=len, default=[])
