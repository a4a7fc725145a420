// A block of 512 threads on one bf16 row after another: thread t has columns 1024 i + 2 t and the next one, which are
// two of the 1024 accumulators of a row's sum. What belongs to columns (gains, column sums) stays in registers.
#pragma once

#include "row.cuh"

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
  // A sum over the row, in all threads; turn: another one of 0 .. 3 than the last three sums had.
  static __device__ __forceinline__ float sum(float2 v, float* scratch, int turn) {
    scratch += 128 * turn;
    v = fold_pairs(v);
    if (threadIdx.x % 4 == 0) scratch[threadIdx.x / 4] = v.x + v.y;
    __syncthreads();
    return fold_vectors(scratch);
  }
  // Two sums at once; turn: 0 or 2.
  static __device__ __forceinline__ float2 sum(float2 first, float2 second, float* scratch, int turn) {
    scratch += 128 * turn;
    first = fold_pairs(first);
    second = fold_pairs(second);
    if (threadIdx.x % 4 == 0) {
      scratch[threadIdx.x / 4] = first.x + first.y;
      scratch[128 + threadIdx.x / 4] = second.x + second.y;
    }
    __syncthreads();
    return make_float2(fold_vectors(scratch), fold_vectors(scratch + 128));
  }
};

__device__ __forceinline__ float2 pair_of(uint32_t word) {
  return make_float2(Words<bf16_t>::element(word, 0), Words<bf16_t>::element(word, 1));
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
