"""Quantizing a shard with a group equals slicing the quantized whole: on real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import VALUE_QUANTIZERS, assert_same_bytes, rng_for, varied

import te_dist
from te_dist import transport
from te_dist.formats import ceil_div

GLOBAL_SCALES = ["current_e4m3", "current_e5m2", "current_pow2_eps", "nvfp4", "nvfp4_2d", "nvfp4_rht"]
LOCAL_SCALES = ["block_1d", "block_2d", "mxfp8_e4m3", "mxfp8_2d"]


def whole_tensor(outlier_row: int, value: float = 1e4) -> torch.Tensor:
    x = varied((256, 96), torch.bfloat16)
    x[outlier_row, 5] = value
    return x


def slice_of(storage: Any, start: int, rows: int, total: int) -> dict[str, torch.Tensor]:
    """The buffers that belong to rows [start, start + rows) of a quantized [total, K] tensor."""
    quantizer, cols = storage.quantizer, storage.shape[-1]
    window = slice(start, start + rows)
    if isinstance(quantizer, te_dist.Float8CurrentScalingQuantizer):
        return {
            "_data": storage._data[window],
            "_transpose": storage._transpose[:, window],
            "_scale_inv": storage._scale_inv,
        }
    if isinstance(quantizer, te_dist.NVFP4Quantizer):
        halves = slice(start // 2, (start + rows) // 2)
        blocks = slice(start // 16, ceil_div(start + rows, 16))
        return {
            "_rowwise_data": storage._rowwise_data[window],
            "_rowwise_scale_inv": storage._rowwise_scale_inv[window, : ceil_div(cols, 16)],
            "_columnwise_data": storage._columnwise_data[:, halves],
            "_columnwise_scale_inv": storage._columnwise_scale_inv[:cols, blocks],
            "_amax_rowwise": storage._amax_rowwise,
            "_amax_columnwise": storage._amax_columnwise,
        }
    if isinstance(quantizer, te_dist.MXFP8Quantizer):
        return {
            "_rowwise_data": storage._rowwise_data[window],
            "_rowwise_scale_inv": storage._rowwise_scale_inv[window, : ceil_div(cols, 32)],
            "_columnwise_data": storage._columnwise_data[window],
            "_columnwise_scale_inv": storage._columnwise_scale_inv[start // 32 : ceil_div(start + rows, 32), :cols],
        }
    if quantizer.block_scaling_dim == 2:
        row_blocks = slice(start // 128, ceil_div(start + rows, 128))
        row_scale = storage._rowwise_scale_inv[row_blocks, : ceil_div(cols, 128)]
        col_scale = storage._columnwise_scale_inv[: ceil_div(cols, 128), row_blocks]
    else:
        row_scale = storage._rowwise_scale_inv[:, window]
        col_scale = storage._columnwise_scale_inv[start // 128 : ceil_div(start + rows, 128), :cols]
    return {
        "_rowwise_data": storage._rowwise_data[window],
        "_rowwise_scale_inv": row_scale,
        "_columnwise_data": storage._columnwise_data[:, window],
        "_columnwise_scale_inv": col_scale,
    }


def sharded_equals_slice(rank: int, world: int, name: str, rows: list[int], outlier_row: int, how: str) -> None:
    quantizer = VALUE_QUANTIZERS[name]()
    x = whole_tensor(outlier_row)
    start = sum(rows[:rank])
    shard = x[start : start + rows[rank]]
    group: Any = dist.group.WORLD
    if how == "mesh":
        group = dist.device_mesh.init_device_mesh("cpu", (world,))
    elif how == "name":
        group = dist.group.WORLD.group_name
    storage = quantizer.quantize(shard, amax_reduction_group=group, rng_state=rng_for(quantizer))
    whole = quantizer.quantize(x, rng_state=rng_for(quantizer))
    mine = slice_of(storage, 0, rows[rank], rows[rank])
    expected = slice_of(whole, start, rows[rank], x.shape[0])
    for key in expected:
        assert_same_bytes(mine[key], expected[key].contiguous(), f"{name} rank {rank} {key}")


@pytest.mark.parametrize("name", GLOBAL_SCALES)
def test_shard_equals_slice(name: str, two_ranks: Callable[..., list[Any]]) -> None:
    for rows in ([128, 128], [32, 224], [256, 0], [0, 256]):
        for outlier_row in (0, 255):
            two_ranks(sharded_equals_slice, name, rows, outlier_row, "group")


@pytest.mark.parametrize("name", LOCAL_SCALES)
def test_local_scales_need_no_reduction(name: str, two_ranks: Callable[..., list[Any]]) -> None:
    for rows in ([128, 128], [256, 0]):
        two_ranks(sharded_equals_slice, name, rows, 255, "group")


@pytest.mark.parametrize("how", ["mesh", "name"])
def test_mesh_and_name_are_groups_too(how: str, two_ranks: Callable[..., list[Any]]) -> None:
    two_ranks(sharded_equals_slice, "current_e4m3", [96, 160], 255, how)


def scales_with_special_value(rank: int, world: int, value: float) -> list[int]:
    x = torch.ones(4, 16)
    if rank == world - 1:
        x[1, 1] = value
    storage = te_dist.NVFP4Quantizer(columnwise=False).quantize(x, amax_reduction_group=dist.group.WORLD)
    current = te_dist.Float8CurrentScalingQuantizer("e4m3").quantize(x, amax_reduction_group=dist.group.WORLD)
    return [storage._amax_rowwise.view(torch.int32).item(), current._scale_inv.view(torch.int32).item()]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e30])
def test_every_rank_has_the_same_bits(value: float, two_ranks: Callable[..., list[Any]]) -> None:
    """A NaN on one rank reaches all of them, with the same bits."""
    first, second = two_ranks(scales_with_special_value, value)
    assert first == second
    expected = torch.tensor([max(1.0, value) if value == value else value])
    assert first[0] == expected.view(torch.int32).item()


def delayed_amax(rank: int, world: int) -> float:
    quantizer = te_dist.Float8Quantizer(torch.ones(1), torch.zeros(1), "e4m3")
    quantizer.quantize(torch.full((4, 4), 1.0 + rank), amax_reduction_group=dist.group.WORLD)
    return quantizer.amax.item()


def test_delayed_scaling_reduces_the_recorded_amax(two_ranks: Callable[..., list[Any]]) -> None:
    assert two_ranks(delayed_amax) == [2.0, 2.0]


def outsider(rank: int, world: int) -> str:
    alone = dist.new_group([0])
    x = torch.ones(4, 4)
    quantizer = te_dist.Float8CurrentScalingQuantizer("e4m3")
    if rank == 0:
        quantizer.quantize(x, amax_reduction_group=alone)
        return "member"
    with pytest.raises(ValueError, match="not a member"):
        quantizer.quantize(x, amax_reduction_group=alone)
    with pytest.raises(ValueError, match="one dimension"):
        mesh = dist.device_mesh.DeviceMesh("cpu", torch.arange(world).view(1, world))
        quantizer.quantize(x, amax_reduction_group=mesh)
    return "outsider"


def test_a_rank_outside_of_the_group_is_told(rank_pools: Callable[[int], Any]) -> None:
    # new_group and DeviceMesh are collective or per-rank here; a pool of its own keeps the others clean.
    pool = rank_pools(2)
    try:
        assert pool.run(outsider) == ["member", "outsider"]
    finally:
        pool.close()


def collectives_of(rank: int, world: int, name: str) -> int:
    quantizer = VALUE_QUANTIZERS[name]()
    calls = []
    real = transport.all_reduce
    transport.all_reduce = lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1]
    try:
        quantizer.quantize(
            varied((64, 64), torch.bfloat16),
            amax_reduction_group=dist.group.WORLD,
            rng_state=rng_for(quantizer),
        )
    finally:
        transport.all_reduce = real
    return len(calls)


def test_number_of_collectives(two_ranks: Callable[..., list[Any]]) -> None:
    """One for a scale that spans the tensor (both of NVFP4's amaxes together), none for local ones."""
    for name in GLOBAL_SCALES:
        assert two_ranks(collectives_of, name) == [1, 1], name
    for name in LOCAL_SCALES:
        assert two_ranks(collectives_of, name) == [0, 0], name


def compiled_equals_eager(rank: int, world: int, name: str) -> bool:
    quantizer = VALUE_QUANTIZERS[name]()
    x = varied((64, 64), torch.bfloat16, seed=rank) * (1 + rank)
    group = dist.group.WORLD.group_name

    def function(x: torch.Tensor) -> torch.Tensor:
        return quantizer.quantize(x, amax_reduction_group=group).dequantize()

    torch._dynamo.reset()
    return torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))


@pytest.mark.parametrize("name", ["current_e4m3", "nvfp4_rht", "block_2d"])
def test_reduction_inside_a_compiled_graph(name: str, two_ranks: Callable[..., list[Any]]) -> None:
    assert two_ranks(compiled_equals_eager, name) == [True, True]


def dropped_result(rank: int, world: int) -> int:
    """Rank 0 ignores the quantized result; the collective must stay in its graph all the same."""
    quantizer = te_dist.Float8CurrentScalingQuantizer("e4m3")
    group = dist.group.WORLD.group_name
    calls = []
    real = transport.all_reduce
    transport.all_reduce = lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1]

    def function(x: torch.Tensor) -> torch.Tensor:
        storage = quantizer.quantize(x, amax_reduction_group=group)
        return x + 1 if rank == 0 else storage.dequantize()

    try:
        torch._dynamo.reset()
        torch.compile(function, fullgraph=True, backend="inductor")(torch.ones(4, 4))
    finally:
        transport.all_reduce = real
    return len(calls)


def test_a_collective_is_never_dead_code(two_ranks: Callable[..., list[Any]]) -> None:
    assert two_ranks(dropped_result) == [1, 1]


def noop_keeps_out(rank: int, world: int, name: str, flagged: int) -> bool:
    """Rank `flagged` sets its no-op flag: its output stays, the other's is as if both had taken part."""
    quantizer = VALUE_QUANTIZERS[name]()
    old, new = (varied((32, 64), torch.bfloat16, seed) * (1 + 9 * rank) for seed in (1, 2))
    out = quantizer.quantize(old, amax_reduction_group=dist.group.WORLD)
    before, fresh = out.clone(), quantizer.quantize(new, amax_reduction_group=dist.group.WORLD)
    noop = torch.tensor([1.0 if rank == flagged else 0.0])
    quantizer.quantize(new, out=out, noop=noop, amax_reduction_group=dist.group.WORLD)
    expected = before if rank == flagged else fresh
    return all(torch.equal(a, b) for a, b in zip(out.inner_tensors(), expected.inner_tensors(), strict=True))


@pytest.mark.parametrize("name", ["current_e4m3", "nvfp4_rht"])
def test_noop_together_with_a_reduction(name: str, two_ranks: Callable[..., list[Any]]) -> None:
    for flagged in (0, 1):
        assert two_ranks(noop_keeps_out, name, flagged) == [True, True]


def delayed_noop(rank: int, world: int) -> float:
    quantizer = te_dist.Float8Quantizer(torch.ones(1), torch.full((1,), 0.5), "e4m3")
    out = quantizer.make_empty((4, 4), dtype=torch.float32)
    noop = torch.tensor([float(rank)])
    quantizer.quantize(torch.full((4, 4), 1.0 + rank), out=out, noop=noop, amax_reduction_group=dist.group.WORLD)
    return quantizer.amax.item()


def test_delayed_noop_keeps_the_recorded_amax(two_ranks: Callable[..., list[Any]]) -> None:
    assert two_ranks(delayed_noop) == [2.0, 0.5]


def workspace_in_a_graph(rank: int, world: int) -> tuple[int, bool]:
    """out= and a group inside a graph: reduced, written, and not dropped where rank 0 ignores the result."""
    quantizer = te_dist.Float8CurrentScalingQuantizer("e4m3")
    group = dist.group.WORLD.group_name
    x = varied((16, 32), torch.bfloat16) * (1 + rank)
    calls = []
    real = transport.all_reduce
    transport.all_reduce = lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1]

    def function(x: torch.Tensor) -> torch.Tensor:
        proto = te_dist.TensorProto(tuple(x.shape), x.dtype, quantizer)
        workspace = quantizer.quantize(x, out=proto.create_tensor(), amax_reduction_group=group)
        return x + 1 if rank == 0 else workspace.dequantize()

    try:
        torch._dynamo.reset()
        result = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    finally:
        transport.all_reduce = real
    expected = quantizer.quantize(x, amax_reduction_group=group).dequantize()
    return len(calls), rank == 0 or torch.equal(result, expected)


def test_a_workspace_with_a_group_inside_a_graph(two_ranks: Callable[..., list[Any]]) -> None:
    assert two_ranks(workspace_in_a_graph) == [(1, True), (1, True)]
