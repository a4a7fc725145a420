// Blockwise fp8 with 128x128 scales of a matrix in memory, and the entry point for both kinds of blocks. bf16 moves 4
// bytes an element for both planes.
#include "amax.cuh"
#include "block_2d.cuh"
#include "whole_tile.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename T, typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<T>)
    block_2d_kernel(TileInput<T> x, TileRegion region, BlockOutput out) {
  __shared__ alignas(16) ByteStage stage;
  __shared__ TileScratch scratch;
  if (is_noop(out.noop)) return;
  const TilePlace tile = tile_place(region, blockIdx.x);
  const bool inside = tile_inside(tile, x.rows, x.cols);
  Patch<T> patch;
  load_patch(x, tile.row + threadIdx.x / 16 * 8, tile.col + threadIdx.x % 16 * 8, inside, patch);
  quantize_tile<T, F, false>(patch, tile, inside, out, stage, scratch);
}

template <typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<bf16_t>)
    block_2d_whole_kernel(TileInput<bf16_t> x, TileRegion region, unsigned ahead, BlockOutput out) {
  __shared__ alignas(16) ByteStage stage;
  __shared__ TileScratch scratch;
  if (is_noop(out.noop)) return;
  Patch<bf16_t> patch;
  const TilePlace tile = load_whole_tile<SquareTile>(x, region, blockIdx.x, ahead, false, threadIdx.x / 16 * 8,
                                                     threadIdx.x % 16 * 8, patch);
  quantize_tile<bf16_t, F, true>(patch, tile, true, out, stage, scratch);
}

}  // namespace

void launch_block_2d(const Input& x, Fp8 format, const BlockOutput& out, Lane lane) {
  const auto kernel_for = [](auto input, auto fp8) {
    return block_2d_kernel<TypeOf<decltype(input)>, TypeOf<decltype(fp8)>>;
  };
  const auto whole_for = [](auto fp8) { return block_2d_whole_kernel<TypeOf<decltype(fp8)>>; };
  const bool whole = out.row_data.is_whole() && out.col_data.is_whole();
  launch_tiles<SquareTile>("block_2d_kernel", kernel_for, whole_for, x, format, whole, 0, lane, out);
}

void quantize_block(const Source& x, int block_dim, float eps, bool power_of_2, Fp8 format, const Planes& out,
                    const float* noop, Lane lane) {
  const bool made = is_made(x);
  if (!made) check::plain(x);
  check::block_dim(block_dim);
  if (nothing_to_quantize(x, out, sizeof(float))) return;
  const ScaleRule rule{eps, power_of_2};
  BlockOutput to{byte_matrix(out.row_data, x.rows, x.cols, 8),
                 byte_matrix(out.col_data, x.cols, x.rows, 16),
                 static_cast<float*>(out.row_scale),
                 static_cast<float*>(out.col_scale),
                 rule,
                 noop};
  to.whole = power_of_2 && eps <= kFloatMax && to.row_data.is_whole() && to.col_data.is_whole();
  to.eps_bits = eps > 0.0f ? bits_of(eps) : 0u;
  to.row_pitch = round_up(x.rows, 4);
  to.col_pitch = round_up(x.cols, 4);
  if (block_dim == 1) {
    made ? launch_block_1d_made(x, format, to, lane) : launch_block_1d(x, format, to, lane);
  } else {
    made ? launch_block_2d_made(x, format, to, lane) : launch_block_2d(x, format, to, lane);
  }
}

}  // namespace cuda
}  // namespace te_dist
