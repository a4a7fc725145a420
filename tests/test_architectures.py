"""Which GPUs the CUDA kernels are compiled for, and what happens on others: neither an installation nor a training may
fail because of a GPU that they are not for."""

from __future__ import annotations

import re
import shutil
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from te_dist.capability import built_for
from te_dist.kernels import backend

CSRC = Path(__file__).parents[1] / "csrc"


@pytest.mark.parametrize(
    ("architectures", "runs", "runs_not"),
    [
        ("90", [(9, 0), (10, 0), (12, 1)], [(8, 0), (8, 9)]),
        ("89,90", [(8, 9), (9, 0), (10, 3)], [(8, 6)]),
        ("90a", [(9, 0)], [(8, 9), (10, 0)]),
        ("100a", [(10, 0)], [(9, 0), (10, 3), (12, 0)]),
        ("100f", [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("89-real", [(8, 9)], [(8, 6), (9, 0)]),
        ("90-virtual", [(9, 0), (10, 0)], [(8, 9)]),
        ("native", [(9, 0), (12, 0)], []),
        ("", [], [(9, 0)]),
    ],
)
def test_what_runs_where(architectures: str, runs: list[tuple[int, int]], runs_not: list[tuple[int, int]]) -> None:
    assert all(built_for(architectures, capability) for capability in runs)
    assert not any(built_for(architectures, capability) for capability in runs_not)


def test_no_source_has_a_branch_for_what_came_after_hopper() -> None:
    """Or `make other_gpus` would have to assemble it for these."""
    sources = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh", ".cu")]
    compared = [
        found for path in sources for found in re.findall(r"__CUDA_ARCH\w*(?:\s*[<>=]+\s*\d+)?", path.read_text())
    ]
    assert "__CUDA_ARCH__ >= 900" in compared, "sources are where this test looks for them"
    for found in set(compared):
        name, *limit = re.split(r"\s*[<>=]+\s*", found)
        assert name == "__CUDA_ARCH__" and all(int(n) <= 900 for n in limit), found


def with_gpus(monkeypatch: pytest.MonkeyPatch, archs: str, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(backend, "extension", SimpleNamespace(cuda_archs=archs))
    monkeypatch.setattr(backend, "_TABLES", {"cpu": {"produce": print}, "cuda": {"produce": repr}})
    monkeypatch.setattr(backend, "_forced", "auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])


@pytest.mark.parametrize("gpus", [[(8, 0)], [(8, 6), (8, 9)]], ids=str)
def test_gpus_that_cannot_run_the_kernels_get_the_reference(
    monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[int, int]]
) -> None:
    with_gpus(monkeypatch, "90,100", *gpus)
    names = ", ".join(f"{major}.{minor}" for major, minor in gpus)
    with pytest.warns(UserWarning, match=f"compiled for 90, 100, which the GPUs here, of compute capability {names}"):
        backend._drop_cuda_kernels_that_cannot_run()
    assert backend.backend_name("cuda", "produce") == "reference"
    assert backend.functions(torch.device("cuda")) is None
    assert backend.backend_name("cpu", "produce") == "cpu"


@pytest.mark.parametrize("gpus", [[(9, 0)], [(8, 6), (9, 0)], [(12, 0)], []], ids=str)
def test_gpus_that_run_the_kernels_keep_them(monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[int, int]]) -> None:
    with_gpus(monkeypatch, "90", *gpus)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend._drop_cuda_kernels_that_cannot_run()
    assert backend.backend_name("cuda", "produce") == "cuda"


@pytest.mark.skipif(not getattr(backend.extension, "has_cuda", False), reason="built without CUDA")
def test_that_is_asked_when_cuda_starts() -> None:
    queued = [call[0] for call in torch.cuda._queued_calls]
    assert torch.cuda.is_initialized() or backend._drop_cuda_kernels_that_cannot_run in queued


# ------------------------------------------------------------------------------------------------- the build
def configured(tmp_path: Path, commands: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.cmake"
    script.write_text(f"include({CSRC / 'architectures.cmake'})\n{commands}\n")
    return subprocess.run(["cmake", "-P", script], capture_output=True, text=True, check=False)


needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")


@needs_cmake
@pytest.mark.parametrize(
    ("capabilities", "known", "archs", "old"),
    [
        ("9.0\n9.0\n", "89;90;100", "90", ""),
        ("8.9\n9.0\n", "89;90;100", "89;90", ""),
        ("8.0\n", "89;90;100", "", "80"),
        ("8.6\n9.0\n8.6\n", "89;90", "90", "86"),
        ("10.0\n", "89;90", "90", ""),  # newer than the compiler
        ("12.0\n10.0\n", "89;90;100;103", "103;100", ""),
        ("9.0\n", "", "", "90"),  # a compiler before all of them
    ],
)
def test_architectures_of_the_gpus_here(tmp_path: Path, capabilities: str, known: str, archs: str, old: str) -> None:
    ended = configured(
        tmp_path,
        f'te_dist_archs_of("{capabilities}" "{known}" archs old)\nmessage(STATUS "archs <${{archs}}> old <${{old}}>")',
    )
    assert f"archs <{archs}> old <{old}>" in ended.stdout, ended.stderr


@needs_cmake
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_what_the_compiler_knows(tmp_path: Path) -> None:
    ended = configured(tmp_path, 'te_dist_known_archs(nvcc known)\nmessage(STATUS "known <${known}>")')
    known = ended.stdout.split("<")[1].split(">")[0].split(";")
    assert {"89", "90"} <= set(known) and all(int(arch) >= 89 for arch in known)


@needs_cmake
@pytest.mark.parametrize(("archs", "refused"), [("90;100a;89-real;native", ""), ("90;86", "86"), ("80-virtual", "80")])
def test_architectures_that_cannot_be_asked_for(tmp_path: Path, archs: str, refused: str) -> None:
    ended = configured(tmp_path, f'te_dist_check_archs("{archs}")')
    assert (ended.returncode != 0) == bool(refused)
    assert f"TE_DIST_CUDA_ARCHS names {refused}" in " ".join(ended.stderr.split()) if refused else not ended.stderr
