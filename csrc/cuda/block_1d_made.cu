// Blockwise fp8 with 1x128 scales of a matrix that is made on the fly. E4M3 is what most are, and has faster kernels.
#include "block_1d_whole.cuh"
#include "norm_rows.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F, bool kWhole>
__global__ void __launch_bounds__(MadeConfig::kThreads, MadeConfig::kBlocksPerSm)
    block_1d_made_kernel(const __grid_constant__ Made x, BlockOutput out) {
  extern __shared__ uint4 memory[];
  __shared__ ColumnExchange<bf16_t> exchange;
  if (is_noop(out.noop)) return;
  const bool columns = out.col_data.data != nullptr;
  for_each_made_tile(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, columns, memory,
                     [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                       auto& stage = *static_cast<ByteStage*>(made_stage(memory));
                       if constexpr (kWhole) {
                         quantize_whole_tile<F>(patch, tile, out, exchange, stage);
                       } else {
                         quantize_tile<bf16_t, F>(patch, tile, inside, out, exchange, stage);
                       }
                     });
}

}  // namespace

void launch_block_1d_made(const Source& x, Fp8 format, const BlockOutput& out, Lane lane) {
  const Made made = made_of(x, true);
  if (format == Fp8::kE4M3 && out.col_data.data == nullptr && out.row_data.vector && by_rows(made)) {
    return launch_block_1d_rows(made, x.make_stats, out, lane);
  }
  if (launch_block_1d_patches(made, format, out, lane)) return;
  const bool whole = out.whole && made.is_whole();
  const auto kernel = format == Fp8::kE5M2
                          ? (whole ? block_1d_made_kernel<E5M2, true> : block_1d_made_kernel<E5M2, false>)
                          : (whole ? block_1d_made_kernel<E4M3, true> : block_1d_made_kernel<E4M3, false>);
  launch_made("block_1d_made_kernel", kernel, made, lane, out);
}

}  // namespace cuda
}  // namespace te_dist
