// Column sums of a tile of 128 rows: every thread adds up eight rows of eight columns in order, the sixteen groups
// of rows fold by halves.
#pragma once

#include "common.cuh"

namespace te_dist {
namespace cuda {

struct GroupSums {
  static constexpr int kGroups = 16;
  static constexpr int kColumns = 128;
  alignas(16) float sum[kGroups][kColumns];

  __device__ __forceinline__ void put(int group, int col, const float (&v)[8]) {
    auto* to = reinterpret_cast<float4*>(&sum[group][col]);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
  __device__ __forceinline__ float fold(int col) const {
    // Written out: as a loop that halves its count, the compiler puts the array in memory.
    float eight[8];
    float four[4];
#pragma unroll
    for (int g = 0; g < 8; ++g) eight[g] = sum[g][col] + sum[g + 8][col];
#pragma unroll
    for (int g = 0; g < 4; ++g) four[g] = eight[g] + eight[g + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
  }
  // All threads, after a barrier. `partials` [tiles, cols].
  __device__ __forceinline__ void store(float* partials, int64_t tile, int64_t col, int64_t cols,
                                        int64_t pitch) const {
    const int at = static_cast<int>(threadIdx.x);
    if (at < kColumns && col + at < cols) partials[tile * pitch + col + at] = fold(at);
  }
};

}  // namespace cuda
}  // namespace te_dist
