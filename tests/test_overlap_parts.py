"""Parts of quantized operands: rows and columns of whole blocks are what quantizing them alone would not give, namely
the same bytes and scales as in the whole; and shards become operands again on the other side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import varied

import te_dist
from te_dist.gemm import gemm
from te_dist.parallel import wire
from te_dist.parallel.userbuffers.schedules import feature_bounds, summed
from te_dist.parallel.userbuffers.shards import Parcel, Shard
from te_dist.quantizers import IdentityQuantizer

QUANTIZERS: dict[str, Any] = {
    "per tensor": te_dist.Float8CurrentScalingQuantizer("e4m3"),
    "1x128": te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=1),
    "128x128": te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=2),
    "mxfp8": te_dist.MXFP8Quantizer("e4m3"),
    "nvfp4": te_dist.NVFP4Quantizer(),
    "nvfp4 2d": te_dist.NVFP4Quantizer(with_2d_quantization=True),
    "identity": IdentityQuantizer(),
}
ROWS, COLS = 384, 320  # the last 64 columns are half a part


def matrix(seed: int = 1) -> torch.Tensor:
    return varied((ROWS, COLS), torch.bfloat16, seed)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize(("first", "count"), [(0, 128), (128, 256), (256, 128), (0, 384)])
def test_rows_are_those_of_the_whole(name: str, first: int, count: int) -> None:
    whole = QUANTIZERS[name].with_usage(rowwise=True, columnwise=True).quantize(matrix())
    part = wire.some_rows(whole, first, count)
    part.check_buffers()
    row_plane = whole.with_usage(rowwise=True, columnwise=False)
    assert part.shape == (count, COLS)
    assert torch.equal(part.dequantize(), row_plane.dequantize()[first : first + count])


@pytest.mark.parametrize("name", QUANTIZERS)
def test_columns_are_those_of_the_whole(name: str) -> None:
    whole = QUANTIZERS[name].with_usage(rowwise=True, columnwise=True).quantize(matrix())
    column_plane = whole.with_usage(rowwise=False, columnwise=True).dequantize()
    for first, last in feature_bounds(COLS, 4):
        part = wire.some_columns(whole, first, last - first)
        part.check_buffers()
        assert part.shape == (ROWS, last - first) and not (part.has_rowwise and name != "identity")
        assert torch.equal(part.dequantize(), column_plane[:, first:last]), (first, last)


@pytest.mark.parametrize("name", ["per tensor", "1x128", "mxfp8", "nvfp4"])
def test_products_of_parts_are_parts_of_the_product(name: str) -> None:
    both = {"rowwise": True, "columnwise": True}
    x = QUANTIZERS[name].with_usage(**both).quantize(matrix(1))
    w = QUANTIZERS["128x128" if name == "1x128" else name].with_usage(**both).quantize(matrix(2))
    dy = QUANTIZERS[name].with_usage(**both).quantize(varied((ROWS, ROWS), torch.bfloat16, 3))
    y = gemm(x, w, kind="fprop", out_dtype=torch.bfloat16)
    rows = gemm(wire.some_rows(x, 128, 128), w, kind="fprop", out_dtype=torch.bfloat16)
    features = gemm(x, wire.some_rows(w, 256, 128), kind="fprop", out_dtype=torch.bfloat16)
    assert torch.equal(rows, y[128:256]) and torch.equal(features, y[:, 256:384])
    dx = gemm(dy, w, kind="dgrad", out_dtype=torch.bfloat16)
    part = gemm(dy, wire.some_columns(w, 128, 192), kind="dgrad", out_dtype=torch.bfloat16)
    assert torch.equal(part, dx[:, 128:320])


def test_a_part_that_cuts_a_block_is_refused() -> None:
    whole = QUANTIZERS["128x128"].quantize(matrix())
    with pytest.raises(AssertionError, match="cannot begin at 64"):
        wire.some_rows(whole, 64, 128)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("planes", ["row", "column", "both"])
def test_shards_become_the_whole_again(name: str, planes: str) -> None:
    """Three ranks' shards of 128 rows, sent in two parcels, against the whole quantized by one."""
    quantizer = QUANTIZERS[name].with_usage(rowwise=planes != "column", columnwise=planes != "row")
    whole = quantizer.quantize(matrix())
    if name == "per tensor":  # one amax: all ranks have reduced theirs
        amax = matrix().abs().amax()
        mine = [matrix()[i * 128 : (i + 1) * 128].clone() for i in range(3)]
        for part in mine:
            part[0, 0] = amax
        whole = quantizer.quantize(torch.cat(mine))
    elif name.startswith("nvfp4"):
        pytest.skip("its amax is reduced over ranks; tests/test_overlap.py has them")
    else:
        mine = [matrix()[i * 128 : (i + 1) * 128].clone() for i in range(3)]
    shards = [Shard.of(quantizer.quantize(part)) for part in mine]
    made: list[Any] = []
    for which in ("first", "rest"):
        parcels = [Parcel([getattr(shard, which)]) for shard in shards]
        places = [torch.stack(tensors) for tensors in zip(*(p.tensors for p in parcels), strict=True)]
        made.append(parcels[0].unpack(places)[0])
        for source, parcel in enumerate(parcels):  # one rank's alone
            alone = parcel.unpack([place[source : source + 1] for place in places])[0]
            if alone is not None:
                assert torch.equal(alone.dequantize(), getattr(shards[source], which).dequantize())
    again = shards[0].gathered(*made)
    again.check_buffers()
    assert again.inner_names() == whole.inner_names()
    assert all(torch.equal(a, b) for a, b in zip(again.inner_tensors(), whole.inner_tensors(), strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_sums_are_in_order_and_rounded_once(ranks: int) -> None:
    parts = [varied((4, 33), torch.bfloat16, seed) for seed in range(ranks)]
    total = torch.zeros(4, 33)
    for part in parts:
        total = total + part.float()
    before = [part.clone() for part in parts]
    assert torch.equal(summed(parts), total.to(torch.bfloat16))
    wide = [part.float() for part in parts]
    assert torch.equal(summed(wide), total) and all(map(torch.equal, wide, map(torch.Tensor.float, before)))
