"""Which implementation runs a kernel, and how it is called: compiled for the tensor's device, or the reference."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from te_dist import torch_compat
from te_dist.capability import built_for
from te_dist.formats import DType

extension: ModuleType | None = None
extension_error = ""
try:
    import te_dist._kernels as extension  # type: ignore[no-redef]
except ModuleNotFoundError:
    # A checkout on the path before an installed te_dist, for one: name the folder that was looked into.
    extension_error = f"no _kernels in {os.path.dirname(os.path.dirname(__file__))}"
except ImportError as error:
    extension_error = str(error)

FLOAT_CODE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
FP8_CODE = {DType.kFloat8E4M3: 0, DType.kFloat8E5M2: 1}
# Floats that a GPU's blocks find an amax in together.
AMAX_ROOM: int = 1 if extension is None else extension.amax_room

# Device type -> name -> function.
_TABLES: dict[str, dict[str, Any]] = {}
if extension is not None:
    _TABLES["cpu"] = vars(extension.cpu)
    if extension.has_cuda:
        _TABLES["cuda"] = vars(extension.cuda)


def _drop_cuda_kernels_that_cannot_run() -> None:
    """For CUDA's start: a build for other GPUs than those here would end in an error of the driver's."""
    archs = str(extension.cuda_archs) if extension is not None else ""
    found = sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})
    if not found or any(built_for(archs, each) for each in found):
        return
    _TABLES.pop("cuda", None)
    here = ", ".join(f"{major}.{minor}" for major, minor in found)
    warnings.warn(
        f"te_dist's CUDA kernels were compiled for {archs.replace(',', ', ')}, which the GPUs here, of compute "
        f"capability {here}, cannot run: torch's own operations do their work, many times slower. From 8.9 on, "
        "installing te_dist on this machine compiles the kernels for it.",
        stacklevel=2,
    )


if "cuda" in _TABLES:
    torch_compat.when_cuda_starts(_drop_cuda_kernels_that_cannot_run)

BACKENDS = ("auto", "reference")
_forced = os.environ.get("TE_DIST_BACKEND", "auto")
if _forced not in BACKENDS:
    raise ValueError(f"TE_DIST_BACKEND expects one of {BACKENDS} but got {_forced!r}")


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend inside a ``with`` block: "reference", or "auto" to undo ``TE_DIST_BACKEND``."""
    global _forced
    if name not in BACKENDS:
        raise ValueError(f"use_backend expects one of {BACKENDS} but got {name!r}")
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """No kernel runs inside, and no product: buffers are allocated and that is all. For fake implementations."""
    global _forced
    previous, _forced = _forced, "shapes"
    try:
        yield
    finally:
        _forced = previous


def is_shapes_only() -> bool:
    return _forced == "shapes"


def _nothing(*_: Any) -> None:
    """Every kernel, while only shapes are asked for."""


def has_extension() -> bool:
    return extension is not None


def extension_info() -> dict[str, str]:
    """What was built, for ``doctor``."""
    if extension is None:
        return {"extension": f"missing ({extension_error})"}
    return {
        "extension": str(extension.__file__),
        "cpu variant": _cpu_variant(),
        "cuda architectures": str(extension.cuda_archs) or "none (there was no nvcc, or only GPUs before 8.9)",
    }


def _cpu_variant() -> str:
    try:
        return str(extension.cpu.variant()) if extension is not None else "none"
    except ValueError as error:  # TE_DIST_CPU_VARIANT names one that is not there
        return str(error)


def backend_name(device: torch.device | str, kernel: str = "quantize_block") -> str:
    """ "cuda", "cpu" or "reference": what runs `kernel` for tensors on `device`."""
    device = torch.device(device)
    return device.type if find(device, kernel) is not None else "reference"


def find(device: torch.device, kernel: str) -> Any:
    if _forced == "shapes":
        return _nothing
    if _forced == "reference":
        return None
    table = _TABLES.get(device.type)
    return None if table is None else table.get(kernel)


def run(function: Any, device: torch.device, *args: Any) -> bool:
    """Run an extension function on the caller's stream, or with as many threads as torch uses. False: it cannot, and
    has done nothing. (csrc/api.h says which ones may.)"""
    done: bool
    if function is _nothing:
        return True
    if device.type == "cpu":
        done = function(*args, torch.get_num_threads())
    elif device.index is None or device.index == torch_compat.current_cuda_device():
        done = function(*args, torch_compat.current_raw_stream(torch_compat.current_cuda_device()))
    else:
        with torch.cuda.device(device):
            done = function(*args, torch_compat.current_raw_stream(device.index))
    return done


def functions(device: torch.device) -> dict[str, Any] | None:
    """The compiled kernels of a device by name; None where the reference is to run."""
    return _TABLES.get(device.type) if _forced == "auto" else None


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None or _forced == "shapes" else tensor.data_ptr()


def store(out: Tensor | None, value: Tensor | None, noop: Tensor | None) -> None:
    """out <- value, unless the no-op flag is set; without a host sync."""
    if out is None or value is None:
        return
    value = value.reshape(out.shape)
    out.copy_(value if noop is None else torch.where(noop.reshape(()) != 0, out, value))


def store_all(outs: Sequence[Tensor | None], values: Sequence[Tensor | None], noop: Tensor | None) -> None:
    for out, value in zip(outs, values, strict=True):
        store(out, value, noop)
