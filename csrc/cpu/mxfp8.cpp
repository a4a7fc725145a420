// MXFP8: an E8M0 scale for every 32 elements, along K for the row plane and along M for the column plane, or
// one for 32x32 that both planes repeat. Neither plane is transposed.
#include "../numerics/e8m0.h"
#include "tile.h"

TED_BEGIN_VARIANT
namespace {

constexpr int64_t kBlock = 32;
constexpr int64_t kWidth = 512;  // columns of a tile: 32 rows of it fit the first-level cache
constexpr int64_t kBlocks = kWidth / kBlock;

struct MxJob {
  Input x;
  uint8_t* row;
  uint8_t* row_scale;
  uint8_t* col;
  uint8_t* col_scale;
  int64_t row_pitch;  // of the scales
  int64_t col_pitch;
};

// All kCount of them, whatever the width: a constant count vectorises without a remainder.
template <typename F, typename T, int64_t kCount>
TED_FN void scales_of(const MagnitudeOf<T> (&magnitude)[kCount], uint8_t (&code)[kCount],
                      float (&factor)[kCount]) {
  for (int64_t i = 0; i < kCount; ++i) {
    code[i] = e8m0_from_amax(Magnitude<T>::widen(magnitude[i]), F::reciprocal_max);
    factor[i] = e8m0_encode_factor(code[i]);
  }
}

template <typename F, typename T>
TED_FN void encode_blocks(const T* x, const float (&factor)[kBlocks], uint8_t* out) {
  for (int64_t b = 0; b < kBlocks; ++b)
    encode_uniform<F>(x + b * kBlock, kBlock, factor[b], out + b * kBlock);
}

template <typename F, typename T>
void rows_of_tile(const MxJob& job, TileRows<T> x, int64_t m, int64_t k, int64_t height, int64_t width) {
  const int64_t blocks = ceil_div(width, kBlock);
  for (int64_t r = 0; r < height; ++r) {
    alignas(64) MagnitudeOf<T> magnitude[kBlocks];
    alignas(64) uint8_t code[kBlocks];
    alignas(64) float factor[kBlocks];
    prefetch_next_tile<kWidth>(x[r]);
    block_magnitudes<kBlock, kWidth>(x[r], magnitude);
    scales_of<F, T>(magnitude, code, factor);
    __builtin_memcpy(job.row_scale + (m + r) * job.row_pitch + k / kBlock, code, blocks);
    store_row<kWidth>(job.row + (m + r) * job.x.cols + k, width,
                      [&](uint8_t* out) { encode_blocks<F>(x[r], factor, out); });
  }
}

template <typename F, typename T>
void columns_of_tile(const MxJob& job, TileRows<T> x, int64_t m, int64_t k, int64_t height, int64_t width) {
  alignas(64) MagnitudeOf<T> magnitude[kWidth] = {};
  alignas(64) uint8_t code[kWidth];
  alignas(64) float factor[kWidth];
  for (int64_t r = 0; r < height; ++r) {
    prefetch_next_tile<kWidth>(x[r]);
    raise_magnitudes(x[r], kWidth, magnitude);
  }
  scales_of<F, T>(magnitude, code, factor);
  __builtin_memcpy(job.col_scale + m / kBlock * job.col_pitch + k, code, width);
  for (int64_t r = 0; r < height; ++r) {
    store_row<kWidth>(job.col + (m + r) * job.x.cols + k, width,
                      [&](uint8_t* out) { encode_each<F>(x[r], kWidth, factor, out); });
  }
}

template <typename F, typename T>
void square_tile(const MxJob& job, TileRows<T> x, int64_t m, int64_t k, int64_t height, int64_t width) {
  const int64_t blocks = ceil_div(width, kBlock);
  alignas(64) MagnitudeOf<T> columns[kWidth] = {};
  alignas(64) MagnitudeOf<T> magnitude[kBlocks];
  alignas(64) uint8_t code[kBlocks];
  alignas(64) float factor[kBlocks];
  for (int64_t r = 0; r < height; ++r) {
    prefetch_next_tile<kWidth>(x[r]);
    raise_magnitudes(x[r], kWidth, columns);
  }
  maxima_of_neighbours<kBlock, kWidth>(columns, magnitude);
  scales_of<F, T>(magnitude, code, factor);
  for (int64_t r = 0; r < height; ++r) {
    alignas(64) uint8_t codes[kWidth];
    encode_blocks<F>(x[r], factor, codes);
    const int64_t at = (m + r) * job.x.cols + k;
    if (job.col != nullptr) __builtin_memcpy(job.col + at, codes, width);
    if (job.row == nullptr) continue;
    __builtin_memcpy(job.row + at, codes, width);
    __builtin_memcpy(job.row_scale + (m + r) * job.row_pitch + k / kBlock, code, blocks);
  }
  if (job.col == nullptr) return;
  uint8_t* scales = job.col_scale + m / kBlock * job.col_pitch + k;
  for (int64_t c = 0; c < width; ++c) scales[c] = code[c / kBlock];
}

}  // namespace

void quantize_mxfp8(const Source& x, bool two_d, Fp8 format, const Planes& out, const float* noop, Lane lane) {
  if (skipped(noop)) return;
  const int64_t down = ceil_div(x.rows, kBlock);
  const int64_t across = ceil_div(x.cols, kBlock);
  const MxJob job{x,
                  out.row_data,
                  static_cast<uint8_t*>(out.row_scale),
                  out.col_data,
                  static_cast<uint8_t*>(out.col_scale),
                  round_up(across, 4),
                  round_up(x.cols, 128)};
  if (job.row == nullptr && job.col == nullptr) return;
  clear_padding(job.row_scale, round_up(x.rows, 128), job.row_pitch, x.rows, across);
  clear_padding(job.col_scale, round_up(down, 4), job.col_pitch, down, x.cols);
  with_types(x.dtype, format, [&](auto element, auto fp8) {
    using T = decltype(element);
    using F = decltype(fp8);
    for_each_tile(x.rows, x.cols, kBlock, kWidth, lane,
                  [&](int64_t m, int64_t k, int64_t height, int64_t width) {
                    alignas(64) T padded[kBlock][kWidth];
                    const TileRows<T> rows = load_tile(x, m, k, height, width, padded);
                    if (two_d) return square_tile<F, T>(job, rows, m, k, height, width);
                    if (job.row != nullptr) rows_of_tile<F, T>(job, rows, m, k, height, width);
                    if (job.col != nullptr) columns_of_tile<F, T>(job, rows, m, k, height, width);
                  });
  });
}

TED_END_VARIANT
