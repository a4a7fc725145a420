"""tests/sanitize.py with a stand-in for the tool: several short runs see every test once, and none counts of a process
in which something was found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sanitize

# Says what pytest -v would of three tests, without those that were seen, and what the tool says at its end.
STAND_IN = """#!{python}
import os, pathlib
seen = pathlib.Path(os.environ["TE_DIST_TEST_SEEN"]).read_text().splitlines()
for name in ["tests/test_a.py::test_one[x y]", "tests/test_a.py::test_two", "tests/test_a.py::test_three"]:
    if name not in seen:
        print(name, "PASSED [ 33%]")
        if name.endswith("two"):
            print("{finding}")
            break
print("========= ERROR SUMMARY: {errors}")
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "stages", lambda tool, jobs: [[sanitize.Part("", 1)]])
    return tmp_path / "compute-sanitizer"


def install(tool: Path, finding: str = "", errors: str = "0 errors") -> None:
    tool.write_text(STAND_IN.format(python=sys.executable, finding=finding, errors=errors))
    tool.chmod(0o755)


def skips(tool: Path, reason: str) -> None:
    """A tool under which pytest skips the only test."""
    lines = ("tests/test_a.py::test_three SKIPPED", f"SKIPPED [1] a.py:1: {reason}", "========= ERROR SUMMARY: 0")
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line} '\n" for line in lines))


def check(seen: sanitize.Seen) -> bool:
    return sanitize.check("memcheck", ["golden"], "", 1, 60.0, seen)


def test_runs_that_add_up(tool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tool)
    kept = tmp_path / "seen.json"
    assert check(sanitize.Seen(kept))
    first = sanitize.Seen(kept).names["memcheck"]
    assert first == ["tests/test_a.py::test_one[x y]", "tests/test_a.py::test_two"]
    assert check(sanitize.Seen(kept))
    assert sanitize.Seen(kept).names["memcheck"] == sorted([*first, "tests/test_a.py::test_three"])
    assert "1 tests passed" in capsys.readouterr().out.splitlines()[-1]
    assert check(sanitize.Seen(kept))  # nothing is left to run
    assert "0 tests passed" in (last := capsys.readouterr().out.splitlines()[-1]) and "3 had passed before" in last


def test_a_run_without_time_for_a_test_is_not_clean(
    tool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever has passed before."""
    install(tool)
    seen = sanitize.Seen(tmp_path / "seen.json")
    assert check(seen)
    skips(tool, "TE_DIST_TEST_SECONDS have passed")
    assert not check(seen)
    assert "0 tests passed, 1 had no time, 0 never run" in capsys.readouterr().out.splitlines()[-1]
    assert "tests/test_a.py::test_three" not in seen.names["memcheck"]


def test_what_never_runs_under_a_tool_is_not_waited_for(tool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs with --seen would never come to an end. But where nothing has passed at all, nothing is clean."""
    install(tool)
    seen = sanitize.Seen(None)
    skips(tool, "a sanitizer leaves no room for a profiler")
    assert not check(seen)
    install(tool)
    assert check(seen)
    skips(tool, "a sanitizer leaves no room for a profiler")
    assert check(seen)
    assert "0 tests passed, 0 had no time, 1 never run" in capsys.readouterr().out.splitlines()[-1]


def test_reasons_are_counted_as_pytest_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "test_skips.py"
    file.write_text(
        "import pytest\n@pytest.mark.skipif(True, reason='a tool')\ndef test_a(): pass\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_b(n): pass\n"
    )
    late = [*sanitize.PYTEST, "--confcutdir", str(Path(__file__).parent), "-p", "conftest", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TE_DIST_TEST_SECONDS": "-1"}
    run = subprocess.run(late, env=environment, text=True, capture_output=True)
    assert sanitize.skipped_in(run.stdout) == (2, 1), run.stdout


def test_a_process_without_a_share_of_the_tests_is_clean() -> None:
    """There may be more processes than tests that are left."""
    command = [*sanitize.PYTEST, __file__]
    environment = {**os.environ, "TE_DIST_TEST_SHARE": "99/100"}
    idle = subprocess.run([*command, "-k", "begin_anew"], env=environment, text=True, capture_output=True)
    assert idle.returncode != 0 and "PASSED" not in idle.stdout
    tool = "\n========= Target application returned an error\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitize.is_clean(idle.stdout + tool, idle.returncode, False), idle.stdout


def test_other_sources_begin_anew(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tool)
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc" / "a.cu"
    source.write_text("old")
    monkeypatch.setattr(sanitize, "TESTS", tmp_path / "tests")
    kept = tmp_path / "seen.json"
    assert check(sanitize.Seen(kept)) and sanitize.Seen(kept).names
    source.write_text("new")
    assert sanitize.Seen(kept).names == {}


@pytest.mark.parametrize(
    ("finding", "errors"),
    [("========= Invalid __global__ read of size 4 bytes", "0 errors"), ("", "1 error"), ("FAILED", "0 errors")],
)
def test_what_is_found_counts_for_nothing(
    tool: Path, tmp_path: Path, finding: str, errors: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tool, finding, errors)
    seen = sanitize.Seen(tmp_path / "seen.json")
    assert not check(seen)
    assert seen.names == {} and not (tmp_path / "seen.json").exists()
    assert "1 with problems" in capsys.readouterr().out


def test_tests_that_were_seen_do_not_run(tmp_path: Path) -> None:
    name = "tests/test_sanitize.py::test_other_sources_begin_anew"
    seen = tmp_path / "seen.txt"
    seen.write_text(name)
    run = subprocess.run(
        [*sanitize.PYTEST, "tests/test_sanitize.py", "-k", "anew or found"],
        cwd=Path(__file__).parent.parent, env={**os.environ, "TE_DIST_TEST_SEEN": str(seen)}, text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    assert name not in run.stdout and " 3 passed" in run.stdout, run.stdout
