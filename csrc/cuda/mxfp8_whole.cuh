// The tiles of 1x32 blocks that most tiles are: bf16, wholly inside of the matrix, planes whose rows are aligned. The
// same bytes as mxfp8.cuh makes of any tile, in half of the instructions.
#pragma once

#include "mxfp8.cuh"
#include "powers.cuh"

namespace te_dist {
namespace cuda {
namespace {

// Codes and powers of two blocks, whose magnitudes are in the halves of a word.
struct CodePair {
  uint32_t code[2];
  uint32_t powers;  // in the halves of a word

  template <typename F>
  static __device__ __forceinline__ CodePair of(uint32_t maxima) {
    CodePair result;
    result.code[0] = finite_code<F>(low_float(maxima));
    result.code[1] = finite_code<F>(high_float(maxima));
    result.powers = (254u * 0x10001u - (result.code[0] | (result.code[1] << 16))) << 7;
    if (!is_finite(maxima)) {
      result.powers = 0u;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float amax = float_of(k == 0 ? low_float(maxima) : high_float(maxima));
        const uint8_t code = e8m0_from_amax(amax, F::reciprocal_max);
        result.code[k] = code;
        result.powers |= bits_of(e8m0_encode_factor(code)) >> 16 << (16 * k);
      }
    }
    return result;
  }

  // Of block i of eight, of which four neighbouring lanes have two each.
  __device__ __forceinline__ uint32_t power_of_row(int i) const {
    const uint32_t pair = __shfl_sync(kFullWarp, powers, i / 2, 4);
    return i % 2 == 0 ? low_float(pair) : high_float(pair);
  }

 private:
  // e8m0_from_amax of a finite bf16, which a division by 448 leaves far from the largest codes.
  template <typename F>
  static __device__ __forceinline__ uint32_t finite_code(uint32_t amax_bits) {
    const uint32_t bits = bits_of(float_of(amax_bits) * F::reciprocal_max);
    return bits <= 0x400000u ? 0u : (bits + 0x7FFFFFu) >> 23;
  }
};

// The rows of a patch; encoded(i): row i. special: the warp has infinities or NaNs. kRowByRow: the compiler does not
// mix rows, which takes fewer registers.
template <typename F, bool kRowByRow, typename Encoded>
__device__ __forceinline__ void store_whole_patch(const Patch<bf16_t>& patch, const ByteMatrix& plane, bool special,
                                                  const TilePlace& tile, const MxPlace& at, const Encoded& encoded) {
  uint8_t* const corner = plane.data + (tile.row + at.row) * plane.cols + tile.col + at.col;
  uint8_t* to = corner;
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    store_bulk(reinterpret_cast<uint2*>(to), encoded(i));
    if (kRowByRow && special) saturate_infinities<F>(patch.word[i], to);
    to += plane.cols;
  }
  if constexpr (!kRowByRow) {
    if (!special) return;
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) saturate_infinities<F>(patch.word[i], corner + i * plane.cols);
  }
}

// write(place, codes): the scales of rows threadIdx.x % 4 * 2 of the patch and the next one.
template <typename F, bool kRowByRow, typename Shape, typename Write>
__device__ __forceinline__ void write_whole_rows(const Patch<bf16_t>& patch, const PatchMaxima& maxima, bool special,
                                                 const TilePlace& tile, const MxOutput& out, const Write& write) {
  const PowerScaler scaler;
  const MxPlace at = Shape::place();
  const CodePair mine = CodePair::of<F>(magnitudes(quad_maximum<1>(maxima.rows)));
  write(at, mine);
  store_whole_patch<F, kRowByRow>(patch, out.row_data, special, tile, at,
                       [&](int i) { return scaler.encode_eight<F>(patch.word[i], mine.power_of_row(i)); });
}

template <typename F, bool kRowByRow, typename Shape>
__device__ __forceinline__ void write_whole_columns(const Patch<bf16_t>& patch, const PatchMaxima& maxima, bool special,
                                                    const TilePlace& tile, const MxOutput& out,
                                                    MxScales<Shape>& scales) {
  const PowerScaler scaler;
  const MxPlace at = Shape::place();
  const CodePair mine = CodePair::of<F>(magnitudes(quad_maximum<8>(maxima.cols)));
  auto* code = reinterpret_cast<uint16_t*>(&scales.col[at.row / MxConfig::kBlock][at.col + threadIdx.x / 8 % 4 * 2]);
  *code = static_cast<uint16_t>(mine.code[0] | (mine.code[1] << 8));
  uint32_t power[TileConfig::kPatch];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t pair = __shfl_sync(kFullWarp, mine.powers, static_cast<int>(threadIdx.x % 8u) | (8 * w));
    power[2 * w] = low_float(pair);
    power[2 * w + 1] = high_float(pair);
  }
  store_whole_patch<F, kRowByRow>(patch, out.col_data, special, tile, at,
                       [&](int i) { return scaler.encode_eight<F>(patch.word[i], power); });
}

// Both planes of a tile for which out.whole holds.
template <typename F, bool kRowByRow = false, typename Shape>
__device__ __forceinline__ void quantize_whole_tile(const Patch<bf16_t>& patch, const TilePlace& tile,
                                                    const MxOutput& out, MxScales<Shape>& scales) {
  PatchMaxima maxima;
  maxima.of_rows(patch);
  const bool special = __any_sync(kFullWarp, !all_finite(maxima.rows));
  if (out.row_data.data != nullptr) {
    write_whole_rows<F, kRowByRow, Shape>(
        patch, maxima, special, tile, out, [&](const MxPlace& at, const CodePair& mine) {
          uint8_t* code = &scales.row[at.row + threadIdx.x % 4 * 2][at.col / MxConfig::kBlock];
          code[0] = static_cast<uint8_t>(mine.code[0]);
          code[Shape::kCols / MxConfig::kBlock] = static_cast<uint8_t>(mine.code[1]);
        });
  }
  if (out.col_data.data != nullptr) {
    maxima.of_columns(patch);
    write_whole_columns<F, kRowByRow>(patch, maxima, special, tile, out, scales);
  }
  __syncthreads();
  flush_scales(scales, tile, out);
}

// The rows alone of such a square tile. A warp has two neighbouring blocks of 32 rows, and each lane writes the scales
// of one row, so that no thread waits for another warp's.
template <typename F, bool kRowByRow = false>
__device__ __forceinline__ void quantize_whole_rows(const Patch<bf16_t>& patch, const TilePlace& tile,
                                                    const MxOutput& out) {
  PatchMaxima maxima;
  maxima.of_rows(patch);
  const bool special = __any_sync(kFullWarp, !all_finite(maxima.rows));
  write_whole_rows<F, kRowByRow, MxSquare>(
      patch, maxima, special, tile, out, [&](const MxPlace& at, const CodePair& mine) {
        const bool right = (threadIdx.x & 4u) != 0u;  // the lane has the right one of two blocks, and the second row
        const uint32_t other = __shfl_xor_sync(kFullWarp, right ? mine.code[0] : mine.code[1], 4);
        const uint32_t codes = right ? other | mine.code[1] << 8 : mine.code[0] | other << 8;
        const int64_t row = tile.row + at.row + static_cast<int>(threadIdx.x % 4 * 2) + (right ? 1 : 0);
        const int64_t block = (tile.col + at.col) / (2 * MxConfig::kBlock) * 2;
        store_scale_pair(out.row_scale + row * out.row_pitch + block, codes);
      });
}

}  // namespace
}  // namespace cuda
}  // namespace te_dist
