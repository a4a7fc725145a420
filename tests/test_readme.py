"""The README: its tables come from the results, its example runs, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_tables_are_those_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "readme_tables.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert README.count("<!-- table:") >= 2


def test_python_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


def test_commands_are_in_the_makefile() -> None:
    targets = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert f"\n{command}:" in targets


def test_every_page_of_the_docs_is_linked() -> None:
    linked = set(re.findall(r"\]\((docs/[\w./]+)\)", README))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= linked
    assert all((ROOT / target).exists() for target in linked)


def test_reports_of_some_cases_go_into_one_of_all() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from kernels import MACHINE, merged
    finally:
        sys.path.pop(0)
    machine = dict.fromkeys(MACHINE, "this one")

    def report(bandwidth: float, **times: float) -> dict[str, Any]:
        rows = [{"kernel": kernel, "shape": [128, 128], "us": us} for kernel, us in times.items()]
        return {**machine, "copy_bandwidth_tb_s": bandwidth, "results": rows}

    once = merged(report(4.26, a=1.0, b=2.0), report(4.24, b=1.5))
    twice = merged(once, report(4.2, c=3.0))
    found = {row["kernel"]: (row["us"], row["copy_bandwidth_tb_s"]) for row in twice["results"]}
    assert found == {"a": (1.0, 4.26), "b": (1.5, 4.24), "c": (3.0, 4.2)}
    with pytest.raises(ValueError, match="torch: 'another' is not 'this one'"):
        merged(once, {**report(4.2, a=1.0), "torch": "another"})
