// Blockwise fp8 with 128x128 scales of a matrix that is made on the fly. E4M3 is what most are, and has faster kernels.
#include "block_2d.cuh"
#include "patch_source.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F, Way kWay>
__global__ void __launch_bounds__(PatchConfig::kThreads, WayConfig<kWay>::kBlocksPerSm)
    block_2d_patches_kernel(const __grid_constant__ Made x, BlockOutput out) {
  extern __shared__ __align__(16) float memory[];
  __shared__ TileScratch scratch;
  if (is_noop(out.noop)) return;
  const auto quantize = [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
    auto& stage = *static_cast<ByteStage*>(work_area<kWay>(memory));
    if constexpr (kWay == Way::kActivation || kWay == Way::kBiased) {  // have no registers for less
      quantize_tile<bf16_t, F, true>(patch, tile, inside, out, stage, scratch);
    } else if constexpr (WayConfig<kWay>::kWhole) {
      quantize_whole_tile<F>(patch, tile, out, stage, scratch);
    } else {
      quantize_tile<bf16_t, F, false>(patch, tile, inside, out, stage, scratch);
    }
  };
  for_each_patch<kWay, SquareTile, 8>(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, memory, quantize);
}

template <typename F>
__global__ void __launch_bounds__(MadeConfig::kThreads, MadeConfig::kBlocksPerSm)
    block_2d_made_kernel(const __grid_constant__ Made x, BlockOutput out) {
  extern __shared__ uint4 rings[];
  __shared__ TileScratch scratch;
  if (is_noop(out.noop)) return;
  for_each_made_tile(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, true, rings,
                     [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                       auto& stage = *static_cast<ByteStage*>(made_stage(rings));
                       quantize_tile<bf16_t, F, false>(patch, tile, inside, out, stage, scratch);
                     });
}

}  // namespace

void launch_block_2d_made(const Source& x, Fp8 format, const BlockOutput& out, Lane lane) {
  const Made made = made_of(x, true);
  const auto start = [&](auto way, auto values) {
    constexpr Way kWay = decltype(way)::value;
    const auto kernel = block_2d_patches_kernel<TypeOf<decltype(values)>, kWay>;
    const int stage = out.col_data.data != nullptr ? sizeof(ByteStage) : 0;
    launch_way<kWay>("block_2d_patches_kernel", kernel, stage, made, out.noop, lane, out);
  };
  // What is gated is made faster by source.cuh.
  const bool started = start_way<Way::kNorm, Way::kWholeNorm, Way::kActivation, Way::kSlope, Way::kBiased,
                                 Way::kBiasedSlope>(way_of(made, out.whole), format, start);
  if (started) return;
  const auto kernel = format == Fp8::kE4M3 ? block_2d_made_kernel<E4M3> : block_2d_made_kernel<E5M2>;
  launch_made("block_2d_made_kernel", kernel, made, lane, out);
}

}  // namespace cuda
}  // namespace te_dist
