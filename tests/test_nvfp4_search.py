"""NVFP4's amaxes of whole tiles, which blocks find on a GPU before they write the codes (csrc/cuda/nvfp4_search.cuh):
each looks at a tile of its own, at a share of all others, and at what is left. No tile is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import assert_same_bytes, assert_same_storage, rng_for
from test_blocks_that_stay import multiprocessors
from test_nvfp4_column_amax import signs_of_rows
from test_producers import activation, matrix
from torch import Tensor

import te_dist
from te_dist import kernels
from te_dist.producers import Plain, Producer

pytestmark = pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")

TILE = 128
USAGES = ({}, {"columnwise": False}, {"rowwise": False})
SOURCES: dict[str, Callable[[Tensor], Producer]] = {
    "in memory": Plain,
    "gelu": lambda x: activation(x, "gelu", with_bias=False),
    "gelu with bias": lambda x: activation(x, "gelu"),
    "srelu": lambda x: activation(x, "srelu", with_bias=False),
}
# Tiles down and across: fewer than blocks, blocks of one tile and of two (of which some search), lines of more tiles
# than there are blocks that search, with 1, 3 or all multiprocessors.
SHAPES = ((1, 1), (2, 3), (7, 2), (8, 4), (24, 3), (4, 20))


def quantized(x: Tensor, source: str, random: bool = False, **usage: bool) -> te_dist.QuantizedStorage:
    quantizer = te_dist.NVFP4Quantizer(with_rht=True, stochastic_rounding=random, **usage)
    producer = SOURCES[source](x)
    return quantizer.quantize_produced(producer, producer.shape, rng_state=rng_for(quantizer, x.device.type))


def amaxes(made: te_dist.QuantizedStorage) -> dict[str, Tensor]:
    return {name: getattr(made, name) for name in made.inner_names() if "amax" in name}


def everywhere(down: int, across: int) -> Tensor:
    """A matrix for each of its tiles, which has both of its amaxes there: in one of its strips of 16 rows, which take
    turns."""
    generator = torch.Generator().manual_seed(0)
    base = (torch.randn(down * TILE, across * TILE, generator=generator) / 4).bfloat16()
    made = base.repeat(down * across, 1, 1)
    for tile, x in enumerate(made):
        row, col = tile // across * TILE + tile % 8 * 16, tile % across * TILE + tile * 37 % TILE
        x[row : row + 16, col] = 8 * signs_of_rows(True).bfloat16()
    return made


def test_matrices_have_their_amaxes_where_they_should() -> None:
    for source in SOURCES:
        marked = everywhere(2, 3)
        without = amaxes(quantized(marked[0] * (marked[0].abs() < 8), source))
        for x in marked:
            for name, amax in amaxes(quantized(x, source)).items():
                assert amax.item() > 1.5 * without[name].item(), (source, name)


@pytest.mark.cuda
@pytest.mark.parametrize("most", [1, 3, None], ids=["one", "three", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_the_largest_is_found_in_every_tile(source: str, shape: tuple[int, int], most: int | None) -> None:
    inputs = everywhere(*shape)
    limit = multiprocessors(most or torch.cuda.get_device_properties(0).multi_processor_count)
    with limit:
        found = [amaxes(quantized(x.cuda(), source)) for x in inputs]
    for tile, (x, made) in enumerate(zip(inputs, found, strict=True)):
        expected = amaxes(quantized(x, source))
        assert len(expected) == 2
        for name, amax in expected.items():
            assert_same_bytes(made[name].cpu(), amax, f"{source} {shape} tile {tile} {name}")


@pytest.mark.cuda
@pytest.mark.parametrize("random", [False, True], ids=["nearest", "random"])
@pytest.mark.parametrize("source", SOURCES)
def test_planes(source: str, random: bool) -> None:
    if random and source != "in memory":
        pytest.skip("made and written before it is rounded at random")
    for rows, cols in ((1024, 384), (3072, 256), (256, 2560)):
        x = matrix(rows, cols, torch.bfloat16)
        for usage in USAGES:
            expected = quantized(x, source, random, **usage)
            for most in (1, 3, torch.cuda.get_device_properties(0).multi_processor_count):
                with multiprocessors(most):
                    made = quantized(x.cuda(), source, random, **usage)
                assert_same_storage(made, expected, f"{source} {rows}x{cols} {usage} {most}")


@pytest.mark.cuda
@pytest.mark.parametrize("source", SOURCES)
def test_matrices_in_a_row_and_in_several_streams(source: str) -> None:
    """Blocks of one matrix hold room that others' wait for, and what they share is used again at once."""
    inputs = [matrix(2048, 1024, torch.bfloat16, seed).cuda() * 5.0 ** (seed % 3) for seed in range(6)]
    expected = [quantized(x.cpu(), source) for x in inputs]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(10):
        made = []
        for i, x in enumerate(inputs):
            with torch.cuda.stream(streams[i % len(streams)]):
                made.append(quantized(x, source))
        torch.cuda.synchronize()
        for i, (mine, theirs) in enumerate(zip(made, expected, strict=True)):
            assert_same_storage(mine, theirs, f"{source} {i}")


@pytest.mark.cuda
@pytest.mark.parametrize("source", SOURCES)
def test_graph_is_replayed_with_smaller_values(source: str) -> None:
    """What was found the last time is forgotten."""
    x = matrix(1024, 1024, torch.bfloat16).cuda() * 8
    quantized(x, source)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = quantized(x, source)
    for factor in (1.0, 0.125, 4.0, 0.5):
        x.mul_(factor)
        graph.replay()
        assert_same_storage(made, quantized(x.cpu(), source), f"{source} {factor}")
