"""What FSDP2 gathers of te_dist's weights, told to comm_report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from te_dist import transport
from te_dist.parallel.fsdp.decision import QUANTIZED, Decision
from te_dist.parallel.fsdp.torch_fsdp import TrainingState
from te_dist.torch_compat import in_backward

WEIGHT = "weight"


def record_gather(
    name: str, mesh: Any, state: TrainingState, sent: Sequence[Tensor], decision: Decision, ranks: int
) -> None:
    """One line per weight. FSDP2 itself puts the weights of a parameter group into one collective."""
    recorder = transport.state.recorder
    if recorder is None or ranks == 1:
        return
    phase = "backward" if state == TrainingState.PRE_BACKWARD or in_backward() else "forward"
    payload = f"{WEIGHT}, {decision.format if decision.how == QUANTIZED else 'high precision'}"
    size = sum(t.numel() * t.element_size() for t in sent)
    dtype = str(sent[0].dtype).removeprefix("torch.")
    recorder(("all_gather", str(mesh.get_group().group_name), dtype, size, name, phase, payload))
