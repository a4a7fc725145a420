// What the kernels that find NVFP4's two global amaxes share.
#pragma once

#include "../numerics/hadamard.h"
#include "amax.cuh"
#include "nvfp4.cuh"

namespace te_dist {
namespace cuda {

// Of a matrix that is made, and written to x.written on the way.
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

// What a block has found: a word of raw magnitudes, and transformed_amax's. Either may have no place to go.
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
