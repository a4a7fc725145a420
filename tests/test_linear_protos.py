"""SPEC E11: the protos of a linear layer equal what a real one returns, for TP, SP, caching and groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import VALUE_QUANTIZERS

import te_dist
from te_dist.linear_protos import LinearSpec, linear_backward_protos, linear_forward_protos
from te_dist.plan import PLANS, Move, plan_for
from te_dist.proto import TensorProto, to_tensor_proto

MODES = sorted(PLANS, key=str)


def run_move(move: Move, x: torch.Tensor, world: int) -> torch.Tensor:
    """The collective itself, in the plainest form."""
    if move is Move.NONE:
        return x
    if move is Move.ALL_GATHER:
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)
    x = x.clone()
    dist.all_reduce(x)
    return x if move is Move.ALL_REDUCE else x.chunk(world)[dist.get_rank()].contiguous()


def real_linear(spec: LinearSpec, x: torch.Tensor, weights: list[torch.Tensor], world: int) -> dict[str, Any]:
    """A linear layer written out with quantizers and collectives; groups split the gathered rows evenly."""
    plan = spec.plan
    row = spec.input_quantizer.with_usage(columnwise=False)
    a = run_move(plan.x, row.quantize(x).dequantize(), world)
    workspaces = [spec.weight_quantizer.quantize(w) for w in weights]
    ws = [workspace.dequantize() for workspace in workspaces]
    groups = a.chunk(len(ws))
    y = run_move(plan.y, torch.cat([g @ w.t() for g, w in zip(groups, ws, strict=True)]), world)
    dy = run_move(plan.dy, torch.ones_like(y), world)
    dys = dy.chunk(len(ws))
    dx = run_move(plan.dx, torch.cat([g @ w for g, w in zip(dys, ws, strict=True)]), world)
    flat = [(d.reshape(-1, d.shape[-1]), g.reshape(-1, g.shape[-1])) for d, g in zip(dys, groups, strict=True)]
    return {
        "out": y,
        "saved": spec.input_quantizer.with_usage(rowwise=False).quantize(x),
        "workspaces": workspaces,
        "dx": dx,
        "dweights": [d.t() @ g for d, g in flat],
        "dbiases": [d.sum(0) for d, _ in flat],
    }


def check(rank: int, world: int, name: str, mode: str | None, sequence_parallel: bool, groups: int) -> None:
    plan = plan_for(mode, sequence_parallel)
    rows = 64 if Move.ALL_GATHER in (plan.x,) else 128
    x = torch.randn(rows, 2, 32, dtype=torch.bfloat16)
    weights = [torch.randn(48, 32, dtype=torch.bfloat16) for _ in range(groups)]
    spec = LinearSpec(
        input_quantizer=VALUE_QUANTIZERS[name](),
        weight_quantizer=VALUE_QUANTIZERS[name](),
        plan=plan,
        ranks=world,
        cache_weight=True,
    )
    protos = tuple(to_tensor_proto(w) for w in weights)
    forward = linear_forward_protos(spec, to_tensor_proto(x), protos)
    backward = linear_backward_protos(spec, to_tensor_proto(x), protos, needs_dbias=True)
    real = real_linear(spec, x, weights, world)
    assert forward.out == to_tensor_proto(real["out"])
    assert forward.saved_input == to_tensor_proto(real["saved"])
    assert list(forward.weight_workspaces) == [to_tensor_proto(w) for w in real["workspaces"]]
    for proto, workspace in zip(forward.weight_workspaces, real["workspaces"], strict=True):
        made = proto.create_tensor()
        assert [t.shape for t in made.inner_tensors()] == [t.shape for t in workspace.inner_tensors()]
    assert backward.dx == to_tensor_proto(real["dx"])
    assert list(backward.dweights) == [to_tensor_proto(w) for w in real["dweights"]]
    assert list(backward.dbiases) == [to_tensor_proto(b) for b in real["dbiases"]]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", ["current_e4m3", "block_1d", "mxfp8_e4m3", "nvfp4"])
def test_protos_equal_a_real_layer(name: str, mode: tuple[str | None, bool], two_ranks: Callable[..., Any]) -> None:
    for groups in (1, 2):
        two_ranks(check, name, *mode, groups)


def test_what_is_not_asked_for_is_not_returned() -> None:
    x, w = TensorProto((8, 32), torch.bfloat16), TensorProto((16, 32), torch.bfloat16)
    forward = linear_forward_protos(LinearSpec(saves_input=False), x, (w,))
    assert forward.saved_input is None and forward.weight_workspaces == ()
    backward = linear_backward_protos(LinearSpec(), x, (w,), needs_dx=False, needs_dweight=False)
    assert (backward.dx, backward.dweights, backward.dbiases) == (None, (), ())
    quantizer = te_dist.MXFP8Quantizer("e4m3")
    primary = TensorProto((16, 32), torch.bfloat16, quantizer)
    spec = LinearSpec(weight_quantizer=quantizer, cache_weight=True)
    assert linear_forward_protos(spec, x, (primary,)).weight_workspaces == (), "a quantized weight is its own"


def test_protos_trace_with_symbolic_sizes() -> None:
    spec = LinearSpec(
        input_quantizer=te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=1),
        weight_quantizer=te_dist.Float8BlockQuantizer("e4m3"),
        plan=plan_for("column", True),
        ranks=4,
        cache_weight=True,
    )

    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        forward = linear_forward_protos(spec, to_tensor_proto(x), (to_tensor_proto(w),))
        saved = forward.saved_input.create_tensor()
        return [forward.out.create_tensor(), *saved.inner_tensors()]

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (8, 40):
        x, w = torch.empty(rows, 32, dtype=torch.bfloat16), torch.empty(16, 32, dtype=torch.bfloat16)
        assert [t.shape for t in compiled(x, w)] == [t.shape for t in function(x, w)]
        assert compiled(x, w)[0].shape == (4 * rows, 16)


def test_wrong_shapes() -> None:
    x = TensorProto((6, 32), torch.bfloat16)
    w = TensorProto((16, 32), torch.bfloat16)
    for spec, weights, message in (
        (LinearSpec(), (TensorProto((16, 31), torch.bfloat16),), r"expects shape \[N, 32\]"),
        (LinearSpec(), (w, TensorProto((8, 32), torch.bfloat16)), "weight 1 has 8 rows"),
        (LinearSpec(), (), "at least one weight"),
        (LinearSpec(plan=plan_for("row", True), ranks=4), (w,), "6 rows, which 4 ranks cannot share"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_forward_protos(spec, x, weights)
    with pytest.raises(ValueError, match="at least two dimensions"):
        linear_forward_protos(
            LinearSpec(plan=plan_for("column", True), ranks=2), TensorProto((32,), torch.bfloat16), (w,)
        )
    with pytest.raises(ValueError, match="at least one rank"):
        LinearSpec(ranks=0)
    for arguments in (("diagonal", False), (None, True)):
        with pytest.raises(ValueError, match="plan_for expects"):
            plan_for(*arguments)
