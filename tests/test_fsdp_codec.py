"""Shards to bytes and back, without ranks: every rank's part is made here, and the parts are laid side by side."""

from __future__ import annotations

import pytest
import torch
from cases import special_values, varied
from torch import Tensor

import te_dist
from te_dist.parallel.fsdp.codec import WeightCodec
from te_dist.parallel.fsdp.shards import Place, Shards
from te_dist.tensors import QuantizedStorage

QUANTIZERS = {
    "current": te_dist.Float8CurrentScalingQuantizer("e4m3"),
    "current_eps": te_dist.Float8CurrentScalingQuantizer("e5m2", force_pow_2_scales=True, amax_epsilon=0.5),
    "block": te_dist.Float8BlockQuantizer("e4m3"),
    "block_f32": te_dist.Float8BlockQuantizer("e4m3", force_pow_2_scales=False),
    "block_1d": te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=1),
    "mxfp8": te_dist.MXFP8Quantizer("e4m3"),
    "mxfp8_2d": te_dist.MXFP8Quantizer("e4m3", with_2d_quantization=True),
    "nvfp4": te_dist.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4_1d": te_dist.NVFP4Quantizer(),
}


def gather(quantizer: te_dist.Quantizer, weight: Tensor, ranks: int, sizes: list[int]) -> QuantizedStorage:
    """What all ranks together make of a weight that is joined from parameters of the given numbers of rows."""
    rows, cols = weight.shape
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    codecs = [
        [WeightCodec(quantizer, Shards(size, ranks, r), cols, place=Place(first, rows)) for r in range(ranks)]
        for first, size in zip(firsts, sizes, strict=True)
    ]
    amaxes: list[Tensor | None] = []
    for of_part, param in zip(codecs, weight.split(sizes), strict=True):
        given = [c.contribution(param[c.shards.first : c.shards.last]).view(torch.int32) for c in of_part]
        amaxes.append(torch.stack(given).amax(0).view(torch.float32) if of_part[0].amax_count else None)
    if codecs[0][0].tensor_amax_count:
        largest = torch.stack([a[0].view(torch.int32) for a in amaxes if a is not None]).amax(0).view(torch.float32)
        for reduced in amaxes:
            assert reduced is not None
            reduced[0] = largest
    first_codec = codecs[0][0]
    planes = list(first_codec.planes)
    storage = first_codec.storage(weight.dtype, weight.device)
    for name in first_codec.copied(planes):
        buffer = getattr(storage, name)
        buffer.untyped_storage().resize_(buffer.numel() * buffer.itemsize)
        buffer.view(torch.uint8).fill_(0xAB)  # what is not written must not be right by chance
    for of_part, reduced, param in zip(codecs, amaxes, weight.split(sizes), strict=True):
        codec = of_part[0]
        sent = [c.encode(param[c.shards.first : c.shards.last], planes, reduced) for c in of_part]
        for encoded in sent:
            assert [t.numel() for t in encoded.wire] == codec.wire_sizes(planes)
            assert all(t.dtype == torch.uint8 and t.dim() == 1 for t in encoded.wire)
        whole = [torch.cat(ts) for ts in zip(*[e.wire for e in sent], strict=True)]
        at = 0
        for plane in codec.planes.values():
            codec.adopt(storage, plane, whole[at])
            at += 1 if plane.scale is None else 2
        codec.decode(storage, planes, whole)
        for encoded in sent:
            for name, value in encoded.common.items():
                assert torch.equal(value.view(torch.int32), sent[0].common[name].view(torch.int32)), "ranks disagree"
                getattr(storage, name).copy_(value)
    return storage


def check(name: str, weight: Tensor, ranks: int, sizes: list[int] | None = None) -> None:
    quantizer, sizes = QUANTIZERS[name], sizes or [weight.shape[0]]
    if any(WeightCodec.obstacle(quantizer, Shards(size, ranks, 0)) for size in sizes):
        assert name == "nvfp4_1d" and any(Shards(size, ranks, 0).height % 2 for size in sizes)
        return
    storage = gather(quantizer, weight, ranks, sizes)
    expected = storage.quantizer.quantize(weight)
    for buffer in expected.inner_names():
        mine, theirs = (getattr(s, buffer).view(torch.uint8) for s in (storage, expected))
        assert torch.equal(mine, theirs), f"{name} {list(weight.shape)}, {sizes} over {ranks}: {buffer}"


@pytest.mark.parametrize("name", QUANTIZERS)
def test_gathered_bytes_are_those_of_the_whole(name: str) -> None:
    """Even, uneven, empty and unaligned shards, shards smaller than a block, and a block over many ranks."""
    sizes = [(160, 200), (512, 64), (254, 96), (130, 34), (2, 34), (6, 160), (1000, 64), (66, 130), (1024, 34)]
    for rows, cols in sizes:
        for ranks in (1, 2, 3, 4, 7, 8):
            for dtype in (torch.float32, torch.bfloat16):
                check(name, varied((rows, cols), dtype, seed=rows + cols), ranks)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_special_values_on_both_sides_of_a_cut(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for _, weight in special_values(dtype):
            for ranks in (2, 3, 5):
                check(name, weight, ranks)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_random_sizes(name: str) -> None:
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 9), st.integers(0, 100))
    def run(half_rows: int, half_cols: int, ranks: int, seed: int) -> None:
        check(name, varied((2 * half_rows, 2 * half_cols), torch.float32, seed), ranks)

    run()


BLOCK_ROWS = {"current": 1, "current_eps": 1, "block": 128, "block_f32": 128, "block_1d": 128, "mxfp8": 32,
              "mxfp8_2d": 32, "nvfp4": 16, "nvfp4_1d": 16}  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZERS)
def test_joined_from_several_parameters(name: str) -> None:
    """As q, k and v are, each cut over the ranks by itself: all but the last end where blocks end."""
    block = max(BLOCK_ROWS[name], 2)
    for ranks in (1, 2, 3, 4):
        for sizes in ([block, 2 * block, 34], [3 * block, 3 * block], [block, block, block, 2]):
            for seed in (0, 1):
                weight = varied((sum(sizes), 66), torch.bfloat16, seed)
                weight[sizes[0] * seed] *= 40.0  # the largest value is in one part
                check(name, weight, ranks, sizes)
    inside = WeightCodec.obstacle(QUANTIZERS[name], Shards(64, 2, 0), Place(block // 2, 256))
    assert (f"block of {block} rows" in inside) == (BLOCK_ROWS[name] > 1)


@pytest.mark.parametrize("name", ["block", "mxfp8", "mxfp8_2d", "block_1d"])
def test_no_reduction_where_shards_are_whole_blocks(name: str) -> None:
    codec = WeightCodec(QUANTIZERS[name], Shards(1024, 4, 0), 64)
    assert codec.amax_count == 0
    assert WeightCodec(QUANTIZERS[name], Shards(1000, 4, 0), 64).amax_count > 0


def test_documented_bytes() -> None:
    """The formulas of docs/fsdp.md, as shares of bfloat16's two bytes."""
    rows, cols, ranks = 4096, 4096, 4
    share = {}
    for name, quantizer in QUANTIZERS.items():
        codec = WeightCodec(quantizer, Shards(rows, ranks, 0), cols)
        for plane in codec.planes:
            share[name, plane] = sum(codec.wire_sizes([plane])) / (2 * rows * cols / ranks)
    assert share["current", "row"] == 0.5
    assert share["block", "row"] == (1 + 4 / 128**2) / 2
    assert share["block_1d", "row"] == share["block_1d", "column"] == (1 + 4 / 128) / 2
    assert share["mxfp8", "row"] == share["mxfp8", "column"] == (1 + 1 / 32) / 2
    assert share["mxfp8_2d", "row"] == (1 + 1 / 32**2) / 2
    assert share["nvfp4", "row"] == (0.5 + 1 / 16**2) / 2
    assert share["nvfp4_1d", "row"] == share["nvfp4_1d", "column"] == (0.5 + 1 / 16) / 2


def test_shards_are_those_of_torch() -> None:
    for rows in (1, 2, 5, 8, 127, 128, 129, 300):
        for ranks in (1, 2, 3, 4, 8):
            chunks = list(torch.arange(rows).chunk(ranks))
            chunks += [torch.arange(0)] * (ranks - len(chunks))
            for rank, chunk in enumerate(chunks):
                shards = Shards(rows, ranks, rank)
                assert list(range(shards.first, shards.last)) == chunk.tolist(), (rows, ranks, rank)


def test_every_block_has_one_owner() -> None:
    for rows in (1, 31, 32, 33, 100, 257):
        for ranks in (1, 2, 3, 5):
            for block in (1, 16, 32, 128):
                parts = [Shards(rows, ranks, r) for r in range(ranks)]
                owned = [b for p in parts for b in range(*p.owned(block))]
                assert owned == list(range(-(-rows // block)))
                places = parts[0].places(block)
                assert len(set(places)) == len(places) and max(places) < ranks * parts[0].slots(block)
