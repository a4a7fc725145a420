"""The CPU kernels are compiled once per instruction set: each variant this machine can run gives the same bytes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from te_dist import kernels

VARIANTS = ("baseline", "avx2", "avx512") if platform.machine() in ("x86_64", "AMD64") else ("baseline",)

PROGRAM = """
import sys
import torch
from cases import DTYPES, QUANTIZERS, check_against_reference, special_values, varied
from te_dist import kernels

assert kernels.extension_info()["cpu variant"] == sys.argv[1], kernels.extension_info()
torch.set_num_threads(1)
for name, make in QUANTIZERS.items():
    for dtype in DTYPES:
        for shape in ((144, 272), (17, 48), (1, 130), (256, 384)):
            for planes in ("row", "column", "both"):
                check_against_reference(make, varied(shape, dtype), planes, "cpu", f"{name} {shape} {dtype} {planes}")
        for label, x in special_values(dtype):
            check_against_reference(make, x, "both", "cpu", f"{name} {label} {dtype}")
print("equal")
"""


def run(variant: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, variant],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parent,
        env=os.environ | {"TE_DIST_CPU_VARIANT": variant},
    )


@pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_equals_the_reference(variant: str) -> None:
    done = run(variant)
    if "has no CPU variant" in done.stderr:
        pytest.skip(f"this CPU cannot run {variant}")
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


@pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")
def test_an_unknown_variant_is_named() -> None:
    done = run("sse9")
    assert done.returncode != 0 and "has no CPU variant 'sse9'" in done.stderr
