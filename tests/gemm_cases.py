"""Operands, the fp64 product they are judged by, and the tolerances of the GEMM tests.

Letters: M tokens, K in, N out.
"""

from __future__ import annotations

import torch
from cases import QUANTIZERS, fits, on, rng_for, varied
from torch import Tensor

import te_dist
from te_dist import QuantizedStorage
from te_dist.gemm import dispatch_table
from te_dist.gemm_native import NATIVE, Factor

KINDS = {"fprop": ("row", "row"), "dgrad": ("row", "column"), "wgrad": ("column", "column")}

# a (x or dy) and b (w or x); "plain" stays in bf16.
PAIRS = {
    "per_tensor": ("current_e4m3", "current_e4m3"),
    "per_tensor_hybrid": ("current_e5m2", "current_e4m3"),
    "per_tensor_hybrid_swapped": ("current_e4m3", "current_e5m2"),
    "delayed": ("delayed_e4m3", "current_pow2_eps"),
    "block_1d_2d": ("block_1d", "block_2d"),
    "block_2d_1d": ("block_2d", "block_1d"),
    "block_1d_1d": ("block_1d", "block_1d"),
    "block_f32_scales": ("block_1d_f32", "block_2d_f32"),
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "mxfp8_hybrid_2d": ("mxfp8_e5m2", "mxfp8_2d"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "nvfp4_2d": ("nvfp4", "nvfp4_2d"),
    "nvfp4_rht": ("nvfp4_stochastic", "nvfp4_rht"),
    "nvfp4_rht_mixed": ("nvfp4_rht_plain_signs", "nvfp4_rht"),
    "plain": ("plain", "plain"),
    "plain_quantized": ("plain", "block_2d"),
    "quantized_plain": ("mxfp8_e4m3", "plain"),
    "two_formats": ("current_e4m3", "mxfp8_e4m3"),
}

# M, N, K: one token, odd sizes that fit no multiple, no multiple of a block, exact multiples, nothing at all.
SHAPES = ((1, 16, 32), (17, 48, 80), (3, 5, 7), (130, 258, 272), (144, 272, 130), (128, 256, 512), (0, 32, 64))

# Floors in dB for the error against fp64.
# bf16 keeps 8 bits and fp16 11: a uniform rounding error is 6.02 * bits + 5 dB or more below the value, 53 and 71.
# float32 sums of at most 512 terms lose less than 9 of 24 bits, and typically half that: 115 on a CPU. Tensor cores
# cut bits off instead of rounding, which is one more.
SQNR = {torch.bfloat16: 50.0, torch.float16: 68.0, torch.float32: 110.0}
# Hopper's tensor cores align the addends of an FP8 product at 13 bits below the largest one before they add them, so
# a native result has about that precision, whatever its type.
NATIVE_SQNR = {torch.bfloat16: 48.0, torch.float16: 55.0, torch.float32: 55.0}
# The same per element, relative to sum |a||b|: 512 roundings to 24 bits. For the short alignment: an instruction adds
# 32 products, each cut at 2^-13 of the largest, so 31 small ones beside a large one lose at most 31 * 2^-13 of the sum;
# the largest seen on an H200 over all kinds, formats and depths up to 4096 is 2^-9.4.
SUM_ERROR, NATIVE_SUM_ERROR = 512 * 2.0**-24, 2.0**-8
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


def operand_shapes(kind: str, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return {"fprop": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[kind]


def quantized(
    name: str, shape: tuple[int, ...], plane: str, device: str, seed: int
) -> QuantizedStorage | Tensor | None:
    """A tensor in the format of that name with that plane, or "both"; None if the format cannot hold it."""
    x = varied(shape, torch.bfloat16, seed)
    if name == "plain":
        return x.to(device)
    quantizer = on(device, QUANTIZERS[name](rowwise=plane != "column", columnwise=plane != "row"))
    if not fits(quantizer, shape):
        return None
    return quantizer.quantize(x.to(device), rng_state=rng_for(quantizer, device))


def exact(operand: QuantizedStorage | Tensor) -> Tensor:
    """The plane's values as float64 on the CPU, by the reference."""
    if isinstance(operand, Tensor):
        return operand.double().cpu()
    with te_dist.use_backend("reference"):
        return operand.to(device="cpu").dequantize(dtype=torch.float32).double()


def product(kind: str, a: Tensor, b: Tensor) -> Tensor:
    a, b = (a.t(), b.t()) if kind == "wgrad" else (a, b.t() if kind == "dgrad" else b)
    return a @ b.t()


def sqnr(actual: Tensor, expected: Tensor) -> float:
    expected = expected.cpu()
    noise = (actual.double().cpu() - expected).norm()
    return float("inf") if noise == 0 else (20 * torch.log10(expected.norm() / noise)).item()


def is_native(kind: str, a: QuantizedStorage | Tensor, b: QuantizedStorage | Tensor) -> bool:
    """Whether FP8 tensor cores compute it here."""
    formats = [
        Factor("", operand, plane == "column").format for operand, plane in zip((a, b), KINDS[kind], strict=True)
    ]
    rows = {(row.a, row.b): row.implementation for row in dispatch_table(a.device)}
    return rows.get((formats[0], formats[1]), "emulate") in NATIVE


def check(
    y: Tensor,
    kind: str,
    a: QuantizedStorage | Tensor,
    b: QuantizedStorage | Tensor,
    bias: Tensor | None = None,
    native: bool = False,
) -> None:
    values_a, values_b = exact(a), exact(b)
    expected = product(kind, values_a, values_b)
    magnitude = product(kind, values_a.abs(), values_b.abs())
    if bias is not None:
        expected, magnitude = expected + bias.double().cpu(), magnitude + bias.double().abs().cpu()
    assert y.shape == expected.shape
    assert y.is_contiguous()
    if y.numel() == 0:
        return
    floor = (NATIVE_SQNR if native else SQNR)[y.dtype]
    assert sqnr(y, expected) >= floor, f"SQNR {sqnr(y, expected):.1f} dB < {floor}"
    bound = (NATIVE_SUM_ERROR if native else SUM_ERROR) * magnitude + ROUNDING[y.dtype] * expected.abs()
    # fp16 has subnormals below 2^-14, with an absolute error.
    worst = ((y.double().cpu() - expected).abs() - bound - 2.0**-24).max()
    assert worst <= 0, f"an element is off by {worst:.3g} more than rounding explains"


def storage(name: str, shape: tuple[int, int], device: str, **planes: bool) -> QuantizedStorage:
    return QUANTIZERS[name](**planes).quantize(torch.ones(shape, device=device))
