// Writes a bf16 matrix that is made on the fly: `produce` for sources that the quantize kernels could fuse.
#include "produce.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <bool kActivated>
__global__ void __launch_bounds__(MadeConfig::kThreads, MadeConfig::kBlocksPerSm)
    produce_made_kernel(const __grid_constant__ Made x, bf16_t* out) {
  extern __shared__ uint4 memory[];
  for_each_made_tile<kActivated>(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, false, memory,
                     [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool) {
                       const int64_t row = tile.row + threadIdx.x / 16 * 8;
                       const int64_t col = tile.col + threadIdx.x % 16 * 8;
                       if (out == nullptr || col >= x.pitch) return;
#pragma unroll
                       for (int i = 0; i < TileConfig::kPatch; ++i) {
                         if (row + i >= x.rows) break;
                         const uint32_t(&w)[4] = patch.word[i];
                         store_bulk(reinterpret_cast<uint4*>(out + (row + i) * x.pitch + col),
                                    make_uint4(w[0], w[1], w[2], w[3]));
                       }
                     });
}

}  // namespace

void launch_produce_made(const Source& x, const Output& out, Lane lane) {
  launch_made("produce_made_kernel", produce_made_kernel<false>, produce_made_kernel<true>, made_of(x, true), lane,
              static_cast<bf16_t*>(out.data));
}

}  // namespace cuda
}  // namespace te_dist
