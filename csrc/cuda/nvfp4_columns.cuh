// The codes of columns of bf16 values as they are, one after another. A thread has 16 rows of eight.
#pragma once

#include "nvfp4_dice.cuh"
#include "nvfp4_halves.cuh"
#include "nvfp4_kernel.cuh"
#include "powers.cuh"

namespace te_dist {
namespace cuda {
namespace {

// How values become codes. kSquares: to the nearest, with scales of 16 x 16 blocks.
enum class Codes { kNearest, kRandom, kSquares };

// ---------------------------------------------------------------------------------------------- columns
struct ColumnCodes {
  uint2 codes;
  uint32_t scale;
};

__device__ __forceinline__ uint32_t max_of_column(const uint32_t (&pair)[8]) {
  const uint32_t half[2] = {larger_pair(pair[0], pair[1], pair[2], pair[3]),
                            larger_pair(pair[4], pair[5], pair[6], pair[7])};
  const uint32_t two = magnitudes(larger_pair(half[0], half[1]));
  return max(low_float(two), high_float(two));
}

// Of 16 bf16 values, value(i), rounded at random, where the scale is easy.
template <typename Value>
__device__ __forceinline__ ColumnCodes pack_easy_column_at_random(const Value& value, const EasyScale& scale,
                                                                  const RandomBytes<4>& bytes) {
  const auto later = [&](int i) { return value(8 + i); };
  const auto two = [&](int i) { return bytes.two(i); };
  const auto two_later = [&](int i) { return bytes.two(8 + i); };
  return ColumnCodes{make_uint2(pack_each_at_random(value, scale.factor, two),
                                pack_each_at_random(later, scale.factor, two_later)),
                     scale.code};
}

// words: their random bytes.
__device__ __forceinline__ ColumnCodes pack_hard_column_at_random(const uint32_t (&pair)[8], const HeldScales& from,
                                                                  const uint32_t (&words)[4]) {
  const NvScale scale = make_scale(float_of(max_of_column(pair)), from.plane.global);
  const float factor = exact_factor(scale.code, from.plane.global);
  return ColumnCodes{make_uint2(pack_random<bf16_t, 8>(pair, factor, words),
                                pack_random<bf16_t, 8>(pair + 4, factor, words + 2)),
                     scale.code};
}

// Values as they are, with what make_plain does to them where that is needed.
__device__ __forceinline__ ColumnCodes pack_hard_column(uint32_t (&pair)[8], uint32_t scale,
                                                        const Nvfp4Global& global) {
  float factor = exact_factor(scale, global);
  make_plain(pair, factor);
  return ColumnCodes{make_uint2(pack_plain(pair, factor), pack_plain(pair + 4, factor)), scale};
}

// Of 16 bf16 values, value(i), where the scale is easy.
template <bool kRaised, typename Value>
__device__ __forceinline__ ColumnCodes pack_easy_column(const Value& value, const EasyScale& scale) {
  const auto later = [&](int i) { return value(8 + i); };
  return ColumnCodes{make_uint2(pack_each_by_halves<kRaised>(value, scale.factor),
                                pack_each_by_halves<kRaised>(later, scale.factor)),
                     scale.code};
}

// Column e of two that lie in words. square: its scale, where kSquares. draw(): random bytes, where kRandom.
template <Codes kCodes, bool kRaised, typename Draw>
__device__ __forceinline__ ColumnCodes column_as_it_is(const uint32_t (&word)[kBlock], int e, const HeldScales& from,
                                                       const EasyScale& square, const Draw& draw) {
  uint32_t pair[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) pair[k] = __byte_perm(word[2 * k], word[2 * k + 1], e == 0 ? 0x5410 : 0x7632);
  const EasyScale scale = kCodes == Codes::kSquares ? square : EasyScale(float_of(max_of_column(pair)), from);
  const auto value = [&](int i) { return Words<bf16_t>::element(pair[i / 2], i % 2); };
  if constexpr (kCodes == Codes::kRandom) {
    const RandomBytes<4> bytes = draw();
    if (__all_sync(kFullWarp, scale.is_easy())) return pack_easy_column_at_random(value, scale, bytes);
    return pack_hard_column_at_random(pair, from, {bytes.word(0), bytes.word(1), bytes.word(2), bytes.word(3)});
  }
  if (__all_sync(kFullWarp, scale.is_easy())) return pack_easy_column<kRaised>(value, scale);
  return pack_hard_column(pair, scale.code, from.plane.global);
}

// ---------------------------------------------------------------------------------------------- all of a thread
// Where a thread finds the words of two columns, and where their codes and scales go.
struct TwoColumns {
  const uint32_t* words;
  uint2* codes;
  uint8_t* scales;

  __device__ __forceinline__ void load(uint32_t (&word)[kBlock]) const {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) word[i] = words[i * NvConfig::kThreads * 4];
  }
  // Of the first or the second one.
  __device__ __forceinline__ void store(unsigned e, const ColumnCodes& made) const {
    codes[e * (NvConfig::kLanes * NvConfig::kGroups)] = made.codes;
    scales[e * NvTile<bf16_t>::kColScales] = static_cast<uint8_t>(made.scale);
  }
  // From the first two of a thread to two others.
  __device__ __forceinline__ TwoColumns next(unsigned w) const {
    return TwoColumns{words + w, codes + w * (2 * NvConfig::kLanes * NvConfig::kGroups),
                      scales + w * (2 * NvTile<bf16_t>::kColScales)};
  }
};

// All eight of a thread, as they are, two after two. kRaised: from.plane.raises. square: their scale, where kSquares.
// draw(column): random bytes, where kRandom.
template <Codes kCodes, bool kRaised, typename Draw>
__device__ __forceinline__ void write_columns(const TwoColumns& columns, const HeldScales& from,
                                              const EasyScale& square, const Draw& draw) {
  // Each eight lanes have columns of their own, so that they meet every bank once.
  unsigned w = threadIdx.x / 8u % 4u;
#pragma unroll 1
  for (unsigned turn = 0; turn < 4u; ++turn, w = (w + 1u) % 4u) {
    asm("" : "+r"(w));  // or the compiler would reduce it again wherever it is used
    const TwoColumns two = columns.next(w);
    uint32_t word[kBlock];
    two.load(word);
#pragma unroll
    for (unsigned e = 0u; e < 2u; ++e) {
      two.store(e, column_as_it_is<kCodes, kRaised>(word, e, from, square, [&] { return draw(2u * w + e); }));
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace te_dist
