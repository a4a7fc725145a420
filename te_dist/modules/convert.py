"""convert: swap the nn.Linear layers of a model for te_dist.Linear, in place."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping

import torch
from torch import nn

from te_dist.modules.base import QuantizedLayer
from te_dist.modules.linear import Linear, linear_spec
from te_dist.recipe import DelayedScaling, Recipe
from te_dist.values import interned

RecipeChoice = Recipe | Mapping[str, Recipe | None]
# Weights below this make the quantize kernels cost more than the faster product saves (benchmarks/modules.py).
SMALL_WEIGHT = 1 << 20


@dataclasses.dataclass(frozen=True)
class ConvertedLayer:
    """One line of the report: `recipe` is None where the layer stays as it was, for the reason given."""

    name: str
    shape: tuple[int, int]
    recipe: Recipe | None
    reason: str


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What ``convert`` did, layer by layer. Printed as a table."""

    layers: tuple[ConvertedLayer, ...]

    @property
    def converted(self) -> list[str]:
        return [layer.name for layer in self.layers if layer.recipe is not None]

    @property
    def skipped(self) -> dict[str, str]:
        return {layer.name: layer.reason for layer in self.layers if layer.recipe is None}

    def __str__(self) -> str:
        rows = [("layer", "out x in", "recipe", "why not")]
        for layer in self.layers:
            out_features, in_features = layer.shape
            shown = "-" if layer.recipe is None else repr(layer.recipe).removesuffix("()")
            rows.append((layer.name or "(the model)", f"{out_features} x {in_features}", shown, layer.reason))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        summary = f"te_dist: {len(self.converted)} of {len(self.layers)} linear layers quantized"
        return "\n".join([summary, *lines])


def convert(
    model: nn.Module,
    recipe: RecipeChoice,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    min_size: int | str = "auto",
    *,
    first_last_layers_bf16: bool = False,
    num_layers_at_start_in_bf16: int = 1,
    num_layers_at_end_in_bf16: int = 1,
    verbose: bool = True,
) -> ConversionReport:
    """Swap the nn.Linear layers inside `model` for te_dist.Linear with a recipe.

    Parameters stay the very same objects under the same names, so optimizers, state dicts and checkpoints do not
    notice. Works on the meta device. Layers that are te_dist's already get the recipe. A model that is itself an
    nn.Linear cannot be swapped in place.

    Args:
        recipe: for all layers, or a dict from name patterns to recipes: ``{"layers.*.mlp.*": NVFP4BlockScaling(),
            "layers.*": MXFP8BlockScaling(), "lm_head": None}``. The first pattern that matches counts, None leaves the
            layer alone, and so does a name that no pattern matches.
        filter_fn: called with (module, name); False leaves that layer alone.
        min_size: smallest weight, in elements, that is worth it. "auto" is 2**20 on a GPU and 0 elsewhere.
        first_last_layers_bf16: leave the first and last blocks of the model's longest nn.ModuleList alone, as many
            as num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16 say.
        verbose: print the table.

    Example:
        >>> import torch, te_dist
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        >>> report = te_dist.convert(model, {"0": te_dist.recipe.MXFP8BlockScaling()}, verbose=False)
        >>> report.converted, report.skipped
        (['0'], {'2': 'no pattern matches'})
    """
    patterns = _patterns(recipe)
    if isinstance(model, nn.Linear) and not isinstance(model, QuantizedLayer):
        raise TypeError("convert swaps layers inside a model but got a single nn.Linear; use te_dist.Linear")
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert expects a module but got {type(model).__name__}")
    _check_not_sharded(model)
    if min_size != "auto" and (not isinstance(min_size, int) or min_size < 0):
        raise ValueError(f'convert expects min_size to be "auto" or a number of elements but got {min_size!r}')
    kept_blocks = (
        _end_blocks(model, num_layers_at_start_in_bf16, num_layers_at_end_in_bf16) if first_last_layers_bf16 else []
    )
    lines: list[ConvertedLayer] = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear | QuantizedLayer):
            continue
        chosen, reason = _choose(name, module, patterns, filter_fn, min_size, kept_blocks)
        lines.append(ConvertedLayer(name, _shape(module), chosen, reason))
        if chosen is not None:
            _set(model, name, module, chosen)
    report = ConversionReport(tuple(lines))
    if verbose:
        print(report)
    return report


def _check_not_sharded(model: nn.Module) -> None:
    """FSDP2 hangs its hooks on the parameters' modules: one that is swapped afterwards would not be gathered."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"convert expects a model that is not sharded yet but fully_shard was called on {name or 'it'!r}; "
                f"convert first, then parallelize, compile, and fully_shard last"
            )


def _patterns(recipe: RecipeChoice) -> list[tuple[str, Recipe | None]]:
    if isinstance(recipe, Recipe):
        return [("*", recipe)]
    if not isinstance(recipe, Mapping):
        raise TypeError(f"convert expects recipe to be a te_dist recipe or a dict of them but got {recipe!r}")
    for pattern, value in recipe.items():
        if value is not None and not isinstance(value, Recipe):
            raise TypeError(f"convert expects recipe[{pattern!r}] to be a te_dist recipe or None but got {value!r}")
    return list(recipe.items())


def _choose(
    name: str,
    module: nn.Module,
    patterns: list[tuple[str, Recipe | None]],
    filter_fn: Callable[[nn.Module, str], bool] | None,
    min_size: int | str,
    kept_blocks: list[str],
) -> tuple[Recipe | None, str]:
    """The recipe of a layer, or None and the reason."""
    if type(module) is not nn.Linear and not isinstance(module, QuantizedLayer):
        return None, f"a {type(module).__name__}, which may compute something else"
    if filter_fn is not None and not filter_fn(module, name):
        return None, "filter_fn"
    for block in kept_blocks:
        if name == block or name.startswith(block + "."):
            return None, "first or last block"
    match = next((pair for pair in patterns if fnmatch.fnmatchcase(name, pair[0])), None)
    if match is None:
        return None, "no pattern matches"
    pattern, recipe = match
    if recipe is None:
        return None, f"{pattern!r} is None"
    rows, cols = _shape(module)
    smallest = _smallest(module) if min_size == "auto" else int(min_size)
    if rows * cols < smallest:
        return None, f"{rows * cols} elements, fewer than min_size {smallest}"
    if _packs_fp4(recipe) and (rows % 2 or cols % 2):
        return None, "NVFP4 packs two values a byte: odd size"
    return recipe, ""


def _packs_fp4(recipe: Recipe) -> bool:
    return type(recipe).__name__ == "NVFP4BlockScaling"


def _smallest(module: nn.Module) -> int:
    device = next(module.parameters()).device.type
    on_gpu = device == "cuda" or (device == "meta" and torch.cuda.is_available())
    return SMALL_WEIGHT if on_gpu else 0


def _shape(module: nn.Module) -> tuple[int, int]:
    weights = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
    return (weights[0].shape[-2], weights[0].shape[-1]) if weights else (0, 0)


def _end_blocks(model: nn.Module, at_start: int, at_end: int) -> list[str]:
    """Names of the first and last blocks of the longest list of blocks that hold linear layers."""
    stacks = [
        (len(module), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and any(isinstance(m, nn.Linear | QuantizedLayer) for m in module.modules())
    ]
    if not stacks:
        raise ValueError("convert: first_last_layers_bf16 expects the blocks of the model in an nn.ModuleList")
    count, name = max(stacks)
    ends = {*range(min(at_start, count)), *range(max(0, count - at_end), count)}
    return [f"{name}.{index}" if name else str(index) for index in sorted(ends)]


def _set(model: nn.Module, name: str, module: nn.Module, recipe: Recipe) -> None:
    if isinstance(module, QuantizedLayer):
        module.recipe = interned(recipe)
        if isinstance(recipe, DelayedScaling):  # now, not at the first call: a checkpoint may be loaded before that
            module._ensure_delayed(recipe)
        return
    assert isinstance(module, nn.Linear)
    made = _around(module, recipe, name)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, made)


def _around(module: nn.Linear, recipe: Recipe, name: str) -> Linear:
    """A te_dist.Linear with the parameters, hooks and mode of an nn.Linear."""
    made = Linear.__new__(Linear)
    made.__dict__.update(module.__dict__)  # parameters, hooks, in_features, training
    made._init_method = None
    made.return_bias, made.parameter_splits = False, {}
    made._init_layer(linear_spec(module.bias is not None, name), recipe)
    return made
