// The tiles of 1x128 blocks that most tiles are: bf16, wholly inside of the matrix, planes whose rows are aligned, and
// scales that are powers of two. The same bytes as block_1d.cuh makes of any tile, in half of the instructions.
#pragma once

#include "block_1d.cuh"
#include "powers.cuh"

namespace te_dist {
namespace cuda {
namespace {

// The scales of eight blocks of 128, of which 16 neighbouring lanes have eight values each. maxima: of those, two
// blocks in a word. A lane ends with that of block block_of_lane().
template <typename F>
__device__ __forceinline__ uint32_t power_of_lane(const uint32_t (&maxima)[4], uint32_t eps_bits) {
  uint32_t two = quad_maximum<1>(maxima);
  two = larger_pair(two, __shfl_xor_sync(kFullWarp, two, 4));
  two = magnitudes(larger_pair(two, __shfl_xor_sync(kFullWarp, two, 8)));
  return power_from_amax<F>((threadIdx.x & 4u) != 0u ? high_float(two) : low_float(two), eps_bits);
}

__device__ __forceinline__ int block_of_lane() {
  return static_cast<int>(threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2);
}

// That of block i, out of power_of_lane's.
__device__ __forceinline__ uint32_t power_of_block(uint32_t mine, int i) {
  return __shfl_sync(kFullWarp, mine, i / 2 + i % 2 * 4, 16);
}

template <typename F>
__device__ __forceinline__ void write_whole_rows(const Patch<bf16_t>& patch, const PatchMaxima& maxima,
                                                 const PowerScaler& scaler, const TilePlace& tile,
                                                 const BlockOutput& out) {
  const uint32_t power = power_of_lane<F>(maxima.rows, out.eps_bits);
  const int lane = static_cast<int>(threadIdx.x % 16);
  const int64_t row = tile.row + threadIdx.x / 16 * 8;
  if (lane < 8) {
    const int64_t at = static_cast<int64_t>(tile.col / TileConfig::kTile) * out.row_pitch + row;
    out.row_scale[at + block_of_lane()] = inverse_of_power(power);
  }
  uint8_t* to = out.row_data.data + row * out.row_data.cols + tile.col + lane * 8;
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    const uint32_t row_power = power_of_block(power, i);
    store_bulk(reinterpret_cast<uint2*>(to), scaler.encode_eight<F>(patch.word[i], row_power));
    to += out.row_data.cols;
  }
}

__device__ __forceinline__ void share_whole_column_amax(PatchMaxima& maxima, ColumnExchange<bf16_t>& exchange) {
  uint32_t word[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    word[w] = magnitudes(larger_pair(maxima.cols[w], __shfl_xor_sync(kFullWarp, maxima.cols[w], 16)));
  }
  if ((threadIdx.x & 16u) != 0u) return;
  auto* to = reinterpret_cast<uint4*>(&exchange.word[threadIdx.x / 32][threadIdx.x % 16 * 4]);
  *to = make_uint4(word[0], word[1], word[2], word[3]);
}

template <typename F>
__device__ __forceinline__ void make_whole_column_scales(ColumnExchange<bf16_t>& exchange, const TilePlace& tile,
                                                         const BlockOutput& out) {
  const int col = static_cast<int>(threadIdx.x);
  if (col >= TileConfig::kTile) return;
  const auto at = [&](int w) {
    return static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(exchange.word[w])[col]);
  };
  const uint32_t most = __vimax3_u32(__vimax3_u32(at(0), at(1), at(2)), at(3), at(4));
  const uint32_t raw = max(__vimax3_u32(most, at(5), at(6)), at(7));
  const uint32_t power = power_from_amax<F>(raw << 16, out.eps_bits);
  exchange.scale[col] = float_of(power);
  out.col_scale[static_cast<int64_t>(tile.row / TileConfig::kTile) * out.col_pitch + tile.col + col] =
      inverse_of_power(power);
}

// Both planes of a tile for which out.whole holds. The stage is written after a barrier, when every thread has what it
// held before; behind the tile's last barrier are only reads of it.
template <typename F>
__device__ __forceinline__ void quantize_whole_tile(Patch<bf16_t> patch, const TilePlace& tile, const BlockOutput& out,
                                                    ColumnExchange<bf16_t>& exchange, ByteStage& stage) {
  const bool columns = out.col_data.data != nullptr;
  const PowerScaler scaler;
  PatchMaxima maxima;
  if (columns) {
    maxima.of_columns(patch);
    share_whole_column_amax(maxima, exchange);
    __syncthreads();
    make_whole_column_scales<F>(exchange, tile, out);  // half of the threads, while the others go on
  }
  maxima.of_rows(patch);
  if (__any_sync(kFullWarp, !all_finite(maxima.rows))) {
    // PowerScaler is not for infinities. The scale of their blocks is 1: the largest finite value saturates, too.
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) {
#pragma unroll
      for (int w = 0; w < 4; ++w) patch.word[i][w] = bounded_pair(patch.word[i][w]);
    }
  }
  if (out.row_data.data != nullptr) write_whole_rows<F>(patch, maxima, scaler, tile, out);
  if (!columns) return;
  __syncthreads();
  stage_column_plane<F>(exchange, stage, [&](int i, int j, float power) {
    return scaler.scaled(patch.word[i][j / 2], j % 2, bits_of(power));
  });
  __syncthreads();
  stage.template flush<true>(out.col_data, tile.col, tile.row, true);
}

}  // namespace
}  // namespace cuda
}  // namespace te_dist
