"""TEDistPlugin: what te_dist is to do with a model, from arguments, the environment or a YAML file."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

from te_dist.launch.config import ConfigError
from te_dist.launch.options import _parse_yaml
from te_dist.launch.recipes import is_quantized, patterns_from

# `accelerate launch` exports every key of fp8_config as ACCELERATE_FP8_<KEY>, so `te_dist_recipe` arrives as the first
# of these; the second is for people who set it themselves.
PREFIXES = ("ACCELERATE_FP8_TE_DIST_", "TE_DIST_")
CONFIG_FILE = "TE_DIST_CONFIG"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclasses.dataclass
class TEDistPlugin:
    """Options of ``TEDistAccelerator`` and ``prepare``. None: from the environment, else the default.

    Attributes:
        recipe: "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", or patterns of layer names to recipes.
            Output heads (lm_head) are quantized only if a pattern names them. Required, here or in the environment.
        quantized_all_gather: "auto", "on" (an error where it cannot be) or "off": FSDP2's weights as quantized bytes.
        min_size: smallest weight that is quantized, in elements; None: 2**20 on a GPU, 0 elsewhere.
        first_last_layers_bf16: leave the first and the last block in high precision.
        tp_plan: name patterns to "column", "row", ... for tensor parallelism (tp_size of accelerate's
            ParallelismConfig); None: q/k/v/gate/up are "column" and o/down "row", as Llama's family names them.
        monitor_every: optimizer steps between quantization statistics, 0 for none; see ``te_dist.monitor``.
        monitor_log: the JSONL file that they go to.
        verbose: print the table of layers.

    Example:
        >>> from te_dist.launch.accelerate import TEDistPlugin
        >>> TEDistPlugin(recipe={"*.mlp.*": "nvfp4", "*": "mxfp8"}).recipe
        {'*.mlp.*': 'nvfp4', '*': 'mxfp8'}
    """

    recipe: Any = None
    quantized_all_gather: str | None = None
    min_size: int | None = None
    first_last_layers_bf16: bool | None = None
    tp_plan: dict[str, str] | None = None
    monitor_every: int | None = None
    monitor_log: str | None = None
    verbose: bool | None = None

    def __post_init__(self) -> None:
        for name, value in _from_environment().items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.recipe is None:
            raise ConfigError(
                "TEDistPlugin expects a recipe: TEDistPlugin(recipe='mxfp8'), TE_DIST_RECIPE=mxfp8 in the environment, "
                "or fp8_config: {te_dist_recipe: mxfp8} in the YAML of `accelerate launch` with mixed_precision: fp8"
            )
        try:
            self.recipe = patterns_from(self.recipe, "TEDistPlugin: recipe")
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from None
        if not is_quantized(self.recipe):
            raise ConfigError(f"TEDistPlugin: recipe {self.recipe} quantizes nothing; use accelerate's Accelerator")
        defaults: dict[str, Any] = {
            "quantized_all_gather": "auto", "first_last_layers_bf16": False, "monitor_every": 0, "verbose": True
        }  # fmt: skip
        for name, default in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        if self.quantized_all_gather not in ("auto", "on", "off"):
            raise ConfigError(
                f'TEDistPlugin expects quantized_all_gather "auto", "on" or "off" but got {self.quantized_all_gather!r}'
            )
        if not isinstance(self.monitor_every, int) or self.monitor_every < 0:
            raise ConfigError(f"TEDistPlugin expects monitor_every of at least 0 but got {self.monitor_every!r}")


def environment_keys() -> dict[str, str]:
    """The variables that speak to te_dist's plugin here."""
    names = {prefix + field.name.upper() for prefix in PREFIXES for field in dataclasses.fields(TEDistPlugin)}
    found = {key: value for key, value in os.environ.items() if key in names or key == CONFIG_FILE}
    for key in os.environ:
        if key.startswith(PREFIXES[0]) and key not in names:
            raise ConfigError(_unknown(key.removeprefix(PREFIXES[0]).lower(), "fp8_config: te_dist_"))
    return found


def _from_environment() -> dict[str, Any]:
    """Values by field: TE_DIST_* wins over fp8_config's keys, and those over the file."""
    present = environment_keys()
    values: dict[str, Any] = {}
    if CONFIG_FILE in present:
        values |= _from_file(present[CONFIG_FILE])
    for prefix in PREFIXES:
        for field in dataclasses.fields(TEDistPlugin):
            key = prefix + field.name.upper()
            if key in present:
                values[field.name] = _converted(field.name, present[key], key)
    return values


def _from_file(path: str) -> dict[str, Any]:
    try:
        with open(path) as file:
            values = _parse_yaml(file.read(), path)
    except OSError as error:
        raise ConfigError(f"{CONFIG_FILE}={path} cannot be read: {error.strerror}") from None
    names = [field.name for field in dataclasses.fields(TEDistPlugin)]
    for key in values:
        if key not in names:
            raise ConfigError(f"{path}: " + _unknown(str(key), ""))
    return {key: _converted(key, value, f"{path}: {key}") for key, value in values.items()}


def _unknown(name: str, prefix: str) -> str:
    names = [field.name for field in dataclasses.fields(TEDistPlugin)]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {prefix}{close[0]}?" if close else f"there are {', '.join(names)}"
    return f"te_dist's plugin has no option {name!r}; {hint}"


def _converted(name: str, value: Any, where: str) -> Any:
    """What a variable's text means."""
    if isinstance(value, str) and value.lower() in ("none", ""):
        return None
    if name in ("first_last_layers_bf16", "verbose"):
        text = str(value).lower()
        if text not in _TRUE + _FALSE:
            raise ConfigError(f"{where} expects true or false but got {value!r}")
        return text in _TRUE
    if name in ("min_size", "monitor_every"):
        try:
            return int(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{where} expects a whole number but got {value!r}") from None
    if name == "quantized_all_gather" and not isinstance(value, bool):
        return {**dict.fromkeys(_TRUE, "on"), **dict.fromkeys(_FALSE, "off")}.get(str(value).lower(), str(value))
    if name == "quantized_all_gather":
        return "on" if value else "off"
    if name == "recipe" and isinstance(value, str):
        return value.split(";") if ";" in value else value
    if name == "tp_plan" and not isinstance(value, Mapping):
        raise ConfigError(f"{where} expects a mapping of name patterns to styles but got {value!r}")
    return value
