// Blockwise fp8 with 1x128 scales of a matrix in memory.
#include "block_1d_whole.cuh"
#include "whole_tile.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename T, typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<T>)
    block_1d_kernel(TileInput<T> x, TileRegion region, BlockOutput out) {
  __shared__ alignas(16) ByteStage stage;
  __shared__ ColumnExchange<T> exchange;
  if (is_noop(out.noop)) return;
  const TilePlace tile = tile_place(region, blockIdx.x);
  const bool inside = tile_inside(tile, x.rows, x.cols);
  Patch<T> patch;
  load_patch(x, tile.row + threadIdx.x / 16 * 8, tile.col + threadIdx.x % 16 * 8, inside, patch);
  quantize_tile<T, F>(patch, tile, inside, out, exchange, stage);
}

template <typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<bf16_t>)
    block_1d_whole_kernel(TileInput<bf16_t> x, TileRegion region, unsigned ahead, BlockOutput out) {
  __shared__ alignas(16) ByteStage stage;
  __shared__ ColumnExchange<bf16_t> exchange;
  if (is_noop(out.noop)) return;
  Patch<bf16_t> patch;
  const TilePlace tile = load_whole_tile<SquareTile>(x, region, blockIdx.x, ahead, false, threadIdx.x / 16 * 8,
                                                     threadIdx.x % 16 * 8, patch);
  quantize_whole_tile<F>(patch, tile, out, exchange, stage);
}

}  // namespace

void launch_block_1d(const Input& x, Fp8 format, const BlockOutput& out, Lane lane) {
  const auto kernel_for = [](auto input, auto fp8) {
    return block_1d_kernel<TypeOf<decltype(input)>, TypeOf<decltype(fp8)>>;
  };
  const auto whole_for = [](auto fp8) { return block_1d_whole_kernel<TypeOf<decltype(fp8)>>; };
  launch_tiles<SquareTile>("block_1d_kernel", kernel_for, whole_for, x, format, out.whole, 0, lane, out);
}

}  // namespace cuda
}  // namespace te_dist
