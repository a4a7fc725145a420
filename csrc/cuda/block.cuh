// The arguments of the blockwise kernels; 1-D and 2-D scales are compiled apart.
#pragma once

#include "../numerics/scale.h"
#include "tile.cuh"

namespace te_dist {
namespace cuda {

struct Made;

struct BlockOutput {
  ByteMatrix row_data;  // [M, K], null data: not asked for
  ByteMatrix col_data;  // [K, M]
  float* row_scale;
  float* col_scale;
  ScaleRule rule;
  const float* noop;
  unsigned ahead = 0u;  // 1-D, in memory: a block brings into L2 what the block of so many numbers later loads
};

void launch_block_1d(const Input& x, Fp8 format, const BlockOutput& out, Lane lane);
void launch_block_1d_made(const Source& x, Fp8 format, const BlockOutput& out, Lane lane);
void launch_block_1d_rows(const Made& x, bool make_stats, const BlockOutput& out, Lane lane);
// false: this is made in another way (as are small matrices).
bool launch_block_1d_patches(const Made& x, const BlockOutput& out, Lane lane);
void launch_block_2d(const Input& x, Fp8 format, const BlockOutput& out, Lane lane);

}  // namespace cuda
}  // namespace te_dist
