"""The README: its tables come from the results, its example runs, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
