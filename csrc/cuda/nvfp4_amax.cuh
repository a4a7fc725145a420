// What the kernels that find NVFP4's two global amaxes share.
#pragma once

#include "../numerics/hadamard.h"
#include "amax.cuh"
#include "bands.cuh"
#include "nvfp4.cuh"

namespace te_dist {
namespace cuda {

// Of a matrix that is made, and written to x.written on the way; or of one in memory, whose columns are added up.
void launch_amax_nvfp4_made(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                            const float* noop, Lane lane);

namespace {

// max|transform| of 16 values whose signs are right, before the product with 0.25 and the rounding to bf16, which keep
// the order of magnitudes.
__device__ __forceinline__ uint32_t transformed_amax(float (&v)[kBlock], uint32_t largest) {
  uint32_t sum[8];
  butterfly_but_last(v, sum);
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

// The same of four columns, with the standard signs.
__device__ __forceinline__ uint32_t amax_of_columns(const NvPatch<bf16_t, 2>& patch) {
  uint32_t largest = 0u;
#pragma unroll
  for (int j = 0; j < NvPatch<bf16_t, 2>::kCols; ++j) {
    float v[kBlock];
    column_values(patch, j, v);
    flip_standard(v);
    largest = transformed_amax(v, largest);
  }
  return largest;
}

// What transformed_amax makes of four columns of which every lane has two values: word, of row lane % 16, and of two
// columns in each half of the warp. With the standard signs.
__device__ __forceinline__ uint32_t transformed_across_lanes(uint32_t word) {
  const unsigned row = threadIdx.x % 16u;
  uint32_t largest = 0u;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float v = flip_sign(Words<bf16_t>::element(word, e), kHadamardSigns, static_cast<int>(row));
#pragma unroll
    for (unsigned apart = 1u; apart < 16u; apart *= 2u) {
      const float other = __shfl_xor_sync(kFullWarp, v, apart);
      v = (row & apart) != 0u ? other - v : v + other;
    }
    largest = max(largest, bits_of(fabsf(v)));
  }
  return largest;
}

// ---------------------------------------------------------------------------------------------- columns to leave out
// Of the magnitudes in each half of kRows words, pair by pair. word(i): a word of bf16.
template <int kRows, typename Word>
__device__ __forceinline__ uint32_t sum_of_magnitudes(const Word& word, int first = 0) {
  if constexpr (kRows == 1) {
    return Words<bf16_t>::magnitude(word(first));
  } else {
    const uint32_t left = sum_of_magnitudes<kRows / 2>(word, first);
    return add_bf16(left, sum_of_magnitudes<kRows / 2>(word, first + kRows / 2));
  }
}

// Of 16 rows, too: the magnitudes of what neighbours add up to, and of what they differ by, which is the transform's
// first stage, each added up. The larger sum is a bound as well, and far lower where a column's values have much in
// common, as they do behind a bias. Add of the first eight rows and of the others.
class NeighbourSums {
 public:
  // word(i): of row i of the eight.
  template <typename Word>
  __device__ __forceinline__ void add(const Word& word) {
    uint32_t of[4][2];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const uint32_t together = W::magnitude(add_bf16(word(i), word(i + 1)));
      const uint32_t apart = W::magnitude(subtract_bf16(word(i), word(i + 1)));
      const bool differ = kDiffer >> i & 1u;
      of[i / 2][0] = differ ? apart : together;
      of[i / 2][1] = differ ? together : apart;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t four = add_bf16(of[0][k], of[1][k]);
      sum_[k] = add_bf16(sum_[k], add_bf16(four, add_bf16(of[2][k], of[3][k])));
    }
  }
  // Rounded four times, as sum_of_magnitudes is.
  __device__ __forceinline__ uint32_t largest() const { return W::max(sum_[0], sum_[1]); }

 private:
  using W = Words<bf16_t>;
  // Of each row, whether its sign is not that of the next one.
  static constexpr uint32_t kDiffer = kHadamardSigns ^ (kHadamardSigns >> 1);
  static_assert(((kDiffer ^ (kDiffer >> 8)) & 0x55u) == 0u, "the same of pairs of either eight");

  uint32_t sum_[2] = {0u, 0u};
};

// The first or the second eight rows of a column's 16, as the transform takes them: by three of its stages, what their
// largest magnitude is, pair by pair. The largest of all is at most the sum of both eights'.
class EightRows {
 public:
  __device__ __forceinline__ explicit EightRows(bool second) : flip_(second ? 0u : 0x80008000u) {}

  // word(i): a word of bf16 values.
  template <typename Word>
  __device__ __forceinline__ uint32_t largest(const Word& word) const {
    uint32_t v[8];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const uint32_t sum = add_bf16(word(i), word(i + 1));
      const uint32_t difference = subtract_bf16(word(i), word(i + 1));
      const bool differ = (kSigns >> i & 1u) != (kSigns >> (i + 1) & 1u);
      v[i] = differ ? difference : sum;
      v[i + 1] = differ ? sum : difference;
    }
    v[6] ^= flip_, v[7] ^= flip_;
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Of two numbers and two others: their sums and differences, and the larger ones of these in turn.
      const uint32_t sums[2] = {add_bf16(v[i], v[i + 2]), add_bf16(v[i + 4], v[i + 6])};
      const uint32_t differences[2] = {subtract_bf16(v[i], v[i + 2]), subtract_bf16(v[i + 4], v[i + 6])};
      pair[2 * i] = add_bf16(W::magnitude(sums[0]), W::magnitude(sums[1]));
      pair[2 * i + 1] = add_bf16(W::magnitude(differences[0]), W::magnitude(differences[1]));
    }
    return W::max(W::max(pair[0], pair[1]), W::max(pair[2], pair[3]));
  }

 private:
  using W = Words<bf16_t>;
  // Those of the second eight, of which all are turned around: that changes no magnitude. The first eight have the last
  // two the other way.
  static constexpr uint32_t kSigns = ~(kHadamardSigns >> 8) & 0xFFu;
  static_assert(((kHadamardSigns & 0xFFu) ^ kSigns) == 0xC0u, "the last two alone");

  uint32_t flip_;
};

// An amax in place, as all warps of the GPU raise it, and what this one knows of it.
class KnownAmax {
 public:
  // amax: null if nobody wants to know.
  __device__ __forceinline__ explicit KnownAmax(float* amax) : amax_(amax) {}
  // of_block: of shared memory, zero at first. By it the warps of a block that stays tell each other, and the first one
  // asks for all of them.
  __device__ __forceinline__ KnownAmax(float* amax, uint32_t& of_block)
      : amax_(amax), of_block_(&of_block), has_block_(true) {}

  // For what comes next, ever more rarely: what is known changes less and less.
  __device__ __forceinline__ void ask() {
    ++rounds_;
    if ((rounds_ & (rounds_ - 1u)) == 0u && (!has_block_ || asks(rounds_ - 1u))) ask_now();
  }
  // Of a block whose warps tell each other, whether this one asks. At first all do: what others have found keeps a warp
  // from making all that it has, and none waits for another.
  static __device__ __forceinline__ bool asks(unsigned round) {
    constexpr unsigned kByAll = 2u;
    return round < kByAll || threadIdx.x < 32u;
  }
  __device__ __forceinline__ void ask_now() {
    if (amax_ != nullptr) heard_ = peek(amax_);
  }

  // What was on its way becomes known: whoever waits for an answer waits long.
  __device__ __forceinline__ void hear() {
    known_ = max(known_, bits_of(heard_));
    if (!has_block_) return;
    uint32_t of_others = 0u;
    if (threadIdx.x % 32 == 0) of_others = atomicMax(of_block_, known_);
    known_ = max(known_, __shfl_sync(kFullWarp, of_others, 0));
  }

  __device__ __forceinline__ float known() const { return float_of(known_); }

  // Whether either half of a word of bf16 magnitudes is above `share` of what is known.
  __device__ __forceinline__ bool is_topped_by(uint32_t magnitudes, float share) const {
    return is_above(magnitudes, known() * share);
  }
  // What finite magnitudes may be without being above `share` of what is known: as long as nothing new is.
  __device__ __forceinline__ float limit(float share) const {
    constexpr float kFar = 0x1p126f;  // larger ones may be those of infinities
    return fminf(known() * share, kFar);
  }
  // Whether either half of a word of bf16 magnitudes reaches `most`, or is no number.
  static __device__ __forceinline__ bool reaches(uint32_t magnitudes, float most) {
    return !(float_of(Words<bf16_t>::fold(magnitudes) << 16) < most);
  }
  // is_topped_by, of magnitudes that may be larger by `rest`, which is no zero.
  __device__ __forceinline__ bool may_be_topped_by(uint32_t magnitudes, float share, float rest) const {
    return reaches(magnitudes, limit(share) - rest);
  }

  // found: the same in all lanes.
  __device__ __forceinline__ void raise(float found) {
    const uint32_t bits = bits_of(amax_of_bits(bits_of(found)));
    if (amax_ == nullptr || bits <= known_) return;
    known_ = bits;
    if (threadIdx.x % 32 != 0 || (has_block_ && atomicMax(of_block_, bits) >= bits)) return;
    atomic_amax(amax_, found);
  }

 private:
  // Infinities and NaNs are above any.
  static __device__ __forceinline__ bool is_above(uint32_t magnitudes, float most) {
    constexpr uint32_t kMostFinite = 0x7F7Fu;
    return Words<bf16_t>::fold(magnitudes) > min(bits_of(most) >> 16, kMostFinite);
  }

  float* amax_;
  uint32_t* of_block_ = nullptr;
  bool has_block_ = false;  // which the compiler knows, unlike that an address is not null
  float heard_ = 0.0f;
  uint32_t known_ = 0u;
  uint32_t rounds_ = 0u;
};

// Four times an amax, less what roundings to bf16 may take from a sum (2^-8 of it each), and the transform's.
template <int kRoundings>
constexpr float kFour = 4.0f - kRoundings / 64.0f - 0.0075f;

// That of transformed columns. A column's largest is at most a quarter of the sum of its 16 magnitudes, which takes a
// tenth of the transform's instructions, and tells of most columns that they are below what is known already: those
// need not be transformed.
class ColumnAmax : public KnownAmax {
 public:
  using KnownAmax::KnownAmax;

  // Whether this lane's columns may be larger than what is known. sums: of 16 magnitudes, in each half, with as many
  // roundings on the way.
  template <int kRoundings = 4>
  __device__ __forceinline__ bool may_rise_here(uint32_t sums) const {
    return is_topped_by(sums, kFour<kRoundings>);
  }
  // The same, of sums that may be larger by `rest`, which is no zero unless something is known.
  __device__ __forceinline__ bool may_rise_here(uint32_t sums, float rest) const {
    return may_be_topped_by(sums, kFour<4>, rest);
  }
  // Any lane's.
  template <int kRoundings = 4>
  __device__ __forceinline__ bool may_rise(uint32_t sums) const {
    return __any_sync(kFullWarp, may_rise_here<kRoundings>(sums));
  }

  // largest: transformed_amax's, of each lane.
  __device__ __forceinline__ void raise(uint32_t largest) {
    KnownAmax::raise(to_float(to_bf16(float_of(__reduce_max_sync(kFullWarp, largest)) * 0.25f)));
  }
};

// ---------------------------------------------------------------------------------------------- blocks
// What a block has found: a word of raw magnitudes.
template <typename T, int kThreads>
__device__ __forceinline__ void give_row_amax(uint32_t row_word, const AmaxOut& amax_row, uint32_t* scratch) {
  const uint32_t raw = block_max<kThreads>(Words<T>::fold(row_word), scratch);
  if (threadIdx.x == 0 && amax_row.amax != nullptr) give_amax(amax_row, Words<T>::to_float_of_raw(raw));
}

// And transformed_amax's. Either may have no place to go.
template <typename T, int kThreads>
__device__ __forceinline__ void give_amaxes(uint32_t row_word, uint32_t col_bits, const AmaxOut& amax_row,
                                            const AmaxOut& amax_col, uint32_t* scratch) {
  const uint32_t row_raw = block_max<kThreads>(Words<T>::fold(row_word), scratch);
  __syncthreads();
  const uint32_t col_raw = block_max<kThreads>(col_bits, scratch);
  if (threadIdx.x != 0) return;
  if (amax_row.amax != nullptr) give_amax(amax_row, Words<T>::to_float_of_raw(row_raw));
  if (amax_col.amax != nullptr) give_amax(amax_col, to_float(to_bf16(float_of(col_raw) * 0.25f)));
}

}  // namespace
}  // namespace cuda
}  // namespace te_dist
