// MXFP8: E8M0 scales of 1x32 (or 32x32) blocks; row plane along K, column plane along M, neither transposed,
// both from one read. bf16 moves about 4 bytes an element for both planes.
//
// A warp holds 32 rows x 64 columns as 4 x 8 patches of 8 x 8, so blocks of both directions meet in shuffles.
// A block of threads' tile owns the scales of its rows and columns, padding included.
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
  bool whole;  // tiles inside of a bf16 matrix are mxfp8_whole.cuh's
  int64_t row_pitch;  // of the scales
  int64_t col_pitch;
};

struct Made;
void launch_mxfp8_made(const Source& x, Fp8 format, const MxOutput& out, Lane lane);
void launch_mxfp8_rows(const Made& x, bool make_stats, const MxOutput& out, Lane lane);
// false: this is made in another way.
bool launch_mxfp8_patches(const Made& x, Fp8 format, const MxOutput& out, Lane lane);

namespace {

struct MxConfig {
  static constexpr int kBlock = 32;
};

// Where a thread's patch lies in the tile.
struct MxPlace {
  int row;
  int col;
};

// The tiles of a block of threads. A warp holds 32 rows and 64 columns of either.
struct MxSquare {
  static constexpr int kRows = 128;
  static constexpr int kCols = 128;

  static __device__ __forceinline__ MxPlace place() {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    return MxPlace{warp / 2 * 32 + lane / 8 * 8, warp % 2 * 64 + lane % 8 * 8};
  }
};

// Longer pieces of rows: memory likes them better.
struct MxWide {
  static constexpr int kRows = 32;
  static constexpr int kCols = 512;

  static __device__ __forceinline__ MxPlace place() {
    const int lane = threadIdx.x % 32;
    return MxPlace{lane / 8 * 8, static_cast<int>(threadIdx.x) / 32 * 64 + lane % 8 * 8};
  }
};

// The scales of a tile, 128 words for each plane.
template <typename Shape>
struct MxScales {
  alignas(4) uint8_t row[Shape::kRows][Shape::kCols / MxConfig::kBlock];
  alignas(4) uint8_t col[Shape::kRows / MxConfig::kBlock][Shape::kCols];
};

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

// Maxima over the four lanes that differ in the bits kBit and 2 kBit of their numbers, of 4 kCount values each: a
// lane ends with kCount neighbours, the first ones where both bits are 0. Every step halves what a lane still cares
// about.
template <int kBit, int kCount, typename Max>
__device__ __forceinline__ void max_over_quad(const uint32_t (&all)[4 * kCount], uint32_t (&mine)[kCount],
                                              const Max& max_of) {
  const bool upper = (threadIdx.x & (2 * kBit)) != 0;
  const bool odd = (threadIdx.x & kBit) != 0;
  uint32_t half[2 * kCount];
#pragma unroll
  for (int k = 0; k < 2 * kCount; ++k) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, upper ? all[k] : all[2 * kCount + k], 2 * kBit);
    half[k] = max_of(upper ? all[2 * kCount + k] : all[k], other);
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, odd ? half[k] : half[kCount + k], kBit);
    mine[k] = max_of(odd ? half[kCount + k] : half[k], other);
  }
}

// A lane's two of eight codes (see max_over_quad), and their factors.
struct TwoCodes {
  uint32_t code[2];
  float factor[2];

  __device__ __forceinline__ TwoCodes(uint8_t first, uint8_t second) {
    code[0] = first;
    code[1] = second;
    factor[0] = e8m0_encode_factor(first);
    factor[1] = e8m0_encode_factor(second);
  }
  // The factor of value i of eight.
  template <int kBit>
  __device__ __forceinline__ float factor_of(int i) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return __shfl_sync(kFullWarp, factor[i % 2], (lane & ~(3 * kBit)) | (i / 2 * kBit));
  }
};

template <typename T, typename F>
__device__ __forceinline__ TwoCodes row_codes(const Patch<T>& patch) {
  uint32_t raw[8];
  uint32_t mine[2];
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) raw[i] = Words<T>::fold(patch.row_max(i));
  max_over_quad<1, 2>(raw, mine, [](uint32_t a, uint32_t b) { return max(a, b); });
  return TwoCodes(code_of_raw<T, F>(mine[0]), code_of_raw<T, F>(mine[1]));
}

template <typename T, typename F>
__device__ __forceinline__ TwoCodes column_codes(const Patch<T>& patch) {
  constexpr int kWords = Patch<T>::kWords;
  constexpr int kPer = Words<T>::per_word;
  uint32_t words[kWords];
  uint32_t mine[kWords / 4];
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = patch.col_max(w);
  max_over_quad<8, kWords / 4>(words, mine, [](uint32_t a, uint32_t b) { return Words<T>::max(a, b); });
  const auto code = [&](int i) {
    return e8m0_from_amax(Words<T>::element(mine[i / kPer], i % kPer), F::reciprocal_max);
  };
  return TwoCodes(code(0), code(1));
}

template <typename T, typename F>
__device__ __forceinline__ void write_row_plane(const Patch<T>& patch, const TilePlace& tile, bool inside,
                                                const MxOutput& out, uint8_t square, MxScales<MxSquare>& scales) {
  const MxPlace at = MxSquare::place();
  const TwoCodes codes = out.two_d ? TwoCodes(square, square) : row_codes<T, F>(patch);
  const int mine = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int block = at.col / MxConfig::kBlock;
    const bool padding = tile.row + at.row + mine + k >= out.row_data.rows ||
                         tile.col + block * MxConfig::kBlock >= out.row_data.cols;
    scales.row[at.row + mine + k][block] = inside || !padding ? static_cast<uint8_t>(codes.code[k]) : 0;
  }
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    store_patch_row<false>(out.row_data, tile.row + at.row + i, tile.col + at.col, inside,
                    encode_patch_row<T, F>(patch, i, codes.template factor_of<1>(i)));
  }
}

template <typename T, typename F>
__device__ __forceinline__ void write_column_plane(const Patch<T>& patch, const TilePlace& tile, bool inside,
                                                   const MxOutput& out, uint8_t square, MxScales<MxSquare>& scales) {
  constexpr int kPatch = TileConfig::kPatch;
  const MxPlace at = MxSquare::place();
  const TwoCodes codes = out.two_d ? TwoCodes(square, square) : column_codes<T, F>(patch);
  const int mine = static_cast<int>(threadIdx.x / 8 % 4) * 2;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int block = at.row / MxConfig::kBlock;
    const bool padding = tile.row + block * MxConfig::kBlock >= out.col_data.rows ||
                         tile.col + at.col + mine + k >= out.col_data.cols;
    scales.col[block][at.col + mine + k] = inside || !padding ? static_cast<uint8_t>(codes.code[k]) : 0;
  }
  float factor[kPatch];
#pragma unroll
  for (int j = 0; j < kPatch; ++j) factor[j] = codes.template factor_of<8>(j);
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    const auto scaled = [&](int j) { return patch.value(i, j) * factor[j]; };
    store_patch_row<false>(out.col_data, tile.row + at.row + i, tile.col + at.col, inside,
                    make_uint2(encode_four<F>(scaled(0), scaled(1), scaled(2), scaled(3)),
                               encode_four<F>(scaled(4), scaled(5), scaled(6), scaled(7))));
  }
}

// One word of scales per thread: the lower half of the block writes the row plane's, the upper half the
// column's.
template <typename Shape>
__device__ __forceinline__ void flush_scales(const MxScales<Shape>& scales, const TilePlace& tile,
                                             const MxOutput& out) {
  const int at = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x < 128) {
    if (out.row_data.data == nullptr) return;
    constexpr int kWords = Shape::kCols / MxConfig::kBlock / 4;  // of a row
    const int row = at / kWords;
    const int col = at % kWords * 4;
    store_scale_word(out.row_scale + (tile.row + row) * out.row_pitch + tile.col / MxConfig::kBlock + col,
                     *reinterpret_cast<const uint32_t*>(&scales.row[row][col]));
  } else {
    if (out.col_data.data == nullptr) return;
    constexpr int kWords = Shape::kCols / 4;
    const int row = at / kWords;
    const int col = at % kWords * 4;
    store_scale_word(out.col_scale + (tile.row / MxConfig::kBlock + row) * out.col_pitch + tile.col + col,
                     *reinterpret_cast<const uint32_t*>(&scales.col[row][col]));
  }
}

// Both planes of a tile. The scales are written before its barrier and read behind it.
template <typename T, typename F>
__device__ __forceinline__ void quantize_tile(const Patch<T>& patch, const TilePlace& tile, bool inside,
                                              const MxOutput& out, MxScales<MxSquare>& scales) {
  const uint8_t square = out.two_d ? square_code<T, F>(patch) : 0;
  if (out.row_data.data != nullptr) write_row_plane<T, F>(patch, tile, inside, out, square, scales);
  if (out.col_data.data != nullptr) write_column_plane<T, F>(patch, tile, inside, out, square, scales);
  __syncthreads();
  flush_scales(scales, tile, out);
}

}  // namespace
}  // namespace cuda
}  // namespace te_dist
