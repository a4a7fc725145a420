// A tile of blockwise fp8 with 128x128 scales: it waits in registers for its amax, and the column plane is the
// transpose of the same bytes.
#pragma once

#include "block.cuh"
#include "powers.cuh"

namespace te_dist {
namespace cuda {
namespace {

// The largest value of each warp.
struct TileScratch {
  static constexpr int kWarps = TileConfig::kThreads / 32;
  uint32_t word[kWarps];
};

// The largest magnitude of the block's tile, raw, in every thread; `mine`: of the thread's patch.
__device__ __forceinline__ uint32_t largest_of_block(uint32_t mine, TileScratch& scratch) {
  const uint32_t raw = __reduce_max_sync(kFullWarp, mine);
  if (threadIdx.x % 32 == 0) scratch.word[threadIdx.x / 32] = raw;
  __syncthreads();
  uint32_t all = scratch.word[0];
#pragma unroll
  for (int w = 1; w < TileScratch::kWarps; ++w) all = max(all, scratch.word[w]);
  return all;
}

template <typename T>
__device__ __forceinline__ float tile_amax(const Patch<T>& patch, TileScratch& scratch) {
  uint32_t word = patch.col_max(0);
#pragma unroll
  for (int w = 1; w < Patch<T>::kWords; ++w) word = Words<T>::max(word, patch.col_max(w));
  return Words<T>::to_float_of_raw(largest_of_block(Words<T>::fold(word), scratch));
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

__device__ __forceinline__ void store_tile_scales(const TilePlace& tile, const BlockOutput& out, float scale_inv) {
  if (threadIdx.x != 0) return;
  const int64_t down = tile.row / TileConfig::kTile;
  const int64_t across = tile.col / TileConfig::kTile;
  if (out.row_data.data != nullptr) store_tile_scale(out.row_scale, down, across, out.row_data.cols, scale_inv);
  if (out.col_data.data != nullptr) store_tile_scale(out.col_scale, across, down, out.col_data.cols, scale_inv);
}

// Both planes of a tile. The stage is written after a barrier, when every thread has what it held before; behind the
// tile's last barrier are only reads of it, and of the scratch: whoever takes another tile has a barrier in between.
// kWhole: the tile is wholly inside, and rows are aligned.
template <typename T, typename F, bool kWhole>
__device__ __forceinline__ void quantize_tile(const Patch<T>& patch, const TilePlace& tile, bool inside,
                                              const BlockOutput& out, ByteStage& stage, TileScratch& scratch) {
  const float scale = scale_from_amax(tile_amax(patch, scratch), F::max, Largest<T>::value, out.rule);
  if (kWhole) {
    write_tile<T, F, true>(patch, scale, tile, true, out.row_data, out.col_data, stage);
  } else {
    write_tile<T, F>(patch, scale, tile, inside, out.row_data, out.col_data, stage);
  }
  store_tile_scales(tile, out, 1.0f / scale);
}

// The same of a tile for which out.whole holds, in fewer instructions.
template <typename F>
__device__ __forceinline__ void quantize_whole_tile(const Patch<bf16_t>& patch, const TilePlace& tile,
                                                    const BlockOutput& out, ByteStage& stage, TileScratch& scratch) {
  PatchMaxima maxima;
  maxima.of_columns(patch);
  const uint32_t pair = magnitudes(larger_pair(maxima.cols[0], maxima.cols[1], maxima.cols[2], maxima.cols[3]));
  const uint32_t raw = largest_of_block(Words<bf16_t>::fold(pair), scratch);
  const uint32_t power = power_from_amax<F>(raw << 16, out.eps_bits);
  uint2 bytes[TileConfig::kPatch];
  if (raw << 16 < kInfBits) {
    const PowerScaler scaler;
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) bytes[i] = scaler.encode_eight<F>(patch.word[i], power);
  } else {  // it is not for infinities; the scale is 1
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) bytes[i] = encode_patch_row<bf16_t, F>(patch, i, 1.0f);
  }
  write_bytes<true>(bytes, tile, true, out.row_data, out.col_data, stage);
  store_tile_scales(tile, out, inverse_of_power(power));
}

}  // namespace
}  // namespace cuda
}  // namespace te_dist
