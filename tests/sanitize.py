"""compute-sanitizer over the kernel tests, on a machine with a GPU: make sanitize.

    python tests/sanitize.py [memcheck racecheck ...] [--jobs N] [--seconds N]

Runs the tests in as many processes as there are cores, each with a share of them. memcheck runs without torch's caching
allocator, which would let a kernel write into its neighbour unseen; tests of CUDA graphs need the allocator, and run
once more with it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
KERNEL_TESTS = ("casts", "golden", "exactness", "delayed_scaling", "producers", "round_trip", "norm_modules")


def start(tool: str, which: str, share: str, caching: bool, seconds: float) -> subprocess.Popen[str]:
    files = [str(TESTS / f"test_{name}.py") for name in KERNEL_TESTS]
    plain = ["-p", "no:xdist", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    command = ["compute-sanitizer", "--tool", tool, sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-k", which]
    environment = {**os.environ, "TE_DIST_TEST_SHARE": share, "OMP_NUM_THREADS": "1"}
    environment["TE_DIST_TEST_SECONDS"] = str(seconds)
    if not caching:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return subprocess.Popen(
        [*command, *plain, *files], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def check(tool: str, jobs: int, seconds: float) -> bool:
    """Whether every process ran its tests and the tool found nothing."""
    running = [start(tool, "not graph", f"{k}/{jobs}", tool != "memcheck", seconds) for k in range(jobs)]
    running.append(start(tool, "graph", "0/1", True, seconds))
    tests = problems = left = 0
    for process in running:
        output, _ = process.communicate()
        passed = re.search(r"(\d+) passed", output)
        summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", output)
        if process.returncode or passed is None or summary is None or int(summary[1]):
            problems += 1
            print(output[-8000:])
        tests += int(passed[1]) if passed else 0
        skipped = re.search(r"(\d+) skipped", output)
        left += int(skipped[1]) if skipped else 0
    print(f"{tool}: {tests} tests passed, {left} skipped, {problems} of {len(running)} processes with problems")
    return not problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="*", default=["memcheck", "racecheck"])
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="skip tests that would begin later")
    options = parser.parse_args()
    return 0 if all([check(tool, options.jobs, options.seconds) for tool in options.tools]) else 1


if __name__ == "__main__":
    sys.exit(main())
