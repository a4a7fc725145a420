"""What this machine can run natively: one rule per recipe, by device capability and library version."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True)
class Rule:
    """Whether a GEMM on this format is native on a GPU of compute capability `cc` with CUDA version `cuda`."""

    recipe: str
    needs: str
    holds: Callable[[tuple[int, int], tuple[int, int]], bool]


_FP8 = "compute capability 8.9 or above"
RULES = (
    Rule("DelayedScaling", _FP8, lambda cc, cuda: cc >= (8, 9)),
    Rule("Float8CurrentScaling", _FP8, lambda cc, cuda: cc >= (8, 9)),
    Rule(
        "Float8BlockScaling",
        "compute capability 9.0 and CUDA 12.9 or above",
        lambda cc, cuda: cc == (9, 0) and cuda >= (12, 9),
    ),
    Rule("MXFP8BlockScaling", "compute capability 10.0 or above", lambda cc, cuda: cc >= (10, 0)),
    Rule("NVFP4BlockScaling", "compute capability 10.0 or above", lambda cc, cuda: cc >= (10, 0)),
)


def cuda_version() -> tuple[int, int]:
    """The CUDA version torch was built for; (0, 0) without."""
    version = torch.version.cuda
    if not version:
        return (0, 0)
    major, minor, *_ = (int(part) for part in version.split("."))
    return major, minor


def gemm_support(recipe: str, device: torch.device | str = "cuda") -> tuple[bool, str]:
    """(native, reason) for the GEMMs of a recipe on a device."""
    rule = next((rule for rule in RULES if rule.recipe == recipe), None)
    if rule is None:
        raise ValueError(f"gemm_support expects one of {[rule.recipe for rule in RULES]} but got {recipe!r}")
    device = torch.device(device)
    if device.type != "cuda":
        return False, f"no FP8 matrix units on {device.type}"
    if not torch.cuda.is_available():
        return False, "no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if rule.holds(capability, cuda_version()):
        return True, f"compute capability {capability[0]}.{capability[1]}"
    return False, f"needs {rule.needs}; this is {capability[0]}.{capability[1]}"


def built_for(architectures: str, cc: tuple[int, int]) -> bool:
    """Whether kernels that were compiled for `architectures`, named as CMake does, run on a GPU of capability `cc`.

    Machine code runs on later minor versions as well, and with its PTX, which no suffix leaves out, on all later ones.

    >>> built_for("90", (10, 0)), built_for("90", (8, 9)), built_for("89-real", (9, 0)), built_for("90,100a", (10, 3))
    (True, False, False, True)
    """
    for name in filter(None, architectures.split(",")):
        number = re.match(r"\d+", name)
        if number is None:  # "native" and the like
            return True
        major, minor = divmod(int(number[0]), 10)
        suffix = name[number.end() :]
        if suffix.startswith("a"):
            runs = cc == (major, minor)
        elif suffix.startswith("f") or suffix == "-real":
            runs = cc[0] == major and cc[1] >= minor
        else:
            runs = cc >= (major, minor)
        if runs:
            return True
    return False
