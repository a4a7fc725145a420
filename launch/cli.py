"""The ``te-dist`` command: picks a subcommand and hands it the rest of the line."""

from __future__ import annotations

import difflib
import sys

from te_dist.launch import compare, demo, doctor, export, formats, train

COMMANDS = {
    "train": (train.main, "train a language model, alone or on many ranks"),
    "compare": (compare.main, "curves and a table of several runs"),
    "export": (export.main, "a run's weights for transformers and vLLM, in bf16 or FP8"),
    "doctor": (doctor.main, "versions, devices, and what runs natively here"),
    "demo": (demo.main, "a small Llama in every recipe, alone and on four ranks"),
    "formats": (formats.main, "quantize a transformer-like weight and activation in every format"),
}


def usage() -> str:
    lines = [f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: te-dist COMMAND [options]", "", "commands:", *lines])


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        print(f"te-dist: no command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name][0](rest)
    except KeyboardInterrupt:
        print(f"\nte-dist {name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
