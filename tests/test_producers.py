"""Norms, activations and their gradients: kernels equal the reference bit for bit, the reference is right, and a
quantize that makes its input on the fly gives the bytes of a quantize that reads it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import (
    DTYPES,
    QUANTIZERS,
    assert_equal_with_nan,
    assert_same_bytes,
    assert_same_storage,
    fits,
    on,
    rng_for,
    special_values,
    varied,
)
from torch import Tensor

import te_dist
from te_dist import kernels, reference_producers
from te_dist.kernels import blocks, nvfp4, sources
from te_dist.producers import (
    ACTIVATIONS,
    ActivationGradient,
    ActivationOutput,
    NormOutput,
    Plain,
    Producer,
    split_activation,
)

# One row, odd, below and above the 1024 accumulators of a row's sum and the 128 rows of a partial column sum.
MATRICES = ((0, 32), (1, 16), (3, 5), (17, 48), (130, 258), (144, 272), (300, 1000), (9, 3001), (4200, 8))


def matrix(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return varied((rows, cols), dtype, seed)


def norm(x: Tensor, layer_norm: bool, weight_dtype: torch.dtype, zero_centered: bool = False) -> NormOutput:
    rows, cols = x.shape
    weight, bias = (matrix(1, cols, weight_dtype, seed)[0].to(x.device) for seed in (1, 2))
    stats = torch.empty(2, rows, device=x.device)
    return NormOutput(
        x,
        weight,
        bias if layer_norm else None,
        stats[0] if layer_norm else None,
        stats[1],
        eps=1e-5,
        zero_centered=zero_centered,
    )


def activation(x: Tensor, name: str, with_bias: bool = True) -> ActivationOutput:
    bias = matrix(1, x.shape[1], x.dtype, 3)[0].to(x.device) if with_bias else None
    return ActivationOutput(x, name, bias)


def gradient(x: Tensor, name: str, with_bias: bool = True) -> ActivationGradient:
    made = activation(x, name, with_bias)
    grad = matrix(*made.shape, x.dtype, 4).to(x.device)
    return ActivationGradient(grad, x, name, made.bias)


def made_by(build: Callable[[Tensor], Producer], x: Tensor, device: str) -> tuple[Producer, Producer]:
    """The same matrix twice, by the kernels on `device` and by the reference, with column sums."""
    mine, theirs = build(x.to(device)), build(x)
    for producer in (mine, theirs):
        producer.want_column_sums()
    kernels.materialize(mine)
    with te_dist.use_backend("reference"):
        kernels.materialize(theirs)
    return mine, theirs


def check_made(build: Callable[[Tensor], Producer], x: Tensor, device: str, what: str) -> None:
    mine, theirs = made_by(build, x, device)
    assert_equal_with_nan(mine.materialized.cpu(), theirs.materialized, what)
    assert_equal_with_nan(mine.partials.cpu(), theirs.partials, f"{what} partials")
    if isinstance(mine, NormOutput):
        assert_equal_with_nan(mine.rstd.cpu(), theirs.rstd, f"{what} rstd")
        if mine.mean is not None:
            assert_equal_with_nan(mine.mean.cpu(), theirs.mean, f"{what} mean")
    for dtype in DTYPES:
        sums = kernels.column_sums(mine, dtype)
        with te_dist.use_backend("reference"):
            expected = kernels.column_sums(theirs, dtype)
        assert_equal_with_nan(sums.cpu(), expected, f"{what} column sums")


# ------------------------------------------------------------------------------------------------- exactness
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
def test_norms_equal_the_reference(device: str, dtype: torch.dtype, layer_norm: bool) -> None:
    for shape in MATRICES:
        for weight_dtype, zero_centered in ((dtype, False), (torch.float32, True)):
            what = f"{shape} weight {weight_dtype} zero_centered {zero_centered}"
            check_made(lambda x: norm(x, layer_norm, weight_dtype, zero_centered), matrix(*shape, dtype), device, what)  # noqa: B023


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_the_reference(device: str, dtype: torch.dtype, name: str) -> None:
    for rows, cols in MATRICES:
        cols += cols % 2
        x = matrix(rows, cols, dtype)
        for build in (activation, gradient):
            for with_bias in (False, True):
                what = f"{build.__name__} {rows}x{cols} bias {with_bias}"
                check_made(lambda x: build(x, name, with_bias), x, device, what)  # noqa: B023


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_bias_is_as_if_it_had_been_added_before(device: str, name: str, dtype: torch.dtype, backend: str) -> None:
    x, bias = matrix(37, 264, dtype), matrix(1, 264, torch.float32, 3)[0]
    bias[:8] = torch.tensor([-0.0, 0.0, 1e-30, -1e-30, 6e4, -6e4, 3.38e38, math.nan])
    x[0, :8], x[1, :2] = x[0, 5], -0.0
    for bias_dtype in {dtype, torch.float32}:
        biases = bias.to(bias_dtype)
        total = (x.float() + biases.float()).to(dtype)
        if bias_dtype == dtype:
            assert_equal_with_nan(total, x + biases, "the sum of torch")
        grad = matrix(*ActivationOutput(x, name).shape, dtype, 4).to(device)
        with te_dist.use_backend(backend):
            for build in (ActivationOutput, partial(ActivationGradient, grad)):
                mine, theirs = build(x.to(device), name, biases.to(device)), build(total.to(device), name)
                assert_equal_with_nan(kernels.materialize(mine), kernels.materialize(theirs), f"{name} {bias_dtype}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", range(14))
def test_special_values_equal_the_reference(device: str, dtype: torch.dtype, case: int) -> None:
    what, x = list(special_values(dtype))[case]
    for name in ("gelu", "relu", "srelu", "swiglu"):
        check_made(lambda x: activation(x, name, False), x, device, f"{what} {name}")  # noqa: B023
        check_made(lambda x: gradient(x, name, False), x, device, f"{what} d{name}")  # noqa: B023
    for layer_norm in (False, True):
        check_made(lambda x: norm(x, layer_norm, dtype), x, device, f"{what} norm")  # noqa: B023


def test_every_bf16_value_has_the_same_activation(device: str) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16).view(256, 256)
    for name in ("gelu", "qgelu", "relu", "srelu", "silu"):
        check_made(lambda x: ActivationOutput(x, name), every, device, name)  # noqa: B023
        ones = torch.ones(256, 256, dtype=torch.bfloat16)
        check_made(lambda x: ActivationGradient(ones.to(x.device), x, name), every, device, f"d{name}")  # noqa: B023


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_gradients_equal_the_reference(
    device: str, dtype: torch.dtype, layer_norm: bool, zero_centered: bool
) -> None:
    for shape in MATRICES:
        x = matrix(*shape, dtype)
        forward = norm(x, layer_norm, torch.float32, zero_centered)
        with te_dist.use_backend("reference"):
            kernels.materialize(forward)
        args = [matrix(*shape, dtype, 5), x, forward.weight, forward.mean, forward.rstd]
        options = {"zero_centered": zero_centered, "bias_grad": layer_norm}
        with te_dist.use_backend("reference"):
            expected = kernels.norm_backward(*args, **options)
        actual = kernels.norm_backward(*[None if t is None else t.to(device) for t in args], **options)
        for name, a, e in zip(("dx", "weight", "bias"), actual, expected, strict=True):
            assert (a is None) == (e is None)
            if a is not None:
                assert_equal_with_nan(a.cpu(), e, f"{shape} {name}")


@pytest.mark.parametrize("planes", [(True, False), (False, True), (True, True)], ids=["row", "column", "both"])
@pytest.mark.parametrize("format", QUANTIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantizing_a_producer_equals_quantizing_its_matrix(
    device: str, format: str, planes: tuple[bool, bool], dtype: torch.dtype
) -> None:
    # On the CPU every producer is materialized first, whatever the shape.
    shapes = ((144, 272),) if device == "cpu" else ((16, 32), (144, 272), (130, 258), (256, 384), (300, 1024))
    for rows, cols in shapes:
        x = matrix(rows, cols, dtype)
        builds: dict[str, Callable[[Tensor], Producer]] = {
            "rms": lambda x: norm(x, False, torch.float32),
            "layer": lambda x: norm(x, True, torch.bfloat16),
            "gelu": lambda x: activation(x, "gelu"),
            "swiglu": lambda x: activation(torch.cat([x, x.flip(0)], 1), "swiglu", False),
            "dgelu": lambda x: gradient(x, "gelu"),
            "dswiglu": lambda x: gradient(torch.cat([x, x.flip(0)], 1), "swiglu", False),
            "plain": Plain,
        }
        for what, build in builds.items():
            quantizer = on(device, QUANTIZERS[format](rowwise=planes[0], columnwise=planes[1]))
            mine, theirs = build(x.to(device)), build(x)
            if not fits(quantizer, tuple(mine.shape)):
                continue
            for producer in (mine, theirs):
                producer.want_column_sums()
            actual = quantizer.quantize_produced(mine, mine.shape, rng_state=rng_for(quantizer, device))
            with te_dist.use_backend("reference"):
                expected = on("cpu", QUANTIZERS[format](rowwise=planes[0], columnwise=planes[1])).quantize(
                    kernels.materialize(theirs), rng_state=rng_for(quantizer)
                )
            what = f"{format} {what} {rows}x{cols}"
            assert_same_storage(actual, expected, what)
            sums = kernels.column_sums(mine, torch.float32)
            with te_dist.use_backend("reference"):
                assert_same_bytes(sums.cpu(), kernels.column_sums(theirs, torch.float32), f"{what} column sums")
            if isinstance(mine, NormOutput):
                assert_same_bytes(mine.rstd.cpu(), theirs.rstd, f"{what} rstd")


BUILDS: dict[str, Callable[[Tensor], Producer]] = {
    "rms": lambda x: norm(x, False, torch.float32),
    "layer": lambda x: norm(x, True, torch.bfloat16, True),
    "gelu": lambda x: activation(x, "gelu", False),
    "swiglu": lambda x: activation(torch.cat([x, x.flip(0)], 1), "swiglu"),
    "dsilu": lambda x: gradient(x, "silu", False),
    "dswiglu": lambda x: gradient(torch.cat([x, x.flip(0)], 1), "swiglu"),
}


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("shape", [(2200, 3072), (140, 8192), (140, 8704)], ids=str)
def test_blocks_that_take_several_tiles(shape: tuple[int, int], build: Callable[[Tensor], Producer]) -> None:
    """More tiles than blocks, several bands of rows, and rows beyond what registers hold."""
    x = matrix(*shape, torch.bfloat16)
    theirs = build(x)
    theirs.want_column_sums()
    with te_dist.use_backend("reference"):
        made = kernels.materialize(theirs).cuda()
    for format in ("delayed_e4m3", "current_e5m2", "block_1d", "block_2d_f32", "mxfp8_e4m3"):
        mine = build(x.cuda())
        mine.want_column_sums()
        actual = on("cuda", QUANTIZERS[format]()).quantize_produced(mine, mine.shape)
        expected = on("cuda", QUANTIZERS[format]()).quantize(made)
        assert_same_storage(actual, expected, format)
        assert_same_bytes(mine.partials.cpu(), theirs.partials, f"{format} partials")
        if isinstance(mine, NormOutput):
            assert_same_bytes(mine.rstd.cpu(), theirs.rstd, f"{format} rstd")
    if isinstance(theirs, NormOutput):
        check_norm_gradient(theirs, x, matrix(*shape, torch.bfloat16, 5))


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.parametrize("build", [BUILDS["rms"], BUILDS["layer"]], ids=["rms", "layer"])
@pytest.mark.parametrize(
    "shape", [(13000, 264), (6149, 1032), (12400, 2048), (8500, 2056), (8400, 4096), (6149, 4104)], ids=str
)
def test_norm_gradients_of_many_tiles(shape: tuple[int, int], build: Callable[[Tensor], NormOutput]) -> None:
    """Clusters of blocks that take several tiles one after the other, the last one not whole; all lengths of the
    ring."""
    x = matrix(*shape, torch.bfloat16)
    theirs = build(x)
    with te_dist.use_backend("reference"):
        kernels.materialize(theirs)
    for seed in (5, 6):  # the second time other sums lie in shared memory
        check_norm_gradient(theirs, x, matrix(*shape, torch.bfloat16, seed))


def check_norm_gradient(made: NormOutput, x: Tensor, grad: Tensor) -> None:
    args = [grad, x, made.weight, made.mean, made.rstd]
    options = {"zero_centered": made.zero_centered, "bias_grad": made.mean is not None}
    with te_dist.use_backend("reference"):
        expected = kernels.norm_backward(*args, **options)
    actual = kernels.norm_backward(*[None if t is None else t.cuda() for t in args], **options)
    for a, e in zip(actual, expected, strict=True):
        if e is not None:
            assert_same_bytes(a.cpu(), e, "norm gradient")


def check_quantized(
    build: Callable[[Tensor], Producer], x: Tensor, format: str, columnwise: bool, sums: bool = False
) -> None:
    """On the GPU: a quantize that makes the matrix equals one of the matrix made on the CPU."""
    theirs = build(x)
    mine = build(x.cuda())
    for producer in (mine, theirs) if sums else ():
        producer.want_column_sums()
    made = kernels.materialize(theirs).cuda()
    quantizer = on("cuda", QUANTIZERS[format](rowwise=True, columnwise=columnwise))
    if not fits(quantizer, tuple(mine.shape)):
        return
    what = f"{format} {tuple(x.shape)} column {columnwise}"
    actual = quantizer.quantize_produced(mine, mine.shape)
    expected = on("cuda", QUANTIZERS[format](rowwise=True, columnwise=columnwise)).quantize(made)
    assert_same_storage(actual, expected, what)
    if sums:
        assert_equal_with_nan(mine.partials.cpu(), theirs.partials, f"{what} partials")
    if isinstance(mine, NormOutput):
        assert_same_bytes(mine.rstd.cpu(), theirs.rstd, f"{what} rstd")
        if mine.mean is not None:
            assert_same_bytes(mine.mean.cpu(), theirs.mean, f"{what} mean")


EVERY_BF16 = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
TABLED: dict[str, Callable[[Tensor], Producer]] = {
    **{name: lambda x, n=name: ActivationOutput(x, n) for name in ("silu", "gelu", "qgelu")},
    **{
        name: lambda x, n=name: ActivationOutput(torch.cat([x, x.flip(0)], 1), n)
        for name in ("swiglu", "geglu", "qgeglu")
    },
    "dgelu": lambda x: ActivationGradient(x.flip(0), x, "gelu"),
    **{
        f"d{name}": lambda x, n=name: ActivationGradient(x.flip(0), torch.cat([x, x.flip(1)], 1), n)
        for name in ("swiglu", "geglu")
    },
}


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "both"])
@pytest.mark.parametrize("name", TABLED)
def test_every_bf16_value_by_table(name: str, columnwise: bool) -> None:
    """Matrices of so many tiles that the GPU looks activations up."""
    in_order = EVERY_BF16.repeat(144).view(2304, 4096)
    shuffled = in_order.flatten()[torch.randperm(in_order.numel(), generator=torch.Generator().manual_seed(1))]
    finite = torch.where(shuffled.float().abs() < 1e4, shuffled, torch.ones_like(shuffled)).view(2304, 4096)
    for x in (in_order, finite, finite[:2299, :4040].contiguous()):
        for format in ("delayed_e4m3", "current_e4m3", "current_e5m2", "block_1d", "mxfp8_e4m3"):
            check_quantized(TABLED[name], x, format, columnwise)
    if name.startswith("d"):
        for format in ("delayed_e4m3", "block_1d", "mxfp8_e4m3"):
            check_quantized(TABLED[name], finite, format, columnwise, sums=True)


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if split_activation(name)[1]])
def test_approximations_round_to_the_same_bits(name: str) -> None:
    """One in a thousand products with a second factor lies so near to the middle between two bf16 values that an
    approximation could round to the other one."""
    generator = torch.Generator().manual_seed(6)
    firsts = [torch.randn(2304, 2048, generator=generator).mul_(size) for size in (1.0, 6.0, 40.0)]
    # Down to sigmoids of nearly 0, whose products with large factors are not.
    for first, size in (*((first, 1.0) for first in firsts), (EVERY_BF16.repeat(72).view(2304, 2048), 2.0**100)):
        second = torch.randn(2304, 2048, generator=generator).mul_(size)
        x = torch.cat([first, second], 1).bfloat16()
        theirs = kernels.materialize(ActivationOutput(x, name))
        mine = kernels.materialize(ActivationOutput(x.cuda(), name))
        assert_equal_with_nan(mine.cpu(), theirs, f"{name} times {size}")


# What the sigmoids' exponents are made of (csrc/numerics/activation.h): t = -x (a + b x^2).
EXPONENTS = {"silu": (1.4426950, 0.0), "gelu": (2.3022082, 0.10294324), "qgelu": (2.4554670, 0.0)}


def ends_of_sigmoids() -> Tensor:
    """4096 floats: neighbours of those beyond which sigmoids are 0, of each activation, and others."""
    found = []
    for a, b in EXPONENTS.values():
        x = -126 / a
        for _ in range(100):  # Newton's method
            x -= (x * (a + b * x * x) + 126) / (a + 3 * b * x * x)
        bits = torch.tensor(x).view(torch.int32) + torch.arange(-680, 681, dtype=torch.int32)
        found.append(bits.view(torch.float32))
    return torch.cat([*found, torch.tensor([-3e38, -1e30, -200.0, -88.0, -1e-3, 3e38, -2.0**127, -125.0, 125.0, 1e30,
                                            -126.0, -127.0, -128.0])])  # fmt: skip


@pytest.mark.parametrize("name", EXPONENTS)
def test_ends_of_activations(name: str, device: str) -> None:
    """Where exponents end, kernels end at the same value; far below zero activations are 0, at minus infinity NaN, as
    torch's."""
    a, b = EXPONENTS[name]
    for dtype in (torch.float32, torch.bfloat16):
        x = ends_of_sigmoids().view(1, -1).to(dtype)
        with te_dist.use_backend("reference"):
            expected = kernels.materialize(ActivationOutput(x, name))
        assert_same_bytes(kernels.materialize(ActivationOutput(x.to(device), name)).cpu(), expected, name)
        t = -x.double() * (a + b * x.double().square())
        assert (expected[t > 126.001] == 0).all() and (expected[t < 125.999] != 0).all()
        assert (expected == 0).any() and (expected[x < 0] != 0).any()
        far = torch.tensor([[-3e38, -1e30, 3e38, -math.inf, math.inf, math.nan]], dtype=dtype)
        made = kernels.materialize(ActivationOutput(far.to(device), name)).cpu()
        assert torch.equal(made[0, :2], torch.zeros(2, dtype=dtype)) and torch.equal(made[0, 2], far[0, 2])
        assert made[0, 3].isnan() and made[0, 4] == math.inf and made[0, 5].isnan()
        assert true_activation(far, name)[0, 3].isnan()


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
def test_norms_of_whole_rows(layer_norm: bool) -> None:
    shapes = ((1, 8), (5, 8192), (130, 264), (131, 4096), (2, 8184), (1023, 1024), (257, 2048), (6, 16384))
    for shape in (*shapes, (3, 2048), (18, 2056), (1030, 3000), (4400, 2048), (4400, 4096), (130, 17000), (257, 28672)):
        for weight_dtype, zero_centered in ((torch.bfloat16, False), (torch.float32, True), (torch.float16, False)):
            x = matrix(*shape, torch.bfloat16)
            for format in ("current_e4m3", "delayed_e4m3", "block_1d", "mxfp8_e4m3"):
                check_quantized(lambda x: norm(x, layer_norm, weight_dtype, zero_centered), x, format, False)  # noqa: B023


@pytest.mark.parametrize("cols", [8, 16, 264, 2056, 20000])
@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
def test_infinite_statistics_have_no_amax_behind_a_rows_end(device: str, layer_norm: bool, cols: int) -> None:
    """Zeros there would become NaNs, where the result itself is infinite."""
    x = torch.full((3, cols), 2.0**123 * 8 / cols if layer_norm else 1e-30, dtype=torch.bfloat16)

    def build(where: str) -> NormOutput:
        stats = torch.empty(2, 3, device=where)
        weight = torch.ones(cols, dtype=torch.bfloat16, device=where)
        # For a LayerNorm's mean times its reciprocal deviation to overflow.
        eps = 1e-5 / cols**2 if layer_norm else 0.0
        return NormOutput(x.to(where), weight, None, stats[0] if layer_norm else None, stats[1], eps=eps)

    with te_dist.use_backend("reference"):
        made = kernels.materialize(build("cpu"))
    assert bool(made.isinf().all())
    amax = torch.zeros(1, device=device)
    kernels.amax(build(device), amax)
    assert amax.isinf()
    for columnwise in (False, True):
        delayed = on(device, QUANTIZERS["delayed_e4m3"](columnwise=columnwise))
        delayed.quantize_produced(build(device), made.shape)
        assert delayed.amax.isinf().all()


@pytest.mark.parametrize("cols", [264, 2048, 20000])
def test_an_rms_norm_with_a_bias(device: str, cols: int) -> None:
    x = matrix(70, cols, torch.bfloat16)
    bias, weight = 3 * matrix(2, cols, torch.bfloat16, 1)

    def build(x: Tensor) -> NormOutput:
        rstd = torch.empty(70, device=x.device)
        return NormOutput(x, weight.to(x.device), bias.to(x.device), None, rstd, eps=1e-5)

    with te_dist.use_backend("reference"):
        made = kernels.materialize(build(x))
    for format in ("current_e4m3", "delayed_e4m3", "block_1d", "mxfp8_e4m3"):
        for columnwise in (False, True):
            quantizer = on(device, QUANTIZERS[format](columnwise=columnwise))
            actual = quantizer.quantize_produced(build(x.to(device)), x.shape)
            with te_dist.use_backend("reference"):
                expected = QUANTIZERS[format](columnwise=columnwise).quantize(made)
            assert_same_storage(actual, expected, format)


@pytest.mark.parametrize("cols", [264, 2048, 3000, 8192, 20000])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_rows_that_are_not_there_have_no_amax(device: str, rows: int, cols: int) -> None:
    """Of rows that are held together, some may lie behind the last one; a bias alone is larger than all results."""
    x = torch.zeros(rows, cols, dtype=torch.bfloat16)
    x[:, :8] = -1.0
    bias = torch.zeros(cols, dtype=torch.bfloat16)
    bias[0] = 4.0 * (cols / 8) ** 0.5

    def build(where: str) -> NormOutput:
        stats = torch.empty(2, rows, device=where)
        weight = torch.ones(cols, dtype=torch.bfloat16, device=where)
        return NormOutput(x.to(where), weight, bias.to(where), stats[0], stats[1], eps=1e-5)

    with te_dist.use_backend("reference"):
        made = kernels.materialize(build("cpu"))
    amax = made.abs().amax().float()
    assert amax < bias[0]
    for columnwise in (False, True):
        current = on(device, QUANTIZERS["current_e4m3"](rowwise=True, columnwise=columnwise))
        stored = current.quantize_produced(build(device), made.shape)
        assert torch.equal(stored._scale_inv.cpu().reshape(()), 1 / (torch.tensor(448.0) / amax))
        delayed = on(device, QUANTIZERS["delayed_e4m3"](rowwise=True, columnwise=columnwise))
        delayed.quantize_produced(build(device), made.shape)
        assert torch.equal(delayed.amax.cpu().reshape(()), amax)


@pytest.mark.parametrize("name", ["gelu", "qgelu", "relu", "srelu", "silu"])
def test_magnitudes_of_activations_rise_and_fall_in_stretches(name: str) -> None:
    """What the CUDA amax of an activation relies on; the troughs are those of csrc/cuda/stretches.cuh."""
    trough = {"silu": 0xBFA8, "gelu": 0xBF4E}.get(name, 0xBF43)
    bits = EVERY_BF16.view(torch.int16).int() & 0xFFFF
    made = reference_producers.activation_output(EVERY_BF16.view(256, 256), name, False, None).flatten().float().abs()
    by_bits = torch.empty_like(made)
    by_bits[bits.long()] = made
    infinity, minus_zero, minus_infinity = 0x7F80, 0x8000, 0xFF80

    def rises(values: Tensor) -> bool:
        return bool((values[1:] >= values[:-1]).all())

    assert rises(by_bits[: infinity + 1]) and rises(by_bits[minus_zero : trough + 1])
    assert rises(by_bits[trough + 1 : minus_infinity].flip(0))
    assert by_bits[minus_infinity].isnan() if name in EXPONENTS else by_bits[minus_infinity] == 0
    one = 0x3F80
    assert by_bits[one] > by_bits[minus_zero:minus_infinity].max()  # from there on, the trough does not matter


@pytest.mark.parametrize("name", ["gelu", "qgelu", "relu", "srelu", "silu"])
def test_amax_of_an_activation(device: str, name: str) -> None:
    ordered = EVERY_BF16.float()
    ordered = ordered[ordered.isfinite()].sort().values.bfloat16()
    generator = torch.Generator().manual_seed(2)
    constants = (float("-inf"), float("inf"), 0.0, -0.0, -3e38)
    samples = [torch.full((4, 8), value, dtype=torch.bfloat16) for value in constants]
    for _ in range(60):
        ends = torch.randint(0, ordered.numel(), (2,), generator=generator).sort().values
        among = ordered[int(ends[0]) : int(ends[1]) + 1]
        samples.append(among[torch.randint(0, among.numel(), (24, 40), generator=generator)])
    for low, high in ((-2, -0.5), (-1, 0), (-100, -80), (-1e-3, 1e-3), (-0.8, 0.5), (-20, 0.1)):
        samples.append(torch.empty(24, 40).uniform_(low, high, generator=generator).bfloat16())
    for where in (0, 959):
        poisoned = samples[-1].clone()
        poisoned.view(-1)[where] = float("nan")
        samples += [poisoned, -poisoned]
    for x in samples:
        made = reference_producers.activation_output(x, name, False, None)
        expected = torch.zeros(1)
        with te_dist.use_backend("reference"):
            kernels.amax(made, expected)
        actual = torch.full((1,), 7.0, device=device)
        kernels.amax(ActivationOutput(x.to(device), name), actual)
        assert_same_bytes(actual.cpu(), expected, f"{name} of {x.min()} .. {x.max()}")
        wide = torch.full((x.shape[0], x.shape[1] + 8), 1e30, dtype=torch.bfloat16)
        wide[:, : x.shape[1]] = x
        kernels.amax(ActivationOutput(wide.to(device)[:, : x.shape[1]], name), actual, accumulate=True)
        assert_same_bytes(actual.cpu(), expected, f"{name}, strided")


@pytest.mark.parametrize("name", ["gelu", "qgelu", "relu", "srelu", "silu"])
def test_amax_of_an_activation_with_a_bias(device: str, name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    columns = 296  # more than a warp takes at once
    samples: list[tuple[Tensor, Tensor]] = []
    for low, high in ((-2, -0.5), (-1, 0), (-300, -80), (-1e-3, 1e-3), (-0.8, 0.5), (-20, 0.1), (-3e38, -1e36), (0, 9)):
        x = torch.empty(9, columns).uniform_(low, high, generator=generator).bfloat16()
        for size in (0.0, 0.01, 1.0, 1e4, 1e38):
            samples.append((x, torch.randn(columns, generator=generator) * size))
            samples.append((x, -samples[-1][1].abs()))
    for value in (float("-inf"), float("inf"), float("nan")):
        for where in (0, 8 * columns + 295):
            poisoned = samples[0][0].clone()
            poisoned.view(-1)[where] = value
            samples.append((poisoned, samples[1][1]))
        bias = samples[2][1].clone()
        bias[290] = value
        samples.append((samples[0][0], bias))
    for x, bias in samples:
        made = reference_producers.activation_output(x, name, False, bias)
        expected = torch.zeros(1)
        with te_dist.use_backend("reference"):
            kernels.amax(made, expected)
        actual = torch.full((1,), 7.0, device=device)
        kernels.amax(ActivationOutput(x.to(device), name, bias.to(device)), actual)
        assert_same_bytes(actual.cpu(), expected, f"{name} of {x.min()} .. {x.max()} + {bias.min()} .. {bias.max()}")


@pytest.mark.cuda
@pytest.mark.parametrize("format", ["current_e4m3", "block_1d", "mxfp8_e4m3"])
@pytest.mark.parametrize("build", [BUILDS["layer"], BUILDS["dswiglu"]], ids=["layer", "dswiglu"])
@pytest.mark.parametrize("shape", [(700, 1024), (130, 17408)], ids=str)
def test_fused_kernels_in_a_graph(shape: tuple[int, int], format: str, build: Callable[[Tensor], Producer]) -> None:
    """Statistics and workspaces start anew at each replay."""
    quantizer = QUANTIZERS[format]()
    first = matrix(*shape, torch.bfloat16).cuda()
    eager = build(first)
    quantizer.quantize_produced(eager, eager.shape)
    captured = build(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantizer.quantize_produced(captured, captured.shape)
    for seed in (1, 2):
        again = build(matrix(*shape, torch.bfloat16, seed).cuda())
        captured.x.copy_(again.x)
        graph.replay()
        assert_same_storage(out, quantizer.quantize_produced(again, again.shape), format)


class SeenOnGpu(Tensor):
    """For what asks where a tensor is, and no more."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


@pytest.mark.parametrize("fp8", [te_dist.DType.kFloat8E4M3, te_dist.DType.kFloat8E5M2])
def test_blocks_are_made_on_the_fly_on_a_gpu(monkeypatch: pytest.MonkeyPatch, fp8: te_dist.DType) -> None:
    """The same bytes come of a matrix that was written to memory, in twice the time: no other test would tell."""
    made = torch.ones(256, 256, dtype=torch.bfloat16)
    calls: list[tuple[object, ...]] = []
    for module in (blocks, nvfp4, sources):
        monkeypatch.setattr(module, "find", lambda device, kernel: kernel)
        monkeypatch.setattr(module, "run", lambda *arguments: calls.append(arguments) or True)
    monkeypatch.setattr(sources, "materialize", lambda producer: made)
    monkeypatch.setattr(nvfp4, "amax_scratch", lambda device, count: torch.empty(count))
    builds = (lambda x: norm(x, False, torch.float32), lambda x: activation(x, "gelu"), lambda x: gradient(x, "silu"))
    for build in builds:
        producer = build(torch.ones(256, 256, dtype=torch.bfloat16))
        producer.x = producer.x.as_subclass(SeenOnGpu)
        for block_dim in (1, 2):
            kernels.quantize_block(producer, *[None] * 4, fp8=fp8, block_dim=block_dim, eps=0.0, power_of_2=True)
        for two_d in (False, True):
            kernels.quantize_mxfp8(producer, *[None] * 4, fp8=fp8, two_d=two_d)
        rules = {"two_d": False, "with_rht": True, "random_signs": True, "rng_state": None}
        kernels.quantize_nvfp4_current(producer, *[None] * 6, **rules)
    summed = Plain(torch.ones(256, 256, dtype=torch.bfloat16))
    summed.want_column_sums()
    summed.x = summed.x.as_subclass(SeenOnGpu)
    kernels.quantize_nvfp4_current(summed, *[None] * 6, **rules)
    on_the_fly = [isinstance(source, tuple) for _, _, source, *_ in calls]
    assert on_the_fly == [True] * 16
    assert summed.partials is not None and calls[-1][2][-1] == summed.partials.data_ptr()


@pytest.mark.skipif(not getattr(kernels.extension, "has_cuda", False), reason="built without CUDA")
def test_kernels_refuse_producers_they_do_not_make() -> None:
    """te_dist.kernels never asks for these; the entry points check all the same, before they touch a device."""
    x = torch.ones(64, 64)
    amax = torch.zeros(1)
    backend = kernels.extension.cuda
    for made in (ActivationOutput(x, "gelu"), ActivationOutput(x.bfloat16()[:, :60], "gelu")):
        with pytest.raises(ValueError, match="on the fly"):
            backend.amax(kernels.producer_fields(made), amax.data_ptr(), False, 0, 0)
    fine = ActivationOutput(x.bfloat16(), "gelu")
    with pytest.raises(ValueError, match="reads a matrix from memory"):
        backend.amax_nvfp4(kernels.producer_fields(fine), False, 0, amax.data_ptr(), 0, 0, 0)
    with pytest.raises(ValueError, match="the made matrix"):  # has an address of its own
        backend.amax_nvfp4((*kernels.producer_fields(fine), 8), False, 0, amax.data_ptr(), 0, 0, 0)


def test_strided_inputs(device: str) -> None:
    """Rows that lie apart, as in a slice of a wider tensor."""
    wide = matrix(130, 800, torch.bfloat16)
    x = wide[:, 8:264]

    def strided(x: Tensor) -> Tensor:
        return torch.cat([x, x, x], 1)[:, 256:512]

    check_made(lambda x: norm(strided(x), True, torch.float32), x, device, "norm")
    check_made(lambda x: activation(strided(x), "swiglu"), x, device, "swiglu")
    check_made(lambda x: gradient(strided(x), "swiglu"), x, device, "dswiglu")


# ------------------------------------------------------------------------------------------------- correctness
TRUE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
}


def true_activation(x: Tensor, name: str) -> Tensor:
    plain, gated = split_activation(name)
    if not gated:
        return TRUE_ACTIVATIONS[plain](x)
    first, second = x.chunk(2, dim=-1)
    return TRUE_ACTIVATIONS[plain](first) * second


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_torch(name: str) -> None:
    """Against autograd in float64. The exponential is good to 2e-7 of itself, its argument to 2^-24 of itself, and
    arguments reach 30 here: 3e-6 relative to the largest factor bounds the rest."""
    x = torch.linspace(-20, 20, 4096).reshape(64, 64).requires_grad_()
    wide = x.double()
    result = true_activation(wide, name)
    grad = torch.linspace(0.5, 2, result.numel()).reshape(result.shape)
    (expected,) = torch.autograd.grad(result, x, grad.double())
    bound = 3e-6 * x.abs().max().item() ** (2 if name in ("srelu", "sreglu") else 1)
    assert (kernels.materialize(ActivationOutput(x.detach(), name)) - result).abs().max() <= bound * 20
    made = kernels.materialize(ActivationGradient(grad, x.detach(), name))
    assert (made - expected).abs().max() <= bound * 40
    # Where it matters, close to zero, to a few units in the last place.
    near = ActivationOutput(torch.linspace(-4, 4, 512).reshape(8, 64), name)
    assert torch.allclose(
        kernels.materialize(near).double(), true_activation(near.x.double(), name), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_are_those_of_torch(layer_norm: bool, zero_centered: bool) -> None:
    x = matrix(150, 700, torch.float32) + 0.3
    forward = norm(x, layer_norm, torch.float32, zero_centered)
    y = kernels.materialize(forward)
    wide, weight, bias = (t.double().requires_grad_() for t in (x, forward.weight, torch.zeros(700)))
    gain = weight + 1 if zero_centered else weight
    offset = bias if forward.bias is None else bias + forward.bias.double()
    expected = F.layer_norm(wide, (700,), gain, offset, 1e-5) if layer_norm else F.rms_norm(wide, (700,), gain, 1e-5)
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-5)
    grad = matrix(150, 700, torch.float32, 6)
    wanted = (wide, weight, bias) if layer_norm else (wide, weight)
    dx, dweight, *dbias = torch.autograd.grad(expected, wanted, grad.double())
    made = kernels.norm_backward(
        grad, x, forward.weight, forward.mean, forward.rstd, zero_centered=zero_centered, bias_grad=layer_norm
    )
    assert torch.allclose(made[0].double(), dx, rtol=1e-4, atol=1e-5 * dx.abs().max().item())
    assert torch.allclose(made[1].double(), dweight, rtol=1e-5, atol=1e-5 * dweight.abs().max().item())
    if layer_norm:
        assert torch.allclose(made[2].double(), dbias[0], rtol=1e-5, atol=1e-5 * dbias[0].abs().max().item())


@pytest.mark.parametrize("cols", [1, 2, 65, 700, 8192])
def test_statistics_of_rows_far_from_zero_and_of_outliers(cols: int) -> None:
    """Rows are gone through once, and yet lose nothing by what they have in common, nor by columns far from others."""
    x = matrix(64, cols, torch.float32)
    column = torch.arange(cols)
    rows = {
        "usual": x,
        "far": x + 1000,
        "farther": x * 0.01 - 300,
        "a far first column": torch.where(column == 0, 300.0, x),
        "a far second column": torch.where(column == 1, -300.0, x),
        "far first columns": torch.where(column % 64 == 0, 100.0, x),
        "all the same": torch.full_like(x, 3.3),
    }
    for label, of in rows.items():
        mean, rstd = reference_producers.norm_stats(of, layer_norm=True, eps=1e-5)
        assert mean is not None
        wide = of.double()
        exact = (wide.var(1, unbiased=False) + 1e-5).rsqrt()
        # The mean is a float, and what it is off by adds its square to the variance.
        off = wide.mean(1).abs() * 2.0**-23
        assert ((mean - wide.mean(1)).abs() <= 2 * off + 1e-7 * wide.abs().amax(1)).all(), label
        assert (((rstd - exact) / exact).abs() <= 5e-7 + (off * exact) ** 2).all(), label


def test_fma_rounds_once() -> None:
    """The emulated fused multiply-add against exact rationals, at ties and just beside them."""
    from fractions import Fraction

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2000, generator=generator)
    b = torch.randn(2000, generator=generator)
    product = a.double() * b.double()
    near = (product.float() * 1.5).float()  # c close to the product: bits cancel
    far = torch.randn(2000, generator=generator) * torch.exp2(torch.randint(-40, 40, (2000,), generator=generator))
    for c in (near, -near, far, torch.zeros(2000)):
        made = reference_producers.fma(a, b, c)
        for i in range(0, 2000, 7):
            exact = Fraction(a[i].item()) * Fraction(b[i].item()) + Fraction(c[i].item())
            lower, upper = (torch.nextafter(made[i], torch.tensor(s)).item() for s in (-float("inf"), float("inf")))
            error = abs(Fraction(made[i].item()) - exact)
            assert error <= abs(Fraction(lower) - exact) and error <= abs(Fraction(upper) - exact)


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="swigelu"):
        ActivationOutput(torch.zeros(2, 4), "swigelu")


def test_column_sums_must_be_asked_for() -> None:
    with pytest.raises(ValueError, match="want_column_sums"):
        kernels.column_sums(Plain(torch.zeros(2, 4)), torch.float32)
