// Per-tensor casts of a matrix that is made in registers.
#include "cast.cuh"
#include "patch_source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F, Way kWay>
__global__ void __launch_bounds__(PatchConfig::kThreads, WayConfig<kWay>::kBlocksPerSm)
    cast_patches_kernel(const __grid_constant__ Made x, ByteMatrix row_out, ByteMatrix col_out, CastScale from) {
  extern __shared__ __align__(16) float memory[];
  if (is_noop(from.noop)) return;
  __shared__ uint32_t maxima[PatchConfig::kThreads / 32];
  const float scale = tensor_scale<F, PatchConfig::kThreads>(from, maxima);
  uint32_t word = 0u;
  for_each_patch<kWay, SquareTile>(x, true, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, memory,
                       [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                         if (from.seen != nullptr) word = max_of_patch(patch, word);
                         write_tile<bf16_t, F, WayConfig<kWay>::kWhole>(
                             patch, scale, tile, inside, row_out, col_out,
                             *static_cast<ByteStage*>(work_area<kWay>(memory)));
                       });
  record_amax<bf16_t, PatchConfig::kThreads>(from, word, maxima);
}

}  // namespace

bool launch_cast_patches(const Made& x, Fp8 format, const ByteMatrix& row_out, const ByteMatrix& col_out,
                         const CastScale& from, Lane lane) {
  const auto start = [&](auto way, auto kernel) {
    constexpr int kStage = static_cast<int>(sizeof(ByteStage));
    launch_way<decltype(way)::value>("cast_patches_kernel", kernel, kStage, x, from.noop, lane, row_out, col_out, from);
    return true;
  };
  // Results of activations are E4M3, but for rare recipes; gradients and what is summed up are both.
  const bool e4m3 = format == Fp8::kE4M3;
  switch (way_of(x, row_out.is_whole() && col_out.is_whole())) {
    case Way::kNorm:
      return start(WayTag<Way::kNorm>{}, e4m3 ? cast_patches_kernel<E4M3, Way::kNorm>
                                            : cast_patches_kernel<E5M2, Way::kNorm>);
    case Way::kWholeNorm:
      return start(WayTag<Way::kWholeNorm>{}, e4m3 ? cast_patches_kernel<E4M3, Way::kWholeNorm>
                                            : cast_patches_kernel<E5M2, Way::kWholeNorm>);
    case Way::kActivation:
      return e4m3 && start(WayTag<Way::kActivation>{}, cast_patches_kernel<E4M3, Way::kActivation>);
    case Way::kGated: return e4m3 && start(WayTag<Way::kGated>{}, cast_patches_kernel<E4M3, Way::kGated>);
    case Way::kSlope:
      return start(WayTag<Way::kSlope>{}, e4m3 ? cast_patches_kernel<E4M3, Way::kSlope>
                                            : cast_patches_kernel<E5M2, Way::kSlope>);
    case Way::kPaired:
      return start(WayTag<Way::kPaired>{}, e4m3 ? cast_patches_kernel<E4M3, Way::kPaired>
                                            : cast_patches_kernel<E5M2, Way::kPaired>);
    default: break;
  }
  return false;
}

}  // namespace cuda
}  // namespace te_dist
