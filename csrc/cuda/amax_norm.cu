// amax of a norm's result: 2 bytes an element.
#include "amax.cuh"
#include "norm_rows.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <bool kCentered, int kVectors, int kHeld>
__global__ void __launch_bounds__(NormRowsConfig::kThreads, NormRowsConfig::kBlocksPerSm<kVectors>)
    amax_norm_kernel(const __grid_constant__ Made x, bool make_stats, float* amax, const float* noop) {
  extern __shared__ float4 memory[];
  if (is_noop(noop)) return;
  using Held = TeamRow<kVectors, kHeld>;
  using W = Words<bf16_t>;
  const int rank = RowTeam::rank();
  uint32_t largest = 0u;
  for_each_norm_row<kCentered, kVectors, kHeld, false>(
      x, make_stats, false, memory,
      [&](int64_t, int, const Held& made) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (Held::offset_of(i) + 8 * rank >= x.cols) continue;
          const uint4& v = made.vector[i];
          largest = W::max(largest, W::magnitude(v.x), W::magnitude(v.y));
          largest = W::max(largest, W::magnitude(v.z), W::magnitude(v.w));
        }
      },
      [](int64_t) {});
  raise_amax_by_warps<bf16_t>(amax, largest);
}

template <int kVectors, int kHeld>
void launch_held(const Made& x, bool make_stats, float* amax, const float* noop, Lane lane) {
  const auto kernel = x.centered ? amax_norm_kernel<true, kVectors, kHeld> : amax_norm_kernel<false, kVectors, kHeld>;
  launch_norm_rows<kVectors, kHeld>("amax_norm_kernel", kernel, x, lane, make_stats, amax, noop);
}

}  // namespace

void launch_amax_norm(const Made& x, bool make_stats, float* amax, const float* noop, Lane lane) {
  // Rows that fit no registers wait for their statistics in L2.
  if (x.cols > NormRowsConfig::kLongColumns || (!x.centered && x.biased)) {
    return launch_amax_norm_patches(x, amax, noop, lane);
  }
  if (x.cols > NormRowsConfig::kColumns) {
    return launch_held<NormRowsConfig::kLongVectors, 1>(x, make_stats, amax, noop, lane);
  }
  with_held_rows(x.cols, [&](auto held) {
    launch_held<NormRowsConfig::kVectors, held>(x, make_stats, amax, noop, lane);
  });
}

}  // namespace cuda
}  // namespace te_dist
