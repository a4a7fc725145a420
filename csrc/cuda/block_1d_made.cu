// Blockwise fp8 with 1x128 scales of a matrix that is made on the fly.
#include "block_1d.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<bf16_t>)
    block_1d_made_kernel(const __grid_constant__ Made x, BlockOutput out) {
  extern __shared__ uint4 memory[];
  __shared__ ColumnExchange<bf16_t> exchange;
  if (is_noop(out.noop)) return;
  for_each_made_tile(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, memory,
                     [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                       quantize_tile<bf16_t, F>(patch, tile, inside, out, exchange,
                                                *reinterpret_cast<ByteStage*>(memory));
                     });
}

}  // namespace

void launch_block_1d_made(const Source& x, Fp8 format, const BlockOutput& out, Lane lane) {
  TED_CHECK(format == Fp8::kE4M3, "1x128 blocks of a matrix made on the fly are E4M3");
  const Made made = made_of(x, true);
  if (made.order.counters != nullptr) launch_bands_reset(made.order, lane);
  allow_made_bytes(block_1d_made_kernel<E4M3>);
  block_1d_made_kernel<E4M3>
      <<<grid_size(made_blocks(made)), TileConfig::kThreads, made_bytes(made), stream_of(lane)>>>(made, out);
  check_launch("block_1d_made_kernel");
}

}  // namespace cuda
}  // namespace te_dist
