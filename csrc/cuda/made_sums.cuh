// Made tiles that threads hold as patches: from shared memory, and their column sums.
#pragma once

#include "columns.cuh"
#include "made.cuh"
#include "tile.cuh"

namespace te_dist {
namespace cuda {

// The patch's share of the column sums, then all of the tile's. A barrier has to lie between two tiles.
__device__ __forceinline__ void store_column_sums(const Made& x, const Patch<bf16_t>& patch, const TilePlace& tile,
                                                  int patch_row, int patch_col, GroupSums& sums) {
  float total[8] = {};
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] += patch.value(i, j);
  }
  sums.put(patch_row / 8, patch_col, total);
  __syncthreads();
  sums.store(x.partials, tile.row / TileConfig::kTile, tile.col, x.pitch, x.pitch);
}

}  // namespace cuda
}  // namespace te_dist
