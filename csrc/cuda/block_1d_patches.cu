// Blockwise fp8 with 1x128 scales of a matrix that is made in registers.
#include "block_1d_whole.cuh"
#include "patch_source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F, Way kWay>
__global__ void __launch_bounds__(PatchConfig::kThreads, WayConfig<kWay>::kBlocksPerSm)
    block_1d_patches_kernel(const __grid_constant__ Made x, BlockOutput out) {
  extern __shared__ __align__(16) float memory[];
  __shared__ ColumnExchange<bf16_t> exchange;
  if (is_noop(out.noop)) return;
  for_each_patch<kWay, SquareTile>(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, memory,
                       [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                         auto& stage = *static_cast<ByteStage*>(work_area<kWay>(memory));
                         if constexpr (WayConfig<kWay>::kWhole) {
                           quantize_whole_tile<F>(patch, tile, out, exchange, stage);
                         } else {
                           quantize_tile<bf16_t, F>(patch, tile, inside, out, exchange, stage);
                         }
                       });
}

}  // namespace

bool launch_block_1d_patches(const Made& x, const BlockOutput& out, Lane lane) {
  const auto start = [&](auto way, auto kernel) {
    constexpr int kStage = static_cast<int>(sizeof(ByteStage));
    launch_way<decltype(way)::value>("block_1d_patches_kernel", kernel, kStage, x, out.noop, lane, out);
    return true;
  };
  switch (way_of(x, out.whole)) {
    case Way::kNorm: return start(WayTag<Way::kNorm>{}, block_1d_patches_kernel<E4M3, Way::kNorm>);
    case Way::kWholeNorm: return start(WayTag<Way::kWholeNorm>{}, block_1d_patches_kernel<E4M3, Way::kWholeNorm>);
    case Way::kActivation: return start(WayTag<Way::kActivation>{}, block_1d_patches_kernel<E4M3, Way::kActivation>);
    case Way::kGated: return start(WayTag<Way::kGated>{}, block_1d_patches_kernel<E4M3, Way::kGated>);
    case Way::kSlope: return start(WayTag<Way::kSlope>{}, block_1d_patches_kernel<E4M3, Way::kSlope>);
    case Way::kPaired: return start(WayTag<Way::kPaired>{}, block_1d_patches_kernel<E4M3, Way::kPaired>);
    default: break;
  }
  return false;
}

}  // namespace cuda
}  // namespace te_dist
