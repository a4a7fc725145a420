"""Kernels on the caller's stream: CUDA graphs replay them, side streams order them, nothing synchronises."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from cases import QUANTIZERS, assert_same_storage, on, rng_for, varied
from test_blocks_that_stay import BUILDS
from test_producers import matrix

import te_dist
from te_dist import kernels

pytestmark = pytest.mark.cuda


# One that a single block finds the amax of, one that takes many, and one of whole tiles.
SHAPES = ((144, 272), (1040, 1056), (1024, 1280))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_graph_capture_replays_on_new_values(name: str, shape: tuple[int, int]) -> None:
    quantizer = on("cuda", QUANTIZERS[name]())
    rng = rng_for(quantizer, "cuda")
    x = varied(shape, torch.bfloat16).cuda()
    out = quantizer.make_empty(x.shape, device="cuda")
    noop = torch.zeros(1, device="cuda")
    result = torch.empty_like(x)
    quantizer.quantize(x, out=out, noop=noop, rng_state=rng)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantizer.quantize(x, out=out, noop=noop, rng_state=rng)
        result.copy_(out.dequantize())
    for seed, scale in ((1, 1.0), (2, 100.0), (3, 0.01)):
        x.copy_(varied(shape, torch.bfloat16, seed) * scale)
        graph.replay()
        torch.cuda.synchronize()
        expected = quantizer.quantize(x, rng_state=rng)
        assert_same_storage(out, expected, f"{name} replay {seed}")
        assert torch.equal(result, expected.dequantize())
    before = out.clone()
    noop.fill_(1.0)
    x.mul_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_storage(out, before, "the flag is read at replay")


CAPTURED_AT_ONCE = """
import torch
import te_dist

quantizer = {quantizer}
x = torch.randn(256, 256, device="cuda").bfloat16()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    made = quantizer.quantize(x)
graph.replay()
assert torch.equal(made.dequantize(), quantizer.quantize(x).dequantize())
"""


@pytest.mark.parametrize(
    "quantizer",
    [
        "te_dist.NVFP4Quantizer(with_rht=True)",
        'te_dist.Float8CurrentScalingQuantizer("e4m3")',
        'te_dist.MXFP8Quantizer("e4m3")',
    ],
)
def test_the_first_call_may_be_captured(quantizer: str) -> None:
    """What is loaded, asked for and remembered at a first launch is nothing that a capture forbids."""
    subprocess.run([sys.executable, "-c", CAPTURED_AT_ONCE.format(quantizer=quantizer)], check=True, timeout=120)


def test_a_side_stream_orders_the_work() -> None:
    """A long kernel on the side stream comes first: a kernel on another stream would read old values."""
    quantizer = te_dist.Float8BlockQuantizer("e4m3")
    x = torch.zeros(2048, 2048, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        storage = quantizer.quantize(x)
    stream.synchronize()
    assert torch.equal(storage.dequantize(), torch.full_like(x, 3.0))


def test_amaxes_of_several_streams_at_once() -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [varied((2048, 2048), torch.bfloat16, seed).cuda() * 3.0**seed for seed in range(4)]
    found = [torch.full((20,), -1.0, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for turn in range(20):
        for stream, x, amaxes in zip(streams, inputs, found, strict=True):
            with torch.cuda.stream(stream):
                kernels.amax(x[turn:], amaxes[turn : turn + 1])
    torch.cuda.synchronize()
    for x, amaxes in zip(inputs, found, strict=True):
        assert amaxes.tolist() == [x[turn:].abs().max().item() for turn in range(20)]


@pytest.mark.parametrize("shape", [(144, 272), (256, 256)], ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantize_never_synchronises(name: str, shape: tuple[int, int]) -> None:
    quantizer = on("cuda", QUANTIZERS[name]())
    rng = rng_for(quantizer, "cuda")
    x = varied(shape, torch.bfloat16).cuda()
    quantizer.quantize(x, rng_state=rng).dequantize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantizer.quantize(x, rng_state=rng).dequantize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The debug mode knows torch's own calls; for ours, the host must be back while the stream still sleeps.
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    quantizer.quantize(x, rng_state=rng).dequantize()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The names of the kernels that a call launches, the second time."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in on_device]


@pytest.mark.parametrize("planes", [{}, {"columnwise": False}, {"rowwise": False}], ids=["both", "row", "column"])
def test_how_many_launches_current_scaling_takes(planes: dict[str, bool]) -> None:
    """The amax and the cast are one each, however large the tensor; a few tiles are one altogether."""
    x = varied((2048, 2048), torch.bfloat16).cuda()
    noop = torch.zeros(1, device="cuda")
    quantizer = te_dist.Float8CurrentScalingQuantizer("e4m3", **planes)
    out = quantizer.make_empty(x.shape, device="cuda")
    for flag in (None, noop):
        for tensor in (x, x.t()):
            found = kernels_of(lambda tensor=tensor, flag=flag: quantizer.quantize(tensor, out=out, noop=flag))
            assert ["amax" in name for name in found][-2:] == [True, False], found
            assert len(found) == (2 if tensor is x else 3), found  # a transpose is copied
    assert len(kernels_of(lambda: quantizer.quantize(x[:128, :256]))) == 1


@pytest.mark.parametrize("rht", [False, True])
def test_how_many_launches_nvfp4_takes(rht: bool) -> None:
    x = varied((2048, 2048), torch.bfloat16).cuda()
    for planes in ({}, {"rowwise": False}):
        found = kernels_of(lambda planes=planes: te_dist.NVFP4Quantizer(with_rht=rht, **planes).quantize(x))
        first = "search_reset" if rht else "amax"  # those that write codes of a transform find its amaxes
        assert [first in name for name in found] == [True, False], found


def test_nvfp4_of_several_tensors_in_a_row() -> None:
    """The cast starts before the amax has ended, and what they share is used again at once."""
    quantizer = te_dist.NVFP4Quantizer(with_rht=True)
    inputs = [varied((1024, 2048), torch.bfloat16, seed).cuda() * 7.0**seed for seed in range(5)]
    expected = [quantizer.quantize(x.cpu()) for x in inputs]
    for _ in range(20):
        for made, e in zip([quantizer.quantize(x) for x in inputs], expected, strict=True):
            assert_same_storage(made, e, "in a row")


@pytest.mark.parametrize("build", [name for name in BUILDS if name != "plain"])
def test_how_many_launches_current_scaling_takes_of_what_is_made(build: str) -> None:
    producer = BUILDS[build](matrix(512, 640, torch.bfloat16).cuda())
    quantizer = te_dist.Float8CurrentScalingQuantizer("e4m3")
    found = kernels_of(lambda: quantizer.quantize_produced(producer, producer.shape))
    assert ["amax" in name for name in found] == [True, False], found
