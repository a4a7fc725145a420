// MXFP8, 1x32, of a matrix that is made in registers.
#include "mxfp8_whole.cuh"
#include "patch_source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F, Way kWay, typename Shape>
__global__ void __launch_bounds__(PatchConfig::kThreads, WayConfig<kWay>::kBlocksPerSm)
    mxfp8_patches_kernel(const __grid_constant__ Made x, MxOutput out) {
  extern __shared__ __align__(16) float memory[];
  __shared__ MxScales<Shape> scales;
  if (is_noop(out.noop)) return;
  const MxPlace at = Shape::place();
  for_each_patch<kWay, Shape>(x, false, at.row, at.col, memory,
                              [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                                if constexpr (WayConfig<kWay>::kWhole) {
                                  quantize_whole_tile<F>(patch, tile, out, scales);
                                } else {
                                  quantize_tile<bf16_t, F, false>(patch, tile, inside, out, scales);
                                }
                              });
}

template <Way kWay, typename Shape>
bool start(const Made& x, const MxOutput& out, Lane lane) {
  launch_way<kWay>("mxfp8_patches_kernel", mxfp8_patches_kernel<E4M3, kWay, Shape>, 0, x, lane, out);
  return true;
}

}  // namespace

bool launch_mxfp8_patches(const Made& x, const MxOutput& out, Lane lane) {
  const bool sums = x.partials != nullptr;
  switch (way_of(x, out.whole, sums ? MxSquare::kCols : MxWide::kCols)) {
    case Way::kNorm: return start<Way::kNorm, MxSquare>(x, out, lane);
    case Way::kWholeNorm:
      return sums ? start<Way::kWholeNorm, MxSquare>(x, out, lane) : start<Way::kWholeNorm, MxWide>(x, out, lane);
    case Way::kActivation: return start<Way::kStreamed, MxWide>(x, out, lane);
    case Way::kGated: return start<Way::kGated, MxWide>(x, out, lane);
    case Way::kSlope:
      return sums ? start<Way::kSlope, MxSquare>(x, out, lane) : start<Way::kSlope, MxWide>(x, out, lane);
    default: return false;  // source.cuh is faster
  }
}

}  // namespace cuda
}  // namespace te_dist
