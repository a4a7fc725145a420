// Blockwise fp8 with 128x128 scales of a matrix that is made on the fly.
#include "block_2d.cuh"
#include "patch_source.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <Way kWay>
__global__ void __launch_bounds__(PatchConfig::kThreads, WayConfig<kWay>::kBlocksPerSm)
    block_2d_patches_kernel(const __grid_constant__ Made x, BlockOutput out) {
  extern __shared__ __align__(16) float memory[];
  __shared__ TileScratch scratch;
  if (is_noop(out.noop)) return;
  for_each_patch<kWay, SquareTile>(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, memory,
                       [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                         auto& stage = *static_cast<ByteStage*>(work_area<kWay>(memory));
                         constexpr bool kWhole = WayConfig<kWay>::kWhole;
                         quantize_tile<bf16_t, E4M3, kWhole>(patch, tile, inside, out, stage, scratch);
                       });
}

__global__ void __launch_bounds__(MadeConfig::kThreads, MadeConfig::kBlocksPerSm)
    block_2d_made_kernel(const __grid_constant__ Made x, BlockOutput out) {
  extern __shared__ uint4 rings[];
  __shared__ TileScratch scratch;
  if (is_noop(out.noop)) return;
  for_each_made_tile(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, true, rings,
                     [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                       auto& stage = *static_cast<ByteStage*>(made_stage(rings));
                       quantize_tile<bf16_t, E4M3, false>(patch, tile, inside, out, stage, scratch);
                     });
}

}  // namespace

void launch_block_2d_made(const Source& x, Fp8 format, const BlockOutput& out, Lane lane) {
  TED_CHECK(format == Fp8::kE4M3, "128x128 blocks of a matrix made on the fly are E4M3");
  const Made made = made_of(x, true);
  const auto start = [&](auto way) {
    constexpr Way kWay = decltype(way)::value;
    constexpr int kStage = static_cast<int>(sizeof(ByteStage));
    launch_way<kWay>("block_2d_patches_kernel", block_2d_patches_kernel<kWay>, kStage, made, out.noop, lane, out);
  };
  switch (way_of(made, out.row_data.is_whole() && out.col_data.is_whole())) {
    case Way::kNorm: return start(WayTag<Way::kNorm>{});
    case Way::kWholeNorm: return start(WayTag<Way::kWholeNorm>{});
    case Way::kActivation: return start(WayTag<Way::kActivation>{});
    case Way::kGated: return start(WayTag<Way::kGated>{});
    case Way::kSlope: return start(WayTag<Way::kSlope>{});
    case Way::kPaired: return start(WayTag<Way::kPaired>{});
    default: launch_made("block_2d_made_kernel", block_2d_made_kernel, made, lane, out);
  }
}

}  // namespace cuda
}  // namespace te_dist
