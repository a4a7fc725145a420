"""Kernels whose blocks stay on a multiprocessor and take tile after tile: laid out for few multiprocessors they give
what they give on all, which other tests compare with the reference. Nothing of a tile may be left in the next one. The
matrices are small, so that a sanitizer has time for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import PLANES, QUANTIZERS, assert_same_bytes, assert_same_storage, fits, on, rng_for, varied
from test_producers import activation, gradient, matrix, norm
from torch import Tensor

from te_dist import kernels
from te_dist.producers import ActivationOutput, NormOutput, Plain, Producer

pytestmark = pytest.mark.cuda
FEW = (1, 3)


@contextlib.contextmanager
def multiprocessors(most: int) -> Iterator[None]:
    assert kernels.extension is not None
    limit = kernels.extension.cuda.limit_multiprocessors
    assert limit(most) == most
    try:
        yield
    finally:
        assert limit(0) == torch.cuda.get_device_properties(0).multi_processor_count


def on_few(make: Callable[[], dict[str, Any]], what: str) -> None:
    """Storages and tensors that `make` returns are the same whatever work is laid out for."""
    expected = make()
    for most in FEW:
        with multiprocessors(most):
            actual = make()
        for name, e in expected.items():
            same = assert_same_bytes if isinstance(e, Tensor) else assert_same_storage
            same(actual[name], e, f"{what}: {name} on {most}")


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_matrices_in_memory(name: str, planes: str) -> None:
    rowwise, columnwise = PLANES[planes]
    shapes = ((512, 640), (768, 384), (640, 256), (400, 528))  # whole tiles but for the last
    for shape, dtype in (*((shape, torch.bfloat16) for shape in shapes), ((272, 400), torch.float32)):
        quantizer = on("cuda", QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise))
        if not fits(quantizer, shape):
            continue
        x = varied(shape, dtype).cuda()
        on_few(
            lambda: {"storage": quantizer.quantize(x, rng_state=rng_for(quantizer, "cuda"))},  # noqa: B023
            f"{name} {shape}",
        )


def wide(x: Tensor) -> Tensor:
    return torch.cat([x, x.flip(0)], 1)


BUILDS: dict[str, Callable[[Tensor], Producer]] = {
    "rms": lambda x: norm(x, False, torch.float32),
    "layer": lambda x: norm(x, True, torch.bfloat16, True),
    "silu": lambda x: activation(x, "silu", False),
    "gelu": lambda x: activation(x, "gelu", False),
    "biased gelu": lambda x: activation(x, "gelu"),
    "swiglu": lambda x: activation(wide(x), "swiglu", False),
    "biased swiglu": lambda x: activation(wide(x), "swiglu"),
    "dgelu": lambda x: gradient(x, "gelu", False),
    "biased dgelu": lambda x: gradient(x, "gelu"),
    "dswiglu": lambda x: gradient(wide(x), "swiglu", False),
    "biased dswiglu": lambda x: gradient(wide(x), "swiglu"),
    "plain": Plain,
}


# Those of E5M2 and of 32x32 blocks are made by kernels of their own, too.
MADE = (
    "delayed_e4m3", "current_e4m3", "current_e5m2", "block_1d", "block_1d_f32", "block_1d_f32_e5m2", "block_2d",
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp8_2d", "nvfp4", "nvfp4_rht",
)  # fmt: skip


def check(build: Callable[[Tensor], Producer], x: Tensor, name: str, planes: str, sums: bool) -> None:
    rowwise, columnwise = PLANES[planes]

    def make() -> dict[str, Any]:
        producer = build(x)
        if sums:
            producer.want_column_sums()
        quantizer = on("cuda", QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise))
        made = {"storage": quantizer.quantize_produced(producer, producer.shape), "sums": producer.partials}
        if isinstance(producer, NormOutput):
            made |= {"mean": producer.mean, "rstd": producer.rstd}
        if name == "delayed_e4m3":
            made["amax"] = quantizer.amax
        return {what: value for what, value in made.items() if value is not None}

    on_few(make, f"{name} {planes} {tuple(x.shape)} sums {sums}")


@pytest.mark.parametrize("planes", ["row", "both"])
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_matrices_that_are_made(build: Callable[[Tensor], Producer], name: str, planes: str) -> None:
    # 304: of NVFP4's rows there are as many as its transform takes.
    for shape in ((512, 640), (304 if name.startswith("nvfp4") else 300, 384)):
        for sums in (False, True):
            check(build, matrix(*shape, torch.bfloat16).cuda(), name, planes, sums)


@pytest.mark.parametrize("shape", [(70, 264), (75, 2056), (38, 4104), (38, 8192), (22, 9000), (140, 17000)], ids=str)
@pytest.mark.parametrize("build", ["rms", "layer"])
def test_norms_of_many_rows(build: str, shape: tuple[int, int]) -> None:
    x = matrix(*shape, torch.bfloat16).cuda()
    for name in ("delayed_e4m3", "current_e4m3", "block_1d", "mxfp8_e4m3"):
        for planes in ("row", "both"):
            check(BUILDS[build], x, name, planes, False)


@pytest.mark.parametrize("build", ["rms", "layer"])
@pytest.mark.parametrize("planes", ["column", "both"])
def test_long_norms_of_whole_tiles(build: str, planes: str) -> None:
    """Rows that do and do not fill their lanes, and some that are no multiple of 512. Of 256 rows, all multiprocessors
    make tiles, and few make rows; of more, there are more groups of 16 rows than clusters run at once."""
    for shape in ((256, 8192), (256, 4608), (640, 4608), (1024, 8192), (640, 6144), (640, 6016)):
        check(BUILDS[build], matrix(*shape, torch.bfloat16).cuda(), "nvfp4_rht", planes, False)


# A few tiles of each kind of kernel; then more of them, and rows that fill it.
FEW_TILES = ((300, 264), (260, 2056), (260, 4104), (140, 8200))
MANY_TILES = ((900, 264), (900, 2048), (700, 2056), (700, 4096), (650, 4104), (530, 8192), (300, 8200))


@pytest.mark.parametrize(
    "shape", [*FEW_TILES, *(pytest.param(shape, marks=pytest.mark.large) for shape in MANY_TILES)], ids=str
)
@pytest.mark.parametrize("build", ["rms", "layer"])
def test_norm_gradients(build: str, shape: tuple[int, int]) -> None:
    made = BUILDS[build](matrix(*shape, torch.bfloat16).cuda())
    assert isinstance(made, NormOutput)
    kernels.materialize(made)

    def make(seed: int) -> dict[str, Any]:
        grad = matrix(*shape, torch.bfloat16, seed).cuda()
        centered = made.mean is not None
        options = {"zero_centered": made.zero_centered, "bias_grad": centered}
        results = kernels.norm_backward(grad, made.x, made.weight, made.mean, made.rstd, **options)
        return {what: t for what, t in zip(("dx", "weight", "bias"), results, strict=True) if t is not None}

    for seed in (5, 6):  # the second time other sums lie in shared memory
        on_few(lambda: make(seed), f"{build} {shape}")  # noqa: B023


@pytest.mark.parametrize("name", ["gelu", "qgelu", "relu", "srelu", "silu"])
def test_amax_of_an_activation(name: str) -> None:
    x = matrix(300, 1032, torch.bfloat16).cuda()

    def make() -> dict[str, Any]:
        amax = torch.zeros(1, device="cuda")
        kernels.amax(ActivationOutput(x, name), amax)
        return {"amax": amax}

    on_few(make, name)


def test_refusals() -> None:
    assert kernels.extension is not None
    for most in (-1, 2**32):
        with pytest.raises(ValueError, match="limited to a number of multiprocessors"):
            kernels.extension.cuda.limit_multiprocessors(most)
    with pytest.raises(TypeError):
        kernels.extension.cuda.limit_multiprocessors("all")
