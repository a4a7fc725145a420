"""all_gather_report: how each weight of a sharded model travels, how many bytes, and why."""

from __future__ import annotations

import dataclasses

from torch import nn

from te_dist.modules.base import QuantizedLayer
from te_dist.parallel.fsdp.decision import PLAIN, QUANTIZED, Decision
from te_dist.parallel.fsdp.planes import COLUMN, ROW, PlaneName
from te_dist.parallel.fsdp.torch_fsdp import (
    FSDPParam,
    FSDPParamGroup,
    FSDPState,
    groups_of,
    reshards_after_forward,
    states_under,
)
from te_dist.parallel.fsdp.weight import QuantizedFSDPParam
from te_dist.recipe import recipe_in_force

_MODE = "_te_dist_mode"


def note_mode(state: FSDPState, mode: str) -> None:
    state.__dict__[_MODE] = mode


@dataclasses.dataclass(frozen=True)
class GatheredParameter:
    """One line.

    Attributes:
        name: of the parameter in the model.
        shape: of the whole weight, or of what tensor parallelism leaves of it.
        how: "quantized" (bytes are gathered), "quantized after" (gathered in high precision, quantized once per
            unshard) or "high precision".
        format: of the quantized weight, "-" without one.
        forward_bytes, backward_bytes: what a rank sends each time it gathers; backward 0 if forward's lasts. With
            activation checkpointing, formats whose planes are independent send both in backward.
        bf16_bytes: what it would send for the same gathers in bfloat16.
        reason: why it is not "quantized".
    """

    name: str
    shape: tuple[int, ...]
    how: str
    format: str
    forward_bytes: int
    backward_bytes: int
    bf16_bytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class AllGatherReport:
    """What ``all_gather_report`` found. Printed as a table."""

    parameters: tuple[GatheredParameter, ...]

    @property
    def quantized(self) -> list[str]:
        return [p.name for p in self.parameters if p.how == QUANTIZED]

    @property
    def others(self) -> dict[str, str]:
        """Names of the weights that are not gathered as bytes, and why."""
        return {p.name: p.reason for p in self.parameters if p.how != QUANTIZED}

    @property
    def bytes(self) -> int:
        """What a rank sends for all of them in one forward and backward."""
        return sum(p.forward_bytes + p.backward_bytes for p in self.parameters)

    def __str__(self) -> str:
        rows = [("weight", "shape", "gathered", "format", "forward", "backward", "of bf16", "why not")]
        for p in self.parameters:
            share = (p.forward_bytes + p.backward_bytes) / p.bf16_bytes if p.bf16_bytes else 0.0
            sizes = (f"{p.forward_bytes:,}", f"{p.backward_bytes:,}", f"{share:.3f}")
            rows.append((p.name, " x ".join(map(str, p.shape)), p.how, p.format, *sizes, p.reason))
        widths = [max(len(row[column]) for row in rows) for column in range(8)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        summary = (
            f"te_dist: {len(self.quantized)} of {len(self.parameters)} weights of quantized layers are gathered "
            f"quantized (bytes that this rank sends)"
        )
        return "\n".join([summary, *lines])


def all_gather_report(model: nn.Module) -> AllGatherReport:
    """How FSDP2 gathers each weight of te_dist's layers, under the recipes in force now.

    Example:
        >>> import torch
        >>> from te_dist.parallel import all_gather_report
        >>> len(all_gather_report(torch.nn.Linear(2, 2)).parameters)
        0
    """
    names = {child: name for name, child in model.named_modules()}
    lines = []
    for state in states_under(model):
        mode = state.__dict__.get(_MODE, "off")
        for group in groups_of(state):
            for param in group.fsdp_params:
                layer = param._module_info.module
                if isinstance(layer, QuantizedLayer) and len(param._orig_size) > 1:
                    lines.append(_line(param, group, layer, names.get(layer, ""), mode))
    return AllGatherReport(tuple(lines))


def _line(param: FSDPParam, group: FSDPParamGroup, layer: QuantizedLayer, name: str, mode: str) -> GatheredParameter:
    full = f"{name}.{param._module_info.param_name}" if name else param._module_info.param_name
    decision = _decision(param, group, layer, mode)
    forward, backward = _bytes(param, group, decision)
    gathers = 2 if backward else 1
    return GatheredParameter(
        full,
        tuple(param._orig_size),
        decision.how,
        decision.format,
        forward,
        backward,
        2 * param.padded_sharded_param_size.numel() * gathers,
        decision.reason,
    )


def _decision(param: FSDPParam, group: FSDPParamGroup, layer: QuantizedLayer, mode: str) -> Decision:
    if isinstance(param, QuantizedFSDPParam):
        weight = param.te_dist_weight
        recipe = recipe_in_force(layer.recipe)
        return weight.owner.decisions(recipe)[weight.owner.weights.index(weight)]
    if mode == "off":
        return Decision(PLAIN, reason="quantized_all_gather is off")
    from te_dist.parallel.fsdp.attach import _obstacle

    reason = _obstacle(param, group, layer)
    return Decision(PLAIN, reason=reason or "some of the layer's weights are not sharded with it")


def _bytes(param: FSDPParam, group: FSDPParamGroup, decision: Decision) -> tuple[int, int]:
    """Sent in forward and in backward, by one rank."""
    again = reshards_after_forward(group)
    if param.shard_mesh.size() == 1:
        return 0, 0
    if decision.codec is None:
        master = decision.how != PLAIN
        policy = group.mp_policy.param_dtype
        itemsize = (param.sharded_param.dtype if master or policy is None else policy).itemsize
        size = param.padded_sharded_param_size.numel() * itemsize
        return size, size if again else 0
    planes = tuple(decision.codec.planes)
    forward: tuple[PlaneName, ...] = (ROW,) if again else planes
    backward: tuple[PlaneName, ...] = (COLUMN,) if COLUMN in planes else (ROW,)
    return sum(decision.codec.wire_sizes(forward)), sum(decision.codec.wire_sizes(backward)) if again else 0
