// Which tiles the blocks of nvfp4_whole.cuh take, and how many have room at once.
#pragma once

#include "nvfp4_four_rows.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct NvWhole {
  static constexpr int kRowsAtOnce = FourRows::kRows;
  static constexpr int kBlocksPerSm = 5;
  static constexpr unsigned kTall = 2;  // tiles of most blocks
};

// Blocks lie as tiles do, across and down, from the lowest tiles up: L2 still holds the end of what the amax has been
// taken of. The first `tall` lines of blocks have kTall tiles each, the others one.
struct TileOrder {
  unsigned down;  // tiles
  unsigned tall;

  static constexpr int64_t kMostDown = 65535;  // that a grid can have

  static TileOrder of(int64_t rows, int64_t cols) {
    constexpr int kTile = TileConfig::kTile;
    const int64_t across = cols / kTile;
    TileOrder order{static_cast<unsigned>(rows / kTile), 0u};
    // As many as there is room for at once, some times. The rest, and what there would be room for once more, evens out
    // when they end.
    const int64_t room = static_cast<int64_t>(multiprocessors()) * NvWhole::kBlocksPerSm;
    const int64_t times = rows / kTile * across / NvWhole::kTall / room - 1;
    if (times > 0 && order.down % NvWhole::kTall == 0u) order.tall = static_cast<unsigned>(times * room / across);
    return order;
  }
  dim3 blocks(int64_t cols) const {
    const auto across = static_cast<unsigned>(grid_size(cols / TileConfig::kTile));
    return dim3(across, down - (NvWhole::kTall - 1u) * tall);
  }
  __device__ __forceinline__ bool is_tall() const { return blockIdx.y < tall; }
  // Of the uppermost tile, of the blocks of line y.
  __device__ __forceinline__ unsigned row_of(unsigned y) const {
    const unsigned lines = y + 1u;  // of blocks, with these
    return down - lines - (NvWhole::kTall - 1u) * min(lines, tall);
  }
  __device__ __forceinline__ unsigned row() const { return row_of(blockIdx.y); }
  __device__ __forceinline__ unsigned col() const { return gridDim.x - 1u - blockIdx.x; }
};

}  // namespace
}  // namespace cuda
}  // namespace te_dist
