// The codes of columns of bf16 values, as they are or transformed, one after another. A thread has 16 rows of eight.
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

// ---------------------------------------------------------------------------------------------- columns as they are
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

__device__ __forceinline__ ColumnCodes pack_hard_column_at_random(const uint32_t (&pair)[8], const HeldScales& from,
                                                                  const RandomBytes<4>& bytes) {
  const NvScale scale = make_scale(float_of(max_of_column(pair)), from.plane.global);
  const float factor = exact_factor(scale.code, from.plane.global);
  const uint32_t words[4] = {bytes.word(0), bytes.word(1), bytes.word(2), bytes.word(3)};
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
    return pack_hard_column_at_random(pair, from, bytes);
  }
  if (__all_sync(kFullWarp, scale.is_easy())) return pack_easy_column<kRaised>(value, scale);
  return pack_hard_column(pair, scale.code, from.plane.global);
}

// ---------------------------------------------------------------------------------------------- transformed columns
// Column e of two that lie in words, transformed, but for the product with 1/4 at the end. That commutes with the
// rounding to bf16 unless numbers are very large or very small, so that scales take it over.
struct TransformedColumn {
  float v[kBlock];
  float largest;  // magnitude, of what is rounded

  __device__ __forceinline__ TransformedColumn(const uint32_t (&word)[kBlock], int e) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = Words<bf16_t>::element(word[i], e);
    flip_standard(v);
    uint32_t sums[8];  // of two infinities no NaN, which makes no difference: both are no easy scale
    butterfly_but_last(v, sums);
    const uint32_t most = __vimax3_u32(__vimax3_u32(sums[0], sums[1], sums[2]), sums[3], sums[4]);
    largest = rounded(float_of(max(__vimax3_u32(most, sums[5], sums[6]), sums[7])));
    butterfly_stage<8>(v);
  }
  // To bf16, an instruction.
  static __device__ __forceinline__ float rounded(float x) { return float_of(pack_bf16(0.0f, x)); }

  // Of neighbours.
  __device__ __forceinline__ void pairs(float factor, uint32_t (&to)[8]) const {
#pragma unroll
    for (int k = 0; k < 8; ++k) to[k] = pack_bf16(v[2 * k] * factor, v[2 * k + 1] * factor);
  }
};

// draw(): random bytes, where kRandom.
template <bool kRandom, typename Draw>
__device__ __forceinline__ ColumnCodes pack_hard_transformed(const TransformedColumn& column, const HeldScales& from,
                                                             const Draw& draw) {
  uint32_t pair[8];
  column.pairs(0.25f, pair);
  if constexpr (kRandom) return pack_hard_column_at_random(pair, from, draw());
  return pack_hard_column(pair, make_scale(float_of(max_of_column(pair)), from.plane.global).code, from.plane.global);
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

// All eight of a thread, two after two. kRaised: from.plane.raises. square: their scale, where kSquares. draw(column):
// random bytes, where kRandom.
template <bool kHadamard, Codes kCodes, bool kRaised, typename Draw>
__device__ __forceinline__ void write_columns(const TwoColumns& columns, const HeldScales& from,
                                              const EasyScale& square, const Draw& draw) {
  constexpr bool kRandom = kCodes == Codes::kRandom;
  // Each eight lanes have columns of their own, so that they meet every bank once.
  const auto in_turn = [](unsigned turn) { return (turn + threadIdx.x / 8u) % 4u; };
  HardestScale hardest;
  unsigned w = in_turn(0u);
#pragma unroll 1
  for (unsigned turn = 0; turn < 4u; ++turn, w = (w + 1u) % 4u) {
    asm("" : "+r"(w));  // or the compiler would reduce it again wherever it is used
    const TwoColumns two = columns.next(w);
    uint32_t word[kBlock];
    two.load(word);
#pragma unroll
    for (unsigned e = 0u; e < 2u; ++e) {
      const auto draw_here = [&] { return draw(2u * w + e); };
      if constexpr (!kHadamard) {
        two.store(e, column_as_it_is<kCodes, kRaised>(word, e, from, square, draw_here));
      } else {
        const TransformedColumn column(word, e);
        const EasyScale scale(column.largest, from);
        const auto value = [&](int i) { return TransformedColumn::rounded(column.v[i]); };
        if constexpr (kRandom) {
          two.store(e, pack_easy_column_at_random(value, scale, draw_here()));
        } else {
          two.store(e, pack_easy_column<kRaised>(value, scale));
        }
        hardest.add(scale.largest);
      }
    }
  }
  // Codes of columns whose scales are not easy are wrong, and written again.
  if constexpr (kHadamard) {
    if (hardest.are_all_easy()) return;
#pragma unroll 1
    for (unsigned which = 0u; which < 8u; ++which) {
      const unsigned of = in_turn(which / 2u);
      const TwoColumns two = columns.next(of);
      uint32_t word[kBlock];
      two.load(word);
#pragma unroll
      for (uint32_t& values : word) values <<= which % 2u == 0u ? 16 : 0;
      const TransformedColumn column(word, 1);
      if (__all_sync(kFullWarp, EasyScale(column.largest, from).is_easy())) continue;
      const auto draw_here = [&] { return draw(2u * of + which % 2u); };
      two.store(which % 2u, pack_hard_transformed<kRandom>(column, from, draw_here));
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace te_dist
