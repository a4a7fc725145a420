"""gemm against an fp64 product of the dequantized planes: cast error is not judged here, only the GEMM's own."""

from __future__ import annotations

import warnings
from fractions import Fraction

import pytest
import torch
from cases import DTYPES, varied
from gemm_cases import (
    KINDS,
    NATIVE_SQNR,
    PAIRS,
    SHAPES,
    SQNR,
    check,
    exact,
    is_native,
    operand_shapes,
    product,
    quantized,
    sqnr,
    storage,
)
from torch import Tensor

import te_dist
from te_dist import QuantizedStorage, gemm_native
from te_dist.gemm import _announce_emulation, _fma, dispatch_table, gemm, reference_block_gemm

pytestmark = pytest.mark.filterwarnings("ignore:te_dist. the GEMM of")


# ------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PAIRS)
def test_against_fp64(name: str, kind: str, dtype: torch.dtype, device: str) -> None:
    tested = 0
    for m, n, k in SHAPES:
        shape_a, shape_b = operand_shapes(kind, m, n, k)
        a = quantized(PAIRS[name][0], shape_a, KINDS[kind][0], device, 1)
        b = quantized(PAIRS[name][1], shape_b, KINDS[kind][1], device, 2)
        if a is None or b is None:
            continue
        check(gemm(a, b, kind=kind, out_dtype=dtype), kind, a, b, None, is_native(kind, a, b))
        tested += 1
    assert tested >= 3


@pytest.mark.parametrize("backend", ["auto", "emulate"])
@pytest.mark.parametrize("name", PAIRS)
def test_both_planes_present_reads_the_right_one(name: str, backend: str, device: str) -> None:
    """The planes of a 1-D scaled tensor differ; each product must read its own."""
    m, n, k = 144, 272, 400
    for kind, planes in KINDS.items():
        shapes = operand_shapes(kind, m, n, k)
        singles = [quantized(PAIRS[name][i], shapes[i], planes[i], device, i) for i in (0, 1)]
        both = [quantized(PAIRS[name][i], shapes[i], "both", device, i) for i in (0, 1)]
        actual = gemm(*both, kind=kind, out_dtype=torch.float32, backend=backend)
        expected = gemm(*singles, kind=kind, out_dtype=torch.float32, backend=backend)
        assert torch.equal(actual, expected), kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["per_tensor", "block_1d_2d", "block_1d_1d", "mxfp8", "nvfp4"])
def test_operands_may_begin_anywhere(name: str, dtype: torch.dtype, device: str) -> None:
    """A plane or a scale that is a part of something larger, as of a stack of experts, is at no round address."""
    for kind, planes in KINDS.items():
        shapes = operand_shapes(kind, 48, 64, 128)
        plain = [quantized(PAIRS[name][i], shapes[i], planes[i], device, i) for i in (0, 1)]
        moved = [_at_odd_places(operand) for operand in plain]
        assert torch.equal(gemm(*moved, kind=kind, out_dtype=dtype), gemm(*plain, kind=kind, out_dtype=dtype)), kind


def _at_odd_places(storage: QuantizedStorage) -> QuantizedStorage:
    def moved(tensor: Tensor) -> Tensor:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        return room[1:].view(tensor.shape).copy_(tensor)

    buffers = {each: moved(getattr(storage, each)) for each in storage.inner_names()}
    assert all(buffer.storage_offset() == 1 for buffer in buffers.values())
    return type(storage)(buffers, shape=storage.shape, dtype=storage.dtype, quantizer=storage.quantizer)


@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["per_tensor", "block_1d_2d", "block_1d_1d", "mxfp8", "nvfp4", "plain"])
def test_bias(name: str, bias_dtype: torch.dtype, device: str) -> None:
    for m, n, k in ((34, 50, 80), (144, 272, 400)):
        a, b = (quantized(PAIRS[name][i], s, "row", device, i) for i, s in enumerate(((m, k), (n, k))))
        assert a is not None and b is not None
        bias = (varied((n,), torch.float32, 3) * 512).to(device, bias_dtype)
        for dtype in DTYPES:
            y = gemm(a, b, kind="fprop", out_dtype=dtype, bias=bias)
            check(y, "fprop", a, b, bias, is_native("fprop", a, b))
            without = gemm(a, b, kind="fprop", out_dtype=dtype)
            assert sqnr(without, y.double().cpu()) < 40  # the check above would see a missing bias
    empty = gemm(a, torch.zeros(0, k, device=device), kind="fprop", out_dtype=torch.float32, bias=bias[:0])
    assert empty.shape == (m, 0)


def test_nothing_to_sum_gives_the_bias(device: str) -> None:
    quantizer = te_dist.Float8CurrentScalingQuantizer("e4m3")
    a, b = (quantizer.quantize(torch.zeros(rows, 0, device=device)) for rows in (4, 6))
    bias = torch.arange(6.0, device=device)
    y = gemm(a, b, kind="fprop", out_dtype=torch.bfloat16, bias=bias)
    assert torch.equal(y, bias.to(torch.bfloat16).expand(4, 6))


@pytest.mark.parametrize("name", ["per_tensor_hybrid", "block_1d_1d", "mxfp8", "nvfp4_rht", "plain"])
def test_accumulate_rounds_once(name: str, device: str) -> None:
    m, n, k = 144, 272, 130
    a, b = (quantized(PAIRS[name][i], s, "column", device, i) for i, s in enumerate(((m, n), (m, k))))
    assert a is not None and b is not None
    fresh = gemm(a, b, kind="wgrad", out_dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        out = varied((n, k), dtype, 5).to(device) * 16
        expected = (out.float() + fresh).to(dtype)
        result = gemm(a, b, kind="wgrad", out_dtype=dtype, out=out, accumulate=True)
        assert result is out
        assert torch.equal(out, expected)
        gemm(a, b, kind="wgrad", out_dtype=dtype, out=out)
        assert torch.equal(out, gemm(a, b, kind="wgrad", out_dtype=dtype))
    strided = torch.zeros(n, 2 * k, device=device)[:, ::2]
    gemm(a, b, kind="wgrad", out_dtype=torch.float32, out=strided, accumulate=True)
    assert torch.equal(strided, fresh)


@pytest.mark.parametrize("name", ["per_tensor", "block_1d_2d", "mxfp8", "nvfp4", "plain"])
def test_leading_dimensions_come_back(name: str, device: str) -> None:
    x = varied((2, 8, 3, 64), torch.bfloat16).to(device)
    w = quantized(PAIRS[name][1], (48, 64), "row", device, 1)
    flat = quantized(PAIRS[name][0], (48, 64), "row", device, 0)
    assert w is not None
    shaped = x if isinstance(flat, Tensor) else flat.quantizer.quantize(x)
    y = gemm(shaped, w, kind="fprop", out_dtype=torch.bfloat16)
    matrix = shaped.view(48, 64) if isinstance(shaped, Tensor) else shaped.view((48, 64))
    assert y.shape == (2, 8, 3, 48)
    assert torch.equal(y.view(48, 48), gemm(matrix, w, kind="fprop", out_dtype=torch.bfloat16))
    one = gemm(x[0, 0, 0], x[0, 0], kind="fprop", out_dtype=torch.float32)
    assert one.shape == (3,)


def test_wrapped_and_identity_operands(device: str) -> None:
    x, w = (varied((32, 64), torch.bfloat16, seed).to(device) for seed in (1, 2))
    quantizer = te_dist.MXFP8Quantizer("e4m3")
    expected = gemm(quantizer.quantize(x), quantizer.quantize(w), kind="fprop", out_dtype=torch.float32)
    wrapped = gemm(quantizer.make_tensor(x), quantizer.make_tensor(w), kind="fprop", out_dtype=torch.float32)
    assert torch.equal(wrapped, expected)
    identity = te_dist.IdentityQuantizer(columnwise=False)
    for kind in KINDS:
        plain = gemm(x[:, :32], w[:, :32], kind=kind, out_dtype=torch.float32)
        passed = (identity.quantize(operand[:, :32]) for operand in (x, w))
        assert torch.equal(gemm(*passed, kind=kind, out_dtype=torch.float32), plain)
    mixed = gemm(identity.quantize(x), quantizer.quantize(w), kind="fprop", out_dtype=torch.float32)
    check(mixed, "fprop", x, quantizer.quantize(w))


def test_split_accumulator_is_a_choice(device: str) -> None:
    """On Hopper the short accumulator may be less exact, never more; elsewhere both are the same."""
    a, b = (quantized("current_e4m3", (128, 4096), "row", device, seed) for seed in (1, 2))
    assert isinstance(a, QuantizedStorage) and isinstance(b, QuantizedStorage)
    expected = product("fprop", exact(a), exact(b))
    split, fast, default = (
        gemm(a, b, kind="fprop", out_dtype=torch.float32, use_split_accumulator=choice)
        for choice in (True, False, None)
    )
    assert torch.equal(default, fast)
    assert sqnr(split, expected) >= sqnr(fast, expected) - 1
    if device == "cpu":
        assert torch.equal(split, fast)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["block_1d_2d", "block_2d_1d", "block_1d_1d", "block_f32_scales"])
def test_blockwise_against_the_block_order(name: str, kind: str, device: str) -> None:
    for m, n, k in ((1, 16, 32), (130, 258, 272), (144, 272, 400)):
        shapes = operand_shapes(kind, m, n, k)
        a, b = (quantized(PAIRS[name][i], shapes[i], KINDS[kind][i], device, i) for i in (0, 1))
        assert isinstance(a, QuantizedStorage) and isinstance(b, QuantizedStorage)
        bias = varied((n if kind == "fprop" else k,), torch.float32, 3).to(device)
        expected = reference_block_gemm(a, b, torch.float32, kind=kind, bias=bias)
        check(expected, kind, a, b, bias)
        actual = gemm(a, b, kind=kind, out_dtype=torch.float32, bias=bias)
        floor = (NATIVE_SQNR if is_native(kind, a, b) else SQNR)[torch.float32]
        assert sqnr(actual, expected.double().cpu()) >= floor


@pytest.mark.parametrize("dims", [(1, 1), (1, 2), (2, 1)], ids=str)
def test_block_order_rounds_once_per_block(dims: tuple[int, int]) -> None:
    """fma(p * s_first, s_second, y) by hand, with scales that make a second rounding, or the other order, show."""
    a, b = (
        te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=dim, columnwise=False).quantize(
            varied((4, 256), torch.float32, dim)
        )
        for dim in dims
    )
    generator = torch.Generator().manual_seed(0)
    for operand in (a, b):
        scale = operand._rowwise_scale_inv
        scale.mul_(1 + torch.rand(scale.shape, generator=generator) / 8)
    y = reference_block_gemm(a, b, torch.float32)
    qa, qb = (s._rowwise_data.view(torch.float8_e4m3fn).double() for s in (a, b))
    for i in range(4):
        for j in range(4):
            total = torch.zeros((), dtype=torch.float32)
            for block in range(2):
                span = slice(128 * block, 128 * block + 128)
                scales = [
                    operand._rowwise_scale_inv[block, row] if dim == 1 else operand._rowwise_scale_inv[0, block]
                    for operand, dim, row in zip((a, b), dims, (i, j), strict=True)
                ]
                first, second = reversed(scales) if dims == (2, 1) else scales
                scaled = (qa[i, span] @ qb[j, span]).float() * first
                fused = Fraction(scaled.item()) * Fraction(second.item()) + Fraction(total.item())
                near = torch.tensor(float(fused), dtype=torch.float64).float()
                options = [torch.nextafter(near, torch.tensor(d)) for d in (-torch.inf, torch.inf)] + [near]
                total = min(options, key=lambda v: abs(Fraction(v.item()) - fused))
            assert y[i, j] == total


def test_fma_rounds_once() -> None:
    """(2^24 + 1) / 2^24 lies halfway between two floats; what is added, far below float64's last bit, decides."""
    a, b = torch.tensor([97.0 * 2**-12]), torch.tensor([172961.0 * 2**-12])
    for addend, expected in ((2.0**-70, 1 + 2.0**-23), (-(2.0**-70), 1.0), (0.0, 1.0)):
        assert _fma(a, b, torch.tensor([addend])).item() == expected


# ------------------------------------------------------------------------------------------------- refusals
def test_refusals(device: str) -> None:
    x, w = storage("mxfp8_e4m3", (32, 64), device), storage("mxfp8_e4m3", (48, 64), device)
    bf16 = torch.bfloat16
    with pytest.raises(ValueError, match=r"kind to be one of .*fprop.*'sideways'"):
        gemm(x, w, kind="sideways", out_dtype=bf16)
    with pytest.raises(ValueError, match=r"backend to be one of .*'quick'"):
        gemm(x, w, kind="fprop", out_dtype=bf16, backend="quick")
    with pytest.raises(ValueError, match=r"out_dtype .*float64"):
        gemm(x, w, kind="fprop", out_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"sums over K.*x \[32, 64\] has 64 and w \[48, 96\] has 96"):
        gemm(x, storage("mxfp8_e4m3", (48, 96), device), kind="fprop", out_dtype=bf16)
    with pytest.raises(ValueError, match=r"sums over N.*dy \[32, 64\] has 64 and w \[48, 64\] has 48"):
        gemm(x, w, kind="dgrad", out_dtype=bf16)
    with pytest.raises(ValueError, match=r"sums over M.*dy \[32, 64\] has 32 and x \[48, 64\] has 48"):
        gemm(x, w, kind="wgrad", out_dtype=bf16)
    with pytest.raises(ValueError, match=r"bias of shape \[48\].*got \[64\]"):
        gemm(x, w, kind="fprop", out_dtype=bf16, bias=torch.ones(64, device=device))
    with pytest.raises(ValueError, match=r"expects out="):
        gemm(x, w, kind="fprop", out_dtype=bf16, accumulate=True)
    with pytest.raises(ValueError, match=r"out of shape \[32, 48\].*got \[32, 47\]"):
        gemm(x, w, kind="fprop", out_dtype=bf16, out=torch.ones(32, 47, device=device, dtype=bf16))
    with pytest.raises(ValueError, match=r"float16, whose sums overflow"):
        out = torch.ones(32, 48, device=device, dtype=torch.float16)
        gemm(x, w, kind="fprop", out_dtype=torch.float16, out=out, accumulate=True)
    with pytest.raises(TypeError, match=r"w quantized, or in float32.*int64"):
        gemm(x, torch.ones(48, 64, dtype=torch.int64, device=device), kind="fprop", out_dtype=bf16)
    with pytest.raises(TypeError, match=r"x to be a tensor or a quantized storage but got list"):
        gemm([1.0], w, kind="fprop", out_dtype=bf16)


@pytest.mark.parametrize("name", ["current_e4m3", "block_2d", "mxfp8_e4m3", "nvfp4"])
def test_missing_plane_names_the_usage(name: str, device: str) -> None:
    both = storage(name, (32, 32), device)
    row, column = storage(name, (32, 32), device, columnwise=False), storage(name, (32, 32), device, rowwise=False)
    options = {"out_dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=r"fprop reads the row plane of x.*rowwise=True"):
        gemm(column, both, kind="fprop", **options)
    with pytest.raises(ValueError, match=r"dgrad reads the column plane of w.*columnwise=True"):
        gemm(both, row, kind="dgrad", **options)
    with pytest.raises(ValueError, match=r"wgrad reads the column plane of dy.*columnwise=True"):
        gemm(row, both, kind="wgrad", **options)


def test_unsupported_pairs(device: str) -> None:
    tiles = storage("block_2d", (32, 32), device)
    for backend in ("auto", "native", "emulate"):
        with pytest.raises(ValueError, match=r"x \(128x128\) with w \(128x128\).*block_scaling_dim=1"):
            gemm(tiles, tiles, kind="fprop", out_dtype=torch.bfloat16, backend=backend)
    e5m2 = storage("current_e5m2", (32, 32), device)
    with pytest.raises(ValueError, match=r"E5M2 x E5M2" if device == "cuda" else r"no native kernel on cpu"):
        gemm(e5m2, e5m2, kind="fprop", out_dtype=torch.bfloat16, backend="native")
    emulated = gemm(e5m2, e5m2, kind="fprop", out_dtype=torch.float32, backend="emulate")
    assert torch.equal(emulated, torch.full_like(emulated, 32))
    plain = torch.ones(32, 32, device=device)
    with pytest.raises(ValueError, match=r"dy \(high precision\) with w \(per-tensor\) has no native kernel"):
        gemm(plain, e5m2, kind="dgrad", out_dtype=torch.bfloat16, backend="native")
    assert torch.equal(gemm(plain, plain, kind="fprop", out_dtype=torch.float32, backend="native"), emulated)


# ------------------------------------------------------------------------------------------------- dispatch
SM89, SM90, SM100, SM120 = (8, 9), (9, 0), (10, 0), (12, 0)
TENSORWISE = "scaled_mm_tensorwise"
# a, b -> on: cpu, 8.0, 8.9, 9.0 with CUDA 12.8, 9.0, 10.0, 12.0
EXPECTED = {
    ("high precision", "high precision"): ("matmul",) * 7,
    ("per-tensor", "per-tensor"): ("emulate", "emulate", *(TENSORWISE,) * 5),
    ("1x128", "128x128"): (*("emulate",) * 4, "scaled_mm_1x128_128x128", "emulate", "emulate"),
    ("128x128", "1x128"): (*("emulate",) * 4, "scaled_mm_128x128_1x128", "emulate", "emulate"),
    ("1x128", "1x128"): (*("emulate",) * 4, "scaled_mm_1x128_1x128", "emulate", "emulate"),
    ("128x128", "128x128"): ("refuse",) * 7,
    ("mxfp8", "mxfp8"): (*("emulate",) * 5, "scaled_mm_mxfp8", "scaled_mm_mxfp8"),
    ("nvfp4", "nvfp4"): (*("emulate",) * 5, "scaled_mm_nvfp4", "scaled_mm_nvfp4"),
    ("nvfp4 rht", "nvfp4 rht"): (*("emulate",) * 5, "scaled_mm_nvfp4", "scaled_mm_nvfp4"),
    ("nvfp4 rht, no signs", "nvfp4 rht, no signs"): (*("emulate",) * 5, "scaled_mm_nvfp4", "scaled_mm_nvfp4"),
    ("any", "any"): ("emulate",) * 7,
}


def test_dispatch_table() -> None:
    tables = [dispatch_table("cpu")] + [
        dispatch_table("cuda", capability=capability, cuda=cuda)
        for capability, cuda in (
            ((8, 0), (13, 0)), (SM89, (13, 0)), (SM90, (12, 8)), (SM90, (12, 9)), (SM100, (13, 0)), (SM120, (13, 0)),
        )
    ]  # fmt: skip
    for i, (pair, expected) in enumerate(EXPECTED.items()):
        rows = [table[i] for table in tables]
        assert all((row.a, row.b) == pair and row.reason for row in rows)
        assert tuple(row.implementation for row in rows) == expected, pair
    assert all(len(table) == len(EXPECTED) for table in tables)
    assert [table[0].device for table in tables] == ["cpu"] + ["cuda"] * 6
    assert "12.9" in next(row.reason for row in tables[3] if row.a == "1x128")


def test_this_machine_runs_what_the_table_says(device: str) -> None:
    assert {row.device for row in dispatch_table(device)} == {device}


def test_emulation_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = storage("mxfp8_e4m3", (32, 64), "cpu"), storage("mxfp8_e4m3", (48, 64), "cpu")
    options = {"kind": "fprop", "out_dtype": torch.bfloat16}
    _announce_emulation.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemm(x, w, **options)  # a CPU has no other way
    # Pretend to be a Hopper GPU: the tensors' device is what the message is about, so that has to differ, too.
    row = next(row for row in dispatch_table("cuda", capability=SM90, cuda=(13, 0)) if row.a == "mxfp8")
    with pytest.warns(UserWarning, match=r"mxfp8 on cuda:0 is emulated.*needs compute capability 10.0"):
        _announce_emulation(row, "cuda:0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _announce_emulation(row, "cuda:0")
    with pytest.warns(UserWarning, match=r"mxfp8 on cuda:1 is emulated"):
        _announce_emulation(row, "cuda:1")
    _announce_emulation.cache_clear()


@pytest.mark.cuda
def test_emulation_is_said_once_on_this_gpu() -> None:
    x, w = storage("mxfp8_e4m3", (32, 64), "cuda"), storage("mxfp8_e4m3", (48, 64), "cuda")
    row = next(row for row in dispatch_table("cuda") if row.a == "mxfp8")
    _announce_emulation.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            gemm(x, w, kind="fprop", out_dtype=torch.bfloat16)
        gemm(x, w, kind="fprop", out_dtype=torch.bfloat16, backend="emulate")
    assert len(caught) == (1 if row.implementation == "emulate" else 0)


def test_native_table_names_what_exists() -> None:
    names = {row.implementation for row in dispatch_table("cuda", capability=SM90, cuda=(13, 0))}
    names |= {row.implementation for row in dispatch_table("cuda", capability=SM100, cuda=(13, 0))}
    assert names - {"matmul", "emulate", "refuse"} == set(gemm_native.NATIVE)
