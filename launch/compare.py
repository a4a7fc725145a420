"""``te-dist compare RUN RUN ...``: the curves of several runs on one page, and a table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from te_dist.launch.config import ConfigError
from te_dist.launch.doctor import table
from te_dist.launch.report import summary_rows, write_report
from te_dist.launch.runs import Run, read_runs


def differences(runs: list[Run]) -> str:
    """The options that are not the same in all runs."""
    keys = [k for k in runs[0].config if k != "run_dir" and any(r.config.get(k) != runs[0].config[k] for r in runs)]
    if not keys:
        return ""
    rows = [(run.name, *(str(run.config.get(key)) for key in keys)) for run in runs]
    return "\nwhat differs\n" + table(("run", *keys), rows)


def numbers(runs: list[Run]) -> dict[str, Any]:
    """What a benchmark keeps of some runs; ratios are against the first."""
    first = runs[0]
    return {
        "te_dist": first.start.get("te_dist"),
        "torch": first.start.get("torch"),
        "cuda": first.start.get("cuda"),
        "device": first.start.get("device"),
        "ranks": first.start.get("ranks"),
        "runs": [
            {
                "name": run.name,
                "recipe": run.recipe,
                "layout": run.start.get("layout"),
                "config": run.config,
                "steps": run.steps,
                "loss": run.final_loss,
                "eval_loss": run.eval_loss,
                "tokens_per_s": run.tokens_per_s,
                "tokens_per_s_ratio": run.tokens_per_s / first.tokens_per_s if first.tokens_per_s else None,
                "mfu": run.mfu,
                "peak_memory_bytes": run.memory,
                "peak_memory_ratio": run.memory / first.memory if first.memory else None,
                "wire_bytes": run.wire_bytes,
            }
            for run in runs
        ],
    }


def main(argv: list[str] | None = None) -> int:
    """Print the table, write the page."""
    parser = argparse.ArgumentParser(prog="te-dist compare", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs; losses are given against the first")
    parser.add_argument("--out", type=Path, help="the page to write (default: compare.html beside the first run)")
    parser.add_argument("--json", type=Path, help="write the numbers of the table to this file too")
    options = parser.parse_args(argv)
    if len(options.runs) < 2:
        parser.error(f"expects two runs or more but got {len(options.runs)}")
    try:
        runs = read_runs(options.runs)
        if empty := [str(run.folder) for run in runs if not run.steps]:
            raise ConfigError(f"{empty[0]!r} has no step in its metrics yet")
        out = options.out or runs[0].folder.parent / "compare.html"
        path = write_report(options.runs, out)
    except (ConfigError, OSError) as error:
        print(f"te-dist compare: error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(numbers(runs), indent=1) + "\n")
    header, rows = summary_rows(runs)
    print(table(tuple(header), [tuple(row) for row in rows]))
    print(differences(runs))
    print(f"\nreport: {path}")
    if path.with_suffix(".png").exists():
        print(f"plot:   {path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
