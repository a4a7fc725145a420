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
                                  quantize_whole_tile<F, WayConfig<kWay>::kSloped>(patch, tile, out, scales);
                                } else {
                                  quantize_tile<bf16_t, F>(patch, tile, inside, out, scales);
                                }
                              });
}

template <typename F, Way kWay, typename Shape = MxSquare>
bool start(const Made& x, const MxOutput& out, Lane lane) {
  launch_way<kWay>("mxfp8_patches_kernel", mxfp8_patches_kernel<F, kWay, Shape>, 0, x, out.noop, lane, out);
  return true;
}

// Column sums, which norms may have, need square tiles.
bool takes_wide(const Made& x) { return x.partials == nullptr && x.cols % MxWide::kCols == 0; }

// In wide tiles where they fit.
template <typename F, Way kWay>
bool start_whole(const Made& x, const MxOutput& out, Lane lane) {
  return takes_wide(x) ? start<F, kWay, MxWide>(x, out, lane) : start<F, kWay>(x, out, lane);
}

}  // namespace

bool launch_mxfp8_patches(const Made& x, Fp8 format, const MxOutput& out, Lane lane) {
  const bool e4m3 = format == Fp8::kE4M3;
  const bool wide = takes_wide(x);
  switch (way_of(x, out.whole)) {
    case Way::kNorm: return e4m3 ? start<E4M3, Way::kNorm>(x, out, lane) : start<E5M2, Way::kNorm>(x, out, lane);
    case Way::kWholeNorm:
      return e4m3 ? start_whole<E4M3, Way::kWholeNorm>(x, out, lane) : start_whole<E5M2, Way::kWholeNorm>(x, out, lane);
    case Way::kActivation: return e4m3 && start_whole<E4M3, Way::kStreamed>(x, out, lane);
    case Way::kBiased: return e4m3 && wide && start<E4M3, Way::kBiasedStreamed, MxWide>(x, out, lane);
    case Way::kSlope:
      if (x.partials != nullptr) return false;  // in square tiles, source.cuh is faster
      return e4m3 ? start_whole<E4M3, Way::kSlope>(x, out, lane) : start_whole<E5M2, Way::kSlope>(x, out, lane);
    case Way::kBiasedSlope:
      if (!wide) return false;
      return e4m3 ? start<E4M3, Way::kBiasedSlope, MxWide>(x, out, lane)
                  : start<E5M2, Way::kBiasedSlope, MxWide>(x, out, lane);
    default: return false;  // source.cuh is faster
  }
}

}  // namespace cuda
}  // namespace te_dist
