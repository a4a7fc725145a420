"""What gemm hands to torch's scaled_mm, on a machine without a GPU.

``ScaledMM`` stands in for it: it refuses what ATen's ScaledBlas.cpp (torch 2.11) and cuBLASLt refuse, reads data and
scales in the layouts they define, and multiplies in float64. So padding, strides, order, swizzle and scales are
checked here, for Hopper and Blackwell alike; that the kernels accept them is checked on a GPU by test_gemm.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import DTYPES, varied
from gemm_cases import KINDS, PAIRS, SHAPES, check, operand_shapes, quantized, storage
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from te_dist import gemm_native, reference
from te_dist.formats import ceil_div, round_up
from te_dist.gemm import gemm

SM90, SM100 = (9, 0), (10, 0)
NATIVE_PAIRS = [
    *((SM90, name) for name in PAIRS if name.startswith(("per_tensor", "delayed", "block"))),
    *((SM100, name) for name in PAIRS if name.startswith(("per_tensor", "mxfp8", "nvfp4")) and "mixed" not in name),
]


class ScaledMM:
    """torch.nn.functional's scaled_mm, its enums, and a record of its calls."""

    ScalingType, SwizzleType = ScalingType, SwizzleType

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def scaled_mm(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        scale_a: list[Tensor],
        scale_recipe_a: list[ScalingType],
        scale_b: list[Tensor],
        scale_recipe_b: list[ScalingType],
        *,
        swizzle_a: list[SwizzleType],
        swizzle_b: list[SwizzleType],
        bias: Tensor | None,
        output_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        assert mat_a.is_contiguous() and mat_b.t().is_contiguous(), "row-major times column-major only"
        depth = mat_a.shape[1] * (2 if mat_a.dtype == torch.float4_e2m1fn_x2 else 1)
        assert mat_a.shape[1] % 16 == 0 and depth % 16 == 0 and mat_b.shape[1] % 16 == 0
        assert not mat_a.dtype == mat_b.dtype == torch.float8_e5m2
        assert bias is None or (output_dtype != torch.float32 and bias.dtype == output_dtype)
        assert bias is None or bias.shape == (mat_b.shape[1],)
        tensorwise = scale_recipe_a == [ScalingType.TensorWise]
        assert tensorwise or not use_fast_accum
        self.calls.append({"recipes": (scale_recipe_a[0], scale_recipe_b[0]), "fast": use_fast_accum, "bias": bias})
        a = values(mat_a, scale_a, scale_recipe_a, swizzle_a)
        b = values(mat_b.t(), scale_b, scale_recipe_b, swizzle_b)
        result = a @ b.t()
        return (result if bias is None else result + bias.double()).to(output_dtype)


def values(data: Tensor, scales: list[Tensor], recipe: list[ScalingType], swizzle: list[SwizzleType]) -> Tensor:
    """[rows, depth] in float64, as the recipe defines them."""
    assert len(scales) == len(recipe)
    if data.dtype == torch.float4_e2m1fn_x2:
        decoded = reference.decode_e2m1(reference.unpack_nibbles(data.view(torch.uint8))).double()
    else:
        decoded = data.double()
    return decoded * SPREAD[recipe[0]](scales, decoded.shape, swizzle)


def one_scale(scales: list[Tensor], shape: torch.Size, swizzle: list[SwizzleType]) -> Tensor:
    assert scales[0].numel() == 1 and scales[0].dtype == torch.float32
    return scales[0].double().expand(shape)


def row_tiles(scales: list[Tensor], shape: torch.Size, swizzle: list[SwizzleType]) -> Tensor:
    rows, blocks = shape[0], ceil_div(shape[1], 128)
    assert scales[0].shape == (rows, blocks) and scales[0].stride() == (1, rows) and rows % 4 == 0
    return scales[0].double().repeat_interleave(128, 1)[:, : shape[1]]


def square_tiles(scales: list[Tensor], shape: torch.Size, swizzle: list[SwizzleType]) -> Tensor:
    blocks = ceil_div(shape[1], 128)
    inner = round_up(blocks, 4)
    assert scales[0].shape == (inner, ceil_div(shape[0], 128)) and scales[0].stride() == (1, inner)
    full = scales[0].t().double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return full[: shape[0], : shape[1]]


def swizzled(size: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    def spread(scales: list[Tensor], shape: torch.Size, swizzle: list[SwizzleType]) -> Tensor:
        rows, cols = round_up(shape[0], 128), round_up(ceil_div(shape[1], size), 4)
        assert scales[0].dtype == dtype and scales[0].numel() == rows * cols and scales[0].is_contiguous()
        assert swizzle[0] == SwizzleType.SWIZZLE_32_4_4
        i, j = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
        inside = (i % 128 % 32) * 16 + (i % 128 // 32) * 4 + j % 4
        index = (i // 128 * (cols // 4) + j // 4) * 512 + inside
        per_block = scales[0].flatten().view(torch.uint8)[index].view(dtype).double()
        return per_block.repeat_interleave(size, 1)[: shape[0], : shape[1]]

    return spread


def two_levels(scales: list[Tensor], shape: torch.Size, swizzle: list[SwizzleType]) -> Tensor:
    assert swizzle[1] == SwizzleType.NO_SWIZZLE
    blocks = swizzled(16, torch.float8_e4m3fn)(scales, shape, swizzle)
    return blocks * one_scale(scales[1:], shape, swizzle)


SPREAD: dict[ScalingType, Callable[..., Tensor]] = {
    ScalingType.TensorWise: one_scale,
    ScalingType.BlockWise1x128: row_tiles,
    ScalingType.BlockWise128x128: square_tiles,
    ScalingType.BlockWise1x32: swizzled(32, torch.float8_e8m0fnu),
    ScalingType.BlockWise1x16: two_levels,
}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], ScaledMM]:
    """Make gemm believe that the CPU is a GPU of some compute capability."""

    def begin(capability: tuple[int, int]) -> ScaledMM:
        stand_in = ScaledMM()
        monkeypatch.setattr(gemm_native, "scaled_mm_api", lambda: stand_in)
        monkeypatch.setattr(gemm_native, "machine", lambda device: ("cuda", capability, (13, 0)))
        return stand_in

    return begin


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("capability", "name"), NATIVE_PAIRS)
def test_arguments(
    capability: tuple[int, int], name: str, kind: str, pretend: Callable[[tuple[int, int]], ScaledMM]
) -> None:
    # Only one of the two products of a transformed operand is defined natively: where both have the transform.
    mixes_transform = name == "nvfp4_rht" and kind == "dgrad"
    backend = "emulate" if mixes_transform else "native"
    tested = 0
    for m, n, k in SHAPES:
        shapes = operand_shapes(kind, m, n, k)
        a, b = (quantized(PAIRS[name][i], shapes[i], KINDS[kind][i], "cpu", i) for i in (0, 1))
        if a is None or b is None:
            continue
        stand_in = pretend(capability)
        bias = varied((shapes[1][0] if kind == "fprop" else k,), torch.bfloat16, 3)
        for dtype in DTYPES:
            for given in (None, bias):
                y = gemm(a, b, kind=kind, out_dtype=dtype, bias=given, backend=backend)
                # The stand-in rounds once, but a product of scales is rounded to float32 in dequantize.
                check(y, kind, a, b, given, False)
        calls = 0 if m == 0 or mixes_transform else 6
        assert len(stand_in.calls) == calls
        assert sum(call["bias"] is not None for call in stand_in.calls) == (1 if calls else 0)  # the bf16 result's
        tested += 1
    assert tested >= 3


@pytest.mark.parametrize(("capability", "name"), NATIVE_PAIRS)
def test_each_product_reads_its_own_plane(
    capability: tuple[int, int], name: str, pretend: Callable[[tuple[int, int]], ScaledMM]
) -> None:
    for kind, planes in KINDS.items():
        if (name, kind) == ("nvfp4_rht", "dgrad"):
            continue
        pretend(capability)
        shapes = operand_shapes(kind, 144, 272, 400)
        results = []
        for which in (planes, ("both", "both")):
            a, b = (quantized(PAIRS[name][i], shapes[i], which[i], "cpu", i) for i in (0, 1))
            results.append(gemm(a, b, kind=kind, out_dtype=torch.float32, backend="native"))
        assert torch.equal(*results), kind


def test_accumulates_from_float32(pretend: Callable[[tuple[int, int]], ScaledMM]) -> None:
    pretend(SM90)
    dy, x = (quantized("block_1d", shape, "column", "cpu", 1) for shape in ((130, 50), (130, 36)))
    fresh = gemm(dy, x, kind="wgrad", out_dtype=torch.float32)
    out = varied((50, 36), torch.bfloat16, 5)
    expected = (out.float() + fresh).to(torch.bfloat16)
    assert torch.equal(gemm(dy, x, kind="wgrad", out_dtype=torch.bfloat16, out=out, accumulate=True), expected)


def test_order_of_block_shapes(pretend: Callable[[tuple[int, int]], ScaledMM]) -> None:
    stand_in = pretend(SM90)
    rows, tiles = storage("block_1d", (144, 272), "cpu"), storage("block_2d", (144, 272), "cpu")
    for a, b in ((rows, tiles), (tiles, rows), (rows, rows)):
        gemm(a, b, kind="fprop", out_dtype=torch.bfloat16)
    one, two = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    assert [call["recipes"] for call in stand_in.calls] == [(one, two), (two, one), (one, one)]


def test_fast_accumulation(pretend: Callable[[tuple[int, int]], ScaledMM]) -> None:
    """On for fprop, off for dgrad and wgrad, settable, and never asked of a kernel that lacks it."""
    for name, possible in (("current_e4m3", True), ("block_1d", False)):
        stand_in = pretend(SM90)
        x = storage(name, (32, 32), "cpu")
        for kind in KINDS:
            for split in (None, True, False):
                gemm(x, x, kind=kind, out_dtype=torch.bfloat16, use_split_accumulator=split)
        expected = [True, False, True, False, False, True, False, False, True]
        assert [call["fast"] for call in stand_in.calls] == [fast and possible for fast in expected]


def test_e5m2_squared_is_refused(pretend: Callable[[tuple[int, int]], ScaledMM]) -> None:
    for capability, name in ((SM90, "current_e5m2"), (SM100, "mxfp8_e5m2")):
        pretend(capability)
        x = storage(name, (32, 32), "cpu")
        for backend in ("auto", "native"):
            with pytest.raises(ValueError, match=r"x in e5m2 with w in e5m2.*E5M2 x E5M2"):
                gemm(x, x, kind="fprop", out_dtype=torch.bfloat16, backend=backend)
        y = gemm(x, x, kind="fprop", out_dtype=torch.float32, backend="emulate")
        assert torch.equal(y, torch.full_like(y, 32))


def test_blocks_of_e5m2_have_no_kernel(pretend: Callable[[tuple[int, int]], ScaledMM]) -> None:
    """One E5M2 operand is enough, unlike for per-tensor scaling: emulated on request or on "auto", never native."""
    stand_in = pretend(SM90)
    e5m2, e4m3 = storage("block_1d_f32_e5m2", (32, 32), "cpu"), storage("block_2d_f32", (32, 32), "cpu")
    with pytest.raises(ValueError, match="blocks of E4M3 only"):
        gemm(e5m2, e4m3, kind="fprop", out_dtype=torch.float32, backend="native")
    y = gemm(e5m2, e4m3, kind="fprop", out_dtype=torch.float32)
    assert torch.equal(y, torch.full_like(y, 32)) and not stand_in.calls


def test_transform_cancels_only_against_itself(pretend: Callable[[tuple[int, int]], ScaledMM]) -> None:
    stand_in = pretend(SM100)
    plain, signed, unsigned = (
        storage(name, (32, 32), "cpu") for name in ("nvfp4", "nvfp4_rht", "nvfp4_rht_plain_signs")
    )
    for a, b in ((plain, signed), (signed, unsigned)):
        with pytest.raises(ValueError, match="has no native kernel"):
            gemm(a, b, kind="wgrad", out_dtype=torch.float32, backend="native")
        gemm(a, b, kind="fprop", out_dtype=torch.float32, backend="native")  # row planes are not transformed
    assert len(stand_in.calls) == 2
