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
// the order of magnitudes. The last stage's a + b and a - b: the larger magnitude of the two is |a| + |b|.
__device__ __forceinline__ uint32_t transformed_amax(float (&v)[kBlock], uint32_t largest) {
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

// The amax of transformed columns, in place, as all warps of the GPU raise it. A column's largest is at most a quarter
// of the sum of its 16 magnitudes, which takes a tenth of the transform's instructions, and tells of most columns that
// they are below what is known already: those need not be transformed.
class ColumnAmax {
 public:
  // known: there may be something to hear already. Warps that start together would all ask at one place, and wait for
  // each other.
  __device__ __forceinline__ explicit ColumnAmax(float* amax, bool known)
      : amax_(amax), heard_(known ? peek(amax) : 0.0f) {}

  // What was on its way becomes known: whoever waits for an answer waits long.
  __device__ __forceinline__ void hear() { known_ = max(known_, bits_of(heard_)); }

  // The same, and the next one is asked for, ever more rarely: all warps ask at one place of L2, and what they all know
  // changes less and less.
  __device__ __forceinline__ void ask() {
    hear();
    ++rounds_;
    if ((rounds_ & (rounds_ - 1u)) == 0u) heard_ = peek(amax_);
  }

  // Whether this lane's columns may be larger than what is known. sums: of 16 magnitudes, in each half, with as many
  // roundings on the way.
  template <int kRoundings = 4>
  __device__ __forceinline__ bool may_rise_here(uint32_t sums) const {
    // Four times the amax, less what roundings to bf16 may take from a sum (2^-8 of it each), and the transform's.
    constexpr float kFour = 4.0f - kRoundings / 64.0f - 0.0075f;
    constexpr uint32_t kMostFinite = 0x7F7Fu;
    const uint32_t most = min(bits_of(float_of(known_) * kFour) >> 16, kMostFinite);
    return Words<bf16_t>::fold(sums) > most;
  }
  // Any lane's.
  template <int kRoundings = 4>
  __device__ __forceinline__ bool may_rise(uint32_t sums) const {
    return __any_sync(kFullWarp, may_rise_here<kRoundings>(sums));
  }

  // largest: transformed_amax's, of each lane.
  __device__ __forceinline__ void raise(uint32_t largest) {
    const float found = to_float(to_bf16(float_of(__reduce_max_sync(kFullWarp, largest)) * 0.25f));
    const uint32_t bits = bits_of(amax_of_bits(bits_of(found)));
    if (bits <= known_) return;
    known_ = bits;
    if (threadIdx.x % 32 == 0) atomic_amax(amax_, found);
  }

 private:
  float* amax_;
  float heard_;
  uint32_t known_ = 0u;
  uint32_t rounds_ = 0u;
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
