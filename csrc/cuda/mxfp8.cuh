// MXFP8: E8M0 scales of 1x32 (or 32x32) blocks; row plane along K, column plane along M, neither transposed,
// both from one read. bf16 moves about 4 bytes an element for both planes.
//
// A warp holds 32 rows x 64 columns as 4 x 8 patches of 8 x 8, so blocks of both directions meet in shuffles.
// The block's 128 x 128 tile owns 128 x 4 row scales and 4 x 128 column scales, padding included.
#pragma once

#include "../numerics/e8m0.h"
#include "tile.cuh"

namespace te_dist {
namespace cuda {

struct MxOutput {
  ByteMatrix row_data;  // [M, K], null data: not asked for
  ByteMatrix col_data;  // [M, K]
  uint8_t* row_scale;
  uint8_t* col_scale;
  bool two_d;
  const float* noop;
};

void launch_mxfp8_made(const Source& x, Fp8 format, const MxOutput& out, Lane lane);

namespace {

struct MxConfig {
  static constexpr int kBlock = 32;
  static constexpr int kBlocks = TileConfig::kTile / kBlock;  // scales of a tile along a blocked dimension
};

struct MxScales {
  alignas(4) uint8_t row[TileConfig::kTile][MxConfig::kBlocks];
  alignas(4) uint8_t col[MxConfig::kBlocks][TileConfig::kTile];
};

// Where a thread's patch lies in the tile.
struct MxPlace {
  int row;
  int col;
};

__device__ __forceinline__ MxPlace mx_place() {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  return MxPlace{warp / 2 * 32 + lane / 8 * 8, warp % 2 * 64 + lane % 8 * 8};
}

__device__ __forceinline__ uint32_t max_with_lane(uint32_t raw, int distance) {
  return max(raw, __shfl_xor_sync(kFullWarp, raw, distance));
}

template <typename T, typename F>
__device__ __forceinline__ uint8_t code_of_raw(uint32_t raw) {
  return e8m0_from_amax(Words<T>::to_float_of_raw(raw), F::reciprocal_max);
}

// The one code of the 32x32 block that the patch belongs to.
template <typename T, typename F>
__device__ __forceinline__ uint8_t square_code(const Patch<T>& patch) {
  uint32_t word = patch.col_max(0);
#pragma unroll
  for (int w = 1; w < Patch<T>::kWords; ++w) word = Words<T>::max(word, patch.col_max(w));
  uint32_t raw = Words<T>::fold(word);
  raw = max_with_lane(max_with_lane(raw, 1), 2);
  return code_of_raw<T, F>(max_with_lane(max_with_lane(raw, 8), 16));
}

template <typename T, typename F>
__device__ __forceinline__ void write_row_plane(const Patch<T>& patch, const TilePlace& tile, bool inside,
                                                const MxOutput& out, uint8_t square, MxScales& scales) {
  const MxPlace at = mx_place();
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    uint8_t code = square;
    if (!out.two_d) {
      const uint32_t raw = Words<T>::fold(patch.row_max(i));
      code = code_of_raw<T, F>(max_with_lane(max_with_lane(raw, 1), 2));
    }
    store_patch_row(out.row_data, tile.row + at.row + i, tile.col + at.col, inside,
                    encode_patch_row<T, F>(patch, i, e8m0_encode_factor(code)));
    if (threadIdx.x % 4 == 0) {
      const bool padding =
          tile.row + at.row + i >= out.row_data.rows || tile.col + at.col >= out.row_data.cols;
      scales.row[at.row + i][at.col / MxConfig::kBlock] = padding ? 0 : code;
    }
  }
}

template <typename T, typename F>
__device__ __forceinline__ void column_codes(const Patch<T>& patch, uint8_t (&code)[TileConfig::kPatch]) {
  constexpr int kPer = Words<T>::per_word;
#pragma unroll
  for (int w = 0; w < Patch<T>::kWords; ++w) {
    uint32_t word = patch.col_max(w);
    word = Words<T>::max(word, __shfl_xor_sync(kFullWarp, word, 8));
    word = Words<T>::max(word, __shfl_xor_sync(kFullWarp, word, 16));
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      code[w * kPer + i] = e8m0_from_amax(Words<T>::element(word, i), F::reciprocal_max);
    }
  }
}

template <typename T, typename F>
__device__ __forceinline__ void write_column_plane(const Patch<T>& patch, const TilePlace& tile, bool inside,
                                                   const MxOutput& out, uint8_t square, MxScales& scales) {
  constexpr int kPatch = TileConfig::kPatch;
  const MxPlace at = mx_place();
  uint8_t code[kPatch];
  float factor[kPatch];
  if (out.two_d) {
#pragma unroll
    for (int j = 0; j < kPatch; ++j) code[j] = square;
  } else {
    column_codes<T, F>(patch, code);
  }
#pragma unroll
  for (int j = 0; j < kPatch; ++j) {
    factor[j] = e8m0_encode_factor(code[j]);
    if (threadIdx.x % 32 < 8) {
      const bool padding =
          tile.row + at.row >= out.col_data.rows || tile.col + at.col + j >= out.col_data.cols;
      scales.col[at.row / MxConfig::kBlock][at.col + j] = padding ? 0 : code[j];
    }
  }
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    const auto scaled = [&](int j) { return patch.value(i, j) * factor[j]; };
    store_patch_row(out.col_data, tile.row + at.row + i, tile.col + at.col, inside,
                    make_uint2(encode_four<F>(scaled(0), scaled(1), scaled(2), scaled(3)),
                               encode_four<F>(scaled(4), scaled(5), scaled(6), scaled(7))));
  }
}

// One word of scales per thread: the lower half of the block writes the row plane's, the upper half the
// column's.
__device__ __forceinline__ void flush_scales(const MxScales& scales, const TilePlace& tile,
                                             const MxOutput& out) {
  const int at = threadIdx.x % TileConfig::kTile;
  if (threadIdx.x < TileConfig::kTile) {
    if (out.row_data.data == nullptr) return;
    const int64_t pitch = round_up(ceil_div(out.row_data.cols, MxConfig::kBlock), 4);
    store_scale_word(out.row_scale + (tile.row + at) * pitch + tile.col / MxConfig::kBlock,
                     *reinterpret_cast<const uint32_t*>(scales.row[at]));
  } else {
    if (out.col_data.data == nullptr) return;
    const int64_t pitch = round_up(out.col_data.cols, TileConfig::kTile);
    store_scale_word(out.col_scale + (tile.row / MxConfig::kBlock + at / 32) * pitch + tile.col + at % 32 * 4,
                     *reinterpret_cast<const uint32_t*>(&scales.col[at / 32][at % 32 * 4]));
  }
}

// Both planes of a tile. The scales are written before its barrier and read behind it.
template <typename T, typename F>
__device__ __forceinline__ void quantize_tile(const Patch<T>& patch, const TilePlace& tile, bool inside,
                                              const MxOutput& out, MxScales& scales) {
  const uint8_t square = out.two_d ? square_code<T, F>(patch) : 0;
  if (out.row_data.data != nullptr) write_row_plane<T, F>(patch, tile, inside, out, square, scales);
  if (out.col_data.data != nullptr) write_column_plane<T, F>(patch, tile, inside, out, square, scales);
  __syncthreads();
  flush_scales(scales, tile, out);
}

}  // namespace
}  // namespace cuda
}  // namespace te_dist
