// Blockwise fp8 with 1x128 scales of a matrix in memory.
#include "block_1d.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename T, typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<T>)
    block_1d_kernel(TileInput<T> x, BlockOutput out) {
  __shared__ alignas(16) ByteStage stage;
  __shared__ ColumnExchange<T> exchange;
  if (is_noop(out.noop)) return;
  const TilePlace tile = tile_place(blockIdx.x, x.cols);
  const bool inside = tile_inside(tile, x.rows, x.cols);
  const unsigned later = blockIdx.x + out.ahead;
  if (later < gridDim.x) prefetch_tile(x.data, x.rows, x.cols, x.stride, tile_place(later, x.cols));
  Patch<T> patch;
  load_patch(x, tile.row + threadIdx.x / 16 * 8, tile.col + threadIdx.x % 16 * 8, inside, patch);
  quantize_tile<T, F>(patch, tile, inside, out, exchange, stage);
}

}  // namespace

void launch_block_1d(const Input& x, Fp8 format, const BlockOutput& out, Lane lane) {
  const auto kernel_for = [](auto input, auto fp8) {
    return block_1d_kernel<TypeOf<decltype(input)>, TypeOf<decltype(fp8)>>;
  };
  BlockOutput to = out;
  to.ahead = 2u * static_cast<unsigned>(multiprocessors());
  launch_tiles("block_1d_kernel", kernel_for, x, format, to, lane);
}

}  // namespace cuda
}  // namespace te_dist
