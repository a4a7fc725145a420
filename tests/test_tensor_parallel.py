"""Layers over several ranks against one process: bit-equal where no sum crosses ranks, close where one does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_cases import sqnr
from layer_cases import FLOORS
from parallel_cases import (
    MODES,
    RECIPES,
    SUMMED,
    compare,
    differing,
    linear,
    local,
    parallel_twin,
    param_dim,
    part,
    sample,
    shake,
    sizes,
    step,
    tp_mesh,
)

import te_dist
from te_dist import recipe as recipes
from te_dist.formats import ceil_div, round_up
from te_dist.parallel import comm_report, sequence_shards, shard_sizes

Pools = Callable[[int], Any]


def expected_parts(
    one: dict[str, torch.Tensor], twin: Any, mode: str, sp: bool, rank: int, world: int
) -> dict[str, torch.Tensor]:
    """This rank's part of what one process got."""
    rows = 0 if sp else None
    y_dim, dx_dim = (1, rows) if mode == "column" else (rows, 1)
    made = {"y": part(one["y"], y_dim, rank, world), "dx": part(one["dx"], dx_dim, rank, world)}
    for name in one:
        if name not in made:
            made[name] = part(one[name], param_dim(twin, name), rank, world)
    return made


def linear_matches(rank: int, world: int, device: str, kind: str, names: list[str], options: dict[str, Any]) -> None:
    m, k, n = sizes(world)
    wrong: list[str] = []
    for recipe in names:
        for label, (mode, sp) in MODES.items():
            if kind == "layernorm_linear" and mode == "row":
                continue
            layer = linear(kind, k, n, RECIPES[recipe], device)
            twin = parallel_twin(layer, tp_mesh(world, device), mode, sequence_parallel=sp, **options)
            x, dy = sample(m, k, device, 1), sample(m, n, device, 2)
            x_dim, dy_dim = (0 if sp else None, 1) if mode == "column" else (1, 0 if sp else None)
            exact = {"weight", "bias"} | ({"y"} if mode == "column" else {"dx"})
            if sp and mode == "row":
                exact -= {"bias"}  # summed over the ranks
            if kind == "layernorm_linear" and sp:
                # The norm's own sums over rows are made rank by rank.
                exact -= {"layer_norm_weight", "layer_norm_bias"}
            for _ in range(2 if recipe == "delayed" else 1):  # a second step has scales that were recorded
                one = step(layer, x, dy)
                mine = step(twin, part(x, x_dim, rank, world), part(dy, dy_dim, rank, world))
                expected = expected_parts(one, twin, mode, sp, rank, world)
                wrong += compare(f"{recipe} {label}", mine, expected, exact, SUMMED)
            if recipe == "delayed":
                for buffer in ("fp8_scale", "fp8_amax_history"):
                    if not torch.equal(getattr(layer, buffer), getattr(twin, buffer)):
                        wrong.append(f"{label} {buffer}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear"])
@pytest.mark.parametrize("world", [2, 4])
def test_linear_matches_one_process(rank_pools: Pools, device: str, world: int, kind: str) -> None:
    names = list(RECIPES) if world == 2 else ["current", "mxfp8"]
    rank_pools(world).run(linear_matches, device, kind, names, {})


# ------------------------------------------------------------------------------------------------- LayerNormMLP
def mlp_matches(rank: int, world: int, device: str, names: list[str], activation: str) -> None:
    m, k, n = sizes(world)
    wrong: list[str] = []
    for recipe in names:
        for sp in (False, True):
            layer = linear(
                "layernorm_mlp", k, n, RECIPES[recipe], device, activation=activation, split_gate=activation == "swiglu"
            )
            twin = parallel_twin(layer, tp_mesh(world, device), "column", sequence_parallel=sp)
            x, dy = sample(m, k, device, 1), sample(m, k, device, 2)
            rows = 0 if sp else None
            one = step(layer, x, dy)
            mine = step(twin, part(x, rows, rank, world), part(dy, rows, rank, world))
            expected = {
                name: part(value, rows if name in ("y", "dx") else param_dim(twin, name), rank, world)
                for name, value in one.items()
            }
            # dy reaches fc2 as it was; what comes after fc1's gradient has crossed ranks.
            exact = {"fc2_weight"} | ({"fc2_bias"} if not sp else set())
            exact |= {name for name in one if name.startswith("fc1_")}
            wrong += compare(f"{recipe} sp={sp}", mine, expected, exact, SUMMED, flips=recipe)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("world", "activation"), [(2, "gelu"), (2, "swiglu"), (4, "swiglu")])
def test_mlp_matches_one_process(rank_pools: Pools, device: str, world: int, activation: str) -> None:
    names = list(RECIPES) if world == 2 else ["current", "nvfp4"]
    rank_pools(world).run(mlp_matches, device, names, activation)


# ------------------------------------------------------------------------------------------------- GroupedLinear
def rank_order(rows_by_rank: list[list[int]]) -> list[int]:
    """Positions of a group-by-group whole in the order in which the ranks' shards, one after another, have them."""
    starts, at = {}, 0
    for group in range(len(rows_by_rank[0])):
        for rank in range(len(rows_by_rank)):
            starts[rank, group] = at
            at += rows_by_rank[rank][group]
    return [
        starts[rank, group] + i
        for rank in range(len(rows_by_rank))
        for group in range(len(rows_by_rank[0]))
        for i in range(rows_by_rank[rank][group])
    ]


def grouped_matches(
    rank: int,
    world: int,
    device: str,
    rows: list[list[int]],
    equal: bool,
    single: bool,
    features: tuple[int, int] | None = None,
) -> None:
    """`rows`: of each group, for each rank. The whole holds group 0 of rank 0, of rank 1, ..., then group 1."""
    k, n = features or sizes(world)[1:]
    totals = [sum(r[g] for r in rows) for g in range(3)]
    m = sum(totals)
    order = torch.tensor(rank_order(rows), dtype=torch.int64, device=device)
    shards = [sum(r) for r in rows]
    wrong: list[str] = []
    for recipe in RECIPES:
        for label, (mode, sp) in MODES.items():
            options = {"single_grouped_weight": single, "single_grouped_bias": single}
            layer = linear("grouped", k, n, RECIPES[recipe], device, **options)
            twin = parallel_twin(layer, tp_mesh(world, device), mode, sequence_parallel=sp)
            x, dy = sample(m, k, device, 1), sample(m, n, device, 2)
            one = step(layer, x, dy, totals)
            feature = {"x": 1, "dx": 1} if mode == "row" else {"dy": 1, "y": 1}
            data = {"x": x, "dy": dy, "y": one["y"], "dx": one["dx"]}
            spread = {"x", "dx"} if mode == "column" else {"y", "dy"}
            mine = {}
            for name, value in data.items():
                if name in feature:
                    mine[name] = part(value, 1, rank, world)
                elif sp and name in spread:
                    mine[name] = value[order].split(shards)[rank]
                else:
                    mine[name] = value
            expected = {"y": mine["y"], "dx": mine["dx"]}
            expected |= {k: part(v, param_dim(twin, k), rank, world) for k, v in one.items() if k not in expected}
            splits = rows[rank] if sp and mode == "column" else totals
            scope = sequence_shards(rows) if sp and not equal else contextlib.nullcontext()
            with scope:
                made = step(twin, mine["x"], mine["dy"], splits)
            exact = {name for name in one if "weight" in name or "bias" in name}
            exact |= {"y"} if mode == "column" else {"dx"}
            if sp:
                if mode == "row":
                    exact = {name for name in exact if "bias" not in name}
                if any(r[g] % 128 for r in rows for g in range(3)) and recipe in ("block", "mxfp8", "nvfp4"):
                    # Blocks along the rows begin at each rank's first row: other blocks than one process has.
                    exact = {name for name in exact if "weight" not in name}
            if not equal:
                exact -= {"y", "dx"}  # padded rows are multiplied too, in products of another size
            if features is not None:
                exact = set()  # products of another width
            floor = SUMMED if exact & {"weight", "weight0"} else min(SUMMED, FLOORS[recipe] - 3)
            wrong += compare(f"{recipe} {label}", made, expected, exact, floor)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("single", [False, True])
def test_grouped_matches_one_process(rank_pools: Pools, device: str, single: bool) -> None:
    rows = [[128, 0, 256]] * 2
    rank_pools(2).run(grouped_matches, device, rows, True, single)


def test_grouped_with_uneven_rows(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(grouped_matches, device, [[7, 0, 40], [3, 33, 0]], False, False)


def test_grouped_with_empty_shards(rank_pools: Pools, device: str) -> None:
    rows = [[7, 0, 20], [0, 0, 0], [3, 2, 0], [0, 33, 1]]
    rank_pools(4).run(grouped_matches, device, rows, False, False, (48, 6))


def device_splits_match(rank: int, world: int, device: str, compiled: bool) -> None:
    """Groups whose sizes only the device knows, and which differ from rank to rank where shards are gathered."""
    wrong: list[str] = []
    choices = [*((name, False) for name in RECIPES), ("current", True), ("none", True)]
    for recipe, keep in [("mxfp8", False), ("current", True)] if compiled else choices:
        for label, (mode, sp) in MODES.items():
            if keep and not sp:  # nothing is gathered that could be kept
                continue
            # Whole blocks in each rank's share, and one block on the other side: torch's grouped product is slow here.
            _, k, n = sizes(world)
            k, n = (k // world, n) if mode == "column" else (k, n // world)
            rows = [[10, 0, 22], [5, 20, 7]] if mode == "column" else [[12, 0, 20]] * 2
            totals, shards = [sum(r[g] for r in rows) for g in range(3)], [sum(r) for r in rows]
            order = torch.tensor(rank_order(rows), dtype=torch.int64, device=device)
            layer = linear("grouped", k, n, RECIPES[recipe], device)
            layer._keep_splits_on_device = True
            twin = parallel_twin(layer, tp_mesh(world, device), mode, sequence_parallel=sp, keep_gathered=keep)
            x, dy = sample(sum(totals), k, device, 1), sample(sum(totals), n, device, 2)
            on_device = torch.tensor(totals, device=device)
            one = step(layer, x, dy, on_device)

            def mine(value: torch.Tensor, name: str, order: Any = order, shards: Any = shards, m: str = mode,
                     sp: bool = sp) -> torch.Tensor:  # fmt: skip
                if (name in ("x", "dx")) == (m == "row"):  # the side whose features are spread
                    return part(value, 1, rank, world)
                return value[order].split(shards)[rank] if sp else value

            expected = {"y": mine(one["y"], "y"), "dx": mine(one["dx"], "dx")}
            expected |= {k: part(v, param_dim(twin, k), rank, world) for k, v in one.items() if k not in expected}
            splits = torch.tensor(rows[rank], device=device) if sp and mode == "column" else on_device
            torch._dynamo.reset()
            call = torch.compile(twin, fullgraph=True, backend="aot_eager") if compiled else None
            with comm_report() as report:
                made = step(twin, mine(x, "x"), mine(dy, "dy"), splits, call=call)
            if compiled:
                wrong += differing(f"{recipe} {label}", made, step(twin, mine(x, "x"), mine(dy, "dy"), splits))
            # All rows are quantized at once, row by row: shards change nothing but the order of sums.
            wrong += compare(f"{recipe} {label} {keep}", made, expected, set(), SUMMED)
            wide = {c.dtype for c in report.select(kind="all_gather")} - {"uint8", "int32"}
            assert not wide or recipe == "none", (recipe, label, wide)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_grouped_with_splits_on_the_device(rank_pools: Pools, device: str, compiled: bool) -> None:
    rank_pools(2).run(device_splits_match, device, compiled)


# ------------------------------------------------------------------------------------------------- uneven
UNEVEN_KINDS = ("linear", "layernorm_linear", "layernorm_mlp", "transformer")


def uneven_layer(kind: str, k: int, n: int, recipe: str, device: str) -> Any:
    if kind == "transformer":
        # Behind an attention, gradients of two columns are mostly errors: not so few of them.
        return transformer(k, max(n, 22), 4, recipe, device, num_gqa_groups=4)
    options = {"activation": "swiglu", "split_gate": True} if kind == "layernorm_mlp" else {}
    return linear(kind, k, n, RECIPES[recipe], device, **options)


def uneven_matches(rank: int, world: int, device: str, kind: str, tokens: int, features: tuple[int, int]) -> None:
    """Tokens and features that the ranks cannot share evenly, or of which some rank has none."""
    k, n = features
    rows = shard_sizes(tokens, world)
    is_block = kind in ("layernorm_mlp", "transformer")
    modes = MODES if kind == "linear" else {label: mode for label, mode in MODES.items() if mode[0] == "column"}
    wrong: list[str] = []
    truth: dict[str, torch.Tensor] = {}
    for recipe in RECIPES:
        for label, (mode, sp) in modes.items():
            layer = uneven_layer(kind, k, n, recipe, device)
            twin = parallel_twin(layer, tp_mesh(world, device), mode, sequence_parallel=sp)
            width = k if is_block else n
            # [s, b, K]: the shards are of the first dimension, with 2 rows each
            x, dy = sample(2 * tokens, k, device, 1).view(tokens, 2, k), sample(2 * tokens, width, device, 2)
            dy = dy.view(tokens, 2, width)
            spread = 0 if sp else None
            x_dim, dy_dim = (spread, spread if is_block else 2) if mode == "column" else (2, spread)
            truth = truth or step(uneven_layer(kind, k, n, "none", device).float(), x.float(), dy.float())
            for _ in range(2 if recipe == "delayed" else 1):
                one = step(layer, x, dy)
                with sequence_shards(rows) if sp else contextlib.nullcontext():
                    mine = step(twin, part(x, x_dim, rank, world), part(dy, dy_dim, rank, world))
            expected = {"y": part(one["y"], dy_dim, rank, world), "dx": part(one["dx"], x_dim, rank, world)}
            expected |= {k: part(v, param_dim(twin, k), rank, world) for k, v in one.items() if k not in expected}
            for result in (mine, expected):  # what softmax cannot see has a gradient of nothing but errors
                result.pop("self_attention.layernorm_qkv.key_bias", None)
            # Only scales of whole tensors, and of rows, are independent of where a shard ends.
            floor = min(SUMMED, FLOORS[recipe] - 3)
            for name, value in expected.items():
                least = floor
                if is_block and value.numel():
                    # Errors grow behind a softmax, and where sums cancel. Other blocks and another order are as far
                    # from float32 as one process is: 3 dB for the two of them, and 6 of slack for parts of a few
                    # elements. Zeros would have 0 dB.
                    dim = dy_dim if name == "y" else x_dim if name == "dx" else param_dim(twin, name)
                    reach = sqnr(value, part(truth[name], dim, rank, world).double())
                    least = max(0.5, min(floor, reach) - 9)
                    # The one element of a part may be far off by chance, or near to float32 in one process. On a GPU
                    # that happens: there the error of the whole tensor decides, times sqrt(2) for the two of them,
                    # times 3 standard deviations.
                    error = (mine[name].double() - value.double()).square().mean().sqrt()
                    noise = (one[name].double() - truth[name].double()).square().mean().sqrt()
                    if device == "cuda" and error <= 3 * 2**0.5 * noise:
                        least = -torch.inf
                wrong += compare(f"{recipe} {label}", {name: mine[name]}, {name: value}, set(), least)
            exact = recipe in ("none", "current", "delayed") and mode == "column" and not is_block and device == "cpu"
            if exact and not torch.equal(mine["y"], expected["y"]):
                wrong.append(f"{recipe} {label}: y is not equal")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", UNEVEN_KINDS)
@pytest.mark.parametrize(("world", "tokens", "features"), [(2, 9, (48, 68)), (4, 5, (48, 6))])
def test_uneven_and_empty_shards(
    rank_pools: Pools, device: str, world: int, tokens: int, features: tuple[int, int], kind: str
) -> None:
    rank_pools(world).run(uneven_matches, device, kind, tokens, features)


# ------------------------------------------------------------------------------------------------- TransformerLayer
def transformer(hidden: int, ffn: int, heads: int, recipe: str, device: str, **options: Any) -> Any:
    torch.manual_seed(3)
    layer = te_dist.TransformerLayer(
        hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, activation="swiglu",
        params_dtype=torch.bfloat16, recipe=RECIPES[recipe], device=device, **options,
    )  # fmt: skip
    layer.layernorm_mlp._split_gate()
    return shake(layer)


def transformer_matches(rank: int, world: int, device: str, names: list[str]) -> None:
    wrong: list[str] = []
    for recipe in names:
        for sp in (False, True):
            for fused in (False, True):
                layer = transformer(
                    128 * world, 256 * world, 2 * world, recipe, device, num_gqa_groups=world, fuse_qkv_params=fused,
                    output_layernorm=fused,
                )  # fmt: skip
                twin = parallel_twin(layer, tp_mesh(world, device), "column", sequence_parallel=sp)
                s, b, h = 32 * world, 2, 128 * world
                x, dy = sample(s * b, h, device, 1).view(s, b, h), sample(s * b, h, device, 2).view(s, b, h)
                if fused:  # no norm before the attention: keep its softmax from saturating
                    x = x / 32
                rows = 0 if sp else None
                one = step(layer, x, dy)
                mine = step(twin, part(x, rows, rank, world), part(dy, rows, rank, world))
                expected = {
                    name: part(value, rows if name in ("y", "dx") else param_dim(twin, name), rank, world)
                    for name, value in one.items()
                }
                for result in (mine, expected):  # what softmax cannot see has a gradient of nothing but errors
                    result.pop("self_attention.layernorm_qkv.key_bias" if not fused else "self_attention.qkv.bias")
                # A rounding of a sum that differs by a bit moves the scales and roundings of every later operand: the
                # errors of two layers, each made twice.
                wrong += compare(f"{recipe} sp={sp}", mine, expected, set(), min(38.0, FLOORS[recipe] - 6))
    assert not wrong, "\n".join(wrong)


def test_transformer_layer_matches_one_process(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(transformer_matches, device, list(RECIPES))


# ------------------------------------------------------------------------------------------------- options
def options_match(rank: int, world: int, device: str) -> None:
    """Choices that change what is kept or sent, but not the result."""
    m, k, n = sizes(world)
    x, dy = sample(m, k, device, 1), sample(m, n, device, 2)
    wrong: list[str] = []
    dequantized = recipes.MXFP8BlockScaling(backward_override="dequantized")
    unquantized = recipes.Float8CurrentScaling(fp8_gemm_wgrad=recipes.MMParams(quantized=False))
    high = recipes.Float8CurrentScaling(backward_override="high_precision")
    cases: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
        *((f"keep {name}", recipe, {}, {"keep_gathered": True}) for name, recipe in RECIPES.items()),
        ("original", RECIPES["mxfp8"], {"save_original_input": True}, {}),
        ("original delayed", RECIPES["delayed"], {"save_original_input": True}, {}),
        ("dequantized", dequantized, {}, {}),
        ("unquantized wgrad", unquantized, {}, {}),
        ("high precision backward", high, {}, {}),
        ("float32 sums", RECIPES["mxfp8"], {}, {"reduce_dtype": torch.float32}),
    ]
    for label, recipe, layer_options, options in cases:
        for mode in ("column", "row"):
            layer = linear("linear", k, n, recipe, device, **layer_options)
            twin = parallel_twin(layer, tp_mesh(world, device), mode, sequence_parallel=True, **options)
            one = step(layer, x, dy)
            x_dim, dy_dim = (0, 1) if mode == "column" else (1, 0)
            mine = step(twin, part(x, x_dim, rank, world), part(dy, dy_dim, rank, world))
            expected = expected_parts(one, twin, mode, True, rank, world)
            exact = {"weight", "y", "bias"} if mode == "column" else {"weight", "dx"}
            # Sums in float32 are those of one process but for their order: few results round differently.
            floor = 60.0 if label == "float32 sums" else SUMMED
            wrong += compare(f"{label} {mode}", mine, expected, exact, floor)
    assert not wrong, "\n".join(wrong)


def test_options_do_not_change_results(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(options_match, device)


def norms_keep_gathered(rank: int, world: int, device: str) -> None:
    """Only quantized operands are kept gathered: what wgrad reads in high precision is gathered again."""
    m, k, n = sizes(world)
    unquantized = recipes.Float8CurrentScaling(fp8_gemm_wgrad=recipes.MMParams(quantized=False))
    for recipe in (None, RECIPES["mxfp8"], unquantized):
        for kind, width in (("layernorm_linear", n), ("layernorm_mlp", k)):
            plain, keeps = (
                parallel_twin(
                    linear(kind, k, n, recipe, device), tp_mesh(world, device), "column", sequence_parallel=True,
                    keep_gathered=keep,
                )
                for keep in (False, True)
            )  # fmt: skip
            x, dy = part(sample(m, k, device, 1), 0, rank, world), sample(m, width, device, 2)
            dy = part(dy, 1 if kind == "layernorm_linear" else 0, rank, world)
            one, two = step(plain, x, dy), step(keeps, x, dy)
            assert all(torch.equal(one[name], two[name]) for name in one), (recipe, kind)


def test_norms_keep_gathered(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(norms_keep_gathered, device)


def norm_output_matches(rank: int, world: int, device: str) -> None:
    """The norm's output comes back whole, in the collective that x travels in; gradients of it are summed."""
    mesh, k = tp_mesh(world, device), 128 * world
    wrong: list[str] = []
    for kind, recipe, gathered, rows, compiled in (
        *(("layernorm_linear", name, True, (128,) * world, False) for name in RECIPES),
        ("layernorm_linear", "mxfp8", False, (128,) * world, False),
        ("layernorm_mlp", "current", True, (128,) * world, False),
        ("layernorm_mlp", "mxfp8", True, (9, 4), False),
        ("layernorm_linear", "none", True, (9, 4), False),
        ("layernorm_linear", "mxfp8", True, (128,) * world, True),
        ("layernorm_mlp", "none", True, (32,) * world, True),
    ):
        what = f"{kind} {recipe} {gathered} {rows} {compiled}"
        options = {"return_layernorm_output": True, "return_layernorm_output_gathered": gathered}
        layer = linear(kind, k, k, RECIPES[recipe], device, **options)
        twin = parallel_twin(layer, mesh, "column", sequence_parallel=True)
        is_block, tokens = kind == "layernorm_mlp", sum(rows)
        x, dy = sample(2 * tokens, k, device, 1).view(tokens, 2, k), sample(2 * tokens, k, device, 2).view(tokens, 2, k)
        # Every rank has another gradient for the norm's output: of the whole, or of its own rows.
        parts = [sample(2 * tokens, k, device, 3 + r).view(tokens, 2, k) for r in range(world)]
        mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        whole_dnorm = (parts[0] + parts[1]) if gathered else parts[0]
        one = both_outputs(layer, x, dy, whole_dnorm)
        my_dy = dy[mine] if is_block else part(dy, 2, rank, world)
        my_dnorm = parts[rank] if gathered else parts[0][mine]
        torch._dynamo.reset()
        call = torch.compile(twin, fullgraph=True, backend="aot_eager") if compiled else twin
        with sequence_shards(rows), comm_report() as report:
            made = both_outputs(twin, x[mine], my_dy, my_dnorm, call)
            with torch.no_grad():
                again = twin(x[mine])[1]
        assert torch.equal(again, made["norm"]), what
        expected = {
            "y": one["y"][mine] if is_block else part(one["y"], 2, rank, world),
            "norm": one["norm"] if gathered else one["norm"][mine],
            "dx": one["dx"][mine],
            **{n: part(v, param_dim(twin, n), rank, world) for n, v in one.items() if n not in ("y", "norm", "dx")},
        }
        # One more rounding than SUMMED knows: dx with the gradient of the norm's output, rank by rank.
        floor = min(SUMMED, FLOORS[recipe] - 3) if is_block or rows[0] % 128 else SUMMED - 3
        wrong += compare(what, made, expected, {"norm"}, floor, flips=recipe if is_block else None)
        forward = report.select(kind="all_gather", phase="forward")
        if not is_block:
            travels = "bfloat16" if recipe == "none" else "uint8+bfloat16" if gathered else "uint8"
            assert [c.dtype for c in forward] == [travels] * 2, (what, [c.dtype for c in forward])
        assert len(forward) == 2 and len(report.select(kind="reduce_scatter", phase="backward")) == 1, what
    assert not wrong, "\n".join(wrong)


def both_outputs(module: Any, x: Any, dy: Any, dnorm: Any, call: Any = None) -> dict[str, torch.Tensor]:
    module.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    y, norm = (module if call is None else call)(leaf)
    torch.autograd.backward([y, norm], [dy, dnorm])
    grads = {name: local(param.grad) for name, param in module.named_parameters()}
    return {"y": y.detach(), "norm": norm.detach(), "dx": leaf.grad, **grads}


def test_norm_output_gathered(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(norm_output_matches, device)


def local_amaxes(rank: int, world: int, device: str) -> None:
    m, k, n = sizes(world)
    for recipe in ("current", "nvfp4"):
        for label, (mode, sp) in MODES.items():
            layer = linear("linear", k, n, RECIPES[recipe], device)
            twin = parallel_twin(layer, tp_mesh(world, device), mode, sequence_parallel=sp, amax="local")
            x, dy = sample(m, k, device, 1), sample(m, n, device, 2)
            x_dim, dy_dim = (0 if sp else None, 1) if mode == "column" else (1, 0 if sp else None)
            one = step(layer, x, dy)
            with comm_report() as report:
                mine = step(twin, part(x, x_dim, rank, world), part(dy, dy_dim, rank, world))
            expected = expected_parts(one, twin, mode, sp, rank, world)
            # Scales of a part are at least as fine as those of the whole.
            assert not compare(f"{recipe} {label}", mine, expected, set(), FLOORS[recipe] - 3)
            assert len(report.select(payload="amax")) == (1 if sp else 0), "one amax for what is gathered, none else"


def test_local_amaxes(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(local_amaxes, device)


def microbatches_match(rank: int, world: int, device: str) -> None:
    """Kept weights, delayed and fused weight gradients: as without other ranks."""
    m, k, n = sizes(world)
    x, dy = (part(t, 0, rank, world) for t in (sample(m, k, device, 1), sample(m, n, device, 2)))
    whole_dy = part(sample(m, n, device, 2), 1, rank, world)
    for recipe in ("current", "mxfp8"):
        layer = linear("linear", k, n, RECIPES[recipe], device)
        twin = parallel_twin(layer, tp_mesh(world, device), "column", sequence_parallel=True)
        plain = step(twin, x, whole_dy)
        with te_dist.frozen_weights():
            for _ in range(2):
                assert not differing(recipe, step(twin, x, whole_dy), plain)
        with comm_report() as report:
            first, later = step(twin, x, whole_dy, True), step(twin, x, whole_dy, False)
        assert not differing(recipe, first, plain) and not differing(recipe, later, plain)
        weight_amaxes = 1 if recipe == "current" else 0
        per_step = 2 if recipe == "current" else 0  # x and dy
        assert len(report.select(payload="amax")) == 2 * per_step + weight_amaxes
        late = parallel_twin(
            linear("linear", k, n, RECIPES[recipe], device, delay_wgrad_compute=True),
            tp_mesh(world, device), "row", sequence_parallel=True,
        )  # fmt: skip
        now = parallel_twin(
            linear("linear", k, n, RECIPES[recipe], device), tp_mesh(world, device), "row", sequence_parallel=True
        )
        x_k = part(sample(m, k, device, 1), 1, rank, world)
        expected = step(now, x_k, dy)
        late(x_k.clone().requires_grad_()).backward(dy)
        assert late.weight.grad is None
        late.backward_dw()
        assert torch.equal(local(late.weight.grad), expected["weight"])
        fused = linear("linear", k, n, RECIPES[recipe], device, fuse_wgrad_accumulation=True)
        fused = parallel_twin(fused, tp_mesh(world, device), "row", sequence_parallel=True)
        fused.weight.main_grad = torch.zeros_like(local(fused.weight), dtype=torch.float32)
        fused(x_k.clone().requires_grad_()).backward(dy)
        made = {"weight": fused.weight.main_grad.bfloat16()}
        assert not compare(recipe, made, {"weight": expected["weight"]}, {"weight"}, SUMMED)


def test_microbatches_and_wgrad_scheduling(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(microbatches_match, device)


def stochastic_rounding(rank: int, world: int, device: str) -> torch.Tensor:
    m, k, n = sizes(world)
    x, dy = sample(m, k, device, 1), sample(m, n, device, 2)
    for label, (mode, sp) in MODES.items():
        layer = linear("linear", k, n, recipes.NVFP4BlockScaling(), device)
        twin = parallel_twin(layer, tp_mesh(world, device), mode, sequence_parallel=sp)
        x_dim, dy_dim = (0 if sp else None, 1) if mode == "column" else (1, 0 if sp else None)
        one = step(layer, x, dy)
        mine = step(twin, part(x, x_dim, rank, world), part(dy, dy_dim, rank, world))
        expected = expected_parts(one, twin, mode, sp, rank, world)
        # Two different random roundings of dy: the errors of both.
        wrong = compare(label, mine, expected, {"y"} if mode == "column" else set(), FLOORS["nvfp4"] - 3)
        assert not wrong, wrong
        again = step(twin, part(x, x_dim, rank, world), part(dy, dy_dim, rank, world))
        assert not differing(label, again, mine), "the same seed, the same result"
    # Seeds of a dy that is spread differ between ranks; those of one that all ranks have must not.
    from te_dist.pipeline.function import draw_seeds

    seeds = []
    for mode, sp in MODES.values():
        twin = parallel_twin(linear("linear", k, n, None, device), tp_mesh(world, device), mode, sequence_parallel=sp)
        torch.manual_seed(0)
        seeds.append(draw_seeds(twin.spec, x))
    return torch.stack(seeds).cpu()


def test_stochastic_rounding_streams(rank_pools: Pools, device: str) -> None:
    first, second = rank_pools(2).run(stochastic_rounding, device)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [mode == "row" for mode in MODES]


# ------------------------------------------------------------------------------------------------- bytes
def wire_bytes(recipe: str, rows: int, cols: int, columnwise: bool) -> int:
    """The formulas of docs/parallel.md for a shard [rows, cols]."""
    if recipe == "none":
        return 2 * rows * cols
    if recipe in ("current", "delayed"):
        return rows * cols
    if recipe == "block":
        return rows * cols + (rows // 128 * round_up(cols, 4) if columnwise else ceil_div(cols, 128) * rows) * 4
    if recipe == "mxfp8":
        return rows * cols + (rows // 32 * round_up(cols, 128) if columnwise else rows * round_up(cols // 32, 4))
    scales = round_up(cols, 128) * (rows // 16) if columnwise else rows * round_up(cols // 16, 4)
    return rows * cols // 2 + scales


def bytes_match(rank: int, world: int, device: str) -> None:
    m, k, n = 128 * world, 384, 128 * world
    x, dy = sample(m, k, device, 1), sample(m, n, device, 2)
    for recipe, keep in [*((name, False) for name in RECIPES), ("mxfp8", True), ("current", True)]:
        layer = linear("linear", k, n, RECIPES[recipe], device)
        twin = parallel_twin(layer, tp_mesh(world, device), "column", sequence_parallel=True, keep_gathered=keep)
        with comm_report() as report:
            step(twin, part(x, 0, rank, world), part(dy, 1, rank, world))
        forward = report.select(kind="all_gather", phase="forward")
        backward = report.select(kind="all_gather", phase="backward")
        row, column = (wire_bytes(recipe, 128, k, plane) for plane in (False, True))
        both = row if recipe == "current" else row + column
        assert [c.bytes for c in forward] == [both if keep else row], (recipe, keep)
        assert [c.bytes for c in backward] == ([] if keep else [column]), (recipe, keep)
        if recipe != "none":  # nothing in bf16 but the sum of dx
            assert {c.dtype for c in report.select() if c.phase == "forward"} <= {"uint8", "int32"}, recipe
            assert {c.dtype for c in forward + backward} <= {"uint8"}
        (scatter,) = report.select(kind="reduce_scatter")
        assert (scatter.phase, scatter.dtype, scatter.bytes) == ("backward", "bfloat16", m * k * 2)
        assert {c.layer for c in report.select(kind="all_gather")} == {"layer"}
        saved = 1 if recipe in ("current", "delayed", "nvfp4") else 0
        assert len(report.select(kind="all_reduce", payload="amax")) == 3 * saved, recipe

        layer = linear("linear", k * world, n, RECIPES[recipe], device)
        twin = parallel_twin(layer, tp_mesh(world, device), "row", sequence_parallel=True)
        wide = sample(m, k * world, device, 1)
        with comm_report() as report:
            step(twin, part(wide, 1, rank, world), part(dy, 0, rank, world))
        (gather,) = report.select(kind="all_gather")
        row, column = (wire_bytes(recipe, 128, n, plane) for plane in (False, True))
        # In high precision, and of a per-tensor scaled dy, one plane serves dgrad and wgrad.
        assert gather.bytes == (row if recipe in ("none", "current", "delayed") else row + column), recipe
        assert gather.phase == "backward" and (gather.dtype == "uint8") == (recipe != "none")
        (scatter,) = report.select(kind="reduce_scatter")
        assert (scatter.phase, scatter.bytes) == ("forward", m * n * 2)
        (gradient,) = report.select(payload="gradient")
        assert gradient.bytes == 4 * n


def test_bytes_on_the_wire_are_those_of_the_docs(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(bytes_match, device)
