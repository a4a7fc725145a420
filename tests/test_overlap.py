"""Layers whose communication overlaps with their products, against the same layers without: equal bit for bit where no
sum crosses ranks or two numbers are added, close where the order of a sum differs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from overlap_cases import COLUMN_CONFIGS, ROW_CONFIGS, Case
from parallel_cases import RECIPES, SUMMED, compare, linear, local, parallel_twin, part, sample, sizes, step, tp_mesh
from patience import HUNG

from te_dist import ops
from te_dist import recipe as recipes
from te_dist.parallel import (
    RanksDisagree,
    TensorParallel,
    comm_report,
    overlap_report,
    overlapped,
    sequence_shards,
    set_overlap,
    shard_sizes,
)

Pools = Callable[[int], Any]
FULL = bool(os.environ.get("TE_DIST_FULL_MATRIX"))
# On a GPU all ranks of these tests share one device, which symmetric memory refuses by default.
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def same_as_plain(rank: int, world: int, device: str, cases: list[Case]) -> None:
    wrong: list[str] = []
    m, k, n = sizes(world)
    for case in cases:
        plain, other = case.layers(k, n, world, device)
        x, dy, args = case.data(m, k, n, rank, world, device)
        for turn in range(2):  # a second one finds buffers that the first has used
            expected = step(plain, x * (1 + turn), dy, *args)
            with overlap_report(other) as report:
                made = step(other, x * (1 + turn), dy, *args)
            inexact = case.summed() if world > 2 else set()
            exact = set() if "everything" in inexact else set(expected) - inexact
            # Behind several sums, and behind quantizing what a sum made, errors add up; of a whole layer they meet in
            # the gradients of its first norm, whose sums over rows cancel.
            floor = SUMMED if not case.is_block else (40.0 if case.recipe == "none" else 20.0)
            floor -= 4.0 if case.kind == "transformer" else 0.0
            # Attention does not depend on a bias of all keys: its gradient is what rounding leaves of zero.
            seen = {name for name in expected if exact or "key_bias" not in name}
            made, expected = ({name: found[name] for name in seen} for found in (made, expected))
            wrong += compare(f"{case} step {turn}", made, expected, exact, floor)
            ran = {(e.product, e.method) for e in report.entries}
            wanted = {(d.product, d.method) for d in report.decisions if d.method != "off"}
            # Beside dgrad in rings and pipelines there is no reduction left for wgrad; kept columns need no gather.
            kept = ("keep_gathered", True) in case.options
            missing = {w for w in wanted - ran if w[0] != "wgrad" and not (kept and w == ("dgrad", "bulk"))}
            if missing:
                wrong.append(f"{case}: {missing} did not run, of {wanted}")
    assert not wrong, "\n".join(wrong)


def linear_cases(column: list[str], row: list[str], recipes: Any = tuple(RECIPES)) -> list[Case]:
    return [
        *(Case("linear", "column", recipe, config) for recipe in recipes for config in column),
        *(Case("linear", "row", recipe, config) for recipe in recipes for config in row),
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_every_method_and_format(rank_pools: Pools, device: str, world: int) -> None:
    cases = linear_cases(list(COLUMN_CONFIGS), list(ROW_CONFIGS))
    if world == 4 and not FULL:
        cases = linear_cases(["ring", "pipeline"], ["default", "ring"], ("none", "delayed", "mxfp8"))
        cases += linear_cases(["default"], ["together"], ("current", "block", "nvfp4"))
    rank_pools(world).run(same_as_plain, device, cases)


LAYERS = [
    *(Case("layernorm_linear", "column", recipe, "default") for recipe in RECIPES),
    *(Case("layernorm_mlp", "column", recipe, "default") for recipe in RECIPES),
    *(Case("layernorm_mlp", "column", recipe, "ring") for recipe in ("current", "nvfp4")),
    *(Case("transformer", "column", recipe, "default") for recipe in ("none", "delayed", "block")),
    Case("transformer", "column", "mxfp8", "ring"),
    Case("grouped", "column", "current", "ring"),
    Case("grouped", "row", "mxfp8", "default"),
    Case("linear", "column", "mxfp8", "ring", (("keep_gathered", True),)),
    Case("linear", "column", "current", "default", (("keep_gathered", True),)),
    Case("linear", "row", "block", "ring", (("reduce_dtype", torch.float32),)),
    Case("linear", "column", "none", "pipeline", (("reduce_dtype", torch.float32),)),
]


@pytest.mark.parametrize("world", [2, 4])
def test_every_layer(rank_pools: Pools, device: str, world: int) -> None:
    cases = LAYERS if world == 2 or FULL else LAYERS[5::4]
    rank_pools(world).run(same_as_plain, device, cases)


# ------------------------------------------------------------------------------------------------- options
def options_of_layers(rank: int, world: int, device: str) -> None:
    """What a layer keeps and when it computes: backward in high precision or on dequantized operands, products that
    are not quantized, the original input kept, weight gradients later."""
    chosen = {
        "dequantized": recipes.Float8CurrentScaling(backward_override="dequantized"),
        "high precision": recipes.MXFP8BlockScaling(backward_override="high_precision"),
        "plain wgrad": recipes.Float8CurrentScaling(fp8_gemm_wgrad=recipes.MMParams(quantized=False)),
        "plain dgrad": recipes.MXFP8BlockScaling(fp8_gemm_dgrad=recipes.MMParams(quantized=False)),
    }
    m, k, n = sizes(world)
    wrong: list[str] = []
    for mode, config in (("column", "ring"), ("column", "pipeline"), ("row", "default"), ("row", "ring")):
        case = Case("linear", mode, "none", config)
        x, dy, _ = case.data(m, k, n, rank, world, device)
        for name, recipe in chosen.items():
            for options in ({}, {"save_original_input": True}, {"delay_wgrad_compute": True}):
                made = []
                for table in (None, case.table()):
                    layer = linear("linear", k, n, recipe, device, **options)
                    twin: Any = parallel_twin(layer, tp_mesh(world, device), mode, sequence_parallel=True)
                    if table is not None:
                        set_overlap(twin, "require", table)
                    leaf = x.detach().clone().requires_grad_()
                    y = twin(leaf)
                    y.backward(dy)
                    if "delay_wgrad_compute" in options:
                        twin.backward_dw()
                    grads = {key: local(p.grad) for key, p in twin.named_parameters()}
                    made.append({"y": y.detach(), "dx": leaf.grad, **grads})
                wrong += compare(f"{case} {name} {options}", made[1], made[0], set(made[0]), SUMMED)
    assert not wrong, "\n".join(wrong)


def test_options_of_layers(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(options_of_layers, device)


# ------------------------------------------------------------------------------------------------- sums
def partial(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.float() @ w.float()).to(torch.bfloat16)


def sums_in_rank_order(rank: int, world: int, device: str) -> None:
    """Documented: in float32, of what the ranks 0, 1, .. computed, rounded once."""
    m, k, n = sizes(world)
    for mode, configs in (("row", ROW_CONFIGS), ("column", COLUMN_CONFIGS)):
        for config in configs:
            case = Case("linear", mode, "none", config)
            _, layer = case.layers(k, n, world, device)
            x, dy, _ = case.data(m, k, n, rank, world, device)
            made = step(layer, x, dy)
            weight = layer.weight.to_local().detach()
            mine = partial(x, weight.t()) if mode == "row" else partial(dy, weight)
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, mine.cpu())
            total = torch.zeros(mine.shape)
            for theirs in everyone:
                total += theirs
            expected = total.to(torch.bfloat16).chunk(world)[rank]
            if mode == "row":
                expected = expected + local(layer.bias.detach()).cpu()
            actual = made["y" if mode == "row" else "dx"].cpu()
            assert torch.equal(actual, expected), (mode, config, rank)


def test_sums_are_in_the_documented_order(rank_pools: Pools) -> None:
    rank_pools(4).run(sums_in_rank_order, "cpu")


# ------------------------------------------------------------------------------------------------- sizes
def uneven(rank: int, world: int, device: str) -> None:
    wrong: list[str] = []
    for total in (world * 40 + 3, 3):  # the last ranks have less, or nothing
        rows = shard_sizes(total, world)
        for mode in ("column", "row"):
            for recipe, config in (("none", "ring"), ("current", "default"), ("mxfp8", "default"), ("block", "ring")):
                case = Case("linear", mode, recipe, config)
                k, n = 64 * world, 192
                plain, other = case.layers(k, n, world, device)
                x, dy = sample(total, k, device, 1), sample(total, n, device, 2)
                if mode == "column":
                    x, dy = x.split(rows)[rank], part(dy, 1, rank, world)
                else:
                    x, dy = part(x, 1, rank, world), dy.split(rows)[rank]
                with sequence_shards(rows):
                    expected, made = step(plain, x, dy), step(other, x, dy)
                # A sum over an empty or padded row is one of zeros; the order counts as everywhere.
                exact = set(expected) - (case.summed() if world > 2 else set())
                wrong += compare(f"{case} {rows}", made, expected, exact, SUMMED)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world", [2, 4])
def test_uneven_sizes(rank_pools: Pools, device: str, world: int) -> None:
    rank_pools(world).run(uneven, device)


def random_sizes(rank: int, world: int, device: str, count: int) -> None:
    """Any rows on any rank, any features that a recipe takes, any method; drawn alike on all ranks."""
    import random

    draw = random.Random(7)
    wrong: list[str] = []
    for number in range(count):
        mode = draw.choice(("column", "row"))
        recipe = draw.choice(("none", "current", "block", "mxfp8", "nvfp4"))
        case = Case("linear", mode, recipe, draw.choice(list(COLUMN_CONFIGS if mode == "column" else ROW_CONFIGS)))
        # Blocks of a weight do not straddle ranks; 128 also keeps the depth where the CPU adds up in one order.
        k, n = (world * draw.choice((32, 64, 128)) for _ in range(2))
        if recipe == "block":
            k, n = world * 128, world * 128
        rows = tuple(draw.choice((0, 1, 5, 31, 32, 40, 130)) for _ in range(world))
        plain, other = case.layers(k, n, world, device)
        x, dy = sample(sum(rows) + 8, k, device, number), sample(sum(rows) + 8, n, device, number + 1)
        x, dy = x[: sum(rows)], dy[: sum(rows)]
        if mode == "column":
            x, dy = x.split(rows)[rank], part(dy, 1, rank, world)
        else:
            x, dy = part(x, 1, rank, world), dy.split(rows)[rank]
        with sequence_shards(rows):
            expected, made = step(plain, x, dy), step(other, x, dy)
        wrong += compare(f"{number}: {case} {k}x{n} {rows}", made, expected, set(expected), SUMMED)
    assert not wrong, "\n".join(wrong)


def test_random_sizes(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(random_sizes, device, 200 if FULL else 40)


def one_rank(rank: int, world: int, device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, (world, 1), mesh_dim_names=("dp", "tp"))["tp"]
    plain = linear("linear", 64, 96, RECIPES["mxfp8"], device)
    twin = set_overlap(parallel_twin(plain, mesh, "column", sequence_parallel=True), "require")
    x, dy = sample(32, 64, device, 1), sample(32, 96, device, 2)
    with overlap_report(twin) as report:
        assert not compare("one rank", step(twin, x, dy), step(plain, x, dy), {"y", "dx", "weight", "bias"}, SUMMED)
    assert not report.entries and not report.decisions


def test_one_rank_has_nothing_to_overlap(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(one_rank, device)


# ------------------------------------------------------------------------------------------------- ops
def ops_chain(k: int, n: int, recipe: Any, device: str, comm: Any, collectives: bool) -> ops.Sequential:
    common = {"device": device, "dtype": torch.bfloat16, "recipe": recipe, "bias": False}
    torch.manual_seed(3)
    if collectives:
        local = n // comm.size
        return ops.Sequential(
            ops.AllGather(comm), ops.Linear(k, local, **common), ops.SReLU(), ops.Linear(local, k, **common),
            ops.ReduceScatter(comm),
        )  # fmt: skip
    both = {**common, "tensor_parallel_group": comm, "sequence_parallel": True}
    return ops.Sequential(
        ops.Linear(k, n, tensor_parallel_mode="column", **both),
        ops.SReLU(),
        ops.Linear(n, k, tensor_parallel_mode="row", **both),
    )


def ops_overlap(rank: int, world: int, device: str, names: list[str], compiled: bool) -> None:
    m, k, n = sizes(world)
    plain = TensorParallel.of(tp_mesh(world, device).get_group(), None)
    wrong: list[str] = []
    for name in names:
        for collectives in (False, True):
            one, two = (
                ops_chain(k, n, RECIPES[name], device, comm, collectives)
                for comm in (plain, overlapped(plain, "require", {"column_dgrad": "ring_exchange"}))
            )
            x, dy = (part(sample(m, k, device, seed), 0, rank, world) for seed in (1, 2))
            torch._dynamo.reset()
            call = torch.compile(two, fullgraph=True, backend="aot_eager") if compiled else None
            expected = list(step(one, x, dy).values())
            with overlap_report() as report:
                made = step(two, x, dy, call=call)
            wanted = dict(zip(made, expected, strict=True))
            wrong += compare(f"{name} collectives={collectives}", made, wanted, set(wanted), SUMMED)
            ran = {(e.product, e.method) for e in report.entries}
            if not {("fprop", "ring_exchange"), ("fprop", "pipeline"), ("dgrad", "ring_exchange")} <= ran:
                wrong.append(f"{name} collectives={collectives}: only {ran}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_operations_overlap(rank_pools: Pools, device: str, compiled: bool) -> None:
    names = ["mxfp8"] if compiled else ["none", "current", "block", "nvfp4"]
    rank_pools(2).run(ops_overlap, device, names, compiled)


# ------------------------------------------------------------------------------------------------- compiled
def compiled_equals_eager(rank: int, world: int, device: str, cases: list[tuple[Case, str]]) -> None:
    from torch._dynamo.backends.registry import lookup_backend

    m, k, n = 32 * world, 64, 256
    wrong: list[str] = []
    for case, backend in cases:
        _, eager = case.layers(k, n, world, device)
        _, module = case.layers(k, n, world, device)
        x, dy, args = case.data(m, k, n, rank, world, device)
        seen: list[str] = []

        def look(graph: Any, inputs: Any, backend: str = backend, seen: list[str] = seen) -> Any:
            seen.extend(str(node.target) for node in graph.graph.nodes)
            for _, inner in graph.named_children():
                seen.extend(str(node.target) for node in getattr(inner, "graph", graph.graph).nodes)
            return lookup_backend(backend)(graph, inputs)

        torch._dynamo.reset()
        call = torch.compile(module, fullgraph=True, backend=look)
        for turn in range(2):
            expected = step(eager, x, dy, *args)
            with overlap_report() as report:
                made = step(module, x, dy, *args, call=call)
            wrong += compare(f"{case} step {turn}", made, expected, set(expected), SUMMED)
            # With fprop off there is nothing to see in forward.
            in_forward = case.config == "only bulk" or report.select(phase="forward")
            if not in_forward or not report.select(phase="backward"):
                wrong.append(f"{case}: nothing overlapped")
        name = {"column": "all_gather_linear", "row": "linear_reduce_scatter"}[case.mode]
        if case.kind == "linear" and not any(name in target for target in seen):
            wrong.append(f"{case}: no {name} in {seen}")
        with torch.no_grad():
            if not torch.equal(call(x, *args), eager(x, *args)):
                wrong.append(f"{case}: no_grad")
    assert not wrong, "\n".join(wrong)


COMPILED = [
    (Case("linear", "column", "current", "ring"), "aot_eager"),
    (Case("linear", "row", "mxfp8", "default"), "aot_eager"),
    (Case("layernorm_mlp", "column", "nvfp4", "default"), "aot_eager"),
]
if FULL:
    COMPILED = [
        (Case(kind, mode, recipe, config), "aot_eager")
        for recipe in RECIPES
        for kind, mode, configs in (
            ("linear", "column", COLUMN_CONFIGS), ("linear", "row", ROW_CONFIGS),
            ("layernorm_linear", "column", ["ring"]), ("layernorm_mlp", "column", ["default", "ring"]),
            ("transformer", "column", ["default"]),
        )
        for config in configs
    ] + [(Case("transformer", "column", "current", "default"), "inductor")]  # fmt: skip


SHARES = 8 if FULL else 1  # compiling all of them takes longer than one test may


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("world", [2, 4] if FULL else [2])
def test_compiled_equals_eager(rank_pools: Pools, device: str, world: int, share: int) -> None:
    rank_pools(world).run(compiled_equals_eager, device, COMPILED[share::SHARES])


# ------------------------------------------------------------------------------------------------- what is said
def reports(rank: int, world: int, device: str) -> None:
    m, k, n = sizes(world)
    earlier = set(threading.enumerate())  # an exchange that failed, in another file's tests, waits for its timeout
    case = Case("linear", "column", "mxfp8", "default")
    plain, layer = case.layers(k, n, world, device)
    x, dy, _ = case.data(m, k, n, rank, world, device)
    with comm_report() as before:
        step(plain, x, dy)
    with comm_report() as after, overlap_report(layer) as report:
        step(layer, x, dy)
    assert before.bytes(kind="all_gather") == after.bytes(kind="all_gather"), "the same bytes travel"
    # Of what is scattered a rank keeps its own part for itself.
    assert after.bytes(kind="reduce_scatter") == before.bytes(kind="reduce_scatter") * (world - 1) // world
    fprop, dgrad, wgrad = (report.select(product=p)[0] for p in ("fprop", "dgrad", "wgrad"))
    assert (fprop.method, fprop.chunks, fprop.phase) == ("ring_exchange", world, "forward")
    assert (dgrad.method, wgrad.method) == ("bulk", "bulk")
    assert fprop.bytes == after.bytes(kind="all_gather", phase="forward")
    assert fprop.bytes == m // world * (k + k // 32), "data and scales"
    assert wgrad.bytes == 2 * m * k * (world - 1) // world
    assert 0 <= report.exposed() < HUNG and fprop.exposed > 0
    text = str(report)
    assert "ring_exchange" in text and "exposed ms" in text and f"{fprop.bytes:,}" in text
    # Column planes of dy travel beside dgrad, or over the group's own backend.
    for config, methods in (("default", ["bulk"]), ("together", [])):
        row = Case("linear", "row", "mxfp8", config)
        with overlap_report() as of_row:
            step(row.layers(k, n, world, device)[1], *row.data(m, k, n, rank, world, device)[:2])
        assert [e.method for e in of_row.select(product="wgrad")] == methods
    set_overlap(layer, "off")
    with overlap_report(layer) as off:
        step(layer, x, dy)

    def of_messages() -> bool:
        return any(t.name == "te_dist messages" for t in set(threading.enumerate()) - earlier)

    until = time.monotonic() + HUNG
    while of_messages() and time.monotonic() < until:
        time.sleep(0.01)
    assert not of_messages(), "threads end with their exchange"
    assert not off.entries and "layer: off" in str(off).lower().replace("linear: off", "layer: off")


def test_the_report_says_what_ran(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(reports, device)


def different_tables(rank: int, world: int) -> None:
    config = {"row_fprop": "ring_exchange" if rank else "pipeline"}
    layer = parallel_twin(linear("linear", 256, 256, None, "cpu"), tp_mesh(world), "row", sequence_parallel=True)
    set_overlap(layer, "require", config)
    with pytest.raises(RanksDisagree, match=r"pipeline[\s\S]*ring_exchange"):
        layer(sample(64, 128, "cpu", 1))


def test_ranks_with_different_tables_disagree(rank_pools: Pools) -> None:
    rank_pools(2).run(different_tables)


def ops_are_sound(rank: int, world: int) -> None:
    """Schema, and fakes that have the shapes of the real thing, of the fused ops."""
    from te_dist.pipeline.config import CallFlags
    from te_dist.recipe import MXFP8BlockScaling

    for mode, op in (("column", "all_gather_linear"), ("row", "linear_reduce_scatter")):
        case = Case("linear", mode, "mxfp8", "ring")
        _, layer = case.layers(128, 256, world, "cpu")
        x, _, _ = case.data(64, 128, 256, rank, world, "cpu")
        params = [local(p.detach()) for p in (layer.weight, layer.bias)]
        recipe, flags = MXFP8BlockScaling(), CallFlags(True, (True, True))
        weights = torch.ops.te_dist.quantize_weights_exchanged(params, None, layer.spec, recipe, flags)
        given = (x, params, weights, None, [], None, layer.spec, recipe, flags, torch.bfloat16)
        overload = getattr(torch.ops.te_dist, op).default
        torch.library.opcheck(overload, given, test_utils=["test_schema", "test_faketensor"])
        with overlap_report() as report:
            made = overload(*given)
        assert report.entries and torch.equal(made[0], layer(x)), op


def test_the_fused_ops_have_fakes(rank_pools: Pools) -> None:
    rank_pools(2).run(ops_are_sound)
