"""Recipes by the names that people type, per pattern of layer names."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from te_dist import recipe as recipes
from te_dist.recipe import Recipe

HIGH_PRECISION = ("bf16", "none")
# te_dist's short names, then what Megatron-LM calls them.
RECIPE_NAMES: dict[str, type[Recipe]] = {
    "fp8_current": recipes.Float8CurrentScaling,
    "fp8_delayed": recipes.DelayedScaling,
    "fp8_block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "tensorwise": recipes.Float8CurrentScaling,
    "delayed": recipes.DelayedScaling,
    "blockwise": recipes.Float8BlockScaling,
}
# Output heads turn small errors into wrong tokens: they are quantized only when a pattern names them.
HEADS = ("head", "lm_head", "*.head", "*.lm_head")


def recipe_from(text: Any, where: str = "recipe") -> Recipe | None:
    """A recipe from its name, "name:option=value,..." or the JSON of ``Recipe.to_json``; None for high precision."""
    if text is None or isinstance(text, Recipe):
        return text
    if isinstance(text, Mapping):
        text = json.dumps(dict(text))
    if not isinstance(text, str):
        raise ValueError(f"{where} expects the name of a recipe but got {text!r}")
    if text.lstrip().startswith("{"):
        return Recipe.from_json(text)
    name, _, options = text.partition(":")
    name = name.strip().lower().replace("-", "_")
    if name in HIGH_PRECISION:
        return None
    cls = RECIPE_NAMES.get(name) or next((c for c in RECIPE_NAMES.values() if c.__name__.lower() == name), None)
    if cls is None:
        known = (*HIGH_PRECISION, *RECIPE_NAMES)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{where} expects one of {', '.join(known)} but got {text!r}{hint}")
    values: dict[str, Any] = {"recipe": cls.__name__}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"{where} expects options as name=value but got {option!r} in {text!r}")
        values[key.strip()] = _option(value.strip())
    return Recipe.from_json(json.dumps(values))


def _option(text: str) -> Any:
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except json.JSONDecodeError:
        return text


def patterns_from(choice: Any, where: str = "recipe") -> dict[str, str]:
    """What the user gave, as an ordered table of patterns to recipe texts: "fp8_current", ["*.fc1=nvfp4", "mxfp8"],
    or a mapping. Every recipe in it is checked."""
    table: dict[str, str] = {}
    if isinstance(choice, Mapping) and "recipe" not in choice:
        items: list[tuple[str, Any]] = list(choice.items())
    else:
        given = choice if isinstance(choice, Sequence) and not isinstance(choice, str) else [choice]
        items = [_pattern_and_recipe(text) for text in given]
    for pattern, text in items:
        if pattern in table:
            raise ValueError(f"{where}: the pattern {pattern!r} is there twice")
        recipe = recipe_from(text, where)
        table[pattern] = text if isinstance(text, str) else "bf16" if recipe is None else recipe.to_json()
    return table


def _pattern_and_recipe(text: Any) -> tuple[str, Any]:
    if not isinstance(text, str) or text.lstrip().startswith("{"):
        return "*", text
    head = text.split(":", 1)[0]  # an "=" after a colon belongs to a recipe's options
    if "=" not in head:
        return "*", text
    pattern, _, name = text.partition("=")
    return pattern.strip(), name.strip()


def recipe_table(patterns: Mapping[str, str]) -> dict[str, Recipe | None]:
    """What ``te_dist.convert`` takes, with the heads left alone unless a pattern names them."""
    table = {pattern: recipe_from(text) for pattern, text in patterns.items()}
    named = [p for p in table if p != "*" and any(fnmatch.fnmatchcase(h.lstrip("*."), p) for h in HEADS)]
    heads: dict[str, Recipe | None] = {} if named else dict.fromkeys(HEADS)
    return {**heads, **table}


def unmatched(patterns: Mapping[str, str], layers: Sequence[str]) -> list[str]:
    """A sentence for each pattern that no layer's name matches: a typing error, or a pattern of another model."""
    sentences = []
    for pattern in patterns:
        if pattern != "*" and not any(fnmatch.fnmatchcase(name, pattern) for name in layers):
            hint = f"; there is {max(layers, key=functools.partial(_likeness, pattern))!r}" if layers else ""
            sentences.append(f"no layer matches the recipe's pattern {pattern!r}{hint}")
    return sentences


def _likeness(pattern: str, name: str) -> float:
    """Of a pattern and the end of a name."""
    return difflib.SequenceMatcher(None, pattern.strip("*."), name[-len(pattern.strip("*.")) :]).ratio()


def is_quantized(patterns: Mapping[str, str]) -> bool:
    return any(recipe is not None for recipe in recipe_table(patterns).values())


def short_label(patterns: Mapping[str, str]) -> str:
    """For names of runs: "fp8_current", "nvfp4+mxfp8"."""
    names = []
    for text in patterns.values():
        recipe = recipe_from(text)
        short = next((n for n, cls in RECIPE_NAMES.items() if type(recipe) is cls), type(recipe).__name__)
        names.append("bf16" if recipe is None else short)
    return "+".join(dict.fromkeys(names)) or "bf16"
