"""compute-sanitizer over the kernel tests, on a machine with a GPU: make sanitize.

    python tests/sanitize.py [memcheck racecheck ...] [--files NAME ...] [--only EXPRESSION] [--jobs N]
                              [--seconds N] [--seen FILE]

Runs the tests in as many processes as there are cores, each with a share of them. memcheck runs without torch's caching
allocator, which would let a kernel write into its neighbour unseen; tests of CUDA graphs need the allocator, and run
once more with it. For racecheck, gradients of norms and long norms run alone, afterwards: their blocks wait for others
of their cluster, which takes the tool long enough, and much longer where other processes have the GPU in turns. That is
more than one would want to do at once: with --seen, a file keeps the names of the tests in which a tool found nothing,
and the next run of the same csrc/ leaves them out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
KERNEL_TESTS = (
    "blocks_that_stay", "whole_tiles", "casts", "golden", "producers", "round_trip", "norm_modules", "delayed_scaling",
    "exactness", "nvfp4_column_amax", "nvfp4_late_blocks", "nvfp4_norm_rows", "nvfp4_norm_tiles",
)  # fmt: skip

# Names of what passed, and reasons for what did not run.
PYTEST = (sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:xdist", "-p", "no:cacheprovider")
GRACE = 45  # seconds that a test may take which began in time


class Part(NamedTuple):
    """Tests that one process runs, or several, each a share of them."""

    which: str  # pytest's -k
    processes: int
    caching: bool = True  # torch's allocator


def stages(tool: str, jobs: int) -> list[list[Part]]:
    """What runs at the same time, one list after the other."""
    if tool == "memcheck":
        return [[Part("not graph", jobs, caching=False), Part("graph", 1)]]
    clusters = "(gradients or norm_rows or long_norms or (norm_tiles and (4608 or all_kinds)))"
    return [[Part(f"not graph and not {clusters}", jobs), Part(f"graph and not {clusters}", 1)], [Part(clusters, 1)]]


def start(
    tool: str, names: Sequence[str], which: str, share: str, caching: bool, seconds: float, left_out: Path
) -> subprocess.Popen[str]:
    files = [str(TESTS / f"test_{name}.py") for name in names]
    plain = ["-p", "no:benchmark", "-o", "timeout=0"]
    others = ["--kernel-name-exclude", "kns=at6native"]  # torch's: they would take most of the time
    # Large matrices would take racecheck hours; test_blocks_that_stay.py has small ones for the same loops.
    marked = "cuda" if tool == "memcheck" else "cuda and not large"
    tests = [*PYTEST, "--durations=20", "-m", marked, "-k", which]
    command = ["compute-sanitizer", "--tool", tool, *others, *tests, *plain, *files]
    environment = {**os.environ, "TE_DIST_TEST_SHARE": share, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment |= {"TE_DIST_TEST_SECONDS": str(seconds), "TE_DIST_TEST_SEEN": str(left_out)}
    if not caching:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def finish(process: subprocess.Popen[str], deadline: float) -> tuple[str, bool]:
    """What it wrote, and whether it had to be ended."""
    timeout = None if math.isinf(deadline) else max(1.0, deadline - time.monotonic())
    try:
        return process.communicate(timeout=timeout)[0], False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], True


def is_clean(output: str, returncode: int | None, ended: bool) -> bool:
    """Whether the tool found nothing and every test that ran passed."""
    # The tool's lines; pytest's end with the same sign.
    found = [line for line in output.splitlines() if re.match(r"=========\s+\S", line) and not line.endswith("=")]
    harmless = ["COMPUTE-SANITIZER", "ERROR SUMMARY: 0 ", "RACECHECK SUMMARY: 0 "]
    # None of the files has tests for this process, which pytest calls an error.
    idle = re.search(r"items? / \d+ deselected / 0 selected", output) is not None
    if idle:
        harmless.append("Target application returned an error")
    if any(not line.split(maxsplit=1)[1].startswith(tuple(harmless)) for line in found) or "FAILED" in output:
        return False
    return ended or idle or (returncode == 0 and any("SUMMARY" in line for line in found))


def passed_in(output: str) -> list[str]:
    """The names of the tests, as pytest -v writes them."""
    return re.findall(r"^(\S+::.+?) PASSED", output, re.MULTILINE)


def skipped_in(output: str) -> tuple[int, int]:
    """How many tests there was no time for, and how many never run under a tool, by pytest's list of reasons."""
    found = re.findall(r"^SKIPPED \[(\d+)\] (.*)", output, re.MULTILINE)
    late = sum(int(count) for count, reason in found if "TE_DIST_TEST_SECONDS" in reason)
    return late, sum(int(count) for count, _ in found) - late


class Seen:
    """The tests that passed under each tool, kept in a file for as long as the kernels' sources stay the same."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.names: dict[str, list[str]] = {}
        self.sources = hashlib.sha256()
        folder = TESTS.parent / "csrc"
        for source in sorted(file for file in folder.rglob("*") if file.suffix in (".cpp", ".h", ".cu", ".cuh")):
            self.sources.update(str(source.relative_to(folder)).encode() + b"\0" + source.read_bytes())
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            if kept["sources"] == self.sources.hexdigest():
                self.names = kept["passed"]

    def add(self, tool: str, names: Sequence[str]) -> None:
        self.names[tool] = sorted({*self.names.get(tool, ()), *names})
        if self.path is not None:
            self.path.write_text(json.dumps({"sources": self.sources.hexdigest(), "passed": self.names}, indent=1))


def slowest(outputs: Sequence[str], count: int = 10) -> list[tuple[float, str]]:
    """Seconds and names of the tests that took the longest, out of pytest's own lists."""
    found = [re.findall(r"^([\d.]+)s call +(.+?)\s*$", output, re.MULTILINE) for output in outputs]
    return sorted(((float(seconds), name) for each in found for seconds, name in each), reverse=True)[:count]


def run(
    tool: str, names: Sequence[str], only: str, parts: Sequence[Part], seconds: float, left_out: Path
) -> list[tuple[str, int | None, bool]]:
    """What each process wrote, how it ended, and whether it had to be ended."""
    deadline = time.monotonic() + seconds + GRACE
    running = [
        start(tool, names, f"({part.which}) and ({only})" if only else part.which, f"{k}/{part.processes}",
              part.caching, seconds, left_out)
        for part in parts for k in range(part.processes)
    ]  # fmt: skip
    written = [finish(process, deadline) for process in running]
    return [(text, process.returncode, ended) for process, (text, ended) in zip(running, written, strict=True)]


def check(tool: str, names: Sequence[str], only: str, jobs: int, seconds: float, seen: Seen) -> bool:
    """Whether tests ran, or all had passed before, and no process has problems. Tests that there was no time for are
    counted."""
    passed = left = never = problems = cut = 0
    outputs = []
    before = len(seen.names.get(tool, ()))
    with tempfile.TemporaryDirectory() as folder:
        left_out = Path(folder, "left_out")  # too long for the environment
        left_out.write_text("\n".join(seen.names.get(tool, ())))
        for parts in stages(tool, jobs):
            for output, returncode, ended in run(tool, names, only, parts, seconds, left_out):
                outputs.append(output)
                if not is_clean(output, returncode, ended):
                    problems += 1
                    print(output[-8000:])
                elif not ended:  # what it found may come last
                    seen.add(tool, passed_in(output))
                passed += output.count(" PASSED")
                late, others = skipped_in(output)
                left += late
                never += others
                cut += ended
    for took, name in slowest(outputs):
        print(f"{took:8.1f} s {name}")
    print(
        f"{tool}: {passed} tests passed, {left} had no time, {never} never run under a tool, {cut} of {len(outputs)} "
        f"processes ended before their last tests, {problems} with problems"
        + (f"; {before} had passed before" if before else "")
    )
    nothing_left = before > 0 and left == cut == 0
    return not problems and (passed > 0 or nothing_left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="*", default=["memcheck", "racecheck"])
    parser.add_argument("--files", nargs="+", default=KERNEL_TESTS, choices=KERNEL_TESTS, metavar="NAME")
    parser.add_argument("--only", default="", metavar="EXPRESSION", help="tests that pytest's -k would choose")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of a stage; later, no test begins")
    parser.add_argument("--seen", type=Path, metavar="FILE", help="of tests that passed, for the next run to leave out")
    options = parser.parse_args()
    seen = Seen(options.seen)
    clean = [check(tool, options.files, options.only, options.jobs, options.seconds, seen) for tool in options.tools]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
