"""grouped_gemm: the loop against single products, and torch's grouped kernels against the loop."""

from __future__ import annotations

import pytest
import torch
from cases import varied
from gemm_cases import KINDS, NATIVE_SQNR, PAIRS, SQNR, exact, is_native, operand_shapes, quantized, sqnr, storage

import te_dist
from te_dist.gemm import gemm
from te_dist.gemm_grouped import grouped_gemm, has_grouped_kernel

pytestmark = pytest.mark.filterwarnings("ignore:te_dist. the GEMM of")

SPLITS = (16, 0, 48, 1, 31)


@pytest.mark.parametrize("name", ["per_tensor", "block_1d_2d", "mxfp8", "nvfp4", "plain"])
def test_grouped_equals_one_by_one(name: str, device: str) -> None:
    n, k = 48, 80
    splits = SPLITS if name != "nvfp4" else (16, 0, 48, 2, 30)
    for kind, planes in KINDS.items():
        shape_a = operand_shapes(kind, sum(splits), n, k)[0]
        second = PAIRS[name][0] if kind == "wgrad" else PAIRS[name][1]
        xs = [quantized(PAIRS[name][0], (s, shape_a[1]), planes[0], device, i) for i, s in enumerate(splits)]
        ws = [
            quantized(second, (s if kind == "wgrad" else n, k), planes[1], device, 9 + i) for i, s in enumerate(splits)
        ]
        expected = [gemm(x, w, kind=kind, out_dtype=torch.float32) for x, w in zip(xs, ws, strict=True)]
        whole = torch.stack(expected) if kind == "wgrad" else torch.cat(expected)
        actual = grouped_gemm(xs, ws, kind=kind, out_dtype=torch.float32)
        assert torch.equal(actual, whole), kind
        out = torch.ones_like(whole)
        result = grouped_gemm(xs, ws, kind=kind, out_dtype=torch.float32, out=out, accumulate=True)
        assert result is out
        assert torch.equal(out, 1 + whole)


@pytest.mark.parametrize("name", ["current_e4m3", "block_1d", "mxfp8_e4m3", "nvfp4", "plain"])
def test_cutting_one_tensor_into_groups(name: str, device: str) -> None:
    """Rows quantized together and cut equal the rows of the whole product."""
    n, k = 48, 80
    x = quantized(name, (sum(SPLITS), k), "row", device, 0)
    ws = [
        quantized("block_2d" if name == "block_1d" else name, (n, k), "row", device, 9 + i) for i in range(len(SPLITS))
    ]
    assert x is not None
    bias = varied((len(SPLITS), n), torch.float32, 3).to(device)
    actual = grouped_gemm(x, ws, kind="fprop", out_dtype=torch.float32, splits=SPLITS, bias=bias)
    start = 0
    for i, size in enumerate(SPLITS):
        whole = gemm(x, ws[i], kind="fprop", out_dtype=torch.float32, bias=bias[i])
        part = actual[start : start + size]
        if size:  # another number of rows may get another kernel
            floor = (NATIVE_SQNR if is_native("fprop", x, ws[i]) else SQNR)[torch.float32]
            assert sqnr(part, whole[start : start + size].double().cpu()) > floor
        start += size


@pytest.mark.parametrize("name", ["current_e4m3", "plain"])
def test_cutting_columns(name: str, device: str) -> None:
    m, n, k = sum(SPLITS), 48, 80
    dy, x = (quantized(name, shape, "column", device, i) for i, shape in enumerate(((m, n), (m, k))))
    assert dy is not None and x is not None
    dw = grouped_gemm(dy, x, kind="wgrad", out_dtype=torch.float32, splits=SPLITS)
    values = [exact(operand).split(list(SPLITS)) for operand in (dy, x)]
    expected = torch.stack([a.t() @ b for a, b in zip(*values, strict=True)])
    assert sqnr(dw, expected) >= (NATIVE_SQNR if is_native("wgrad", dy, x) else SQNR)[torch.float32]
    assert torch.equal(dw[1], torch.zeros_like(dw[1]))


def test_device_offsets(device: str) -> None:
    """One kernel for all groups where torch has it; the same numbers as the loop up to the result's rounding."""
    n, k, splits = 48, 80, (16, 0, 48, 1, 31)
    offsets = torch.tensor(splits).cumsum(0).to(device, torch.int32)
    x, dy = (varied((sum(splits), cols), torch.bfloat16, cols).to(device) for cols in (k, n))
    w = varied((len(splits), n, k), torch.bfloat16, 3).to(device)
    for kind, a, b in (("fprop", x, w), ("dgrad", dy, w), ("wgrad", dy, x)):
        assert has_grouped_kernel(a, b, kind=kind, out_dtype=torch.bfloat16)
        actual = grouped_gemm(a, b, kind=kind, out_dtype=torch.bfloat16, offsets=offsets)
        expected = grouped_gemm(a, b, kind=kind, out_dtype=torch.float32, splits=splits)
        assert actual.shape == expected.shape
        assert sqnr(actual, expected.double().cpu()) >= SQNR[torch.bfloat16]
    quantizer = te_dist.Float8CurrentScalingQuantizer("e4m3")
    quantized_w = [quantizer.quantize(e) for e in w]
    for kind, whole in (("fprop", quantizer.quantize(x)), ("dgrad", quantizer.quantize(dy))):
        native = device == "cuda" and torch.cuda.get_device_capability()[0] in (9, 10)
        assert has_grouped_kernel(whole, quantized_w, kind=kind, out_dtype=torch.bfloat16) == native
        y = grouped_gemm(whole, quantized_w, kind=kind, out_dtype=torch.bfloat16, offsets=offsets, splits=splits)
        expected = grouped_gemm(whole, quantized_w, kind=kind, out_dtype=torch.float32, splits=splits)
        assert sqnr(y, expected.double().cpu()) >= NATIVE_SQNR[torch.bfloat16]


def test_grouped_refusals(device: str) -> None:
    x, w = torch.ones(8, 32, device=device), torch.ones(2, 16, 32, device=device)
    options = {"kind": "fprop", "out_dtype": torch.float32}
    with pytest.raises(ValueError, match=r"splits= or offsets= to cut x"):
        grouped_gemm(x, w, **options)
    with pytest.raises(ValueError, match=r"add up to the 8 rows of x but got \[3, 4\]"):
        grouped_gemm(x, w, splits=(3, 4), **options)
    with pytest.raises(ValueError, match=r"a w for each of 3 groups but got 2"):
        grouped_gemm(x, w, splits=(3, 4, 1), **options)
    with pytest.raises(ValueError, match=r"x \(128x128\).*quantize each group"):
        grouped_gemm(storage("block_2d", (8, 32), device), w, splits=(4, 4), **options)
    with pytest.raises(ValueError, match=r"one quantized storage per group"):
        grouped_gemm(x, storage("block_2d", (8, 32), device), splits=(4, 4), **options)
    if device == "cuda":
        with pytest.raises(ValueError, match=r"no kernel that reads device offsets"):
            offsets = torch.tensor([4, 8], dtype=torch.int32, device=device)
            grouped_gemm(x, w, offsets=offsets, **options)
