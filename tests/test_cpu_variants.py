"""The CPU kernels are compiled once per instruction set: each variant this machine can run gives the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import DTYPES, PLANES, QUANTIZERS, fits, rng_for, special_values, varied
from patience import HUNG
from torch import Tensor

import te_dist
from te_dist import kernels

VARIANTS = ("baseline", "avx2", "avx512") if platform.machine() in ("x86_64", "AMD64") else ("baseline",)

PROGRAM = """
import json, sys
from te_dist import kernels
from test_cpu_variants import digests

assert kernels.extension_info()["cpu variant"] == sys.argv[1], kernels.extension_info()
print(json.dumps(digests()))
"""


def matrices() -> Iterator[tuple[str, str, Tensor]]:
    """(name, planes, matrix)"""
    for dtype in DTYPES:
        for shape in ((144, 272), (17, 48), (1, 130), (256, 384)):
            for planes in PLANES:
                yield f"{shape} {dtype} {planes}", planes, varied(shape, dtype)
        for label, x in special_values(dtype):
            yield f"{label} {dtype}", "both", x


def digest(exact: list[Tensor], any_nan: list[Tensor]) -> str:
    """Of bytes; in `any_nan` all NaNs are one: torch's own casts keep no particular one."""
    found = hashlib.blake2b()
    for t in (*exact, *(torch.where(t.isnan(), torch.full_like(t, float("nan")), t) for t in any_nan)):
        found.update(repr((t.shape, t.dtype)).encode())
        found.update(t.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests() -> dict[str, str]:
    """Of everything that the quantizers make of the matrices: planes, the recorded amax, values read back."""
    torch.set_num_threads(1)
    found, all_matrices = {}, list(matrices())
    for name, make in QUANTIZERS.items():
        for label, planes, x in all_matrices:
            rowwise, columnwise = PLANES[planes]
            quantizer = make(rowwise=rowwise, columnwise=columnwise)
            if not fits(quantizer, tuple(x.shape)):
                continue
            storage = quantizer.quantize(x, rng_state=rng_for(quantizer))
            exact, any_nan = storage.inner_tensors(), [storage.dequantize(dtype=dtype) for dtype in DTYPES]
            if isinstance(quantizer, te_dist.IdentityQuantizer):
                exact, any_nan = [], [*exact, *any_nan]
            if isinstance(quantizer, te_dist.Float8Quantizer):
                exact = [*exact, quantizer.amax]
            found[f"{name} {label}"] = digest(list(exact), any_nan)
    return found


def run(variant: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, variant],
        capture_output=True,
        text=True,
        timeout=HUNG,
        cwd=Path(__file__).parent,
        env=os.environ | {"TE_DIST_CPU_VARIANT": variant},
    )


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    with te_dist.use_backend("reference"):
        return digests()


@pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_equals_the_reference(variant: str, expected: dict[str, str]) -> None:
    done = run(variant)
    if "has no CPU variant" in done.stderr:
        pytest.skip(f"this CPU cannot run {variant}")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found.keys() == expected.keys() and len(found) > 1000
    assert [name for name in found if found[name] != expected[name]] == []


@pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")
def test_an_unknown_variant_is_named() -> None:
    done = run("sse9")
    assert done.returncode != 0 and "has no CPU variant 'sse9'" in done.stderr
