// MXFP8, 1x32, of a matrix that is made in registers.
#include "mxfp8.cuh"
#include "patch_source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F, Way kWay>
__global__ void __launch_bounds__(PatchConfig::kThreads, WayConfig<kWay>::kBlocksPerSm)
    mxfp8_patches_kernel(const __grid_constant__ Made x, MxOutput out) {
  extern __shared__ __align__(16) float memory[];
  __shared__ MxScales scales;
  if (is_noop(out.noop)) return;
  const MxPlace at = mx_place();
  for_each_patch<kWay>(x, false, at.row, at.col, memory,
                       [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                         quantize_tile<bf16_t, F>(patch, tile, inside, out, scales);
                       });
}

}  // namespace

bool launch_mxfp8_patches(const Made& x, const MxOutput& out, Lane lane) {
  const auto start = [&](auto way, auto kernel) {
    launch_way<decltype(way)::value>("mxfp8_patches_kernel", kernel, 0, x, lane, out);
    return true;
  };
  switch (way_of(x)) {
    case Way::kNorm: return start(WayTag<Way::kNorm>{}, mxfp8_patches_kernel<E4M3, Way::kNorm>);
    case Way::kActivation: return start(WayTag<Way::kActivation>{}, mxfp8_patches_kernel<E4M3, Way::kActivation>);
    default: return false;  // the others are slower than source.cuh's
  }
}

}  // namespace cuda
}  // namespace te_dist
