// From quantized planes back to floats. A transposed plane is turned tile by tile while it is still bytes.
#include "../numerics/e8m0.h"
#include "../numerics/hadamard.h"
#include "../numerics/nvfp4.h"
#include "transpose.h"
#include "vector.h"

TED_BEGIN_VARIANT
namespace {

constexpr int64_t kTile = 128;

// Bytes [height, width] of a plane, starting at `source`, into tile[width][height].
void load_transposed(const uint8_t* source, int64_t pitch, int64_t height, int64_t width,
                     uint8_t (*tile)[kTile]) {
  alignas(64) uint8_t copy[kTile][kTile];
  for (int64_t i = 0; i < height; ++i) __builtin_memcpy(copy[i], source + i * pitch, width);
  transpose_tile(copy[0], kTile, height, width, tile[0], kTile);
}

// body(row, col, width, bytes) for every run of [M, K] within a tile, whichever plane the bytes come from.
template <typename Body>
void for_each_segment(const uint8_t* data, bool columnwise, const Output& out, Lane lane, const Body& body) {
  if (!columnwise) {
    // No tiles: a row is read from end to end.
    for_each_task(out.rows, out.rows * out.cols, lane, [&](int64_t m) {
      for (int64_t k = 0; k < out.cols; k += kTile) {
        body(m, k, smaller(kTile, out.cols - k), data + m * out.cols + k);
      }
    });
    return;
  }
  for_each_tile(out.rows, out.cols, kTile, kTile, lane,
                [&](int64_t m, int64_t k, int64_t height, int64_t width) {
                  alignas(64) uint8_t tile[kTile][kTile];
                  load_transposed(data + k * out.rows + m, out.rows, width, height, tile);
                  for (int64_t r = 0; r < height; ++r) body(m + r, k, width, tile[r]);
                });
}

template <typename T>
T* at(const Output& out, int64_t row, int64_t col) {
  return static_cast<T*>(out.data) + row * out.cols + col;
}

struct Nvfp4Source {
  const uint8_t* data;
  const uint8_t* scale;
  int64_t scale_pitch;
  float amax;
  bool hadamard;
  uint32_t signs;
};

// One value per block -> one per element, for the `width` elements of a segment.
template <int64_t kBlock, typename Decode>
TED_FN void spread(int64_t width, const Decode& decode, float (&each)[kTile]) {
  for (int64_t b = 0; b < ceil_div(width, kBlock); ++b) {
    const float value = decode(b);
    for (int64_t i = 0; i < kBlock; ++i) each[b * kBlock + i] = value;
  }
}

template <typename T>
void nvfp4_row(const Nvfp4Source& source, const Output& out, int64_t row, int64_t col, int64_t width) {
  const uint8_t* __restrict data = source.data + (row * out.cols + col) / 2;
  T* __restrict target = at<T>(out, row, col);
  alignas(64) float scale[kTile];
  alignas(64) uint8_t codes[kTile];
  const uint8_t* scales = source.scale + row * source.scale_pitch + col / kNvfp4Block;
  spread<kNvfp4Block>(width, [&](int64_t b) { return decode_fp8<E4M3>(scales[b]); }, scale);
  for (int64_t i = 0; i < width / 2; ++i) {
    codes[2 * i] = data[i] & 0x0Fu;
    codes[2 * i + 1] = data[i] >> 4;
  }
  const float amax = source.amax;
  for (int64_t i = 0; i < width; ++i) target[i] = from_float<T>(nvfp4_decode(codes[i], scale[i], amax));
}

void untransform_columns(float (&v)[kNvfp4Block][kTile], uint32_t signs) {
  for (int64_t c = 0; c < kTile; ++c) {
    float column[kNvfp4Block];
    TED_UNROLL
    for (int64_t r = 0; r < kNvfp4Block; ++r) column[r] = v[r][c];
    hadamard16_inverse(column, signs);
    TED_UNROLL
    for (int64_t r = 0; r < kNvfp4Block; ++r) v[r][c] = column[r];
  }
}

// The 16 rows of [M, K] from m on, out of 8 rows of byte pairs.
template <typename T>
void nvfp4_strip(const Nvfp4Source& source, const Output& out, int64_t m, int64_t k, int64_t width,
                 const uint8_t (*pairs)[kTile]) {
  alignas(64) float v[kNvfp4Block][kTile];
  alignas(64) float scale[kTile];
  if (width < kTile) __builtin_memset(v, 0, sizeof(v));
  for (int64_t c = 0; c < width; ++c) {
    scale[c] = decode_fp8<E4M3>(source.scale[(k + c) * source.scale_pitch + m / kNvfp4Block]);
  }
  const int64_t height = smaller(kNvfp4Block, out.rows - m);
  const float amax = source.amax;
  for (int64_t r = 0; r < height; ++r) {
    const int shift = r % 2 == 0 ? 0 : 4;
    const uint8_t* __restrict codes = pairs[r / 2];
    for (int64_t c = 0; c < width; ++c) {
      v[r][c] = nvfp4_decode((codes[c] >> shift) & 0x0Fu, scale[c], amax);
    }
  }
  if (source.hadamard) untransform_columns(v, source.signs);
  for (int64_t r = 0; r < height; ++r) {
    T* __restrict target = at<T>(out, m + r, k);
    for (int64_t c = 0; c < width; ++c) target[c] = from_float<T>(v[r][c]);
  }
}

template <typename T>
void nvfp4_columns(const Nvfp4Source& source, const Output& out, Lane lane) {
  for_each_tile(out.rows, out.cols, kTile, kTile, lane,
                [&](int64_t m, int64_t k, int64_t height, int64_t width) {
                  alignas(64) uint8_t pairs[kTile][kTile];
                  const int64_t pitch = out.rows / 2;
                  load_transposed(source.data + k * pitch + m / 2, pitch, width, height / 2, pairs);
                  for (int64_t r = 0; r < height; r += kNvfp4Block)
                    nvfp4_strip<T>(source, out, m + r, k, width, pairs + r / 2);
                });
}

}  // namespace

void dequantize_tensor(const uint8_t* data, bool columnwise, Fp8 format, const float* scale_inv,
                       const Output& out, Lane lane) {
  const float scale = *scale_inv;
  with_types(out.dtype, format, [&](auto element, auto fp8) {
    using T = decltype(element);
    using F = decltype(fp8);
    for_each_segment(data, columnwise, out, lane,
                     [&](int64_t m, int64_t k, int64_t width, const uint8_t* codes) {
                       decode_uniform<F>(codes, width, scale, at<T>(out, m, k));
                     });
  });
}

void dequantize_block(const uint8_t* data, const float* scale, bool columnwise, int block_dim, Fp8 format,
                      const Output& out, Lane lane) {
  const int64_t plane_rows = columnwise ? out.cols : out.rows;
  const int64_t plane_cols = columnwise ? out.rows : out.cols;
  const int64_t pitch = round_up(block_dim == 1 ? plane_rows : ceil_div(plane_cols, kTile), 4);
  with_types(out.dtype, format, [&](auto element, auto fp8) {
    using T = decltype(element);
    using F = decltype(fp8);
    for_each_segment(data, columnwise, out, lane,
                     [&](int64_t m, int64_t k, int64_t width, const uint8_t* codes) {
                       T* target = at<T>(out, m, k);
                       if (block_dim == 1 && columnwise) {
                         return decode_each<F>(codes, width, scale + m / kTile * pitch + k, target);
                       }
                       const int64_t plane_row = columnwise ? k : m;
                       const int64_t plane_col = columnwise ? m : k;
                       const int64_t index = block_dim == 1 ? plane_col / kTile * pitch + plane_row
                                                            : plane_row / kTile * pitch + plane_col / kTile;
                       decode_uniform<F>(codes, width, scale[index], target);
                     });
  });
}

void dequantize_mxfp8(const uint8_t* data, const uint8_t* scale, bool columnwise, Fp8 format,
                      const Output& out, Lane lane) {
  const int64_t pitch = columnwise ? round_up(out.cols, 128) : round_up(ceil_div(out.cols, 32), 4);
  with_types(out.dtype, format, [&](auto element, auto fp8) {
    using T = decltype(element);
    using F = decltype(fp8);
    // Neither plane is transposed.
    for_each_segment(data, false, out, lane, [&](int64_t m, int64_t k, int64_t width, const uint8_t* codes) {
      alignas(64) float factor[kTile];
      const uint8_t* from = columnwise ? scale + m / 32 * pitch + k : scale + m * pitch + k / 32;
      if (columnwise) {
        for (int64_t i = 0; i < width; ++i) factor[i] = decode_e8m0(from[i]);
      } else {
        spread<32>(width, [&](int64_t b) { return decode_e8m0(from[b]); }, factor);
      }
      decode_each<F>(codes, width, factor, at<T>(out, m, k));
    });
  });
}

void dequantize_nvfp4(const uint8_t* data, const uint8_t* scale, const float* amax, bool columnwise,
                      const Nvfp4Options& options, const Output& out, Lane lane) {
  const int64_t inner = columnwise ? out.rows : out.cols;
  const Nvfp4Source source{
      data, scale, round_up(ceil_div(inner, kNvfp4Block), 4), *amax, options.hadamard, options.signs};
  with_float(out.dtype, [&](auto element) {
    using T = decltype(element);
    if (columnwise) return nvfp4_columns<T>(source, out, lane);
    for_each_segment(data, false, out, lane, [&](int64_t m, int64_t k, int64_t width, const uint8_t*) {
      nvfp4_row<T>(source, out, m, k, width);
    });
  });
}

TED_END_VARIANT
