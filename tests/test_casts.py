"""The 8-bit and 4-bit codes, exhaustively: decode of every code, encode of every 16-bit float and its neighbours."""

from __future__ import annotations

import pytest
import torch
from cases import assert_equal_with_nan, assert_same_bytes

import te_dist
from te_dist import kernels, reference
from te_dist.formats import E2M1_VALUES, FP8_DTYPES, FP8_MAX, TORCH_FP8, DType


def all_floats(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def interesting_floats() -> torch.Tensor:
    """All bf16 values as float32, each with its neighbours one ulp away and on both halves."""
    bits = all_floats(torch.bfloat16).float().view(torch.int32)
    return torch.cat([(bits + delta) for delta in (-1, 0, 1, 0x7FFF, 0x8000, 0x8001)]).view(torch.float32)


def scaled_by_one(x: torch.Tensor, fp8: DType, device: str) -> torch.Tensor:
    quantizer = te_dist.Float8Quantizer(
        torch.ones(1, device=device), torch.zeros(1, device=device), fp8, columnwise=False
    )
    return quantizer.quantize(x.to(device))._data.cpu()


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
def test_fp8_encode(fp8: DType, device: str) -> None:
    """Against torch's own cast on the clamped value; NaN is 0x7F whatever its sign."""
    limit = FP8_MAX[fp8]
    for x in (all_floats(torch.bfloat16), all_floats(torch.float16), interesting_floats()):
        wide = x.float()
        expected = wide.clamp(-limit, limit).to(TORCH_FP8[fp8]).view(torch.uint8)
        expected = torch.where(wide.isnan(), 0x7F, expected).to(torch.uint8)
        assert_same_bytes(scaled_by_one(x, fp8, device), expected, f"{fp8} from {x.dtype}")


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
def test_fp8_all_256_codes(fp8: DType, device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    layout = te_dist.Float8CurrentScalingQuantizer(fp8, columnwise=False)
    storage = te_dist.Float8TensorStorage(
        {"_data": codes.to(device), "_scale_inv": torch.ones(1, device=device)},
        shape=(1, 256),
        dtype=torch.float32,
        quantizer=layout,
    )
    values = storage.dequantize().cpu()
    assert_equal_with_nan(values, codes.view(TORCH_FP8[fp8]).float(), str(fp8))
    # Every finite code is a fixed point of decode, encode.
    finite = values.isfinite()
    back = scaled_by_one(values, fp8, device)
    assert torch.equal(back[finite], codes[finite])


def test_e2m1_all_16_codes(device: str) -> None:
    """With amax 6 * 448 and a block scale of 1 the packed codes are the values themselves."""
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)
    scale = torch.zeros(128, 4, dtype=torch.uint8)
    scale[0, 0] = torch.tensor([1.0]).to(torch.float8_e4m3fn).view(torch.uint8)[0]
    storage = te_dist.NVFP4TensorStorage(
        {
            "_rowwise_data": reference.pack_nibbles(codes).to(device),
            "_rowwise_scale_inv": scale.to(device),
            "_amax_rowwise": torch.tensor([6.0 * 448.0], device=device),
        },
        shape=(1, 16),
        dtype=torch.float32,
        quantizer=te_dist.NVFP4Quantizer(columnwise=False),
    )
    expected = torch.tensor([E2M1_VALUES + tuple(-v for v in E2M1_VALUES)])
    assert_same_bytes(storage.dequantize().cpu(), expected, "E2M1 codes")


def e2m1_nearest(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest of the eight values, ties to the even code, by distance and not by thresholds."""
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    distance = (x.double().abs()[:, None] - grid).abs()
    best = distance.min(dim=1, keepdim=True).values
    candidates = distance == best
    even_first = torch.tensor([0, 8, 1, 9, 2, 10, 3, 11])  # even codes before odd ones
    order = torch.where(candidates, even_first, 99).argmin(dim=1)
    return order.to(torch.uint8)


def test_e2m1_rounding(device: str) -> None:
    x = all_floats(torch.bfloat16).float()
    x = x[x.abs() <= 6]
    x = x[: x.numel() // 32 * 32]
    code = reference.encode_e2m1(x)
    assert torch.equal(code & 7, e2m1_nearest(x))
    assert torch.equal(code >> 3, x.signbit().to(torch.uint8))
    # The kernel: blocks whose amax is 6 in a tensor of amax 6 have scale factors of exactly 1.
    blocks = torch.full((x.numel() // 8, 16), 6.0)
    blocks[:, :8] = x.view(-1, 8)
    quantizer = te_dist.NVFP4Quantizer(columnwise=False)
    data = quantizer.quantize(blocks.to(device))._rowwise_data.cpu()
    assert torch.equal(reference.unpack_nibbles(data)[:, :8].flatten(), code)


def test_e8m0_all_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = reference.decode_e8m0(codes)
    expected = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [float("nan")])
    assert_equal_with_nan(values, expected, "decode")
    factors = reference.e8m0_encode_factor(codes)
    assert torch.equal(factors, torch.tensor([2.0 ** (127 - code) for code in range(256)]))


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
def test_e8m0_from_every_amax(fp8: DType, device: str) -> None:
    """One block per value: the code is the smallest power of two that keeps the block in range."""
    x = interesting_floats()
    x = x[x >= 0]
    x = torch.cat((x, torch.tensor([float("inf"), float("nan"), 0.0])))
    storage = te_dist.MXFP8Quantizer(fp8, columnwise=False).quantize(x[:, None].expand(-1, 32).contiguous().to(device))
    code = storage._rowwise_scale_inv[: x.numel(), 0].cpu()
    assert torch.equal(code, reference.e8m0_from_amax(x, fp8))
    usual = (x >= 2.0**-100) & x.isfinite()
    ratio = x[usual].double() * torch.tensor(1 / FP8_MAX[fp8]).double()
    exact = torch.ceil(torch.log2((x[usual] * torch.tensor(1 / FP8_MAX[fp8])).double()))
    assert ratio.min() > 0
    assert torch.equal(code[usual].double() - 127, exact.clamp(max=127))


def test_float_conversions_round_to_nearest_even(device: str) -> None:
    """dequantize to fp16 and bf16 rounds like torch does, over products that need rounding."""
    if not kernels.has_extension():
        pytest.skip("the extension is not built")
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(torch.float8_e4m3fn).float().isfinite()]
    scales = torch.cat((interesting_floats()[::997], torch.tensor([1.0, 3e-8, 65519.0 / 448, 65520.0 / 448])))
    scales = scales[scales.isfinite() & (scales > 0)]
    for scale in scales:
        storage = te_dist.Float8TensorStorage(
            {"_data": codes[None].to(device), "_scale_inv": scale.reshape(1).to(device)},
            shape=(1, codes.numel()),
            dtype=torch.float32,
            quantizer=te_dist.Float8CurrentScalingQuantizer("e4m3", columnwise=False),
        )
        wide = codes[None].view(torch.float8_e4m3fn).float() * scale
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert_same_bytes(storage.dequantize(dtype=dtype).cpu(), wide.to(dtype), f"{scale} {dtype}")
