// Equal items of work for blocks that stay, and the last of them for small blocks, which start where others have ended.
//
// Multiprocessors do not read equally fast: on an H200, the last of blocks that had all items dealt out between them
// ended 7 us behind the average, of 70. What small blocks have evens that out, as far as memory lets it.
#pragma once

#include "common.cuh"

namespace te_dist {
namespace cuda {

// A warp's: from `first` on, every `step`, before `end`.
struct WarpItems {
  unsigned first;
  unsigned step;
  unsigned end;
};

struct Taper {
  unsigned items;
  unsigned large;     // blocks that stay
  unsigned of_large;  // items, which these take in turn
  unsigned each;      // items of a small block's warps

  static constexpr int64_t kSmallBlocksPerSm = 2;
  static constexpr int64_t kLeastRounds = 4;  // of large blocks, where there are small ones
  static constexpr int64_t kShare = 16;       // one item in so many is theirs

  // blocks: how many have room at once.
  static Taper of(int64_t items, int warps, int64_t blocks) {
    const auto count = static_cast<unsigned>(grid_size(items));
    const int64_t rounds = items * (kShare - 1) / kShare / (blocks * warps);
    if (rounds < kLeastRounds) {
      return Taper{count, static_cast<unsigned>(smaller(ceil_div(items, warps), blocks)), count, 1u};
    }
    const int64_t of_large = rounds * blocks * warps;
    const int64_t small = static_cast<int64_t>(multiprocessors()) * kSmallBlocksPerSm;
    const int64_t each = larger(1, ceil_div(items - of_large, small * warps));
    return Taper{count, static_cast<unsigned>(blocks), static_cast<unsigned>(of_large), static_cast<unsigned>(each)};
  }
  int blocks(int warps) const {
    return static_cast<int>(large + (items - of_large + each * warps - 1u) / (each * warps));
  }

  __device__ __forceinline__ bool is_small() const { return blockIdx.x >= large; }

  template <unsigned kWarps>
  __device__ __forceinline__ WarpItems items_of_warp() const {
    const unsigned first = is_small() ? of_large + (blockIdx.x - large) * kWarps * each : blockIdx.x * kWarps;
    const unsigned step = is_small() ? kWarps : large * kWarps;
    const unsigned end = is_small() ? min(first + kWarps * each, items) : of_large;
    return WarpItems{first + threadIdx.x / 32u, step, end};
  }
  // body(item) for those of a warp.
  template <unsigned kWarps, typename Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
    const WarpItems mine = items_of_warp<kWarps>();
#pragma unroll 1
    for (unsigned at = mine.first; at < mine.end; at += mine.step) body(at);
  }
};

}  // namespace cuda
}  // namespace te_dist
