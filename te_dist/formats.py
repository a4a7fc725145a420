"""Dtypes, maxima and block sizes of the quantized formats. A leaf: imports nothing of te_dist."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

BLOCK_SIZE = 128  # blockwise FP8: 1x128 and 128x128
MXFP8_BLOCK_SIZE = 32
NVFP4_BLOCK_SIZE = 16

E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Bit i set: input i of the 16-point Hadamard transform is negated.
HADAMARD_SIGN_MASK = 0xD7E8

INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class DType(enum.IntEnum):
    """Element types under the names and numbers Transformer Engine users know."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, value: DType | torch.dtype | int | str) -> DType:
        """Turn a DType, a torch dtype, a code or a short name such as ``"e4m3"`` into a DType."""
        if isinstance(value, cls):
            return value
        if isinstance(value, torch.dtype) and value in _FROM_TORCH:
            return _FROM_TORCH[value]
        if isinstance(value, str) and value.lower() in _FROM_NAME:
            return _FROM_NAME[value.lower()]
        if type(value) is int and value in cls._value2member_map_:
            return cls(value)
        raise ValueError(f"DType expects a DType, a torch dtype or one of {sorted(_FROM_NAME)} but got {value!r}")


_FROM_TORCH = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
_FROM_NAME = {
    "e4m3": DType.kFloat8E4M3,
    "e5m2": DType.kFloat8E5M2,
    "e2m1": DType.kFloat4E2M1,
    "fp32": DType.kFloat32,
    "fp16": DType.kFloat16,
    "bf16": DType.kBFloat16,
}
_SHORT_NAME = {dtype: name for name, dtype in _FROM_NAME.items()}

FP8_DTYPES = (DType.kFloat8E4M3, DType.kFloat8E5M2)
TORCH_FP8 = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
FP8_MAX = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}


def short_name(dtype: DType) -> str:
    """``e4m3`` for ``DType.kFloat8E4M3``, and so on."""
    return _SHORT_NAME[dtype]


def matrix_size(shape: Sequence[int]) -> tuple[int, int]:
    """(M, K) of a logical shape, also with symbolic sizes, which torch.Size.numel() would turn into numbers."""
    rows = 1
    for size in shape[:-1]:
        rows = rows * size
    return rows, shape[-1]


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up; also for symbolic sizes."""
    return (a + b - 1) // b


def round_up(a: int, b: int) -> int:
    """The next multiple of b; also for symbolic sizes."""
    return ceil_div(a, b) * b
