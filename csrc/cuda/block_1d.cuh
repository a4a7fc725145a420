// Blockwise fp8 with 1x128 scales: row plane in tiles along K, column plane in tiles along M, both from one
// read. bf16 moves 4 bytes an element for both planes.
//
// A block's 128 x 128 tile holds 128 whole row blocks and 128 whole column blocks. The tile stays in
// registers: row amaxes meet within half a warp, column amaxes through 2 KB of shared memory, then the column
// plane is quantized a second time from the registers, its byte pairs made along M at once.
#pragma once

#include "block.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename T>
struct ColumnExchange {
  static constexpr int kWarps = TileConfig::kThreads / 32;
  alignas(16)
      uint32_t word[kWarps][TileConfig::kTile / Words<T>::per_word];  // raw magnitudes, by warp and column
  alignas(16) float scale[TileConfig::kTile];
};

// Maximum over the 16 lanes of half a warp of eight values each; lane l ends with that of value l % 8. Every
// step halves what a lane still cares about: 8 shuffles, where reducing each value alone takes 32.
__device__ __forceinline__ uint32_t max_of_rows(const uint32_t (&raw)[8], int lane) {
  uint32_t four[4];
  uint32_t two[2];
  const bool third = (lane & 4) != 0;
  const bool second = (lane & 2) != 0;
  const bool first = (lane & 1) != 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, third ? raw[k] : raw[4 + k], 4);
    four[k] = max(third ? raw[4 + k] : raw[k], other);
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, second ? four[k] : four[2 + k], 2);
    two[k] = max(second ? four[2 + k] : four[k], other);
  }
  const uint32_t other = __shfl_xor_sync(kFullWarp, first ? two[0] : two[1], 1);
  const uint32_t one = max(first ? two[1] : two[0], other);
  return max(one, __shfl_xor_sync(kFullWarp, one, 8));
}

template <typename T, typename F>
__device__ __forceinline__ float block_scale(uint32_t raw, const ScaleRule& rule) {
  return scale_from_amax(Words<T>::to_float_of_raw(raw), F::max, Largest<T>::value, rule);
}

// Scales are stored [block along the plane's inner dimension, rup(lines, 4)]; the padding is zero.
__device__ __forceinline__ void store_line_scale(float* scales, int64_t block, int64_t line, int64_t lines,
                                                 float scale) {
  const int64_t pitch = round_up(lines, 4);
  if (line < pitch) scales[block * pitch + line] = line < lines ? 1.0f / scale : 0.0f;
}

template <typename T, typename F>
__device__ __forceinline__ void write_row_plane(const Patch<T>& patch, const TilePlace& tile, bool inside,
                                                const BlockOutput& out) {
  const int lane = threadIdx.x % 32;
  const int64_t row = tile.row + threadIdx.x / 16 * 8;
  const int64_t col = tile.col + threadIdx.x % 16 * 8;
  uint32_t raw[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) raw[i] = Words<T>::fold(patch.row_max(i));
  const float scale = block_scale<T, F>(max_of_rows(raw, lane), out.rule);
  if (lane % 16 < 8) {
    store_line_scale(out.row_scale, tile.col / TileConfig::kTile, row + lane % 8, out.row_data.rows, scale);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float row_scale = __shfl_sync(kFullWarp, scale, (lane & 16) | i);
    store_patch_row<false>(out.row_data, row + i, col, inside, encode_patch_row<T, F>(patch, i, row_scale));
  }
}

template <typename T>
__device__ __forceinline__ void share_column_amax(const Patch<T>& patch, ColumnExchange<T>& exchange) {
  constexpr int kWords = Patch<T>::kWords;
  uint32_t word[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    word[w] = patch.col_max(w);
    word[w] = Words<T>::max(word[w], __shfl_xor_sync(kFullWarp, word[w], 16));
  }
  if (threadIdx.x % 32 >= 16) return;
  auto* to = reinterpret_cast<uint4*>(&exchange.word[threadIdx.x / 32][threadIdx.x % 16 * kWords]);
#pragma unroll
  for (int v = 0; v < kWords / 4; ++v) {
    to[v] = make_uint4(word[4 * v], word[4 * v + 1], word[4 * v + 2], word[4 * v + 3]);
  }
}

template <typename T, typename F>
__device__ __forceinline__ void make_column_scales(ColumnExchange<T>& exchange, const TilePlace& tile,
                                                   const BlockOutput& out) {
  const int col = threadIdx.x;
  if (col >= TileConfig::kTile) return;
  uint32_t raw = 0u;
#pragma unroll
  for (int w = 0; w < ColumnExchange<T>::kWarps; ++w) {
    raw = max(raw,
              static_cast<uint32_t>(reinterpret_cast<const typename Words<T>::Raw*>(exchange.word[w])[col]));
  }
  const float scale = block_scale<T, F>(raw, out.rule);
  exchange.scale[col] = scale;
  store_line_scale(out.col_scale, tile.row / TileConfig::kTile, tile.col + col, out.col_data.rows, scale);
}

// scaled(i, j, scale): the scaled value of row i and column j of the thread's patch.
template <typename F, typename T, typename Scaled>
__device__ __forceinline__ void stage_column_plane(const ColumnExchange<T>& exchange, ByteStage& stage,
                                                   const Scaled& scaled) {
  const int tx = threadIdx.x % 16;
  const int ty = threadIdx.x / 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 scales = reinterpret_cast<const float4*>(exchange.scale)[2 * tx + half];
    const float scale[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int j = 4 * half + k;
      const auto at = [&](int i) { return scaled(i, j, scale[k]); };
      stage.put(8 * tx + j, ty,
                make_uint2(encode_four<F>(at(0), at(1), at(2), at(3)), encode_four<F>(at(4), at(5), at(6), at(7))));
    }
  }
}

// Both planes of a tile. The stage is written after a barrier, when every thread has what it held before.
template <typename T, typename F>
__device__ __forceinline__ void quantize_tile(const Patch<T>& patch, const TilePlace& tile, bool inside,
                                              const BlockOutput& out, ColumnExchange<T>& exchange,
                                              ByteStage& stage) {
  const bool columns = out.col_data.data != nullptr;
  if (columns) {
    share_column_amax(patch, exchange);
    __syncthreads();
    make_column_scales<T, F>(exchange, tile, out);  // half of the threads, while the others go on
  }
  if (out.row_data.data != nullptr) write_row_plane<T, F>(patch, tile, inside, out);
  if (!columns) return;
  __syncthreads();
  stage_column_plane<F>(exchange, stage, [&](int i, int j, float scale) { return patch.value(i, j) * scale; });
  __syncthreads();
  stage.template flush<false>(out.col_data, tile.col, tile.row, inside);
}

}  // namespace
}  // namespace cuda
}  // namespace te_dist
