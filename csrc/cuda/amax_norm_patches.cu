// amax of a norm's result whose rows do not fit registers, or that has a bias but no mean: tile by tile, behind the
// statistics. 2 bytes an element, and as many again out of L2.
#include "cast.cuh"
#include "norm_rows.cuh"
#include "patch_source.cuh"

namespace te_dist {
namespace cuda {
namespace {

__global__ void __launch_bounds__(PatchConfig::kThreads, WayConfig<Way::kNorm>::kBlocksPerSm)
    amax_norm_patches_kernel(const __grid_constant__ Made x, float* amax, const float* noop) {
  extern __shared__ __align__(16) float memory[];
  __shared__ uint32_t maxima[PatchConfig::kThreads / 32];
  if (is_noop(noop)) return;
  uint32_t word = 0u;
  for_each_patch<Way::kNorm, SquareTile>(
      x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, memory,
      [&](const Patch<bf16_t>& patch, const TilePlace&, bool) { word = max_of_patch(patch, word); });
  const uint32_t raw = block_max<PatchConfig::kThreads>(Words<bf16_t>::fold(word), maxima);
  if (threadIdx.x == 0 && raw != 0u) atomic_amax(amax, Words<bf16_t>::to_float_of_raw(raw));
}

}  // namespace

void launch_amax_norm_patches(const Made& x, float* amax, const float* noop, Lane lane) {
  launch_way<Way::kNorm>("amax_norm_patches_kernel", amax_norm_patches_kernel, 0, x, noop, lane, amax, noop);
}

}  // namespace cuda
}  // namespace te_dist
