// A block of 512 threads on one bf16 row after another: thread t has columns 1024 i + 2 t and the next one,
// which are two of the 1024 accumulators of a row's sum. What belongs to columns (gains, column sums) stays
// in registers.
#pragma once

#include "row_team.cuh"

namespace te_dist {
namespace cuda {

struct RowBlock {
  static constexpr int kThreads = 512;
  static constexpr int kScratch = 4 * 128;  // floats of shared memory

  static __device__ __forceinline__ float2 fold_pairs(float2 v) {
#pragma unroll
    for (int distance = 2; distance > 0; distance /= 2) {
      v.x += __shfl_xor_sync(kFullWarp, v.x, distance);
      v.y += __shfl_xor_sync(kFullWarp, v.y, distance);
    }
    return v;
  }
  static __device__ __forceinline__ float fold_vectors(const float* s) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return fold_lanes((s[lane] + s[64 + lane]) + (s[32 + lane] + s[96 + lane]));
  }
  // A sum over the row, in all threads; turn: another one of 0 .. 3 than the last sum had.
  static __device__ __forceinline__ float sum(float2 v, float* scratch, int turn) {
    scratch += 128 * turn;
    v = fold_pairs(v);
    if (threadIdx.x % 4 == 0) scratch[threadIdx.x / 4] = v.x + v.y;
    __syncthreads();
    return fold_vectors(scratch);
  }
  // Two sums at once, and what finish makes of each; turn: 0 or 2. Lanes first halve what they still care about.
  template <typename Finish>
  static __device__ __forceinline__ float2 sum(float2 first, float2 second, float* scratch, int turn,
                                               const Finish& finish) {
    scratch += 128 * turn;
    const bool later = (threadIdx.x & 2u) != 0u;  // has the second one
    const bool odd = (threadIdx.x & 1u) != 0u;
    float2 v = later ? second : first;
    const float2 other = later ? first : second;
    v.x += __shfl_xor_sync(kFullWarp, other.x, 2);
    v.y += __shfl_xor_sync(kFullWarp, other.y, 2);
    float one = (odd ? v.y : v.x) + __shfl_xor_sync(kFullWarp, odd ? v.x : v.y, 1);
    one += __shfl_xor_sync(kFullWarp, one, 1);
    if (!odd) scratch[(later ? 128 : 0) + threadIdx.x / 4] = one;
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto column = [&](const float* s) { return (s[lane] + s[64 + lane]) + (s[32 + lane] + s[96 + lane]); };
    const float a = column(scratch);
    const float b = column(scratch + 128);
    const bool upper = lane >= 16;  // has the second one
    one = (upper ? b : a) + __shfl_xor_sync(kFullWarp, upper ? a : b, 16);
#pragma unroll
    for (int half = 8; half > 0; half /= 2) one += __shfl_xor_sync(kFullWarp, one, half);
    one = finish(one);
    const float rest = __shfl_xor_sync(kFullWarp, one, 16);
    return upper ? make_float2(rest, one) : make_float2(one, rest);
  }
};

__device__ __forceinline__ float2 pair_of(uint32_t word) {
  return make_float2(Words<bf16_t>::element(word, 0), Words<bf16_t>::element(word, 1));
}

__device__ __forceinline__ float2 fma_pair(float2 a, float2 b, float2 c) {
  return make_float2(fused_multiply_add(a.x, b.x, c.x), fused_multiply_add(a.y, b.y, c.y));
}
__device__ __forceinline__ float2 fma_pair(float2 a, float b, float c) {
  return fma_pair(a, make_float2(b, b), make_float2(c, c));
}

// Two neighbours of a vector along K; `none` behind its end or where there is no vector.
__device__ __forceinline__ float2 load_pair(const RowView& from, int64_t col, float none) {
  if (from.data == nullptr || col >= from.cols) return make_float2(none, none);
  switch (from.dtype) {
    case Float::kF32: {
      const float* at = static_cast<const float*>(from.data) + col;
      return make_float2(at[0], at[1]);
    }
    case Float::kF16: {
      const fp16_t* at = static_cast<const fp16_t*>(from.data) + col;
      return make_float2(to_float(at[0]), to_float(at[1]));
    }
    default: {
      const bf16_t* at = static_cast<const bf16_t*>(from.data) + col;
      return make_float2(to_float(at[0]), to_float(at[1]));
    }
  }
}

__device__ __forceinline__ float2 load_gain_pair(const RowView& weight, bool zero_centered, int64_t col) {
  const float2 v = load_pair(weight, col, 0.0f);
  return zero_centered ? make_float2(v.x + 1.0f, v.y + 1.0f) : v;
}

}  // namespace cuda
}  // namespace te_dist
