"""Every kernel once more in plain PyTorch: the executable definition that the C++ and CUDA kernels must equal bit
for bit, and the fallback where they are not built.

Written for clarity. Inputs are 2-D [M, K] tensors of float32, float16 or bfloat16 on any device; results are fresh
tensors in the layouts of docs/numerics.md, scale padding zero. Quotients are tensor / tensor throughout, because torch
computes ``number / tensor`` as ``number * reciprocal(tensor)``, which rounds twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist.formats import (
    BLOCK_SIZE,
    E2M1_VALUES,
    FP8_MAX,
    HADAMARD_SIGN_MASK,
    MXFP8_BLOCK_SIZE,
    NVFP4_BLOCK_SIZE,
    TORCH_FP8,
    DType,
    ceil_div,
    round_up,
)

# Row data, row scale, column data, column scale.
BlockPlanes = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

FLOAT_MAX = torch.finfo(torch.float32).max


# ------------------------------------------------------------------------------------------------- helpers
def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _constant(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _pad(x: Tensor, rows: int, cols: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, cols - x.shape[1], 0, rows - x.shape[0]))


def _canonical_amax(amax: Tensor) -> Tensor:
    """One NaN pattern, so that equal tensors have equal bytes."""
    return torch.where(amax.isnan(), _constant(float("nan"), amax), amax)


def _tile_amax(x: Tensor, tile_rows: int, tile_cols: int) -> Tensor:
    """[ceil(M / tile_rows), ceil(K / tile_cols)] amaxes; partial tiles count as zero-padded."""
    rows, cols = ceil_div(x.shape[0], tile_rows), ceil_div(x.shape[1], tile_cols)
    if rows == 0 or cols == 0:
        return x.new_zeros((rows, cols), dtype=torch.float32)
    tiles = _pad(x.float().abs(), rows * tile_rows, cols * tile_cols)
    return tiles.view(rows, tile_rows, cols, tile_cols).amax(dim=(1, 3))


def _spread(per_tile: Tensor, tile_rows: int, tile_cols: int, shape: torch.Size) -> Tensor:
    """A value per tile -> a value per element of `shape`."""
    full = per_tile.repeat_interleave(tile_rows, 0).repeat_interleave(tile_cols, 1)
    return full[: shape[0], : shape[1]]


# ------------------------------------------------------------------------------------------------- fp8
def encode_fp8(x: Tensor, fp8: DType) -> Tensor:
    """float32 -> fp8 bits: round to nearest even, saturate, NaN -> 0x7F."""
    limit = FP8_MAX[fp8]
    bits = x.clamp(-limit, limit).to(TORCH_FP8[fp8]).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(bits, 0x7F), bits)


def decode_fp8(bits: Tensor, fp8: DType) -> Tensor:
    return bits.view(TORCH_FP8[fp8]).float()


def amax(x: Tensor) -> Tensor:
    """max|x| as float32 [1]; 0 for an empty tensor, NaN if there is one."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return _canonical_amax(x.abs().amax().float().reshape(1))


def scale_from_amax(amax: Tensor, fp8: DType, *, eps: float, power_of_2: bool, overflow: float) -> Tensor:
    """The encode scale of every amax."""
    amax = torch.maximum(amax, _constant(eps, amax))
    unusable = (amax == 0) | ~amax.isfinite()
    scale = _constant(FP8_MAX[fp8], amax) / torch.where(unusable, torch.ones_like(amax), amax)
    scale = torch.where(unusable, torch.ones_like(scale), scale)
    scale = torch.where(scale.isinf(), _constant(overflow, scale), scale)
    if power_of_2:
        scale = (_bits(scale) & -(1 << 23)).view(torch.float32)
    return scale


def _reciprocal(x: Tensor) -> Tensor:
    return torch.ones_like(x) / x


def cast_scaled(
    x: Tensor, scale: Tensor, fp8: DType, *, rowwise: bool = True, columnwise: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Cast with a given scale [1]: data [M, K], its transpose [K, M], scale_inv [1]."""
    data = encode_fp8(x.float() * scale, fp8)
    return data if rowwise else None, data.t().contiguous() if columnwise else None, _reciprocal(scale)


def cast_current(
    x: Tensor,
    amax: Tensor,
    fp8: DType,
    *,
    eps: float,
    power_of_2: bool,
    rowwise: bool = True,
    columnwise: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Cast with the scale that `amax` [1] asks for."""
    scale = scale_from_amax(amax, fp8, eps=eps, power_of_2=power_of_2, overflow=FLOAT_MAX)
    return cast_scaled(x, scale, fp8, rowwise=rowwise, columnwise=columnwise)


def dequantize_tensor(data: Tensor, scale_inv: Tensor, fp8: DType, columnwise: bool) -> Tensor:
    values = decode_fp8(data, fp8) * scale_inv
    return values.t().contiguous() if columnwise else values


# ------------------------------------------------------------------------------------------------- blockwise fp8
def _block_plane(x: Tensor, tile_rows: int, fp8: DType, eps: float, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Data [M, K] and scale_inv per tile of tile_rows x 128."""
    overflow = torch.finfo(x.dtype).max
    amax = _tile_amax(x, tile_rows, BLOCK_SIZE)
    scale = scale_from_amax(amax, fp8, eps=eps, power_of_2=power_of_2, overflow=overflow)
    data = encode_fp8(x.float() * _spread(scale, tile_rows, BLOCK_SIZE, x.shape), fp8)
    return data, _reciprocal(scale)


def quantize_block(
    x: Tensor,
    fp8: DType,
    *,
    block_dim: int,
    eps: float,
    power_of_2: bool,
    rowwise: bool = True,
    columnwise: bool = True,
) -> BlockPlanes:
    """row data [M, K], row scale, column data [K, M], column scale; None for a plane not asked for.

    1-D scales are stored transposed, [ceil(K/128), rup(M, 4)]; 2-D ones [ceil(M/128), rup(ceil(K/128), 4)].
    """
    if block_dim == 2:
        data, scale = _block_plane(x, BLOCK_SIZE, fp8, eps, power_of_2)
        row = (data, _pad_inner(scale)) if rowwise else (None, None)
        return *row, *((data.t().contiguous(), _pad_inner(scale.t())) if columnwise else (None, None))

    def plane(along: Tensor) -> tuple[Tensor, Tensor]:
        data, scale = _block_plane(along, 1, fp8, eps, power_of_2)
        return data, _pad_inner(scale.t())

    row = plane(x) if rowwise else (None, None)
    return *row, *(plane(x.t().contiguous()) if columnwise else (None, None))


def _pad_inner(scale: Tensor) -> Tensor:
    return _pad(scale, scale.shape[0], round_up(scale.shape[1], 4))


def dequantize_block(data: Tensor, scale: Tensor, fp8: DType, *, block_dim: int, columnwise: bool) -> Tensor:
    rows, cols = data.shape
    if block_dim == 2:
        spread = _spread(scale[:, : ceil_div(cols, BLOCK_SIZE)], BLOCK_SIZE, BLOCK_SIZE, data.shape)
    else:
        spread = _spread(scale[:, :rows].t(), 1, BLOCK_SIZE, data.shape)
    values = decode_fp8(data, fp8) * spread
    return values.t().contiguous() if columnwise else values


# ------------------------------------------------------------------------------------------------- mxfp8
def e8m0_from_amax(amax: Tensor, fp8: DType) -> Tensor:
    """E8M0 scale bytes, rounded up so that no element saturates."""
    bits = _bits(amax * _constant(1.0 / FP8_MAX[fp8], amax))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    tiny = (exponent == 0) & (mantissa <= 0x400000)
    code = exponent + ((mantissa > 0) & (exponent != 0xFE) & ~tiny).to(torch.int32)
    code = torch.where(amax.isinf(), torch.full_like(code, 0xFE), code)
    code = torch.where(amax.isnan(), torch.full_like(code, 0xFF), code)
    return code.to(torch.uint8)


def decode_e8m0(code: Tensor) -> Tensor:
    """2 ** (code - 127); 0xFF is NaN."""
    values = torch.ldexp(torch.ones_like(code, dtype=torch.float32), code.to(torch.int32) - 127)
    return torch.where(code == 0xFF, _constant(float("nan"), values), values)


def e8m0_encode_factor(code: Tensor) -> Tensor:
    """2 ** (127 - code), the factor that brings a block into range."""
    bits = (254 - code.to(torch.int32)) << 23
    bits = torch.where(code == 0xFE, torch.full_like(bits, 1 << 22), bits)
    bits = torch.where(code == 0xFF, torch.full_like(bits, 1 << 21), bits)
    return bits.view(torch.float32)


def _mxfp8_plane(x: Tensor, fp8: DType, two_d: bool, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Data [M, K] and unpadded scales of one plane."""
    size = MXFP8_BLOCK_SIZE
    block = (size, 1) if columnwise else (1, size)
    tile = (size, size) if two_d else block
    code = e8m0_from_amax(_tile_amax(x, *tile), fp8)
    data = encode_fp8(x.float() * _spread(e8m0_encode_factor(code), *tile, x.shape), fp8)
    # A 32x32 scale is repeated for each row (or column) of its tile: the GEMM sees 1x32.
    blocks = torch.Size((ceil_div(x.shape[0], block[0]), ceil_div(x.shape[1], block[1])))
    return data, _spread(code, tile[0] // block[0], tile[1] // block[1], blocks)


def quantize_mxfp8(x: Tensor, fp8: DType, *, two_d: bool, rowwise: bool = True, columnwise: bool = True) -> BlockPlanes:
    """row data [M, K], row scale [rup(M,128), rup(ceil(K/32),4)], column data [M, K], column scale
    [rup(ceil(M/32),4), rup(K,128)]; None for a plane not asked for."""
    row: tuple[Tensor | None, Tensor | None] = (None, None)
    col: tuple[Tensor | None, Tensor | None] = (None, None)
    if rowwise:
        data, scale = _mxfp8_plane(x, fp8, two_d, False)
        row = data, _pad(scale, round_up(scale.shape[0], 128), round_up(scale.shape[1], 4))
    if columnwise:
        data, scale = _mxfp8_plane(x, fp8, two_d, True)
        col = data, _pad(scale, round_up(scale.shape[0], 4), round_up(scale.shape[1], 128))
    return *row, *col


def dequantize_mxfp8(data: Tensor, scale: Tensor, fp8: DType, *, columnwise: bool) -> Tensor:
    tile = (MXFP8_BLOCK_SIZE, 1) if columnwise else (1, MXFP8_BLOCK_SIZE)
    code = scale[: ceil_div(data.shape[0], tile[0]), : ceil_div(data.shape[1], tile[1])]
    return decode_fp8(data, fp8) * _spread(decode_e8m0(code), *tile, data.shape)


# ------------------------------------------------------------------------------------------------- nvfp4
def encode_e2m1(x: Tensor) -> Tensor:
    """float32 -> codes 0..15, ties to the even code, saturating; NaN -> 7 (the format has none)."""
    a = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for threshold, inclusive in (
        (0.25, False),
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code += (a >= threshold) if inclusive else (a > threshold)
    code += x.signbit().to(torch.uint8) * 8
    return torch.where(x.isnan(), torch.full_like(code, 7), code)


def encode_e2m1_stochastic(x: Tensor, random: Tensor) -> Tensor:
    """As encode_e2m1, rounding up with the probability of the remainder; `random` holds bytes.

    t is x with random / 256 of a step added to its magnitude, in whole 256ths of a step: a float would round the sum.
    """
    a = x.abs().clamp(max=6.0)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    t = ((a * (256.0 / step)).floor() + random.float()) * (step / 256.0)
    code = torch.zeros_like(x, dtype=torch.uint8)
    for value in E2M1_VALUES[1:]:
        code += t >= value
    code += x.signbit().to(torch.uint8) * 8
    return torch.where(x.isnan(), torch.full_like(code, 7), code)


def decode_e2m1(code: Tensor) -> Tensor:
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=code.device)
    return table[code.to(torch.int64)]


def pack_nibbles(code: Tensor) -> Tensor:
    """[R, C] codes -> [R, C/2] bytes, the even index in the low nibble."""
    return code[:, 0::2] | (code[:, 1::2] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    return torch.stack((data & 0xF, data >> 4), dim=-1).reshape(data.shape[0], 2 * data.shape[1])


def _multiply_32(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product of two unsigned 32-bit numbers held in int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & 0xFFFFFFFF


def philox(rng_state: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Philox4x32-10: four random words, [..., 4], for each pair of counter words; rng_state is int64 (seed, offset)."""
    mask = 0xFFFFFFFF
    seed, offset = rng_state[0], rng_state[1]
    first, second = torch.broadcast_tensors(first, second)
    c = [first, second] + [word.expand_as(first) for word in (offset & mask, (offset >> 32) & mask)]
    key0, key1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        high0, low0 = _multiply_32(c[0], 0xD2511F53)
        high1, low1 = _multiply_32(c[2], 0xCD9E8D57)
        c = [high1 ^ c[1] ^ key0, low1, high0 ^ c[3] ^ key1, low0]
        key0, key1 = (key0 + 0x9E3779B9) & mask, (key1 + 0xBB67AE85) & mask
    return torch.stack(c, dim=-1)


def random_bytes(rng_state: Tensor, lines: int, blocks: int, columnwise: bool) -> Tensor:
    """The random bytes of a plane, [lines, 16 * blocks]. Byte j of a block is byte j of its place XORed with byte
    j / 2 % 2 of its line; both are other ones in every tile of 128 lines and 8 blocks. csrc/numerics/philox.h says what
    is independent of what.
    """

    def count(size: int, by: int) -> Tensor:
        return torch.arange(ceil_div(size, by), device=rng_state.device)

    def bytes_of(words: Tensor) -> Tensor:
        return torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)], dim=-1)

    plane, of_lines = (1 << 31 if columnwise else 0), 1 << 30
    line, block = count(lines, 1), count(blocks, 1)
    drawn = bytes_of(philox(rng_state, count(lines, 8)[:, None], count(blocks, 8) | plane | of_lines))
    line_bytes = drawn.flatten(2).unflatten(2, (8, 2)).transpose(1, 2).flatten(0, 1)[:lines]  # [lines, tiles, 2]
    line_bytes = line_bytes.repeat_interleave(2, -1).repeat(1, 1, 4)
    place_bytes = bytes_of(philox(rng_state, block, count(lines, 128)[:, None] | plane)).flatten(2)
    return (line_bytes[:, block // 8] ^ place_bytes[line // 128]).flatten(1)


def _butterfly(v: Tensor) -> Tensor:
    """Sylvester's H16 on the last dimension, in fp32, strides 1, 2, 4, 8."""
    for stride in (1, 2, 4, 8):
        pairs = v.view(-1, 16 // (2 * stride), 2, stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        v = torch.stack((a + b, a - b), dim=2).view(-1, 16)
    return v


def hadamard_signs(random_signs: bool, device: torch.device) -> Tensor:
    mask = HADAMARD_SIGN_MASK if random_signs else 0
    return torch.tensor([-1.0 if mask >> i & 1 else 1.0 for i in range(16)], device=device)


def hadamard(x: Tensor, random_signs: bool) -> Tensor:
    """The transform on groups of 16 of the last dimension; inputs and results are rounded to bf16. Zero is +0."""
    groups = x.to(torch.bfloat16).float().reshape(-1, 16) * hadamard_signs(random_signs, x.device)
    return ((_butterfly(groups) + 0.0) * 0.25).to(torch.bfloat16).float().view(x.shape)


def hadamard_inverse(x: Tensor, random_signs: bool) -> Tensor:
    groups = _butterfly(x.reshape(-1, 16)) * 0.25
    return (groups * hadamard_signs(random_signs, x.device)).view(x.shape)


def _column_path(x: Tensor, with_rht: bool, random_signs: bool) -> Tensor:
    transposed = x.t().contiguous()
    return hadamard(transposed, random_signs) if with_rht else transposed


def amax_nvfp4(x: Tensor, *, with_rht: bool, random_signs: bool) -> tuple[Tensor, Tensor]:
    """Global amax [1] of the row path and of the column path."""
    row = amax(x)
    return row, amax(_column_path(x, True, random_signs)) if with_rht else row.clone()


def nvfp4_global(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Senc and Sdec for a global amax."""
    encode = _constant(448.0 * 6.0, amax) / amax
    encode = torch.minimum(encode, _constant(FLOAT_MAX, amax))
    encode = torch.where((amax == 0) | (encode == 0), torch.ones_like(encode), encode)
    return encode, _reciprocal(encode)


def _nvfp4_plane(
    x: Tensor, amax: Tensor, two_d: bool, rng_state: Tensor | None, columnwise: bool
) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and E4M3 scale bits [R, ceil(C/16)]."""
    size = NVFP4_BLOCK_SIZE
    rows, cols = x.shape
    tile = (size, size) if two_d else (1, size)
    encode, decode = nvfp4_global(amax)
    sixth = encode * _constant(1.0 / 6.0, amax)
    scale = encode_fp8(_tile_amax(x, *tile) * sixth, DType.kFloat8E4M3)
    factor = _reciprocal(decode_fp8(scale, DType.kFloat8E4M3) * decode)
    factor = torch.minimum(factor, _constant(FLOAT_MAX, factor))
    scaled = x.float() * _spread(factor, *tile, x.shape)
    if rng_state is None:
        code = encode_e2m1(scaled)
    else:
        random = random_bytes(rng_state, rows, ceil_div(cols, size), columnwise)
        code = encode_e2m1_stochastic(scaled, random[:, :cols])
    return code, scale.repeat_interleave(tile[0], 0)[:rows]


def quantize_nvfp4(
    x: Tensor,
    amax_row: Tensor | None,
    amax_col: Tensor | None,
    *,
    two_d: bool,
    with_rht: bool,
    random_signs: bool,
    rng_state: Tensor | None,
    rowwise: bool = True,
    columnwise: bool = True,
) -> BlockPlanes:
    """row data [M, K/2], row scale [rup(M,128), rup(ceil(K/16),4)], column data [K, M/2], column scale
    [rup(K,128), rup(ceil(M/16),4)]; None for a plane not asked for, whose even size need not hold."""

    def packed(plane: Tensor, amax: Tensor | None, is_column: bool) -> tuple[Tensor, Tensor]:
        if amax is None:
            raise ValueError("quantize_nvfp4 expects the amax of every plane it is asked for")
        code, scale = _nvfp4_plane(plane, amax, two_d, rng_state, is_column)
        return pack_nibbles(code), _pad(scale, round_up(scale.shape[0], 128), round_up(scale.shape[1], 4))

    row = packed(x, amax_row, False) if rowwise else (None, None)
    col = packed(_column_path(x, with_rht, random_signs), amax_col, True) if columnwise else (None, None)
    return row[0], row[1], col[0], col[1]


def dequantize_nvfp4(
    data: Tensor, scale: Tensor, amax: Tensor, *, columnwise: bool, with_rht: bool, random_signs: bool
) -> Tensor:
    code = unpack_nibbles(data)
    block_scale = decode_fp8(scale[: code.shape[0], : ceil_div(code.shape[1], 16)], DType.kFloat8E4M3)
    values = decode_e2m1(code) * _spread(block_scale, 1, NVFP4_BLOCK_SIZE, code.shape)
    values = values * amax * _constant(1.0 / (6.0 * 448.0), values)
    if not columnwise:
        return values
    return (hadamard_inverse(values, random_signs) if with_rht else values).t().contiguous()


# ------------------------------------------------------------------------------------------------- layout
def transpose_nibbles(data: Tensor) -> Tensor:
    """Packed [R, C/2] -> packed [C, R/2]."""
    return pack_nibbles(unpack_nibbles(data).t().contiguous())


def swizzle_scales(scale: Tensor) -> Tensor:
    """[rows, cols] block scales into cuBLAS's order of 128x4 tiles; rows % 128 == 0 and cols % 4 == 0."""
    rows, cols = scale.shape
    tiles = scale.view(rows // 128, 4, 32, cols // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, cols).contiguous()


# ------------------------------------------------------------------------------------------------- delayed scaling
def advance_scales(history: Tensor, scales: Tensor, largest: Tensor, *, margin: int, most_recent: bool) -> None:
    """In place: scale = (fp8_max / amax) / 2**margin, an unusable amax keeps the old one; the history rolls by -1."""
    amax = history[0] if most_recent else history.amax(0)
    usable = (amax > 0) & amax.isfinite()
    fresh = largest / torch.where(usable, amax, torch.ones_like(amax)) / float(2**margin)
    fresh = torch.where(fresh.isinf(), _constant(FLOAT_MAX, fresh), fresh)
    scales.copy_(torch.where(usable, fresh, scales))
    history.copy_(history.roll(-1, 0))
    history[0].zero_()
