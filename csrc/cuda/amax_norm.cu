// amax of a norm's result: 2 bytes an element.
#include "amax.cuh"
#include "norm_rows.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <bool kCentered, int kVectors>
__global__ void __launch_bounds__(NormRowsConfig::kThreads, NormRowsConfig::kBlocksPerSm<kVectors>)
    amax_norm_kernel(const __grid_constant__ Made x, bool make_stats, float* amax, const float* noop) {
  extern __shared__ float4 memory[];
  __shared__ uint32_t maxima[NormRowsConfig::kThreads / 32];
  if (is_noop(noop)) return;
  using W = Words<bf16_t>;
  uint32_t largest = 0u;
  for_each_norm_row<kCentered, kVectors, false>(
      x, make_stats, false, memory,
      [&](int64_t, int, const TeamRow<kVectors>& made) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const uint4& v = made.vector[i];
          largest = W::max(largest, W::magnitude(v.x), W::magnitude(v.y));
          largest = W::max(largest, W::magnitude(v.z), W::magnitude(v.w));
        }
      },
      [](int64_t) {});
  const uint32_t raw = block_max<NormRowsConfig::kThreads>(W::fold(largest), maxima);
  if (threadIdx.x == 0) atomic_amax(amax, W::to_float_of_raw(raw));
}

template <int kVectors>
void launch_held(const Made& x, bool make_stats, float* amax, const float* noop, Lane lane) {
  const auto kernel = x.centered ? amax_norm_kernel<true, kVectors> : amax_norm_kernel<false, kVectors>;
  launch_norm_rows<kVectors>("amax_norm_kernel", kernel, x, lane, make_stats, amax, noop);
}

}  // namespace

void launch_amax_norm(const Made& x, bool make_stats, float* amax, const float* noop, Lane lane) {
  TED_CHECK(x.cols <= NormRowsConfig::kLongColumns, "the amax of a norm takes rows of up to 16384 elements, got ",
            x.cols);
  TED_CHECK(x.bias.data == nullptr || x.centered, "the amax of an RMSNorm takes no bias");
  if (x.cols <= NormRowsConfig::kColumns) {
    launch_held<NormRowsConfig::kVectors>(x, make_stats, amax, noop, lane);
  } else {
    launch_held<NormRowsConfig::kLongVectors>(x, make_stats, amax, noop, lane);
  }
}

}  // namespace cuda
}  // namespace te_dist
