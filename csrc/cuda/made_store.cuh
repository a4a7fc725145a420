// A made patch on its way to memory.
#pragma once

#include "made.cuh"
#include "tile.cuh"

namespace te_dist {
namespace cuda {

// That of thread (ty, tx); out null: nowhere.
__device__ __forceinline__ void store_patch(const Made& x, const Patch<bf16_t>& patch, const TilePlace& tile,
                                            bf16_t* out) {
  const int64_t row = tile.row + threadIdx.x / 16 * 8;
  const int64_t col = tile.col + threadIdx.x % 16 * 8;
  if (out == nullptr || col >= x.pitch) return;
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    if (row + i >= x.rows) break;
    const uint32_t(&w)[4] = patch.word[i];
    store_bulk(reinterpret_cast<uint4*>(out + (row + i) * x.pitch + col), make_uint4(w[0], w[1], w[2], w[3]));
  }
}

}  // namespace cuda
}  // namespace te_dist
