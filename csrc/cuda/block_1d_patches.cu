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
  const bool shares = out.col_data.data != nullptr;
  const auto quantize = [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
    auto& stage = *static_cast<ByteStage*>(work_area<kWay>(memory));
    if constexpr (WayConfig<kWay>::kWhole) {
      quantize_whole_tile<F>(patch, tile, out, exchange, stage);
    } else {
      quantize_tile<bf16_t, F>(patch, tile, inside, out, exchange, stage);
    }
  };
  for_each_patch<kWay, SquareTile, 4, 2>(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, memory, quantize,
                                         shares);
}

}  // namespace

bool launch_block_1d_patches(const Made& x, Fp8 format, const BlockOutput& out, Lane lane) {
  const auto start = [&](auto way, auto values) {
    constexpr Way kWay = decltype(way)::value;
    const auto kernel = block_1d_patches_kernel<TypeOf<decltype(values)>, kWay>;
    const int stage = out.col_data.data != nullptr ? sizeof(ByteStage) : 0;
    launch_way<kWay>("block_1d_patches_kernel", kernel, stage, x, out.noop, lane, out);
  };
  return start_way<Way::kNorm, Way::kWholeNorm, Way::kActivation, Way::kRectified, Way::kGated, Way::kSlope,
                   Way::kPaired, Way::kBiased, Way::kBiasedSlope, Way::kBiasedPaired>(way_of(x, out.whole), format,
                                                                                     start);
}

}  // namespace cuda
}  // namespace te_dist
