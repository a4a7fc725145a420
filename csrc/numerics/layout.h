// Where padded scales and swizzled scales live. M rows, K columns of the logical tensor.
#pragma once

#include "portability.h"

namespace te_dist {

// cuBLAS reads E8M0 and E4M3 block scales in tiles of 128 x 4: index of scale (row, column) in that order.
TED_FN int64_t swizzled_index(int64_t row, int64_t column, int64_t columns) {
  const int64_t tile = (row / 128) * (columns / 4) + column / 4;
  const int64_t i = row % 128;
  return tile * 512 + (i % 32) * 16 + (i / 32) * 4 + column % 4;
}

}  // namespace te_dist
