// NVFP4: packed E2M1 with E4M3 scales of 1x16 (or 16x16) blocks under one global amax, and the two global
// amaxes. bf16 moves about 3.1 bytes an element for both planes; the amax pass 2.
//
// Both kernels are bound by instructions before they are bound by memory, so everything stays in registers: a
// thread holds 16 rows x 16 bytes, one 16-byte load a row. Its columns are whole blocks of the column plane,
// transform included; a row's block meets its neighbours' in one shuffle, and lane pairs share the work of the
// row scales. Row codes leave as they are; column codes cross shared memory as packed nibbles.
#include "../numerics/hadamard.h"
#include "../numerics/nvfp4.h"
#include "../numerics/philox.h"
#include "amax.cuh"
#include "tile.cuh"

namespace te_dist {
namespace cuda {
namespace {

constexpr int kBlock = kNvfp4Block;

struct NvConfig {
  static constexpr int kLanes = 16;         // threads across a tile: 16 or 32
  static constexpr int kGroups = 8;         // threads down a tile, 16 rows each
  static constexpr int kThreads = kLanes * kGroups;
  static constexpr int kWarpsPerSm = 16;    // of the cast: 128 registers a thread
  static constexpr int kAmaxThreads = 128;
  static constexpr int kAmaxBlocksPerSm = 5;
  static constexpr int kRows = kGroups * kBlock;
};

// 16 rows of 16 bytes.
template <typename T>
struct NvPatch {
  static constexpr int kCols = 16 / static_cast<int>(sizeof(T));
  static constexpr int kSharers = kBlock / kCols;  // threads that hold a row's block
  uint32_t word[kBlock][4];
};

template <typename T>
struct NvTile {
  static constexpr int kCols = NvConfig::kLanes * NvPatch<T>::kCols;
  static constexpr int kRowScales = kCols / kBlock;  // of a line
  static constexpr int kColScales = NvConfig::kGroups;
  struct Shared {
    alignas(16) Stage<NvConfig::kGroups, 3, kCols, NvConfig::kThreads> codes;  // of the column plane
    alignas(4) uint8_t row_scales[NvConfig::kRows][kRowScales];
    alignas(4) uint8_t col_scales[kCols][kColScales];
  };
  // Scale rows are padded to 128, so tiles cover the columns up to there.
  static int64_t across(int64_t cols) { return ceil_div(round_up(cols, 128), kCols); }
};

struct NvPlane {
  ByteMatrix data;  // [lines, values / 2], null data: not asked for
  uint8_t* scale;
  const float* amax;
};

struct NvRule {
  bool two_d;
  bool hadamard;
  uint32_t signs;
  const int64_t* rng;
};

__device__ __forceinline__ constexpr bool same_as_bf16(Tag<bf16_t>) { return true; }
template <typename T>
__device__ __forceinline__ constexpr bool same_as_bf16(Tag<T>) {
  return false;
}

// Two floats to bf16, `low` in the low half; the same function as to_bf16, but for the bits of a NaN.
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return to_bf16(low).bits | static_cast<uint32_t>(to_bf16(high).bits) << 16;
#endif
}

__device__ __forceinline__ bf16_t round_to_bf16(float value) {
  return bf16_t{static_cast<uint16_t>(bf16_pair(value, 0.0f))};
}

// ---------------------------------------------------------------------------------------------- loads
template <typename T>
__device__ __forceinline__ void load_nv_patch(const TileInput<T>& x, int64_t row, int64_t col,
                                              NvPatch<T>& patch) {
  constexpr int kCols = NvPatch<T>::kCols;
  const T* from = x.data + row * x.stride + col;
  if (x.vector && row + kBlock <= x.rows && col + kCols <= x.cols) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const uint4 v = load_bulk(reinterpret_cast<const uint4*>(from + i * x.stride));
      patch.word[i][0] = v.x;
      patch.word[i][1] = v.y;
      patch.word[i][2] = v.z;
      patch.word[i][3] = v.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      constexpr int kPer = Words<T>::per_word;
      const auto* raw = reinterpret_cast<const typename Words<T>::Raw*>(from + i * x.stride);
      uint32_t word = 0u;
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        const int j = w * kPer + e;
        if (row + i < x.rows && col + j < x.cols) word |= Words<T>::place(raw[j], e);
      }
      patch.word[i][w] = word;
    }
  }
}

// ---------------------------------------------------------------------------------------------- amax
// A word of raw magnitudes: the maximum over kCount (even) words and `start`.
template <typename T, int kCount>
__device__ __forceinline__ uint32_t max_of_words(const uint32_t (&word)[kCount], uint32_t start) {
  using W = Words<T>;
#pragma unroll
  for (int w = 0; w < kCount; w += 2) {
    start = W::max(start, W::magnitude(word[w]), W::magnitude(word[w + 1]));
  }
  return start;
}

// ---------------------------------------------------------------------------------------------- scales
struct NvScale {
  uint32_t code;
  float factor;
  bool plain;  // the factor is right, no NaN, and no value scales past 6.9
};

// E4M3 to float; the same function as decode_fp8.
__device__ __forceinline__ float decode_scale(uint32_t code) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("{.reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 pair, %1; mov.b32 {low, high}, pair; "
      "cvt.f32.f16 %0, low;}"
      : "=f"(value)
      : "h"(static_cast<uint16_t>(code)));
  return value;
#else
  return decode_fp8<E4M3>(static_cast<uint8_t>(code));
#endif
}

// 1 / x for exponent fields 1 to 252. It is what the compiler makes of a division, without the branch to what
// handles the others.
__device__ __forceinline__ float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return __fmaf_rn(y, -__fmaf_rn(x, y, -1.0f), y);
#else
  return 1.0f / x;
#endif
}

// nvfp4_block_scale and nvfp4_encode_factor. Not plain: the factor is exact_factor's.
__device__ __forceinline__ NvScale make_scale(float amax, const Nvfp4Global& global) {
  NvScale scale;
  scale.code = encode_fp8<E4M3>(amax * global.encode_sixth);
  const float x = decode_scale(scale.code) * global.decode;
  const bool zero = x == 0.0f;
  const bool usual = bits_of(x) - 0x00800000u < 0x7E000000u;
  scale.factor = zero ? kFloatMax : reciprocal(x);
  scale.plain = (zero || usual) && amax * scale.factor < 6.9f;
  return scale;
}

__device__ __forceinline__ float exact_factor(uint32_t code, const Nvfp4Global& global) {
  const float factor = 1.0f / (decode_scale(code) * global.decode);
  return factor > kFloatMax ? kFloatMax : factor;  // a NaN stays NaN
}

// ---------------------------------------------------------------------------------------------- codes
// encode_e2m1 of a magnitude below 7, on top of the bits of 2^23. E2M1's steps are 1/2, 1 and 2, so its code is
// the least of three roundings to an integer, 2a, a + 2 and a/2 + 4: ties go to even in all of them.
constexpr float kCodeBase = 8388608.0f;
__device__ __forceinline__ uint32_t code_over_base(float a) {
  return __vimin3_u32(bits_of(__fmaf_rn(a, 2.0f, kCodeBase)), bits_of(a + (kCodeBase + 2.0f)),
                      bits_of(__fmaf_rn(a, 0.5f, kCodeBase + 4.0f)));
}

// The signs of 8 16-bit floats, element i's in bit 4 i + 3.
__device__ __forceinline__ uint32_t signs_of_eight(const uint32_t* word) {
  const uint32_t low = __byte_perm(word[0], word[1], 0x7351);   // elements 0 2 1 3
  const uint32_t high = __byte_perm(word[2], word[3], 0x7351);  // elements 4 6 5 7
  const uint32_t even = __byte_perm(low, high, 0x5410);
  const uint32_t odd = __byte_perm(low, high, 0x7632);
  return (odd & 0x80808080u) | ((even >> 4) & 0x08080808u);
}

// kCount (4 or 8) values to 4-bit codes.
template <typename E, int kCount>
__device__ __forceinline__ uint32_t pack_codes_any(const uint32_t* word, float factor) {
  uint32_t codes = 0u;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float v = Words<E>::element(word[i / Words<E>::per_word], i % Words<E>::per_word);
    codes |= static_cast<uint32_t>(encode_e2m1(v * factor)) << (4 * i);
  }
  return codes;
}

// Makes 16-bit values fit for pack_codes where NvScale::plain is false, which is rare: magnitudes that scale past
// 6.9 shrink to one that scales to about 6, and a block of NaN becomes one of sixes.
template <typename E, int kWords>
__device__ __forceinline__ void make_plain(uint32_t (&word)[kWords], float& factor) {
  using W = Words<E>;
  const bool is_nan = (bits_of(factor) & kAbsMask) > kInfBits;
  factor = is_nan ? 6.0f : factor;
  constexpr uint32_t one = sizeof(E) == 2 ? (same_as_bf16(Tag<E>{}) ? 0x3F803F80u : 0x3C003C00u) : 0x3F800000u;
  const uint32_t limit = (bits_of(6.0f * (1.0f / factor)) >> 16) * 0x00010001u;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint32_t magnitude = W::magnitude(word[w]);
    // fp16 has no value near 6 / factor where the factor is large: pack_codes clamps for itself there.
    const uint32_t clamped = same_as_bf16(Tag<E>{}) ? __vminu2(magnitude, limit) : magnitude;
    word[w] = is_nan ? one : clamped | (word[w] ^ magnitude);
  }
}

// 4 words of 16-bit values.
template <typename E>
__device__ __forceinline__ uint32_t pack_codes(const uint32_t* word, float factor) {
  const auto code = [&](int i) {
    const float v = Words<E>::element(word[i / 2], i % 2);
    const float a = fabsf(v) * factor;
    return code_over_base(same_as_bf16(Tag<E>{}) ? a : fminf(a, 6.0f));
  };
  uint32_t codes = code(7);
#pragma unroll
  for (int i = 6; i >= 0; --i) codes = codes * 16u + code(i);
  // What the eight bases add up to, modulo 2^32.
  return codes - 0xFB000000u + signs_of_eight(word);
}

template <typename E, int kCount>
__device__ __forceinline__ uint32_t pack_codes_random(const uint32_t* word, float factor,
                                                      const uint32_t* random) {
  uint32_t codes = 0u;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float v = Words<E>::element(word[i / Words<E>::per_word], i % Words<E>::per_word);
    const uint32_t byte = (random[i / 4] >> (8 * (i % 4))) & 0xFFu;
    codes |= static_cast<uint32_t>(encode_e2m1_stochastic(v * factor, byte)) << (4 * i);
  }
  return codes;
}

struct NvRandom {
  uint64_t seed;
  uint64_t offset;
};

// ---------------------------------------------------------------------------------------------- row plane
// Who makes the scales of a row plane's 16 rows: of the kSharers threads that hold a row's block, thread s those
// of rows s * kRows ... , kRows = 16 / kSharers.
template <typename T>
struct RowShare {
  static constexpr int kSharers = NvPatch<T>::kSharers;
  static constexpr int kRows = kBlock / kSharers;
};

// The raw amaxes of this thread's rows.
template <typename T>
__device__ __forceinline__ void row_amaxes(const NvPatch<T>& patch, int sharer, bool two_d,
                                           uint32_t (&raw)[RowShare<T>::kRows]) {
  constexpr int kSharers = RowShare<T>::kSharers;
  constexpr int kRows = RowShare<T>::kRows;
  uint32_t all[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) all[i] = max_of_words<T>(patch.word[i], 0u);
  if (two_d) {
    uint32_t word = all[0];
#pragma unroll
    for (int i = 1; i < kBlock; ++i) word = Words<T>::max(word, all[i]);
    uint32_t one = Words<T>::fold(word);
#pragma unroll
    for (int d = 1; d < kSharers; d *= 2) one = max(one, __shfl_xor_sync(kFullWarp, one, d));
#pragma unroll
    for (int k = 0; k < kRows; ++k) raw[k] = one;
    return;
  }
  if constexpr (sizeof(T) == 2) {
    // Rows i and i + 4 share a word from here on; each of the two threads keeps one half of the rows.
    uint32_t pair[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = k / 4 * 8 + k % 4;
      pair[k] = Words<T>::max(__byte_perm(all[i], all[i + 4], 0x5410), __byte_perm(all[i], all[i + 4], 0x7632));
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t other = __shfl_xor_sync(kFullWarp, sharer != 0 ? pair[k] : pair[4 + k], 1);
      const uint32_t mine = Words<T>::max(sharer != 0 ? pair[4 + k] : pair[k], other);
      raw[k] = mine & 0xFFFFu;
      raw[k + 4] = mine >> 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      uint32_t one = all[i];
#pragma unroll
      for (int d = 1; d < kSharers; d *= 2) one = max(one, __shfl_xor_sync(kFullWarp, one, d));
      if (i / kRows == sharer) raw[i % kRows] = one;
    }
  }
}

// Where a thread's row codes go.
struct RowCodes {
  uint8_t* to;
  int64_t pitch;
  int rows;     // of the patch that are in the tensor
  int bytes;    // of a patch's row that are in the tensor
  bool vector;  // all of them, in one store
};

template <typename T, bool kWhole>
__device__ __forceinline__ void store_row_codes(const RowCodes& out, int i, uint32_t codes) {
  constexpr int kBytes = NvPatch<T>::kCols / 2;
  uint8_t* to = out.to + i * out.pitch;
  if constexpr (kWhole && kBytes == 4) {
    store_bulk(reinterpret_cast<uint32_t*>(to), codes);
  } else if constexpr (kWhole) {
    store_bulk(reinterpret_cast<uint16_t*>(to), static_cast<uint16_t>(codes));
  } else {
#pragma unroll
    for (int j = 0; j < kBytes; ++j) {
      if (i < out.rows && j < out.bytes) to[j] = static_cast<uint8_t>(codes >> (8 * j));
    }
  }
}

template <typename T, bool kPlain>
__device__ __forceinline__ uint32_t row_codes(const uint32_t (&from)[4], float factor) {
  if constexpr (sizeof(T) == 4) {
    return pack_codes_any<T, NvPatch<T>::kCols>(from, factor);
  } else {
    uint32_t word[4] = {from[0], from[1], from[2], from[3]};
    if (!kPlain) make_plain<T>(word, factor);
    return pack_codes<T>(word, factor);
  }
}

// kPlain: every block of the warp is plain, and all of it is in the tensor, on boundaries of the stores.
template <typename T, bool kRandom, bool kPlain>
__device__ __forceinline__ void write_row_codes(const NvPatch<T>& patch,
                                                const float (&factor)[RowShare<T>::kRows],
                                                const NvRandom& random, int64_t first_block, int64_t blocks,
                                                const RowCodes& out) {
  constexpr int kSharers = RowShare<T>::kSharers;
  constexpr int kRows = RowShare<T>::kRows;
  constexpr int kCols = NvPatch<T>::kCols;
  const int sharer = threadIdx.x % kSharers;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    Philox4 bytes;
    if (kRandom) {
      bytes = random_bytes(random.seed, random.offset, static_cast<uint64_t>(first_block + k * blocks), false);
    }
#pragma unroll
    for (int s = 0; s < kSharers; ++s) {
      const int from = threadIdx.x % 32 / kSharers * kSharers + s;
      const float heard = __shfl_sync(kFullWarp, factor[k], from);
      const int i = s * kRows + k;
      uint32_t codes;
      if constexpr (kRandom) {
        uint32_t part[2];
#pragma unroll
        for (int p = 0; p < kCols / 4; ++p) {
#pragma unroll
          for (int t = 0; t < kSharers; ++t) {
            const uint32_t word = __shfl_sync(kFullWarp, bytes.word[t * (kCols / 4) + p], from);
            if (t == sharer) part[p] = word;
          }
        }
        codes = pack_codes_random<T, kCols>(patch.word[i], heard, part);
      } else {
        codes = row_codes<T, kPlain>(patch.word[i], heard);
      }
      store_row_codes<T, kPlain>(out, i, codes);
    }
  }
}

template <typename T, bool kRandom>
__device__ __forceinline__ void write_row_plane(const NvPatch<T>& patch, const NvPlane& plane,
                                                const NvRule& rule, const NvRandom& random, int64_t row0,
                                                int64_t col0, typename NvTile<T>::Shared& shared) {
  constexpr int kSharers = RowShare<T>::kSharers;
  constexpr int kRows = RowShare<T>::kRows;
  constexpr int kCols = NvPatch<T>::kCols;
  const int lane = threadIdx.x % NvConfig::kLanes;
  const int group = threadIdx.x / NvConfig::kLanes;
  const int sharer = lane % kSharers;
  const int64_t row = row0 + group * kBlock;
  const int64_t col = col0 + lane * kCols;
  const int64_t blocks = ceil_div(2 * plane.data.cols, kBlock);
  const Nvfp4Global global = nvfp4_global(*plane.amax);
  RowCodes out;
  out.to = plane.data.data + row * plane.data.cols + col / 2;
  out.pitch = plane.data.cols;
  out.rows = static_cast<int>(min(static_cast<int64_t>(kBlock), plane.data.rows - row));
  out.bytes = static_cast<int>(min(static_cast<int64_t>(kCols / 2), plane.data.cols - col / 2));
  out.vector = plane.data.vector && out.bytes == kCols / 2;

  uint32_t raw[kRows];
  float factor[kRows];
  uint32_t code[kRows];
  row_amaxes<T>(patch, sharer, rule.two_d, raw);
  bool plain = true;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const NvScale own = make_scale(Words<T>::to_float_of_raw(raw[k]), global);
    factor[k] = own.factor;
    code[k] = own.code;
    plain = plain && own.plain;
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const bool padding = sharer * kRows + k >= out.rows || col / kBlock >= blocks;
    shared.row_scales[group * kBlock + sharer * kRows + k][lane / kSharers] =
        padding ? 0 : static_cast<uint8_t>(code[k]);
  }
  const int64_t first_block = (row + sharer * kRows) * blocks + col / kBlock;
  if (__all_sync(kFullWarp, plain && out.vector && out.rows == kBlock)) {
    write_row_codes<T, kRandom, true>(patch, factor, random, first_block, blocks, out);
  } else {
#pragma unroll
    for (int k = 0; k < kRows; ++k) factor[k] = exact_factor(code[k], global);
    write_row_codes<T, kRandom, false>(patch, factor, random, first_block, blocks, out);
  }
}

// ---------------------------------------------------------------------------------------------- column plane
// As flip_sign on all values, but the negations disappear in the additions that follow.
__device__ __forceinline__ void flip_standard(float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = ((kHadamardSigns >> i) & 1u) != 0 ? -v[i] : v[i];
}

// hadamard16 up to the product with 0.25, with the standard signs.
__device__ __forceinline__ void transform(float (&v)[kBlock]) {
  flip_standard(v);
  butterfly16(v);
}

template <typename T>
__device__ __forceinline__ void column_values(const NvPatch<T>& patch, int j, float (&v)[kBlock]) {
  constexpr int kPer = Words<T>::per_word;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    v[i] = Words<T>::element(patch.word[i][j / kPer], j % kPer);
    if (!same_as_bf16(Tag<T>{})) v[i] = to_float(round_to_bf16(v[i]));
  }
}

// The transform of column j, rounded to bf16, in pairs.
template <typename T>
__device__ __forceinline__ void transformed_column(const NvPatch<T>& patch, int j, uint32_t (&word)[8]) {
  float v[kBlock];
  column_values<T>(patch, j, v);
  transform(v);
#pragma unroll
  for (int k = 0; k < 8; ++k) word[k] = bf16_pair(v[2 * k] * 0.25f, v[2 * k + 1] * 0.25f);
}

template <typename T>
__device__ __forceinline__ void plain_column(const NvPatch<T>& patch, int j,
                                             uint32_t (&word)[kBlock / Words<T>::per_word]) {
  constexpr int kPer = Words<T>::per_word;
#pragma unroll
  for (int k = 0; k < kBlock / kPer; ++k) {
    word[k] = kPer == 1 ? patch.word[k * kPer][j / kPer]
                        : __byte_perm(patch.word[k * kPer][j / kPer], patch.word[(k * kPer + 1) % kBlock][j / kPer],
                                      j % kPer == 0 ? 0x5410 : 0x7632);
  }
}

// Where the transform was asked for with other signs than the standard ones.
template <typename T>
__device__ __forceinline__ void flip_rows(NvPatch<T>& patch, uint32_t flips) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t mask = ((flips >> i) & 1u) != 0 ? (sizeof(T) == 2 ? 0x80008000u : 0x80000000u) : 0u;
#pragma unroll
    for (int w = 0; w < 4; ++w) patch.word[i][w] ^= mask;
  }
}

// E: what the plane's values are.
template <typename T, typename E, bool kHadamard>
__device__ __forceinline__ void column_words(const NvPatch<T>& patch, int j,
                                             uint32_t (&word)[kBlock / Words<E>::per_word]) {
  if constexpr (kHadamard) {
    transformed_column<T>(patch, j, word);
  } else {
    plain_column<T>(patch, j, word);
  }
}

template <typename T, typename E, bool kHadamard, bool kRandom>
__device__ __forceinline__ void stage_column_plane(const NvPatch<T>& patch, const NvPlane& plane,
                                                   const NvRule& rule, const NvRandom& random, int64_t row0,
                                                   int64_t col0, typename NvTile<T>::Shared& shared) {
  constexpr int kCols = NvPatch<T>::kCols;
  constexpr int kWords = kBlock / Words<E>::per_word;
  const int lane = threadIdx.x % NvConfig::kLanes;
  const int group = threadIdx.x / NvConfig::kLanes;
  const int64_t blocks = ceil_div(2 * plane.data.cols, kBlock);
  const int64_t block = row0 / kBlock + group;
  const Nvfp4Global global = nvfp4_global(*plane.amax);
  uint32_t square = 0u;
  if (rule.two_d) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      uint32_t word[kWords];
      column_words<T, E, kHadamard>(patch, j, word);
      square = max_of_words<E>(word, square);
    }
    square = Words<E>::fold(square);
#pragma unroll
    for (int d = 1; d < NvPatch<T>::kSharers; d *= 2) square = max(square, __shfl_xor_sync(kFullWarp, square, d));
  }
#pragma unroll
  for (int j = 0; j < kCols; ++j) {
    const int line = lane * kCols + j;
    uint32_t word[kWords];
    column_words<T, E, kHadamard>(patch, j, word);
    const uint32_t raw = rule.two_d ? square : Words<E>::fold(max_of_words<E>(word, 0u));
    const NvScale scale = make_scale(Words<E>::to_float_of_raw(raw), global);
    float factor = scale.factor;
    if (!__all_sync(kFullWarp, scale.plain)) {
      factor = exact_factor(scale.code, global);
      if constexpr (sizeof(E) == 2 && !kRandom) make_plain<E>(word, factor);
    }
    uint2 codes;
    if constexpr (kRandom) {
      const Philox4 bytes = random_bytes(random.seed, random.offset,
                                         static_cast<uint64_t>((col0 + line) * blocks + block), true);
      codes = make_uint2(pack_codes_random<E, 8>(word, factor, bytes.word),
                         pack_codes_random<E, 8>(word + kWords / 2, factor, bytes.word + 2));
    } else if constexpr (sizeof(E) == 4) {
      codes = make_uint2(pack_codes_any<E, 8>(word, factor), pack_codes_any<E, 8>(word + 8, factor));
    } else {
      codes = make_uint2(pack_codes<E>(word, factor), pack_codes<E>(word + 4, factor));
    }
    shared.codes.put(line, group, codes);
    const bool padding = col0 + line >= plane.data.rows || block >= blocks;
    shared.col_scales[line][group] = padding ? 0 : static_cast<uint8_t>(scale.code);
  }
}

// ---------------------------------------------------------------------------------------------- kernels
template <int kLines, int kPerLine>
__device__ __forceinline__ void flush_scales(const uint8_t (&scales)[kLines][kPerLine], const NvPlane& plane,
                                             int64_t line0, int64_t block0) {
  constexpr int kWords = kPerLine / 4;
  const int64_t pitch = round_up(ceil_div(2 * plane.data.cols, kBlock), 4);
  const int64_t lines = round_up(plane.data.rows, 128);
#pragma unroll
  for (int at = threadIdx.x; at < kLines * kWords; at += NvConfig::kThreads) {
    const int line = at / kWords;
    const int word = at % kWords;
    if (line0 + line < lines && block0 + 4 * word < pitch) {
      store_scale_word(plane.scale + (line0 + line) * pitch + block0 + 4 * word,
                       *reinterpret_cast<const uint32_t*>(&scales[line][4 * word]));
    }
  }
}

template <typename T, bool kRandom>
__global__ void __launch_bounds__(NvConfig::kThreads, NvConfig::kWarpsPerSm * 32 / NvConfig::kThreads)
    nvfp4_kernel(TileInput<T> x, unsigned across, NvPlane row, NvPlane col, NvRule rule, const float* noop) {
  using Tile = NvTile<T>;
  __shared__ typename Tile::Shared shared;
  if (is_noop(noop)) return;
  const unsigned down = blockIdx.x / across;
  const int64_t row0 = static_cast<int64_t>(down) * NvConfig::kRows;
  const int64_t col0 = static_cast<int64_t>(blockIdx.x - down * across) * Tile::kCols;
  NvPatch<T> patch;
  load_nv_patch(x, row0 + threadIdx.x / NvConfig::kLanes * kBlock,
                col0 + threadIdx.x % NvConfig::kLanes * NvPatch<T>::kCols, patch);
  NvRandom random{0u, 0u};
  if (kRandom) random = NvRandom{static_cast<uint64_t>(rule.rng[0]), static_cast<uint64_t>(rule.rng[1])};
  const bool columns = col.data.data != nullptr;
  if (row.data.data != nullptr) write_row_plane<T, kRandom>(patch, row, rule, random, row0, col0, shared);
  if (columns && rule.hadamard) {
    if (rule.signs != kHadamardSigns) flip_rows(patch, rule.signs ^ kHadamardSigns);
    stage_column_plane<T, bf16_t, true, kRandom>(patch, col, rule, random, row0, col0, shared);
  } else if (columns) {
    stage_column_plane<T, T, false, kRandom>(patch, col, rule, random, row0, col0, shared);
  }
  __syncthreads();
  if (row.data.data != nullptr) flush_scales(shared.row_scales, row, row0, col0 / kBlock);
  if (!columns) return;
  const bool inside = col0 + Tile::kCols <= col.data.rows && row0 + NvConfig::kRows <= 2 * col.data.cols;
  shared.codes.flush(col.data, col0, row0 / 2, inside);
  flush_scales(shared.col_scales, col, col0, row0 / kBlock);
}

// max|transform| of column j before the product with 0.25 and the rounding to bf16, which keep the order of
// magnitudes. The last stage's a + b and a - b: the larger magnitude of the two is |a| + |b|.
template <typename T>
__device__ __forceinline__ uint32_t transformed_amax(const NvPatch<T>& patch, int j, uint32_t largest) {
  float v[kBlock];
  column_values<T>(patch, j, v);
  flip_standard(v);
  butterfly_stage<1>(v);
  butterfly_stage<2>(v);
  butterfly_stage<4>(v);
  uint32_t sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum[i] = bits_of(fabsf(v[i]) + fabsf(v[i + 8]));
  }
#pragma unroll
  for (int i = 0; i < 8; i += 2) largest = __vimax3_u32(largest, sum[i], sum[i + 1]);
  // Two infinities: one of their sum and their difference is NaN.
  if (largest == kInfBits) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (bits_of(v[i] + v[i + 8]) << 1 > kInfBits << 1 || bits_of(v[i] - v[i + 8]) << 1 > kInfBits << 1)
        largest = kNanBits;
    }
  }
  return largest;
}

// Both global amaxes where the column path is transformed. A warp takes 16 rows x 512 bytes at a time.
template <typename T>
__global__ void __launch_bounds__(NvConfig::kAmaxThreads, NvConfig::kAmaxBlocksPerSm)
    nvfp4_amax_kernel(TileInput<T> x, unsigned across, unsigned items, uint32_t signs, float* amax_row,
                      float* amax_col, const float* noop) {
  constexpr int kWarps = NvConfig::kAmaxThreads / 32;
  __shared__ uint32_t scratch[kWarps];
  if (is_noop(noop)) return;
  uint32_t row_word = 0u;
  uint32_t col_bits = 0u;
  for (unsigned at = blockIdx.x * kWarps + threadIdx.x / 32; at < items; at += gridDim.x * kWarps) {
    const unsigned down = at / across;
    NvPatch<T> patch;
    load_nv_patch(x, static_cast<int64_t>(down) * kBlock,
                  (static_cast<int64_t>(at - down * across) * 32 + threadIdx.x % 32) * NvPatch<T>::kCols, patch);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) row_word = max_of_words<T>(patch.word[i], row_word);
    if (signs != kHadamardSigns) flip_rows(patch, signs ^ kHadamardSigns);
#pragma unroll
    for (int j = 0; j < NvPatch<T>::kCols; ++j) col_bits = transformed_amax<T>(patch, j, col_bits);
  }
  const uint32_t row_raw = block_max<NvConfig::kAmaxThreads>(Words<T>::fold(row_word), scratch);
  __syncthreads();
  const uint32_t col_raw = block_max<NvConfig::kAmaxThreads>(col_bits, scratch);
  if (threadIdx.x != 0) return;
  if (amax_row != nullptr) atomic_amax(amax_row, Words<T>::to_float_of_raw(row_raw));
  if (amax_col != nullptr) atomic_amax(amax_col, to_float(to_bf16(float_of(col_raw) * 0.25f)));
}

}  // namespace

void amax_nvfp4(const Input& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                const float* noop, Lane lane) {
  check::input(x);
  check::hadamard(options, x.rows);
  if (amax_row == nullptr && amax_col == nullptr) return;
  if (!options.hadamard) {
    float* first = amax_row != nullptr ? amax_row : amax_col;
    return launch_amax(x, first, first == amax_col ? nullptr : amax_col, false, noop, lane);
  }
  launch_amax_reset(amax_row, amax_col, noop, lane);
  if (x.rows == 0 || x.cols == 0) return;
  dispatch_float(x.dtype, [&](auto input) {
    using T = typename decltype(input)::type;
    const int64_t across = ceil_div(x.cols, 32 * NvPatch<T>::kCols);
    const int64_t items = grid_size(x.rows / kBlock * across);
    const int64_t most = static_cast<int64_t>(multiprocessors()) * NvConfig::kAmaxBlocksPerSm;
    const int blocks = grid_size(smaller(ceil_div(items, NvConfig::kAmaxThreads / 32), most));
    launch("nvfp4_amax_kernel", nvfp4_amax_kernel<T>, blocks, NvConfig::kAmaxThreads, lane, tile_input<T>(x),
           static_cast<unsigned>(across), static_cast<unsigned>(items), options.signs, amax_row, amax_col,
           noop);
  });
}

void quantize_nvfp4(const Input& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                    const Planes& out, const float* noop, Lane lane) {
  if (nothing_to_quantize(x, out, 1)) return;
  if (out.row_data != nullptr) {
    check::nibbles("columns", x.cols);
    check::required("amax_row", amax_row, sizeof(float));
  }
  if (out.col_data != nullptr) {
    check::nibbles("rows", x.rows);
    check::hadamard(options, x.rows);
    check::required("amax_col", amax_col, sizeof(float));
  }
  const NvRule rule{options.two_d, options.hadamard, options.signs, options.rng};
  const NvPlane col{byte_matrix(out.col_data, x.cols, x.rows / 2, 16), static_cast<uint8_t*>(out.col_scale),
                    amax_col};
  dispatch_float(x.dtype, [&](auto input) {
    using T = typename decltype(input)::type;
    const NvPlane row{byte_matrix(out.row_data, x.rows, x.cols / 2, NvPatch<T>::kCols / 2),
                      static_cast<uint8_t*>(out.row_scale), amax_row};
    const int64_t across = NvTile<T>::across(x.cols);
    const int blocks = grid_size(ceil_div(x.rows, NvConfig::kRows) * across);
    const auto kernel = rule.rng == nullptr ? nvfp4_kernel<T, false> : nvfp4_kernel<T, true>;
    launch("nvfp4_kernel", kernel, blocks, NvConfig::kThreads, lane, tile_input<T>(x),
           static_cast<unsigned>(across), row, col, rule, noop);
  });
}

}  // namespace cuda
}  // namespace te_dist
