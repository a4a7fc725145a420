"""Matrices of whole tiles, which kernels of their own quantize on a GPU, with few instructions: the same bytes."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from cases import (
    PLANES,
    QUANTIZERS,
    assert_same_bytes,
    assert_same_storage,
    check_against_reference,
    fits,
    on,
    rng_for,
    special_values,
)
from test_blocks_that_stay import multiprocessors
from test_producers import activation, gradient, matrix, norm
from torch import Tensor

import te_dist
from te_dist import kernels, reference
from te_dist.producers import ActivationOutput, NormOutput, Plain, Producer

pytestmark = pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")

FORMATS = ("delayed_e4m3", "current_e4m3", "current_e5m2", "block_1d", "block_2d", "mxfp8_e4m3", "mxfp8_e5m2")
# Whole tiles of 128 x 128 and of 32 x 512; the same with columns, and with rows, behind them.
SHAPES = ((256, 1024), (128, 640), (300, 1100))


def with_specials(x: Tensor, seed: int = 0) -> Tensor:
    """Infinities, NaNs, zeros and the outermost finite values, in a few of all places."""
    info = torch.finfo(x.dtype)
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor(
        [float("inf"), -float("inf"), float("nan"), -0.0, info.max, -info.max, info.smallest_normal / 4], dtype=x.dtype
    )
    chosen = torch.rand(x.shape, generator=generator) < 1 / 500
    which = torch.randint(len(values), x.shape, generator=generator)
    return torch.where(chosen, values[which], x)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("planes", PLANES)
def test_special_values(name: str, planes: str, device: str) -> None:
    for shape in SHAPES:
        x = with_specials(matrix(*shape, torch.bfloat16))
        check_against_reference(QUANTIZERS[name], x, planes, device, f"{name} {shape}")
    for label, x in special_values(torch.bfloat16):
        repeated = x.repeat(2, 4)[:256, :1024].contiguous()
        check_against_reference(QUANTIZERS[name], repeated, planes, device, f"{name} {label}")


def test_every_magnitude_as_the_largest_of_its_block(device: str) -> None:
    """Every scale that a block can have, in both directions: a power of two follows from bits of the amax."""
    every = torch.arange(1 << 15, dtype=torch.int16).view(torch.bfloat16)
    for start in range(0, 1 << 15, 512):
        x = matrix(128, 512, torch.bfloat16) * 0
        x[torch.arange(512) % 128, torch.arange(512)] = every[start : start + 512]
        for name in ("block_1d", "mxfp8_e4m3", "mxfp8_e5m2"):
            check_against_reference(QUANTIZERS[name], x, "both", device, f"{name} {start}")


def nvfp4_inputs() -> dict[str, Tensor]:
    """Every code and every tie, scales of all sizes, and what has none."""
    generator = torch.Generator().manual_seed(0)
    x = matrix(256, 640, torch.bfloat16)
    powers = torch.randint(-24, 1, (16, 40), generator=generator).repeat_interleave(16, 0).repeat_interleave(16, 1)
    # One 2688 makes the tensor's scale 1, a 6 in each block makes the blocks' 1: values are rounded as they are.
    ties = (torch.randint(-24, 25, x.shape, generator=generator) / 4).bfloat16()
    nudge = torch.randint(-1, 2, x.shape, generator=generator).to(torch.int16)
    inner = (ties != 0) & (ties.abs() < 6)
    ties = torch.where(inner, (ties.view(torch.int16) + nudge).view(torch.bfloat16), ties)
    ties[::16], ties[:, ::16], ties[0, 0] = 6.0, 6.0, 2688.0
    assert bool(ties.isfinite().all())
    infinite = x.clone()
    infinite[3, 5], infinite[100, 200] = float("inf"), -float("inf")
    return {
        "normal": x,
        "specials": with_specials(x),
        "infinities": infinite,
        "blocks of many magnitudes": x * 2.0**powers,
        "ties": ties,
        "tiny": x * 2.0**-126,
        "subnormal next to normal": torch.where(torch.arange(256)[:, None] % 3 == 0, x * 2.0**-127, x * 2.0**-104),
        "huge": x.clamp(-1, 1) * 2.0**127,
        "sums past the largest bf16": x.clamp(-1, 1) * 2.0**125,
        "huge beside tiny": torch.where(torch.arange(640) % 32 < 16, x * 2.0**120, x * 2.0**-110),
        "zeros": torch.where(torch.arange(640) % 48 < 16, x, x * 0),
        "nothing": x * -0.0,
    }


def values_around_codes() -> Tensor:
    """Every E2M1 number, every tie, the floats around them, and others in between."""
    points = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 6.9])
    near = torch.arange(-5000, 5001, dtype=torch.int32)
    values = (points.view(torch.int32)[:, None] + near).clamp(min=0).view(torch.float32).flatten()
    return torch.cat([values, torch.linspace(0, 6.95, 100_001)])


def bits_as_halves(values: Tensor) -> Tensor:
    """Of fp16 towards zero, where fp16's smallest normal number stands for 1."""
    scaled = values.double() / 2**14
    nearest = scaled.half()
    return nearest.view(torch.int16).int() - (nearest.double() > scaled).int()


def test_nvfp4_codes_by_halves() -> None:
    """The arithmetic of csrc/cuda/nvfp4_halves.cuh: right but for ties that should go down."""
    values = values_around_codes()
    bits = bits_as_halves(values)
    expected = reference.encode_e2m1(values).int()
    downwards = torch.isin(values, torch.tensor([0.25, 1.25, 2.5, 5.0]))
    assert torch.equal((bits + 256) // 512, expected + downwards.int())
    assert downwards.sum() == 4


ONE = torch.tensor(1.0)


def codes_of_raised(values: Tensor, share: float, factor: Tensor = ONE) -> Tensor:
    """Of values times a factor that is made smaller by a share, whose numbers are raised by 2^-10 of themselves."""
    number = bits_as_halves(values * (factor * torch.tensor(1 - share))).short().view(torch.half).double()
    return ((number * (1 + 2.0**-10)).half().view(torch.int16).int() + 256) // 512


def test_nvfp4_codes_where_ties_go_down() -> None:
    """The same, raised: by the first share all ties are right, and what is wrong is next to one; by the second, 0.25
    and those that go up."""
    values = values_around_codes()
    expected = reference.encode_e2m1(values).int()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    wrong = codes_of_raised(values, 2.0**-10) != expected
    assert not wrong[torch.isin(values, ties)].any()
    assert ((values[wrong][:, None] / ties - 1).abs().amin(1) < 2.0**-9).all()
    assert 0 < wrong.sum() < 50_000
    second = torch.tensor([0.25, 0.75, 1.75, 3.5])
    assert torch.equal(codes_of_raised(second, 2.0**-12), reference.encode_e2m1(second).int())


def test_nvfp4_ties_need_no_long_way() -> None:
    """Under every bf16 amax one of both shares is right for every block that can meet a tie that goes down: for the
    values of its scale next to ties, which are the kernel's condition."""
    mantissas = 1 + torch.arange(128) / 128
    decode = reference.nvfp4_global(mantissas)[1][:, None] * (1 + torch.arange(8) / 8)  # [amax, scale]
    exact = 1 / decode
    every = (mantissas * 2.0 ** torch.arange(-30, 31)[:, None]).flatten()
    met = 0
    for factor in exact.flatten():
        values = every[(every * factor > 0.1) & (every * factor < 6.9)]
        expected = reference.encode_e2m1(values * factor).int()
        if not torch.equal((bits_as_halves(values * factor) + 256) // 512, expected):
            met += 1
            assert any(torch.equal(codes_of_raised(values, share, factor), expected) for share in (2.0**-10, 2.0**-12))
    assert met == 95


def test_nvfp4_codes_at_random() -> None:
    """The arithmetic of pack_at_random: fp16 numbers take random bits behind those of the code, and are cut off. Codes
    of numbers past 6 may become 8, which is to be 7."""
    shares = torch.arange(1, 512).float() / 512  # 0.5 less the share of a random byte, and more
    near = torch.arange(-40, 41, dtype=torch.int32)
    values = [(shares * factor).view(torch.int32)[:, None].add(near).view(torch.float32) for factor in (1, 2, 4, 13)]
    values = torch.cat([v.flatten() for v in values] + [torch.linspace(0, 6.9, 4001), 2.0 ** torch.arange(-40, -8)])
    values = values[values < 6.9]  # CodeHalves::kLimit
    bits = bits_as_halves(values)
    rounded_up = past_six = 0
    for byte in range(256):
        expected = reference.encode_e2m1_stochastic(values, torch.full_like(values, byte)).int()
        codes = (bits + 2 * byte) // 512
        past_six = max(past_six, int(codes.max()))
        assert torch.equal(codes.clamp(max=7), expected), f"random byte {byte}"
        # The definition: what is at most the sum, which float64 does not round up to any of these values' steps.
        small = values < 2
        exact = ((values.double() + byte / 512) * 2).floor().int()
        assert torch.equal(exact[small], expected[small]), f"random byte {byte}"
        rounded_up += int((((values + byte / 512) * 2).floor().int() != exact)[small].sum())
    assert rounded_up > 100  # float32 would
    assert past_six == 8


@pytest.mark.parametrize("name", ["current_e4m3", "nvfp4", "nvfp4_rht"])
def test_whatever_lay_where_amaxes_are_found(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for parts of an amax, a block's each, comes as it is; here, as NaNs. Any number of blocks."""
    quantizer = QUANTIZERS[name]()
    matrices = [matrix(rows, cols, torch.bfloat16) for rows in range(128, 1024, 128) for cols in (128, 2048)]
    expected = [quantizer.quantize(x) for x in matrices]
    used = 0

    def of_nans(where: torch.device, count: int = 1) -> Tensor:
        nonlocal used
        used += 1
        return kernels.amax_scratch(where, count).fill_(float("nan"))

    for module in (kernels.per_tensor, kernels.nvfp4):
        monkeypatch.setattr(module, "amax_scratch", of_nans)
    for x, storage in zip(matrices, expected, strict=True):
        assert_same_storage(quantizer.quantize(x.to(device)), storage, str(x.shape))
    assert used == len(matrices)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_2d", "nvfp4_rht", "nvfp4_rht_plain_signs", "nvfp4_stochastic"])
@pytest.mark.parametrize("planes", PLANES)
def test_nvfp4(name: str, planes: str, device: str) -> None:
    for label, x in nvfp4_inputs().items():
        check_against_reference(QUANTIZERS[name], x, planes, device, f"{name} {label}")


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_2d", "nvfp4_rht", "nvfp4_stochastic"])
@pytest.mark.parametrize("planes", PLANES)
def test_nvfp4_by_tall_blocks(name: str, planes: str) -> None:
    """Blocks of threads that take two tiles, one below the other, which are other ones on each number of
    multiprocessors, and blocks that take one."""
    for rows, cols in ((512, 640), (1536, 384), (640, 1024)):
        x = matrix(rows, cols, torch.bfloat16)
        for most in (1, 2, 3):
            with multiprocessors(most):
                check_against_reference(QUANTIZERS[name], x, planes, "cuda", f"{name} {rows} x {cols} on {most}")


# How values become codes: transformed columns, square blocks, at random.
CODES = {
    "plain": (False, False, False),
    "rht": (True, False, False),
    "squares": (False, True, False),
    "random": (False, False, True),
    "rht random": (True, False, True),
}


def nvfp4_under(amax: float, x: Tensor, codes: str, device: str, offset: int = 0) -> list[Tensor]:
    """All planes of `x` under a given amax; the scales lie `offset` bytes behind the start of their buffers."""
    hadamard, squares, at_random = CODES[codes]
    x = x.to(device)
    planes = te_dist.NVFP4Quantizer().make_empty(x.shape, device=device)
    amaxes = torch.full((1,), amax, device=device)
    data, scales = (planes._rowwise_data, planes._columnwise_data), []
    for scale in (planes._rowwise_scale_inv, planes._columnwise_scale_inv):
        bytes_of_scale = torch.zeros(offset + scale.numel(), dtype=torch.uint8, device=device)[offset:]
        scales.append(bytes_of_scale.view(scale.dtype).view(scale.shape))
    kernels.quantize_nvfp4(
        x, amaxes, amaxes, data[0], scales[0], data[1], scales[1],
        two_d=squares, with_rht=hadamard, random_signs=True,
        rng_state=torch.tensor([7, 2**40 + 5], device=device) if at_random else None,
    )  # fmt: skip
    return [plane.cpu().view(torch.uint8) for plane in (*data, *scales)]


@pytest.mark.parametrize("codes", CODES)
def test_nvfp4_under_any_amax(codes: str, device: str) -> None:
    """Amaxes come from other ranks and other steps: they need not be the tensor's. At 448 * 2^90 and 448 / 2^90 factors
    change from a table's to exact ones."""
    edges = [448 * 2.0 ** (90 * sign) * near for sign in (-1, 1) for near in (0.999, 1.001)]
    kinds = set()
    for label, x in nvfp4_inputs().items():
        own = x.nan_to_num(0, 0, 0).abs().max().item()
        scaled = [own * share for share in (1 / 8, 0.95, 1, 8, 4096)]
        for amax in (*scaled, *edges, 0.0, float("inf"), float("nan"), 1e-45, -1.0):
            if abs(amax) >= 2.0**128 and amax != float("inf"):
                continue
            with te_dist.use_backend("reference"):
                expected = nvfp4_under(amax, x, codes, "cpu")
            actual = nvfp4_under(amax, x, codes, device)
            for plane, mine, theirs in zip(
                ("row", "column", "row scale", "column scale"), actual, expected, strict=True
            ):
                assert_same_bytes(mine, theirs, f"{label} under {amax}, {plane}")
            kinds.add((len(expected[2].unique()) > 1, len(expected[0].unique()) > 16))
    assert (True, True) in kinds


def test_nvfp4_sums_that_a_float_rounds_up_to_a_half(device: str) -> None:
    """Random codes of values whose sum with some share of a byte is below 0.5 by less than a float has places for.
    They are rare, so that amaxes are looked for under which there are any."""
    small = ((1 + torch.arange(128) / 128) * 2.0 ** torch.arange(-8, -4)[:, None]).flatten()
    amaxes = 8 + torch.arange(1 << 13) / 1024
    encode, decode = reference.nvfp4_global(amaxes)
    scale = (encode * torch.tensor(1 / 6)).to(torch.float8_e4m3fn).float()  # of blocks with an amax of 1
    scaled = small * (1 / (scale * decode))[:, None]
    below = (scaled.double() * 512).ceil() / 512 - scaled.double()
    found = ((below > 0) & (below <= 2.0**-26) & (scaled < 0.25)).nonzero()
    assert len(found) > 4
    bytes_of_all = torch.arange(256).float()
    for which, value in found[:4].tolist():
        x = torch.full((128, 256), small[value].item(), dtype=torch.bfloat16)
        x[torch.arange(128)[:, None] % 16 == torch.arange(256) % 16] = 1.0  # one in every block, of either plane
        with te_dist.use_backend("reference"):
            expected = nvfp4_under(amaxes[which].item(), x, "random", "cpu")
        for mine, theirs in zip(nvfp4_under(amaxes[which].item(), x, "random", device), expected, strict=True):
            assert_same_bytes(mine, theirs, f"{small[value]} under {amaxes[which]}")
        codes = reference.encode_e2m1_stochastic(scaled[which, value].expand(256), bytes_of_all)
        assert not torch.equal(codes.bool(), scaled[which, value] + bytes_of_all / 512 >= 0.5)


@pytest.mark.parametrize("codes", ["plain", "rht", "squares"])
def test_nvfp4_ties_under_amaxes_of_all_mantissas(codes: str, device: str) -> None:
    """Whether a block's values can meet ties depends on how the amax's mantissa divides 2688 times the scale's."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 1 << 7, (128, 256), generator=generator)
    exponents = torch.randint(-4, 0, (128, 256), generator=generator)
    sizes = torch.randint(-8, 1, (8, 16), generator=generator).repeat_interleave(16, 0).repeat_interleave(16, 1)
    signs = 1 - 2 * torch.randint(0, 2, (128, 256), generator=generator)
    x = ((1 + bits / 128) * 2.0 ** (exponents + sizes) * signs).bfloat16()
    x[16:32, 32:64] *= 0  # blocks of zeros of both signs, beside those that meet ties
    met = 0
    for mantissa in range(128):
        amax = torch.tensor(1 + mantissa / 128)
        with te_dist.use_backend("reference"):
            expected = nvfp4_under(amax.item(), x, codes, "cpu")
        actual = nvfp4_under(amax.item(), x, codes, device)
        for mine, theirs in zip(actual, expected, strict=True):
            assert_same_bytes(mine, theirs, f"mantissa {mantissa}")
        scales = expected[2][:, :16].view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
        scaled = x.float().abs() * (1 / (scales * reference.nvfp4_global(amax)[1]))
        met += bool(torch.isin(scaled, torch.tensor([0.25, 1.25, 2.5, 5.0])).any())
    assert 0 < met < 128


@pytest.mark.cuda
def test_nvfp4_scales_that_are_not_aligned() -> None:
    x = nvfp4_inputs()["blocks of many magnitudes"]
    for codes in CODES:
        for mine, theirs in zip(nvfp4_under(1.0, x, codes, "cuda", 4), nvfp4_under(1.0, x, codes, "cuda"), strict=True):
            assert_same_bytes(mine, theirs, f"{codes}, scales at 4 bytes")


@pytest.mark.cuda
@pytest.mark.parametrize("pointer", [0, 8, 16])
@pytest.mark.parametrize("name", [*FORMATS, "nvfp4", "nvfp4_2d", "nvfp4_rht", "nvfp4_stochastic"])
def test_rows_that_are_not_aligned(name: str, pointer: int) -> None:
    base = matrix(257, 1024, torch.bfloat16).cuda().flatten()
    x = base[pointer // 2 :][: 256 * 1024].view(256, 1024)
    for planes in PLANES.values():
        made = [on("cuda", QUANTIZERS[name](rowwise=planes[0], columnwise=planes[1])) for _ in range(2)]
        rng = rng_for(made[0], "cuda")
        assert_same_storage(made[0].quantize(x, rng_state=rng), made[1].quantize(x.clone(), rng_state=rng), name)


@pytest.mark.cuda
@pytest.mark.parametrize("step", [0, 8, 1032, 3072])
@pytest.mark.parametrize("name", [*FORMATS, "nvfp4", "nvfp4_2d", "nvfp4_rht", "nvfp4_stochastic"])
def test_rows_at_any_distance(name: str, step: int) -> None:
    """The same row again and again, rows that overlap, rows of something wider."""
    base = matrix(256, 3072, torch.bfloat16).cuda().flatten()
    x = base.as_strided((256, 1024), (step, 1))
    for planes in PLANES.values():
        made = [on("cuda", QUANTIZERS[name](rowwise=planes[0], columnwise=planes[1])) for _ in range(2)]
        rng = rng_for(made[0], "cuda")
        apart = x.clone(memory_format=torch.contiguous_format)
        assert_same_storage(made[0].quantize(x, rng_state=rng), made[1].quantize(apart, rng_state=rng), name)


MADE = (*FORMATS, "block_1d_f32", "nvfp4", "nvfp4_rht")
OF_TENSORS = ("current_e4m3", "current_e5m2", "nvfp4", "nvfp4_rht")  # one NaN makes all their values NaN
BANDS = ((1280, 1024), (4480, 2048), (2048, 4096), (896, 8192), (640, 1536))


def with_wide_bias(made: ActivationOutput) -> ActivationOutput:
    """In fp32, and values that bf16 does not have."""
    assert made.bias is not None
    return ActivationOutput(made.x, made.activation, made.bias.float() * 1.001)


# More tiles than blocks at once; for norms, rows of several lengths, three of them with more bands than statistics
# lead by.
PRODUCERS: dict[str, tuple[Callable[[Tensor], Producer], tuple[tuple[int, int], ...]]] = {
    "rms": (lambda x: norm(x, False, torch.float32), BANDS),
    "layer": (lambda x: norm(x, True, torch.bfloat16, True), BANDS),
    "one band": (lambda x: norm(x, True, torch.bfloat16), ((128, 1024), (256, 8192), (512, 4096))),
    "silu": (lambda x: activation(x, "silu", False), ((2304, 4096), (256, 512))),
    "gelu": (lambda x: activation(x, "gelu", False), ((2304, 4096),)),
    "relu": (lambda x: activation(x, "relu", False), ((2304, 4096),)),
    "srelu": (lambda x: activation(x, "srelu", False), ((2304, 4096),)),
    "swiglu": (lambda x: activation(torch.cat([x, x.flip(0)], 1), "swiglu", False), ((2304, 4096),)),
    "dgelu": (lambda x: gradient(x, "gelu", False), ((2304, 4096),)),
    "dswiglu": (lambda x: gradient(torch.cat([x, x.flip(0)], 1), "swiglu", False), ((2304, 4096),)),
    "dgeglu": (lambda x: gradient(torch.cat([x, x.flip(0)], 1), "geglu", False), ((2304, 4096),)),
    "reglu": (lambda x: activation(torch.cat([x, x.flip(0)], 1), "reglu", False), ((2304, 4096),)),
    "dsilu": (lambda x: gradient(x, "silu", False), ((2304, 4096),)),
    "gelu with bias": (lambda x: activation(x, "gelu"), ((2304, 4096),)),
    "silu with bias": (lambda x: activation(x, "silu"), ((2304, 4096),)),
    "qgelu with bias": (lambda x: activation(x, "qgelu"), ((2304, 4096), (256, 512))),
    "gelu with wide bias": (lambda x: with_wide_bias(activation(x, "gelu")), ((2304, 4096),)),
    "swiglu with bias": (lambda x: activation(torch.cat([x, x.flip(0)], 1), "swiglu"), ((2304, 4096),)),
    "srelu with bias": (lambda x: activation(x, "srelu"), ((2304, 4096),)),
    "dgelu with bias": (lambda x: gradient(x, "gelu"), ((2304, 4096),)),
    "dswiglu with bias": (lambda x: gradient(torch.cat([x, x.flip(0)], 1), "swiglu"), ((2304, 4096),)),
    "plain": (Plain, ((256, 1024),)),
}


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.parametrize("planes", ["row", "both"])
@pytest.mark.parametrize("what", PRODUCERS)
def test_producers(what: str, planes: str) -> None:
    build, shapes = PRODUCERS[what]
    rowwise, columnwise = PLANES[planes]
    for shape in shapes:
        finite = matrix(*shape, torch.bfloat16).cuda()
        special = finite if what in ("rms", "layer", "one band") else with_specials(finite.cpu()).cuda()
        for sums, (x, formats) in itertools.product((False, True), ((finite, OF_TENSORS), (special, MADE))):
            theirs = build(x)
            theirs.want_column_sums()
            made = kernels.materialize(theirs)
            for name in formats:
                mine = build(x)
                if sums:
                    mine.want_column_sums()
                quantizer = on("cuda", QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise))
                actual = quantizer.quantize_produced(mine, mine.shape)
                expected = on("cuda", QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise)).quantize(made)
                label = f"{what} {shape} {name} sums {sums}"
                assert_same_storage(actual, expected, label)
                if sums:
                    assert_same_bytes(mine.partials, theirs.partials, f"{label} partials")
                if isinstance(mine, NormOutput) and isinstance(theirs, NormOutput):
                    assert_same_bytes(mine.rstd, theirs.rstd, f"{label} rstd")


@pytest.mark.parametrize("rows", [128, 100])
@pytest.mark.parametrize("cols", [512, 1000, 3000, 8192])
@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("planes", ["row", "column", "both"])
def test_norms_that_make_special_values(planes: str, layer_norm: bool, cols: int, rows: int, device: str) -> None:
    """Infinities and NaNs in one block, from gains, also where rows are missing; a row too large for finite statistics;
    a constant row."""
    x = matrix(rows, cols, torch.bfloat16)
    x[5], x[6] = 2.0**123, 3.0
    weight = matrix(1, cols, torch.bfloat16, 1)[0]
    weight[7], weight[9], weight[40], weight[-1] = float("inf"), float("nan"), -float("inf"), float("nan")
    rowwise, columnwise = PLANES[planes]

    def build(where: str) -> NormOutput:
        stats = torch.empty(2, rows, device=where)
        bias = torch.zeros(cols, dtype=torch.bfloat16, device=where) if layer_norm else None
        mean = stats[0] if layer_norm else None
        return NormOutput(x.to(where), weight.to(where), bias, mean, stats[1], eps=1e-5)

    with te_dist.use_backend("reference"):
        made = kernels.materialize(build("cpu"))
    for name in MADE:
        quantizers = [on(where, QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise)) for where in (device, "cpu")]
        if not fits(quantizers[0], (rows, cols)):
            continue
        actual = quantizers[0].quantize_produced(build(device), made.shape)
        with te_dist.use_backend("reference"):
            expected = quantizers[1].quantize(made)
        assert_same_storage(actual, expected, name)


SIZED: dict[str, Callable[[Tensor, Tensor], Producer]] = {
    "rms": lambda x, sizes: NormOutput(x, sizes, None, None, x.new_empty(x.shape[0], dtype=torch.float32), eps=1e-5),
    "layer": lambda x, sizes: NormOutput(x, sizes, sizes, *x.new_empty(2, x.shape[0], dtype=torch.float32), eps=1e-5),
    "silu": lambda x, sizes: activation((x * sizes).bfloat16(), "silu", False),
    "srelu": lambda x, sizes: activation((x * sizes).bfloat16(), "srelu", False),
    "plain": lambda x, sizes: Plain((x * sizes).bfloat16()),
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rht"])
@pytest.mark.parametrize("what", SIZED)
@pytest.mark.parametrize("planes", PLANES)
def test_nvfp4_blocks_of_all_sizes(planes: str, what: str, name: str) -> None:
    """Blocks too small for a scale, but not zero, wait until the others of their tile are done: in the only tile of a
    block of threads, and in both of a tall one."""
    x = matrix(512, 640, torch.bfloat16)
    sizes = 2.0 ** (torch.arange(640) // 16 * 7 % 32 * 2.0 - 50)
    sizes[::3] *= -1  # all codes of a block without a scale are sixes; signs tell what is made from what it is made of
    rowwise, columnwise = PLANES[planes]
    with te_dist.use_backend("reference"):
        made = kernels.materialize(SIZED[what](x, sizes))
        expected = QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise).quantize(made)
    scales = expected._rowwise_scale_inv.T if rowwise else expected._columnwise_scale_inv
    small = (scales.view(torch.uint8) == 0).all(1)
    assert made.isfinite().all() and (made.abs().amax(0) > 0).all() and small.any() and not small.all()
    for most in (1, 2, 0):
        with multiprocessors(most) if most else contextlib.nullcontext():
            quantizer = on("cuda", QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise))
            actual = quantizer.quantize_produced(SIZED[what](x.cuda(), sizes.cuda()), x.shape)
        assert_same_storage(actual, expected, f"on {most}")


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rht"])
@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("planes", PLANES)
def test_nvfp4_of_a_norm(planes: str, layer_norm: bool, name: str) -> None:
    """It is made twice and never written; with all types of gains, and with statistics that are there."""
    rowwise, columnwise = PLANES[planes]
    quantizer = on("cuda", QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise))
    x = matrix(384, 1280, torch.bfloat16).cuda()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for zero_centered in (False, True):
            build = functools.partial(norm, layer_norm=layer_norm, weight_dtype=dtype, zero_centered=zero_centered)
            mine, expected = build(x), quantizer.quantize(kernels.materialize(build(x)))
            for turn in range(2):
                label = f"{dtype}, zero-centered {zero_centered}, turn {turn}"
                assert_same_storage(quantizer.quantize_produced(mine, mine.shape), expected, label)
            assert mine.materialized is None


@pytest.mark.cuda
@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("planes", PLANES)
def test_nvfp4_of_a_norm_in_a_graph(planes: str, layer_norm: bool) -> None:
    rowwise, columnwise = PLANES[planes]
    first, second = (matrix(384, 1280, torch.bfloat16, seed).cuda() for seed in (0, 1))
    for name in ("nvfp4", "nvfp4_rht"):
        quantizer = on("cuda", QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise))
        captured = norm(first.clone(), layer_norm, torch.float32)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = quantizer.quantize_produced(captured, captured.shape)
        captured.x.copy_(second)
        graph.replay()
        expected = quantizer.quantize(kernels.materialize(norm(second, layer_norm, torch.float32)))
        assert_same_storage(out, expected, name)


@pytest.mark.cuda
def test_nvfp4_of_what_is_made_once() -> None:
    """What has no whole tiles, or two operands, is written by the kernel that takes its amax."""
    quantizer = on("cuda", QUANTIZERS["nvfp4_rht"]())
    x = matrix(384, 1280, torch.bfloat16).cuda()
    norms = norm(x[:272], True, torch.float32), norm(x[:, :1264], False, torch.float32)
    activations = activation(x[:272], "silu", False), activation(x, "swiglu", False), activation(x[:272], "gelu", True)
    for mine in (*activations, *norms):
        theirs = kernels.materialize(copy.copy(mine))
        assert_same_storage(quantizer.quantize_produced(mine, mine.shape), quantizer.quantize(theirs), repr(mine.shape))
        assert_same_bytes(mine.materialized, theirs, "made")


@pytest.mark.cuda
@pytest.mark.large
def test_a_norm_again_and_again() -> None:
    """Tiles wait for statistics of other tiles: the order in which they come must not matter."""
    x = matrix(2048, 8192, torch.bfloat16).cuda()
    expected = None
    for _ in range(50):
        made = norm(x, True, torch.bfloat16)
        stored = on("cuda", QUANTIZERS["block_1d"]()).quantize_produced(made, made.shape)
        if expected is not None:
            assert_same_storage(stored, expected, "again")
        expected = stored


@pytest.mark.cuda
@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("cols", [512, 8192])
def test_statistics_that_look_as_if_they_were_on_their_way(cols: int, layer_norm: bool) -> None:
    """The NaN that stands for a statistic that is still being made, as a statistic: nobody waits for another one."""
    pending = torch.full((2, 256), 0xFFF0DDED - (1 << 32), dtype=torch.int32, device="cuda").view(torch.float32)
    x = matrix(256, cols, torch.bfloat16).cuda()
    made = norm(x, layer_norm, torch.bfloat16)
    made.rstd.copy_(pending[1])
    if made.mean is not None:
        made.mean.copy_(pending[0])
    made.stats_ready = True
    stored = on("cuda", QUANTIZERS["mxfp8_e4m3"]()).quantize_produced(made, made.shape)
    assert bool(stored.dequantize().isnan().all())


@pytest.mark.cuda
@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
def test_a_skipped_quantize_leaves_statistics_alone(layer_norm: bool) -> None:
    x = matrix(256, 512, torch.bfloat16).cuda()
    made = norm(x, layer_norm, torch.bfloat16)
    stats = [s for s in (made.mean, made.rstd) if s is not None]
    for s in stats:
        s.fill_(3.0)
    storage = on("cuda", QUANTIZERS["mxfp8_e4m3"]()).make_empty((256, 512), device="cuda")
    planes = list(storage.inner_tensors())
    for plane in planes:
        plane.view(torch.uint8).fill_(7)
    skip = torch.ones(1, device="cuda")
    kernels.quantize_mxfp8(made, *planes, fp8=te_dist.DType.kFloat8E4M3, two_d=False, noop=skip)
    for cols in (512, 17408):
        made = norm(matrix(256, cols, torch.bfloat16).cuda(), layer_norm, torch.bfloat16)
        stats += [s.fill_(3.0) for s in (made.mean, made.rstd) if s is not None]
        amax = torch.full((1,), 5.0, device="cuda")
        kernels.amax(made, amax, noop=skip)
        assert amax.item() == 5.0
    assert all(bool((s == 3.0).all()) for s in stats)
    assert all(bool((plane.view(torch.uint8) == 7).all()) for plane in planes)
