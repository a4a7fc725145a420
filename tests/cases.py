"""The formats, shapes and special values that every exactness test runs over."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import te_dist
from te_dist import Quantizer

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLANES = {"row": (True, False), "column": (False, True), "both": (True, True)}

# One constructor per format and option that changes the bytes.
VALUE_QUANTIZERS: dict[str, Callable[..., Quantizer]] = {
    "current_e4m3": lambda **kw: te_dist.Float8CurrentScalingQuantizer("e4m3", **kw),
    "current_e5m2": lambda **kw: te_dist.Float8CurrentScalingQuantizer("e5m2", **kw),
    "current_pow2_eps": lambda **kw: te_dist.Float8CurrentScalingQuantizer(
        "e4m3", force_pow_2_scales=True, amax_epsilon=1e-3, **kw
    ),
    "block_1d": lambda **kw: te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=1, **kw),
    "block_2d": lambda **kw: te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=2, **kw),
    "block_1d_f32_e5m2": lambda **kw: te_dist.Float8BlockQuantizer(
        "e5m2", block_scaling_dim=1, force_pow_2_scales=False, amax_epsilon=1e-3, **kw
    ),
    "block_1d_f32": lambda **kw: te_dist.Float8BlockQuantizer(
        "e4m3", block_scaling_dim=1, force_pow_2_scales=False, **kw
    ),
    "block_2d_f32": lambda **kw: te_dist.Float8BlockQuantizer(
        "e4m3", block_scaling_dim=2, force_pow_2_scales=False, **kw
    ),
    "mxfp8_e4m3": lambda **kw: te_dist.MXFP8Quantizer("e4m3", **kw),
    "mxfp8_e5m2": lambda **kw: te_dist.MXFP8Quantizer("e5m2", **kw),
    "mxfp8_2d": lambda **kw: te_dist.MXFP8Quantizer("e4m3", with_2d_quantization=True, **kw),
    "identity": lambda **kw: te_dist.IdentityQuantizer(**kw),
    "identity_bf16": lambda **kw: te_dist.IdentityQuantizer(dtype="bf16", **kw),
    "nvfp4": lambda **kw: te_dist.NVFP4Quantizer(**kw),
    "nvfp4_2d": lambda **kw: te_dist.NVFP4Quantizer(with_2d_quantization=True, **kw),
    "nvfp4_rht": lambda **kw: te_dist.NVFP4Quantizer(with_rht=True, **kw),
    "nvfp4_rht_plain_signs": lambda **kw: te_dist.NVFP4Quantizer(with_rht=True, with_random_sign_mask=False, **kw),
    "nvfp4_stochastic": lambda **kw: te_dist.NVFP4Quantizer(with_rht=True, stochastic_rounding=True, **kw),
}


def delayed(**kw: bool) -> te_dist.Float8Quantizer:
    return te_dist.Float8Quantizer(torch.tensor([3.7]), torch.zeros(1), "e4m3", **kw)


# The delayed quantizer has state, so it is made anew for each use.
QUANTIZERS: dict[str, Callable[..., Quantizer]] = {"delayed_e4m3": delayed, **VALUE_QUANTIZERS}

# Empty, one row, odd, no multiple of any block, exact multiples, one more and one less than a block.
SHAPES = (
    (0, 32), (32, 0), (1, 16), (1, 130), (3, 5), (17, 48), (16, 2), (33, 31), (128, 128),
    (130, 258), (144, 272), (127, 129), (256, 384), (2, 3, 64), (7,),
)  # fmt: skip


def fits(quantizer: Quantizer, shape: tuple[int, ...]) -> bool:
    try:
        quantizer._check_shape(torch.Size(shape))
    except ValueError:
        return False
    return True


def rng_for(quantizer: Quantizer, device: str = "cpu") -> Tensor | None:
    if getattr(quantizer, "stochastic_rounding", False):
        return torch.tensor([1234567890123, 42], dtype=torch.int64, device=device)
    return None


def varied(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random values whose magnitude differs from tile to tile, so that a wrong scale cannot pass."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if x.numel():
        rows = torch.arange(x[..., 0].numel()).reshape(x[..., 0].shape)[..., None]
        cols = torch.arange(x.shape[-1])
        x = x * torch.exp2(((rows // 8) % 7 + (cols // 8) % 5 - 5).float())
    return x.to(dtype)


def special_values(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """144 x 272 tensors with the values that break careless kernels."""
    info = torch.finfo(dtype)

    def base() -> Tensor:
        return varied((144, 272), dtype)

    yield "all_zero", torch.zeros(144, 272, dtype=dtype)
    yield "negative_zero", torch.full((144, 272), -0.0, dtype=dtype)
    x = base()
    x[:128, :128] = 0
    yield "zero_block", x
    for name, value in (("inf", float("inf")), ("negative_inf", float("-inf")), ("nan", float("nan"))):
        x = base()
        x[5, 7] = value
        x[140, 270] = value
        yield name, x
    x = base()
    x[3, 9] = -float("nan")
    yield "negative_nan", x
    yield "all_inf", torch.full((144, 272), float("inf"), dtype=dtype)
    yield "subnormal", torch.full((144, 272), info.smallest_normal / 4, dtype=dtype) * torch.sign(base())
    x = base() * 0
    x[::3, ::5] = info.smallest_normal / 8
    yield "subnormal_sparse", x
    x = base()
    x[100, 200] = info.max
    x[20, 30] = -info.max
    yield "largest_finite", x
    yield "all_largest", torch.full((144, 272), info.max, dtype=dtype)
    yield "tiny", (base().double() * info.smallest_normal * 8).to(dtype)
    yield "ties", (torch.arange(144 * 272).reshape(144, 272) % 97 / 16 - 3).to(dtype)


def assert_same_bytes(actual: Tensor, expected: Tensor, what: str) -> None:
    """Bitwise equality, with the first difference in the message."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} != {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype} != {expected.dtype}"
    if expected.numel() == 0:
        return
    a, b = (t.detach().cpu().contiguous().view(torch.uint8) for t in (actual, expected))
    if not torch.equal(a, b):
        where = (a != b).nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{what}: {len(where)} of {a.numel()} bytes differ, first at {first}: "
            f"{a[first].item():#04x} != {b[first].item():#04x}"
        )


def assert_same_storage(actual: te_dist.QuantizedStorage, expected: te_dist.QuantizedStorage, what: str) -> None:
    assert actual.inner_names() == expected.inner_names(), what
    for name in expected.inner_names():
        assert_same_bytes(getattr(actual, name), getattr(expected, name), f"{what} {name}")


def assert_equal_with_nan(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal values, -0.0 distinct from 0.0, any NaN equal to any NaN."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan), f"{what}: NaNs differ"
    zero = torch.zeros((), dtype=expected.dtype, device=expected.device)
    assert_same_bytes(torch.where(nan, zero, actual), torch.where(nan, zero, expected), what)


def on(device: str, quantizer: Quantizer) -> Quantizer:
    if isinstance(quantizer, te_dist.Float8Quantizer):
        return quantizer.replace(scale=quantizer.scale.to(device), amax=quantizer.amax.to(device))
    return quantizer


def check_against_reference(make: Callable[..., Quantizer], x: Tensor, planes: str, device: str, what: str) -> None:
    """Quantize and dequantize with kernels on `device` and with the reference on the CPU."""
    rowwise, columnwise = PLANES[planes]
    quantizer = make(rowwise=rowwise, columnwise=columnwise)
    if not fits(quantizer, tuple(x.shape)):
        with pytest.raises(ValueError, match="expects"):
            quantizer.quantize(x)
        return
    mine, theirs = on(device, quantizer.copy()), quantizer.copy()
    actual = mine.quantize(x.to(device), rng_state=rng_for(quantizer, device))
    with te_dist.use_backend("reference"):
        expected = theirs.quantize(x, rng_state=rng_for(quantizer))
    if isinstance(mine, te_dist.IdentityQuantizer):  # torch's own casts, which keep no particular NaN
        assert_equal_with_nan(actual._hp_data.cpu(), expected._hp_data, what)
    else:
        assert_same_storage(actual, expected, what)
    if isinstance(mine, te_dist.Float8Quantizer):
        assert_same_bytes(mine.amax, theirs.amax, f"{what} recorded amax")
    for dtype in DTYPES:
        with te_dist.use_backend("reference"):
            values = expected.dequantize(dtype=dtype)
        assert_equal_with_nan(actual.dequantize(dtype=dtype).cpu(), values, f"{what} dequantized")
