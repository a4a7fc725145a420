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
  // For 1-D scales, of block_output.
  bool whole = false;  // tiles inside of a bf16 matrix are block_1d_whole.cuh's
  uint32_t eps_bits = 0u;
  int64_t row_pitch = 0;  // of the scales
  int64_t col_pitch = 0;
};

void launch_block_1d(const Input& x, Fp8 format, const BlockOutput& out, Lane lane);
void launch_block_1d_made(const Source& x, Fp8 format, const BlockOutput& out, Lane lane);
void launch_block_1d_rows(const Made& x, bool make_stats, const BlockOutput& out, Lane lane);
// false: this is made in another way (as are small matrices).
bool launch_block_1d_patches(const Made& x, Fp8 format, const BlockOutput& out, Lane lane);
void launch_block_2d(const Input& x, Fp8 format, const BlockOutput& out, Lane lane);
void launch_block_2d_made(const Source& x, Fp8 format, const BlockOutput& out, Lane lane);

}  // namespace cuda
}  // namespace te_dist
