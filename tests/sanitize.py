"""compute-sanitizer over the kernel tests, on a machine with a GPU: make sanitize.

    python tests/sanitize.py [memcheck racecheck ...] [--files NAME ...] [--jobs N] [--seconds N]

Runs the tests in as many processes as there are cores, each with a share of them. memcheck runs without torch's caching
allocator, which would let a kernel write into its neighbour unseen; tests of CUDA graphs need the allocator, and run
once more with it.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parent
KERNEL_TESTS = (
    "blocks_that_stay", "whole_tiles", "casts", "golden", "producers", "round_trip", "norm_modules", "delayed_scaling",
    "exactness",
)  # fmt: skip


GRACE = 45  # seconds that a test may take which began in time


def start(
    tool: str, names: Sequence[str], which: str, share: str, caching: bool, seconds: float
) -> subprocess.Popen[str]:
    files = [str(TESTS / f"test_{name}.py") for name in names]
    plain = ["-p", "no:xdist", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    others = ["--kernel-name-exclude", "kns=at6native"]  # torch's: they would take most of the time
    # Large matrices would take racecheck hours; test_blocks_that_stay.py has small ones for the same loops.
    marked = "cuda" if tool == "memcheck" else "cuda and not large"
    tests = [sys.executable, "-m", "pytest", "-v", "--durations=20", "-m", marked, "-k", which]
    command = ["compute-sanitizer", "--tool", tool, *others, *tests, *plain, *files]
    environment = {**os.environ, "TE_DIST_TEST_SHARE": share, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["TE_DIST_TEST_SECONDS"] = str(seconds)
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


def slowest(outputs: Sequence[str], count: int = 10) -> list[tuple[float, str]]:
    """Seconds and names of the tests that took the longest, out of pytest's own lists."""
    found = [re.findall(r"^([\d.]+)s call +(.+?)\s*$", output, re.MULTILINE) for output in outputs]
    return sorted(((float(seconds), name) for each in found for seconds, name in each), reverse=True)[:count]


def check(tool: str, names: Sequence[str], jobs: int, seconds: float) -> bool:
    """Whether tests ran, and no process has problems. Tests that there was no time for are counted."""
    deadline = time.monotonic() + seconds + GRACE
    running = [start(tool, names, "not graph", f"{k}/{jobs}", tool != "memcheck", seconds) for k in range(jobs)]
    running.append(start(tool, names, "graph", "0/1", True, seconds))
    passed = left = problems = cut = 0
    outputs = []
    for process in running:
        output, ended = finish(process, deadline)
        outputs.append(output)
        if not is_clean(output, process.returncode, ended):
            problems += 1
            print(output[-8000:])
        passed += output.count(" PASSED")
        left += output.count(" SKIPPED")
        cut += ended
    for took, name in slowest(outputs):
        print(f"{took:8.1f} s {name}")
    print(
        f"{tool}: {passed} tests passed, {left} skipped, {cut} of {len(running)} processes ended before their last "
        f"tests, {problems} with problems"
    )
    return passed > 0 and not problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="*", default=["memcheck", "racecheck"])
    parser.add_argument("--files", nargs="+", default=KERNEL_TESTS, choices=KERNEL_TESTS, metavar="NAME")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="skip tests that would begin later")
    options = parser.parse_args()
    return 0 if all([check(tool, options.files, options.jobs, options.seconds) for tool in options.tools]) else 1


if __name__ == "__main__":
    sys.exit(main())
