"""From a command line and a YAML file to a TrainConfig: flags win over the file, the file over the defaults."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import types
import typing
from pathlib import Path
from typing import Any, NoReturn

from te_dist.launch.config import ConfigError, TrainConfig

HINTS = typing.get_type_hints(TrainConfig)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _base_type(name: str) -> tuple[type, bool]:
    """(type, may be None) of a field."""
    hint = HINTS[name]
    if isinstance(hint, types.UnionType):
        return next(t for t in hint.__args__ if t is not type(None)), True
    return (dict if typing.get_origin(hint) is dict else hint), False


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="te-dist train",
        description="Train a language model in a quantized recipe, on one process or under torchrun.",
        usage="te-dist train [--config FILE] [--nproc-per-node N] [options]",
        epilog="Every option is also a key of the YAML file, with _ for -. Flags win over the file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--config", metavar="FILE", help="YAML file with options", default=argparse.SUPPRESS)
    _add_ranks(made)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(TrainConfig):
        group = groups.setdefault(field.metadata["group"], None) or made.add_argument_group(field.metadata["group"])
        groups[field.metadata["group"]] = group
        flag = "--" + field.name.replace("_", "-")
        kind, _ = _base_type(field.name)
        shown = "" if field.default in (None, dataclasses.MISSING) else f" (default {field.default})"
        settings: dict[str, Any] = {"help": field.metadata["help"].replace("%", "%%") + shown, "dest": field.name}
        settings["default"] = argparse.SUPPRESS
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
        elif kind is dict:
            group.add_argument(flag, action="append", metavar="RECIPE", **settings)
        else:
            choices = field.metadata["choices"]
            metavar = "{" + ",".join(map(str, choices)) + "}" if choices else kind.__name__.upper()
            group.add_argument(flag, metavar=metavar, **settings)
    return made


def _add_ranks(made: argparse.ArgumentParser) -> None:
    """What says how many processes there are, and is no option of the run that they do."""
    ranks = "start that many ranks on this machine, as torchrun would; default: this process, or torchrun's"
    made.add_argument("--nproc-per-node", metavar="INT", help=ranks, default=argparse.SUPPRESS)
    made.add_argument(
        "--max-restarts", metavar="INT", help="with it: how often lost ranks start again", default=argparse.SUPPRESS
    )


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The processes that a command asks for."""

    count: int
    restarts: int


def ranks_from(argv: list[str]) -> tuple[Ranks | None, list[str]]:
    """(the ranks that are to be started, if any; the other arguments)."""
    made = _Parser(allow_abbrev=False, add_help=False)
    _add_ranks(made)
    known, others = made.parse_known_args(argv)
    given = {name: _whole(value, "--" + name.replace("_", "-")) for name, value in vars(known).items()}
    if "nproc_per_node" not in given:
        if given:
            raise ConfigError("--max-restarts expects --nproc-per-node beside it; torchrun has its own")
        return None, others
    return Ranks(given["nproc_per_node"], given.get("max_restarts", 0)), others


def _whole(text: str, where: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"{where} expects a whole number but got {text!r}")
    return int(text)


def config_from(argv: list[str]) -> TrainConfig:
    """Raises ConfigError with a hint for a flag, key or value that is not known."""
    known, unknown = parser().parse_known_args(argv)
    if unknown:
        raise ConfigError(_unknown_flag(unknown[0]))
    flags = vars(known)
    file = flags.pop("config", None)
    values = read_config_file(file) if file is not None else {}
    values |= {name: _convert(name, value, "--" + name.replace("_", "-")) for name, value in flags.items()}
    return TrainConfig(**values)


def read_config_file(path: str) -> dict[str, Any]:
    """The values of a YAML file, each converted to its option's type."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path!r} cannot be read: {error}") from None
    values = _parse_yaml(text, path)
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    converted = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in names:
            raise ConfigError(f"{path}: no option is called {key!r}{_did_you_mean(name, names)}")
        converted[name] = _convert(name, value, f"{path}: {key}")
    return converted


def _parse_yaml(text: str, path: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError:
        return _parse_plain(text, path)
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} expects one option per line, `name: value`, but holds a {type(values).__name__}")
    return values


def _parse_plain(text: str, path: str) -> dict[str, Any]:
    """What te_dist itself writes, `name: JSON`, without PyYAML."""
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, colon, value = line.partition(":")
        try:
            values[key.strip()] = json.loads(value)
        except json.JSONDecodeError:
            if not colon or value.strip()[:1] in ("", "[", "{", "&", "*", "|", ">"):
                raise ConfigError(f"{path}:{number} needs a YAML reader: pip install pyyaml") from None
            values[key.strip()] = value.split(" #")[0].strip()
    return values


def _convert(name: str, value: Any, where: str) -> Any:
    kind, optional = _base_type(name)
    if value is None and optional:
        return None
    if isinstance(value, str) and optional and value.lower() in ("none", "null"):
        return None
    try:
        if kind is dict:
            return value  # TrainConfig.check reads the recipes
        if kind is bool:
            if isinstance(value, bool):
                return value
            raise ValueError
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        if kind is int:
            if isinstance(value, float) and value != int(value):
                raise ValueError
            return int(value)
        return kind(value)  # float("1e-3"): YAML 1.1 reads that as a string
    except (ValueError, OverflowError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
        raise ConfigError(f"{where} expects {wanted} but got {value!r}") from None


def _unknown_flag(text: str) -> str:
    flag = text.split("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument {text!r}; options start with --"
    names = [f.name for f in dataclasses.fields(TrainConfig)] + ["config", "nproc_per_node", "max_restarts"]
    return f"no option is called {flag}{_did_you_mean(flag.lstrip('-').replace('-', '_'), names, '--')}"


def _did_you_mean(name: str, names: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, names, n=1)
    shown = prefix + close[0].replace("_", "-") if close and prefix else close[0] if close else ""
    return f"; did you mean {shown}?" if close else "; `te-dist train --help` lists them"
