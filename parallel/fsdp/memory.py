"""memory_by_layer: how much memory each part of a model takes and keeps, as forward and backward pass through it.

On a GPU it counts the allocator's bytes; on the CPU, where there is no such count, the memory of all live tensors. Made
for tests and for finding leaks: a quantized copy that outlives its reshard shows as an increment that comes back with
every step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from te_dist.tensors.gathered import GatheredWeight


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """One module in one phase.

    Attributes:
        name: of the module.
        phase: "forward" or "backward".
        before, after: bytes in use when the phase entered and left it.
    """

    name: str
    phase: str
    before: int
    after: int

    @property
    def increment(self) -> int:
        return self.after - self.before


class MemoryReport:
    """What ``memory_by_layer`` saw. Printed as a table."""

    def __init__(self) -> None:
        self.layers: list[LayerMemory] = []

    def increments(self, phase: str) -> dict[str, int]:
        """By module: what it left behind, summed over the calls."""
        found: dict[str, int] = {}
        for entry in self.layers:
            if entry.phase == phase:
                found[entry.name] = found.get(entry.name, 0) + entry.increment
        return found

    @property
    def peak(self) -> int:
        """The largest of the values seen at the borders of modules."""
        return max((max(entry.before, entry.after) for entry in self.layers), default=0)

    def __str__(self) -> str:
        lines = [f"{'module':<40} {'phase':<9} {'before':>15} {'after':>15} {'increment':>15}"]
        for e in self.layers:
            lines.append(f"{e.name:<40} {e.phase:<9} {e.before:>15,} {e.after:>15,} {e.increment:>+15,}")
        return "\n".join(lines)


def bytes_in_use(device: torch.device | str) -> int:
    """Of the GPU's allocator; on the CPU of all tensors that Python can reach, each memory once.

    On the CPU a reading may be too large for a moment: a thread of gloo lets go of a collective's buffer when it runs
    next, which a busy machine may put off. Of several readings the least is right.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    seen: dict[int, int] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance: some objects answer to that with a warning, and there are many of them
        if kind is Tensor or kind is nn.Parameter:
            _count(thing, seen)
        elif kind is GatheredWeight:
            for buffer in thing.quantized_storage.inner_tensors():
                _count(buffer, seen)
    return sum(seen.values())


def _count(tensor: Tensor, seen: dict[int, int]) -> None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
        return
    storage = tensor.untyped_storage()
    if storage.size():
        with contextlib.suppress(RuntimeError):  # a compiler's fakes have no memory
            seen[storage.data_ptr()] = storage.size()


@contextlib.contextmanager
def memory_by_layer(
    model: nn.Module, modules: list[str], device: torch.device | str = "cuda"
) -> Iterator[MemoryReport]:
    """Measure at the borders of the named modules, in forward and in backward.

    Args:
        modules: names as of ``model.named_modules``; blocks rather than layers, each measurement waits for the device.
    """
    report = MemoryReport()
    named = dict(model.named_modules())
    missing = [name for name in modules if name not in named]
    if missing:
        raise ValueError(f"memory_by_layer: {type(model).__name__} has no module {missing[0]!r}")
    waiting: dict[tuple[str, str], int] = {}

    def enter(name: str, phase: str) -> None:
        waiting[name, phase] = bytes_in_use(device)

    def leave(name: str, phase: str) -> None:
        if (name, phase) in waiting:
            report.layers.append(LayerMemory(name, phase, waiting.pop((name, phase)), bytes_in_use(device)))

    handles = []
    for name in modules:
        module = named[name]
        # Around FSDP2's own hooks: in front of its gather, behind its reshard.
        handles.append(module.register_forward_pre_hook(lambda *_, n=name: enter(n, "forward"), prepend=True))
        handles.append(module.register_forward_hook(lambda *_, n=name: leave(n, "forward")))
        handles.append(module.register_full_backward_pre_hook(lambda *_, n=name: enter(n, "backward"), prepend=True))
        handles.append(module.register_full_backward_hook(lambda *_, n=name: leave(n, "backward")))
    try:
        yield report
    finally:
        for handle in handles:
            handle.remove()
