// Blockwise fp8 with 128x128 scales, and the entry point for both kinds of blocks. bf16 moves 4 bytes an
// element for both planes: the tile waits in registers for its amax, and the column plane is the transpose of
// the same bytes.
#include "amax.cuh"
#include "block.cuh"
#include "whole_tile.cuh"

namespace te_dist {
namespace cuda {
namespace {

constexpr int kWarps = TileConfig::kThreads / 32;

// The amax of the block's tile, in every thread.
template <typename T>
__device__ __forceinline__ float tile_amax(const Patch<T>& patch, uint32_t* scratch) {
  uint32_t word = patch.col_max(0);
#pragma unroll
  for (int w = 1; w < Patch<T>::kWords; ++w) word = Words<T>::max(word, patch.col_max(w));
  const uint32_t raw = __reduce_max_sync(kFullWarp, Words<T>::fold(word));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = raw;
  __syncthreads();
  uint32_t all = scratch[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) all = max(all, scratch[w]);
  return Words<T>::to_float_of_raw(all);
}

// [lines of blocks, rup(blocks per line, 4)]; the tile at the end of a line writes its padding.
__device__ __forceinline__ void store_tile_scale(float* scales, int64_t line, int64_t block, int64_t size,
                                                 float scale_inv) {
  const int64_t blocks = ceil_div(size, TileConfig::kTile);
  const int64_t pitch = round_up(blocks, 4);
  scales[line * pitch + block] = scale_inv;
  if (block != blocks - 1) return;
  for (int64_t b = blocks; b < pitch; ++b) scales[line * pitch + b] = 0.0f;
}

template <typename T, typename F, bool kWhole>
__device__ __forceinline__ void quantize_tile(const TileInput<T>& x, const Patch<T>& patch, const TilePlace& tile,
                                              const BlockOutput& out, ByteStage& stage, uint32_t* scratch) {
  const float scale = scale_from_amax(tile_amax(patch, scratch), F::max, Largest<T>::value, out.rule);
  if (kWhole) {
    write_tile<T, F, true>(patch, scale, tile, true, out.row_data, out.col_data, stage);
  } else {
    write_tile<T, F>(patch, scale, tile, tile_inside(tile, x.rows, x.cols), out.row_data, out.col_data, stage);
  }
  if (threadIdx.x == 0) {
    const int64_t down = tile.row / TileConfig::kTile;
    const int64_t across = tile.col / TileConfig::kTile;
    if (out.row_data.data != nullptr) store_tile_scale(out.row_scale, down, across, x.cols, 1.0f / scale);
    if (out.col_data.data != nullptr) store_tile_scale(out.col_scale, across, down, x.rows, 1.0f / scale);
  }
}

template <typename T, typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<T>)
    block_2d_kernel(TileInput<T> x, TileRegion region, BlockOutput out) {
  __shared__ alignas(16) ByteStage stage;
  __shared__ uint32_t scratch[kWarps];
  if (is_noop(out.noop)) return;
  const TilePlace tile = tile_place(region, blockIdx.x);
  const bool inside = tile_inside(tile, x.rows, x.cols);
  Patch<T> patch;
  load_patch(x, tile.row + threadIdx.x / 16 * 8, tile.col + threadIdx.x % 16 * 8, inside, patch);
  quantize_tile<T, F, false>(x, patch, tile, out, stage, scratch);
}

template <typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<bf16_t>)
    block_2d_whole_kernel(TileInput<bf16_t> x, TileRegion region, unsigned ahead, BlockOutput out) {
  __shared__ alignas(16) ByteStage stage;
  __shared__ uint32_t scratch[kWarps];
  if (is_noop(out.noop)) return;
  Patch<bf16_t> patch;
  const TilePlace tile = load_whole_tile<SquareTile>(x, region, blockIdx.x, ahead, false, threadIdx.x / 16 * 8,
                                                     threadIdx.x % 16 * 8, patch);
  quantize_tile<bf16_t, F, true>(x, patch, tile, out, stage, scratch);
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
  const bool made = block_dim == 1 && is_made(x);
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
  if (made) {
    launch_block_1d_made(x, format, to, lane);
  } else if (block_dim == 1) {
    launch_block_1d(x, format, to, lane);
  } else {
    launch_block_2d(x, format, to, lane);
  }
}

}  // namespace cuda
}  // namespace te_dist
