// What each warp reads of a bf16 matrix in whole tiles, 16 rows of 128 columns after 16 rows, in turns of taper.cuh, by
// boxes of its own: its next ones are on their way while it works, for which registers would not be enough.
//
// Needs Hopper (boxes.cuh).
#pragma once

#include "boxes.cuh"
#include "nvfp4.cuh"
#include "taper.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct WarpBoxes {
  static constexpr int kCols = 128;
  static constexpr int kVectors = kBlock * kCols * 2 / 16;
  static constexpr unsigned kStages = 2;
  static constexpr int bytes(int warps) { return warps * static_cast<int>(kStages) * kVectors * 16; }

  static bool has_boxes(const Input& x) {
    constexpr int64_t kMost = int64_t{1} << 30;
    return runs_hopper_code() && x.dtype == Float::kBF16 && x.rows % kBlock == 0 && x.cols % kCols == 0 &&
           x.rows < kMost && x.cols < kMost && x.stride > 0 && x.stride < kMost && tile_input<bf16_t>(x).vector;
  }
  static CUtensorMap map(const bf16_t* data, int64_t rows, int64_t cols, int64_t stride) {
    const auto step = static_cast<cuuint64_t>(stride) * sizeof(bf16_t);
    return map_of({const_cast<bf16_t*>(data),
                   CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                   {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows), 1u},
                   {step, step * static_cast<cuuint64_t>(rows)},
                   {kCols, kBlock, 1u},
                   BoxPlaces::kPlain});
  }
};

// A block's, beside its dynamic shared memory.
template <int kWarps>
struct WarpArrivals {
  Arrival there[kWarps][WarpBoxes::kStages];
};

// A warp's. Its boxes in the order of `items`, which lie side by side, `across` of them.
template <int kWarps>
class WarpReader {
 public:
  __device__ __forceinline__ WarpReader(uint4* memory, WarpArrivals<kWarps>& arrivals, const CUtensorMap& boxes,
                                        unsigned across, const WarpItems& items)
      : memory_(memory), arrivals_(arrivals), boxes_(boxes), across_(across), items_(items), ahead_(items.first) {
    // As a vote, so that the compiler knows that all lanes wait for the same.
    warp_ = __reduce_max_sync(kFullWarp, threadIdx.x / 32u);
    if (threadIdx.x % 32u == 0u) {
#pragma unroll
      for (unsigned stage = 0u; stage < WarpBoxes::kStages; ++stage) arrivals_.there[warp_][stage].init();
    }
#pragma unroll
    for (unsigned stage = 0u; stage < WarpBoxes::kStages; ++stage) fetch(stage);
    __syncwarp();
  }

  // The next one: of each row, the lane's four columns.
  __device__ __forceinline__ void take(NvPatch<bf16_t, 2>& patch) {
    const unsigned stage = taken_ % WarpBoxes::kStages;
    arrivals_.there[warp_][stage].wait(taken_ / WarpBoxes::kStages);
    const auto* words = reinterpret_cast<const uint2*>(place(stage)) + threadIdx.x % 32u;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const uint2 two = words[i * 32];
      patch.word[i][0] = two.x, patch.word[i][1] = two.y;
    }
    ++taken_;
    __syncwarp();  // all have what they need
    fetch(stage);
  }

 private:
  __device__ __forceinline__ uint4* place(unsigned stage) const {
    return memory_ + (warp_ * WarpBoxes::kStages + stage) * WarpBoxes::kVectors;
  }
  __device__ __forceinline__ void fetch(unsigned stage) {
    if (threadIdx.x % 32u == 0u && ahead_ < items_.end) {
      const unsigned down = ahead_ / across_;
      Arrival& there = arrivals_.there[warp_][stage];
      there.expect(WarpBoxes::kVectors * 16u);
      load_box(place(stage), boxes_, static_cast<int>((ahead_ - down * across_) * WarpBoxes::kCols),
               static_cast<int>(down * kBlock), 0, there);
    }
    ahead_ += items_.step;
  }

  uint4* memory_;
  WarpArrivals<kWarps>& arrivals_;
  const CUtensorMap& boxes_;
  unsigned across_;
  WarpItems items_;
  unsigned ahead_;  // the item to ask for next
  unsigned warp_;
  unsigned taken_ = 0u;
};

}  // namespace
}  // namespace cuda
}  // namespace te_dist
