"""What a fuser does with its operations, in words."""

from __future__ import annotations

from te_dist.ops.basic import Activation, AddExtraInput, AllReduce, Dropout, GroupedLinear, MakeExtraOutput, Quantize
from te_dist.ops.basic.basic_linear import LinearOperation
from te_dist.ops.basic.norm import Norm
from te_dist.ops.fused.linear_chain import match_stage, why_not_chained
from te_dist.ops.op import BasicOperation
from te_dist.ops.plan import FusionPlan, Step


def explain_plan(plan: FusionPlan, first: int = 0) -> list[str]:
    """Lines: the steps of both passes, and for neighbours in the forward that are apart, why."""
    lines = ["  forward"]
    lines += [f"    {_described(step, plan, first)}" for step in plan.forward]
    if [(type(s.op), s.first) for s in plan.forward] == [(type(s.op), s.first) for s in plan.backward]:
        lines.append("  backward: the same, in reverse")
    else:
        lines.append("  backward")
        lines += [f"    {_described(step, plan, first)}" for step in reversed(plan.backward)]
    apart = []
    for before, after in zip(plan.forward, plan.forward[1:], strict=False):
        a, b = plan.basic_ops[before.last - 1], plan.basic_ops[after.first]
        reason = why_apart(plan.basic_ops, before.last - 1)
        apart.append(f"    {first + before.last - 1} {a.label()} | {first + after.first} {b.label()}: {reason}")
    return [*lines, "  not fused", *apart] if apart else lines


def _described(step: Step, plan: FusionPlan, first: int) -> str:
    parts = [f"{first + i} {plan.basic_ops[i].label()}" for i in range(step.first, step.last)]
    return f"{type(step.op).__name__}({', '.join(parts)})" if step.op.is_fused_op else parts[0]


def why_apart(ops: list[BasicOperation], at: int) -> str:
    """Why operations `at` and `at` + 1 are not one step."""
    a, b = ops[at], ops[at + 1]
    for op in (a, b):
        if not op._split_forward:
            return f"{op.label()} is written against the legacy API, which no fusion looks into"
        if isinstance(op, Activation) and op.cache_quantized_input:
            return f"{op.label()} keeps its input quantized, which no product does for it"
    if isinstance(b, Norm | Activation | Quantize) and at + 2 >= len(ops) and not isinstance(a, LinearOperation):
        return f"no linear operation follows that would take {b.label()} in"
    earlier = next((s for i in range(at, -1, -1) if (s := match_stage(ops, i)) and i + len(s.ops) == at + 1), None)
    later = match_stage(ops, at + 1)
    if earlier is not None and later is not None:
        return why_not_chained(earlier, later) or "a fusion that comes earlier has taken one of them"
    if isinstance(a, Norm) and len(a.normalized_shape) > 1:
        return f"{a.label()} normalizes several dimensions, a product has one"
    if isinstance(a, Norm | Activation):
        return f"{a.label()} can only be made on the way into a linear operation, and {b.label()} is none"
    if isinstance(a, GroupedLinear) or isinstance(b, GroupedLinear):
        return "only GroupedLinears and what is made on the way into them fuse with one another"
    if isinstance(b, AllReduce) and b.reduce_in_backward and earlier is not None:
        return f"{b.label()} sums gradients as well, which is not row parallelism; reduce_in_backward=False fuses"
    if isinstance(b, AddExtraInput):
        return f"the sum is written into a product's result, and {a.label()} is no product"
    if isinstance(a, MakeExtraOutput):
        return f"{a.label()} copies nothing in the forward; its sum in the backward may be fused"
    for op in (a, b):
        if isinstance(op, Dropout):
            return f"no kernel makes {op.label()} together with its neighbours"
    return f"no fusion is registered for {a.label()} and {b.label()}"
