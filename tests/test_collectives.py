"""Quantized collectives: a gathered tensor is, byte for byte, what one process gets by quantizing the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import PLANES, VALUE_QUANTIZERS, assert_same_bytes, assert_same_storage, rng_for, varied

import te_dist
from te_dist.parallel import (
    all_reduce_amax,
    allreduce,
    comm_report,
    gather_along_first_dim,
    reduce_scatter_along_first_dim,
)

Pools = Callable[[int], Any]
EXACT = [name for name in VALUE_QUANTIZERS if name != "nvfp4_stochastic"]


def whole_tensor(rows: int, cols: int, device: str) -> torch.Tensor:
    x = varied((rows, cols), torch.bfloat16)
    x[-1, 5] = 3e4  # an outlier that only the last rank sees
    return x.to(device)


def delayed(device: str, **planes: bool) -> te_dist.Float8Quantizer:
    scale, amax = torch.tensor([3.7], device=device), torch.zeros(1, device=device)
    return te_dist.Float8Quantizer(scale, amax, "e4m3", **planes)


def gathers_like_one_process(rank: int, world: int, device: str, per_rank: list[int]) -> None:
    group = dist.group.WORLD
    for rows in per_rank:
        # 3 dimensions too: [s, b, K] is a matrix of s * b rows.
        for cols, lead in ((96, (rows,)), (272, (rows // 4, 4))):
            x = whole_tensor(world * rows, cols, device)
            shaped = x.view(world * lead[0], *lead[1:], cols)
            shard = shaped.chunk(world)[rank]
            for name in (*EXACT, "delayed"):
                for planes, (rowwise, columnwise) in PLANES.items():
                    usage = {"rowwise": rowwise, "columnwise": columnwise}
                    quantizer = delayed(device, **usage) if name == "delayed" else VALUE_QUANTIZERS[name](**usage)
                    if rows % quantizer.block_rows:
                        continue
                    what = f"{name} {planes} {rows} x {cols}"
                    asynchronous = planes == "both"
                    storage = quantizer.quantize(shard, amax_reduction_group=group)
                    made, handle = gather_along_first_dim(storage, group, async_op=asynchronous)
                    made = handle.wait() if asynchronous else made
                    one = delayed(device, **usage) if name == "delayed" else quantizer
                    expected = one.quantize(shaped)
                    assert made.shape == expected.shape, what
                    assert_same_storage(made, expected, what)
                    made.check_buffers()


@pytest.mark.parametrize("world", [2, 4])
def test_gathered_equals_quantized_whole(rank_pools: Pools, device: str, world: int) -> None:
    rank_pools(world).run(gathers_like_one_process, device, [128, 160, 20] if world == 2 else [128])


def quantizes_and_gathers(rank: int, world: int, device: str) -> None:
    x = whole_tensor(world * 32, 64, device)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    for group in (dist.group.WORLD, dist.group.WORLD.group_name, mesh):
        quantizer = te_dist.NVFP4Quantizer(with_rht=True)
        made, none = gather_along_first_dim(x.chunk(world)[rank], group, quantizer=quantizer)
        assert none is None
        assert_same_storage(made, quantizer.quantize(x), str(group))
        plain, _ = gather_along_first_dim(x.chunk(world)[rank], group)
        assert torch.equal(plain, x)
    stochastic = te_dist.NVFP4Quantizer(stochastic_rounding=True)
    storage = stochastic.quantize(
        x.chunk(world)[rank], amax_reduction_group=dist.group.WORLD, rng_state=rng_for(stochastic, device)
    )
    made, _ = gather_along_first_dim(storage, dist.group.WORLD)
    mine = made._rowwise_data.chunk(world)[rank]
    assert_same_bytes(mine, storage._rowwise_data, "a stochastic shard travels as it is")


def test_quantize_and_gather(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(quantizes_and_gathers, device)


def straddling_blocks(rank: int, world: int) -> list[str]:
    """Raises before anything is sent: so the ranks are still usable, which the gather at the end shows."""
    said = []
    x = varied((24, 64), torch.bfloat16)
    for name in ("mxfp8_e4m3", "mxfp8_2d", "block_1d", "block_2d", "nvfp4_rht", "nvfp4_2d"):
        quantizer = VALUE_QUANTIZERS[name]()
        with comm_report() as report, pytest.raises(ValueError, match="multiple of") as error:
            gather_along_first_dim(x, dist.group.WORLD, quantizer=quantizer)
        said.append(str(error.value))
        if name != "nvfp4_rht":
            with pytest.raises(ValueError, match="multiple of"):
                gather_along_first_dim(quantizer.quantize(x), dist.group.WORLD)
        assert not report.collectives
    assert gather_along_first_dim(x, dist.group.WORLD)[0].shape == (24 * world, 64)
    return said


def test_straddling_blocks_raise_on_all_ranks(rank_pools: Pools) -> None:
    first, second = rank_pools(2).run(straddling_blocks)
    assert first == second
    assert "32" in first[0] and "got 24" in first[0] and "128" in first[2] and "16" in first[4]


def reduces(rank: int, world: int, device: str) -> None:
    group = dist.group.WORLD
    parts = [varied((8 * world, 32), torch.bfloat16, seed=r).to(device) for r in range(world)]
    mine = parts[rank]
    before = mine.clone()
    exact = torch.stack([p.double() for p in parts]).sum(0)
    for wire_dtype in (None, torch.float32, torch.bfloat16):
        for asynchronous in (False, True):
            with comm_report() as report:
                made, handle = allreduce(mine, group, asynchronous, wire_dtype=wire_dtype)
                made = handle.wait() if asynchronous else made
                share, handle = reduce_scatter_along_first_dim(mine, group, asynchronous, wire_dtype=wire_dtype)
                share = handle.wait() if asynchronous else share
            width = 4 if wire_dtype == torch.float32 else 2
            assert [c.bytes for c in report.select()] == [mine.numel() * width] * 2
            assert {c.dtype for c in report.select()} == {"float32" if width == 4 else "bfloat16"}
            assert made.dtype == torch.bfloat16 and share.shape == (8, 32)
            assert torch.equal(share, made.chunk(world)[rank])
            if wire_dtype == torch.float32:  # sums of so few bf16 values are exact in float32
                assert torch.equal(made, exact.to(torch.bfloat16))
            assert torch.equal(mine, before), "the argument stays as it was"
    with pytest.raises(ValueError, match="divide evenly"):
        reduce_scatter_along_first_dim(mine[:-1], group)


@pytest.mark.parametrize("world", [2, 4])
def test_reductions(rank_pools: Pools, device: str, world: int) -> None:
    rank_pools(world).run(reduces, device)


def reduces_amaxes(rank: int, world: int, device: str) -> None:
    one = torch.tensor([1.0 + rank], device=device)
    many = [torch.tensor([float(rank)], device=device), torch.tensor([5.0 - rank, float("nan")], device=device)]
    with comm_report() as report:
        all_reduce_amax(one, dist.group.WORLD)
        all_reduce_amax(many, dist.group.WORLD)
        all_reduce_amax([], dist.group.WORLD)
    assert one.item() == world and many[0].item() == world - 1 and many[1][0].item() == 5.0
    assert many[1][1].isnan()
    assert [(c.kind, c.bytes, c.payload) for c in report.select()] == [
        ("all_reduce", 4, "amax"),
        ("all_reduce", 12, "amax"),
    ]
    with pytest.raises(TypeError, match="float32"):
        all_reduce_amax(one.double(), dist.group.WORLD)


def test_amax_reductions(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(reduces_amaxes, device)


WIRE = {  # bytes of a shard [64, 256] on the wire: row plane, column plane
    "current_e4m3": (64 * 256, 64 * 256),
    "block_1d": (64 * 256 + 2 * 64 * 4, None),
    "mxfp8_e4m3": (64 * 256 + 64 * 8, 64 * 256 + 2 * 256),
    "nvfp4": (64 * 128 + 64 * 16, 64 * 128 + 256 * 4),
    "identity": (64 * 256 * 2, 64 * 256 * 2),
}


def counts_bytes(rank: int, world: int, device: str) -> None:
    x = varied((64, 256), torch.bfloat16).to(device)
    for name, sizes in WIRE.items():
        for size, columnwise in zip(sizes, (False, True), strict=True):
            if size is None:
                continue
            quantizer = VALUE_QUANTIZERS[name](rowwise=not columnwise, columnwise=columnwise)
            storage = quantizer.quantize(x, amax_reduction_group=dist.group.WORLD)
            with comm_report() as report:
                gather_along_first_dim(storage, dist.group.WORLD)
            (gather,) = report.select()
            assert (gather.kind, gather.bytes) == ("all_gather", size), name
            assert gather.dtype == ("bfloat16" if name == "identity" else "uint8"), name
            assert quantizer.describe() in gather.payload


def test_bytes_on_the_wire(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(counts_bytes, device)


def compiles(rank: int, world: int, device: str) -> None:
    name = dist.group.WORLD.group_name
    x = whole_tensor(world * 128, 96, device)
    shard = x.chunk(world)[rank]
    for case in ("current_e4m3", "block_1d", "mxfp8_e4m3", "nvfp4_rht", "identity"):
        quantizer = VALUE_QUANTIZERS[case]()

        def f(t: torch.Tensor, quantizer: te_dist.Quantizer = quantizer) -> tuple[Any, ...]:
            whole, _ = gather_along_first_dim(t, name, quantizer=quantizer)
            allreduce(t, name)  # nobody reads it; a graph that drops it leaves the other rank waiting
            return whole.dequantize(), allreduce(t, name)[0], reduce_scatter_along_first_dim(t, name)[0]

        expected = f(shard)
        with comm_report() as report:
            made = torch.compile(f, fullgraph=True, backend="aot_eager")(shard)
        for a, b in zip(made, expected, strict=True):
            assert torch.equal(a, b), case
        assert len(report.select(kind="all_reduce", payload="")) == 2, "a collective was dropped"


def test_collectives_compile(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(compiles, device)


def empty_shards(rank: int, world: int, device: str) -> None:
    for name in EXACT:
        quantizer = VALUE_QUANTIZERS[name]()
        x = torch.empty(0, 32, dtype=torch.bfloat16, device=device)
        made, _ = gather_along_first_dim(x, dist.group.WORLD, quantizer=quantizer)
        assert_same_storage(made, quantizer.quantize(x), name)


def test_nothing_to_gather(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(empty_shards, device)


def test_report_is_a_table_and_nests() -> None:
    from te_dist import transport

    with comm_report() as outer, comm_report() as inner:
        transport.state.recorder(("all_gather", "0", "uint8", 96, "fc1", "forward", "MX e4m3, row"))
        inner.next_step()
        transport.state.recorder(("check", "0", "int64", 8, "fc1", "forward", "agreement"))
        transport.state.recorder(("all_gather", "0", "uint8", 96, "fc1", "forward", "MX e4m3, row"))
    assert transport.state.recorder is None
    assert len(outer.collectives) == 3 and inner.bytes() == 192 and inner.bytes(step=1) == 96
    assert inner.select(kind="check")[0].bytes == 8
    text = str(inner)
    assert "fc1" in text and "192" in text and "1 checks" in text and "2 steps" in text
