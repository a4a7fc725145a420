// The search for NVFP4's two global amaxes of a bf16 matrix in memory.
#pragma once

#include "nvfp4_find.cuh"

namespace te_dist {
namespace cuda {
namespace {

// Of a warp.
class MatrixFinder : public ColumnFinder {
 public:
  __device__ __forceinline__ MatrixFinder(const bf16_t* data, int64_t stride, const ColumnFinder& columns)
      : ColumnFinder(columns), data_(data), stride_(stride) {}

  // 16 rows of 128 columns, of which a lane takes four.
  __device__ __forceinline__ void take(const SearchPlace& place, const SearchPlace& ahead) {
    const bf16_t* from = data_ + place.row * stride_ + place.col + threadIdx.x % 32u * 4u;
    Patch patch;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) load_words(from + i * stride_, patch.word[i]);
    prefetch(data_, stride_, ahead);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) largest_ = max_of_words<bf16_t>(patch.word[i], largest_);
    // By what neighbours add up to and differ by, as columns may have much in common.
    const auto sum = [&](int w) {
      NeighbourSums sums;
#pragma unroll
      for (int first = 0; first < kBlock; first += 8) sums.add([&](int i) { return patch.word[first + i][w]; });
      return sums.largest();
    };
    const uint32_t most = W::max(sum(0), sum(1));
    wait_for_kernel_before();  // which zeroes both, while the first values are on their way
    columns_.hear();
    raise(patch, __ballot_sync(kFullWarp, columns_.may_rise_here(most)), [](uint32_t word) { return word; });
    columns_.ask();
  }

  // All that the block has found is said, when threads come back.
  __device__ __forceinline__ void give() {
    give_largest();
    __syncthreads();
  }

 private:
  const bf16_t* data_;
  int64_t stride_;
};

}  // namespace
}  // namespace cuda
}  // namespace te_dist
