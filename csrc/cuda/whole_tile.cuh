// Tiles of a matrix in memory, one a block of threads: those of bf16 that lie wholly inside apart, with few
// instructions, and the others, if any, in a launch of their own.
#pragma once

#include "tile.cuh"

namespace te_dist {
namespace cuda {

// The patch at (row, col) of the block's tile, wholly inside of the matrix. ahead: the later block's number less this
// one's, 0: no prefetch.
template <typename Shape>
__device__ __forceinline__ TilePlace load_whole_tile(const TileInput<bf16_t>& x, const TileRegion& region,
                                                     unsigned tile, unsigned ahead, bool backwards, int row, int col,
                                                     Patch<bf16_t>& patch) {
  const TilePlace place = tile_place<Shape>(region, tile);
  const unsigned later = backwards ? tile - ahead : tile + ahead;  // smaller than 0: a large number
  if (ahead != 0u && later < region.tiles()) {
    prefetch_tile<Shape>(x.data, x.stride, tile_place<Shape>(region, later));
  }
  const bf16_t* from = x.data + (place.row + row) * x.stride + place.col + col;
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    load_words(from, patch.word[i]);
    from += x.stride;
  }
  return place;
}

// Quantizes the tiles of x. kernel_for(input, fp8), for these types, given as Tags, takes (TileInput, TileRegion,
// arguments...), a tile a block. whole_for(fp8), for bf16 and tiles of `Shape` wholly inside, takes one more unsigned
// behind the region: how many tiles ahead to prefetch. whole: the outputs are as it wants them.
template <typename Shape, typename KernelFor, typename WholeFor, typename... Arguments>
void launch_tiles(const char* name, const KernelFor& kernel_for, const WholeFor& whole_for, const Input& x, Fp8 format,
                  bool whole, int64_t least, Lane lane, const Arguments&... arguments) {
  const auto start = [&](const TileRegion& region) {
    const int blocks = grid_size(larger(least, static_cast<int64_t>(region.tiles())));
    if (blocks == 0) return;
    dispatch_cast(x.dtype, format, [&](auto input, auto fp8) {
      using T = TypeOf<decltype(input)>;
      launch(name, kernel_for(input, fp8), blocks, TileConfig::kThreads, lane, tile_input<T>(x), region, arguments...);
    });
  };
  // Multiples of both kinds of tiles.
  const int64_t rows = x.rows / TileConfig::kTile * TileConfig::kTile;
  const int64_t cols = x.cols / Shape::kCols * Shape::kCols;
  if (!whole || x.dtype != Float::kBF16 || rows == 0 || cols == 0 || !tile_input<bf16_t>(x).vector) {
    return start(tile_region(0, 0, x.rows, x.cols));
  }
  const TileRegion inside = tile_region<Shape>(0, 0, rows, cols);
  const auto ahead = static_cast<unsigned>(multiprocessors());  // of 1, 2 and 4 times as many, this was the fastest
  dispatch_fp8(format, [&](auto fp8) {
    launch(name, whole_for(fp8), static_cast<int>(inside.tiles()), TileConfig::kThreads, lane, tile_input<bf16_t>(x),
           inside, ahead, arguments...);
  });
  if (cols < x.cols) start(tile_region(0, cols, rows, x.cols - cols));
  if (rows < x.rows) start(tile_region(rows, 0, x.rows - rows, x.cols));
}

}  // namespace cuda
}  // namespace te_dist
