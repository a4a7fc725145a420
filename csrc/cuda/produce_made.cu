// Writes a bf16 matrix that is made on the fly: `produce` for sources that the quantize kernels could fuse.
#include "made_store.cuh"
#include "patch_source.cuh"
#include "produce.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

__global__ void __launch_bounds__(MadeConfig::kThreads, MadeConfig::kBlocksPerSm)
    produce_made_kernel(const __grid_constant__ Made x, bf16_t* out) {
  extern __shared__ uint4 memory[];
  for_each_made_tile(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, false, memory,
                     [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool) {
                       store_patch(x, patch, tile, out);
                     });
}

template <Way kWay>
__global__ void __launch_bounds__(PatchConfig::kThreads, WayConfig<kWay>::kBlocksPerSm)
    produce_patches_kernel(const __grid_constant__ Made x, bf16_t* out) {
  extern __shared__ __align__(16) float table[];
  for_each_patch<kWay, SquareTile>(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, table,
                       [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool) {
                         store_patch(x, patch, tile, out);
                       });
}

}  // namespace

void launch_produce_made(const Source& x, const Output& out, Lane lane) {
  const Made made = made_of(x, true);
  auto* to = static_cast<bf16_t*>(out.data);
  if (!made.activated()) {
    return launch_way<Way::kNorm>("produce_patches_kernel", produce_patches_kernel<Way::kNorm>, 0, made, nullptr, lane,
                                  to);
  }
  launch_made("produce_made_kernel", produce_made_kernel, made, lane, to);
}

}  // namespace cuda
}  // namespace te_dist
