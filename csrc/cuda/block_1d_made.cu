// Blockwise fp8 with 1x128 scales of a matrix that is made on the fly.
#include "block_1d.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F, bool kActivated>
__global__ void __launch_bounds__(MadeConfig::kThreads, MadeConfig::kBlocksPerSm)
    block_1d_made_kernel(const __grid_constant__ Made x, BlockOutput out) {
  extern __shared__ uint4 memory[];
  __shared__ ColumnExchange<bf16_t> exchange;
  if (is_noop(out.noop)) return;
  for_each_made_tile<kActivated>(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, out.col_data.data != nullptr, memory,
                     [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                       quantize_tile<bf16_t, F>(patch, tile, inside, out, exchange,
                                                *static_cast<ByteStage*>(made_stage(memory)));
                     });
}

}  // namespace

void launch_block_1d_made(const Source& x, Fp8 format, const BlockOutput& out, Lane lane) {
  TED_CHECK(format == Fp8::kE4M3, "1x128 blocks of a matrix made on the fly are E4M3");
  launch_made("block_1d_made_kernel", block_1d_made_kernel<E4M3, false>, block_1d_made_kernel<E4M3, true>,
              made_of(x, true), lane, out);
}

}  // namespace cuda
}  // namespace te_dist
