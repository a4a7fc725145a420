// The tiles of a bf16 matrix in memory, one after another, by blocks that stay: while a block works on a tile in its
// registers, the next one comes to shared memory, each thread's own patch. For many tiles, and those wholly inside.
#pragma once

#include "copy.cuh"
#include "tile.cuh"

namespace te_dist {
namespace cuda {

struct StreamConfig {
  static constexpr int kVectors = TileConfig::kPatch * TileConfig::kThreads;  // of a tile in shared memory
  static constexpr int kBytes = kVectors * 16;
};

// How blocks take tiles: every so manyth, counted in rows and columns of tiles, because a division costs more than
// the rest.
struct TileWalk {
  TileRegion region;
  unsigned step_down;
  unsigned step_across;
  bool backwards;  // starts with the last tile, which L2 may still hold
};

class TileCursor {
 public:
  __device__ __forceinline__ explicit TileCursor(const TileWalk& walk)
      : down_(blockIdx.x / walk.region.across), across_(blockIdx.x - down_ * walk.region.across) {}

  __device__ __forceinline__ bool there(const TileWalk& walk) const { return down_ < walk.region.down; }
  __device__ __forceinline__ void next(const TileWalk& walk) {
    down_ += walk.step_down;
    across_ += walk.step_across;
    if (across_ < walk.region.across) return;
    across_ -= walk.region.across;
    ++down_;
  }
  template <typename Shape, typename Place = NearPlace>
  __device__ __forceinline__ Place place(const TileWalk& walk) const {
    const unsigned down = walk.backwards ? walk.region.down - 1u - down_ : down_;
    const unsigned across = walk.backwards ? walk.region.across - 1u - across_ : across_;
    using Number = decltype(Place::row);
    return Place{static_cast<Number>(down) * Shape::kRows, static_cast<Number>(across) * Shape::kCols};
  }

 private:
  unsigned down_;
  unsigned across_;
};

__device__ __forceinline__ void fetch_patch(const bf16_t* from, int64_t stride, uint4* mine) {
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    copy_async(mine + i * TileConfig::kThreads, from);
    from += stride;
  }
}

// What else comes with a tile: fetch(place) starts its copies, take(patch) is called when they and the tile are there,
// before the next ones start.
struct NothingElse {
  __device__ __forceinline__ void fetch(const NearPlace&) const {}
  __device__ __forceinline__ void take(Patch<bf16_t>&) const {}
};

// consume(patch, place) for the block's tiles. memory: of StreamConfig::kBytes.
template <typename Shape, typename Consume, typename Else = NothingElse>
__device__ __forceinline__ void for_each_streamed_tile(const TileInput<bf16_t>& x, const TileWalk& walk, int patch_row,
                                                       int patch_col, uint4* memory, const Consume& consume,
                                                       const Else& other = Else{}) {
  uint4* mine = memory + threadIdx.x;
  const bf16_t* corner = x.data + patch_row * x.stride + patch_col;
  const auto fetch = [&](const NearPlace& tile) {
    fetch_patch(corner + tile.row * x.stride + tile.col, x.stride, mine);
    other.fetch(tile);
  };
  TileCursor cursor(walk);
  if (cursor.there(walk)) fetch(cursor.template place<Shape>(walk));
#pragma unroll 1
  while (cursor.there(walk)) {
    const NearPlace tile = cursor.template place<Shape>(walk);
    Patch<bf16_t> patch;
    wait_for_copies();
    take_patch(mine, patch);
    other.take(patch);
    cursor.next(walk);
    if (cursor.there(walk)) fetch(cursor.template place<Shape>(walk));
    consume(patch, tile);
  }
}

}  // namespace cuda
}  // namespace te_dist
