"""torch.compile of a model's blocks: one graph for all that are alike."""

from __future__ import annotations

from torch import nn

from te_dist import torch_compat


def compile_blocks(blocks: list[nn.Module]) -> None:
    """torch.compile every block; blocks that are alike share one graph, however many there are."""
    torch_compat.allow_graphs(4 * len(blocks))  # where recipes differ; in training and evaluation
    for block in blocks:
        block.compile(fullgraph=True)


def longest_stack(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model that does not say which they are."""
    stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(stacks, key=len, default=[])
