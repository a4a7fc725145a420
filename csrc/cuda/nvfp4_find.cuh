// What the warps that search for NVFP4's two global amaxes (nvfp4_search.cuh) share, whatever the matrix is made of.
#pragma once

#include "nvfp4_amax.cuh"
#include "nvfp4_search.cuh"

namespace te_dist {
namespace cuda {
namespace {

// Of a warp. The path of columns: few of them can raise what is known (ColumnAmax), and are transformed.
class ColumnFinder {
 public:
  struct Shared {
    uint4 operands[Search::kWarps][kBlock / 2];
  };

  // known: of the block, zero at first.
  __device__ __forceinline__ ColumnFinder(SearchState& state, Shared& shared, uint32_t* known)
      : state_(state), shared_(shared), columns_(&state.col, known) {}

  // What is made, of 16 rows of eight columns: vectors that lie `step` apart.
  __device__ __forceinline__ void look(const uint4* mine, int step) {
    wait_for_kernel_before();
    columns_.hear();
    uint32_t sums[4];
#pragma unroll
    for (int eight = 0; eight < kBlock; eight += 8) {
      uint32_t half[4];
#pragma unroll
      for (int four = 0; four < 8; four += 4) {
        uint32_t word[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4 v = mine[(eight + four + i) * step];
          word[i][0] = W::magnitude(v.x), word[i][1] = W::magnitude(v.y);
          word[i][2] = W::magnitude(v.z), word[i][3] = W::magnitude(v.w);
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          largest_ = W::max(W::max(largest_, word[0][w]), W::max(word[1][w], W::max(word[2][w], word[3][w])));
          const uint32_t sum = add_bf16(add_bf16(word[0][w], word[1][w]), add_bf16(word[2][w], word[3][w]));
          half[w] = four == 0 ? sum : add_bf16(half[w], sum);
        }
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) sums[w] = eight == 0 ? half[w] : add_bf16(sums[w], half[w]);
    }
    if (!columns_.may_rise(W::max(W::max(sums[0], sums[1]), W::max(sums[2], sums[3])))) return;
    uint32_t largest = 0u;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      NvPatch<bf16_t, 2> patch;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const uint2 two = reinterpret_cast<const uint2*>(mine + i * step)[part];
        patch.word[i][0] = two.x, patch.word[i][1] = two.y;
      }
      largest = max(largest, amax_of_columns(patch));
    }
    columns_.raise(largest);
  }

 protected:
  using W = Words<bf16_t>;
  using Patch = NvPatch<bf16_t, 2>;

  // What the warp takes next, on its way to L2 while it works on what it has: a line each lane.
  static __device__ __forceinline__ void prefetch(const bf16_t* data, int64_t stride, const SearchPlace& place) {
    if (!place.any) return;
    const unsigned lane = threadIdx.x % 32u;
    prefetch_line(data + (place.row + lane / 2u) * stride + place.col + lane % 2u * 64u);
  }

  // Of lanes whose columns may rise. make(word): what a word of the patch becomes.
  template <typename Make>
  __device__ __forceinline__ void raise(Patch& patch, uint32_t rising, const Make& make) {
    constexpr int kFew = 8;  // lanes whose columns a warp takes one after another, rather than all lanes' at once
    if (rising == 0u) return;
    uint32_t largest = 0u;
    if (__popc(rising) <= kFew) {
#pragma unroll 1
      for (; rising != 0u; rising &= rising - 1u) {
        const unsigned whose = static_cast<unsigned>(__ffs(static_cast<int>(rising))) - 1u;
        largest = max(largest, transformed_by_warp(patch, whose, make));
      }
    } else {
      each_word(patch, [&](uint32_t& word) { word = make(word); });
      largest = amax_of_columns(patch);
    }
    columns_.raise(largest);
  }

  template <typename Body>
  static __device__ __forceinline__ void each_word(Patch& patch, const Body& body) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) body(patch.word[i][0]), body(patch.word[i][1]);
  }

  // The largest magnitude of all that was seen is said.
  __device__ __forceinline__ void give_largest() { raise_amax_by_warps<bf16_t>(&state_.row, largest_); }

  SearchState& state_;
  Shared& shared_;
  ColumnAmax columns_;
  uint32_t largest_ = 0u;  // magnitudes of rows

 private:
  // What transformed_amax makes of the four columns that one lane has, with two values a lane. Where operands are is no
  // lane's own any more.
  template <typename Make>
  __device__ __forceinline__ uint32_t transformed_by_warp(const Patch& patch, unsigned whose, const Make& make) {
    uint4(&operands)[kBlock / 2] = shared_.operands[threadIdx.x / 32u];
    const unsigned lane = threadIdx.x % 32u;
    const unsigned row = lane % 16u;
    __syncwarp();  // all have read the last ones
    if (lane == whose) {
#pragma unroll
      for (int i = 0; i < kBlock; i += 2) {
        const auto& word = patch.word;
        operands[i / 2] = make_uint4(word[i][0], word[i][1], word[i + 1][0], word[i + 1][1]);
      }
    }
    __syncwarp();
    return transformed_across_lanes(make(reinterpret_cast<const uint32_t*>(operands)[row * 2u + lane / 16u]));
  }
};

}  // namespace
}  // namespace cuda
}  // namespace te_dist
