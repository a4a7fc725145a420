"""NVFP4 of whole tiles, by blocks that start when others have ended (csrc/cuda/nvfp4_whole.cuh): they find what codes
and scales follow from as the first block has made it, or some of it, or nothing. It is this call's, and not the last's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from cases import assert_same_storage, rng_for
from test_blocks_that_stay import multiprocessors
from test_producers import activation, matrix, norm
from torch import Tensor

import te_dist
from te_dist.producers import Plain, Producer

pytestmark = pytest.mark.cuda

QUANTIZERS: dict[str, Callable[..., te_dist.NVFP4Quantizer]] = {
    "transformed": lambda **usage: te_dist.NVFP4Quantizer(with_rht=True, **usage),
    "as it is": lambda **usage: te_dist.NVFP4Quantizer(with_rht=False, **usage),
    "random": lambda **usage: te_dist.NVFP4Quantizer(with_rht=True, stochastic_rounding=True, **usage),
    "squares": lambda **usage: te_dist.NVFP4Quantizer(with_rht=False, with_2d_quantization=True, **usage),
}
SOURCES: dict[str, Callable[[Tensor], Producer]] = {
    "in memory": Plain,
    "gelu": lambda x: activation(x, "gelu", with_bias=False),
    "gelu with bias": lambda x: activation(x, "gelu"),
    "rms": lambda x: norm(x, False, torch.float32),
    "layer": lambda x: norm(x, True, torch.bfloat16),
}
CASES = [(name, source) for name in QUANTIZERS for source in SOURCES if source == "in memory" or name == "transformed"]
USAGES = ({}, {"columnwise": False}, {"rowwise": False})
# More tiles than have room at once, with five for each of 132 or 148 multiprocessors; and few, for fewer of these.
MANY, FEW = (1664, 8192), (768, 640)


def call(x: Tensor, name: str, source: str, **usage: bool) -> Callable[[], te_dist.QuantizedStorage]:
    quantizer = QUANTIZERS[name](**usage)
    producer = SOURCES[source](x)
    rng_state = rng_for(quantizer, x.device.type)
    return lambda: quantizer.quantize_produced(producer, producer.shape, rng_state=rng_state)


def quantized(x: Tensor, name: str, source: str, **usage: bool) -> te_dist.QuantizedStorage:
    return call(x, name, source, **usage)()


def room_as_it_may_be() -> Iterator[None]:
    """Scratch memory holds what was there before: zeros, set bits, small numbers, and what a call has left."""
    for fill in (0.0, float("nan"), 1e-30, None):
        if fill is not None:
            scratch = [torch.full((3 * 1024,), fill, device="cuda") for _ in range(8)]
            for some in scratch:
                some.view(torch.int32).bitwise_or_(-1 if fill != fill else 0)
            del scratch
        yield


@pytest.mark.parametrize(("name", "source"), CASES)
def test_more_blocks_than_have_room(name: str, source: str) -> None:
    x = matrix(*MANY, torch.bfloat16)
    for usage in USAGES:
        expected = quantized(x, name, source, **usage)
        for _ in room_as_it_may_be():
            assert_same_storage(quantized(x.cuda(), name, source, **usage), expected, f"{name} {source} {usage}")


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize(("name", "source"), CASES)
def test_blocks_that_are_late_by_number_alone(name: str, source: str, most: int) -> None:
    """All have room, and start together: those with high numbers find nothing, or a part."""
    for seed in range(3):
        x = matrix(*FEW, torch.bfloat16, seed) * 3.0**seed
        for usage in USAGES:
            expected = quantized(x, name, source, **usage)
            for _ in room_as_it_may_be():
                with multiprocessors(most):
                    made = quantized(x.cuda(), name, source, **usage)
                assert_same_storage(made, expected, f"{name} {source} {usage} {seed}")


@pytest.mark.parametrize("scale", [2.0**-133, 2.0**-100, 2.0**100, float("inf"), float("nan"), 0.0], ids=str)
@pytest.mark.parametrize(("name", "source"), CASES)
def test_amaxes_of_all_kinds(name: str, source: str, scale: float) -> None:
    x = matrix(*MANY, torch.bfloat16)
    x = x * scale if scale * 0 == 0 else torch.where(x == x.amax(), torch.full_like(x, scale), x)
    made, expected = quantized(x.cuda(), name, source), quantized(x, name, source)
    assert_same_storage(made, expected, f"{name} {source} {scale}")


@pytest.mark.parametrize(("name", "source"), CASES)
def test_each_replay_of_a_graph_has_its_own(name: str, source: str) -> None:
    x = matrix(*MANY, torch.bfloat16).cuda()
    quantized(x, name, source)
    quantize = call(x, name, source)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = quantize()
    for factor in (1.0, 0.375, 5.0, 1.0):
        x.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_storage(made, quantized(x.cpu(), name, source), f"{name} {source} {factor}")


def test_calls_in_several_streams() -> None:
    inputs = [matrix(*MANY, torch.bfloat16, seed) * 4.0**seed for seed in range(4)]
    expected = [quantized(x, "transformed", "gelu") for x in inputs]
    there = [x.cuda() for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        made = []
        for stream, x in zip(streams, there, strict=True):
            with torch.cuda.stream(stream):
                made.append(quantized(x, "transformed", "gelu"))
        torch.cuda.synchronize()
        for i, (mine, theirs) in enumerate(zip(made, expected, strict=True)):
            assert_same_storage(mine, theirs, f"stream {i}")
