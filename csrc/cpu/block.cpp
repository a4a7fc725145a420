// Blockwise FP8: 1x128 tiles along K for the row plane and along M for the column plane, or 128x128 tiles for
// both.
#include "../numerics/scale.h"
#include "tile.h"
#include "transpose.h"

TED_BEGIN_VARIANT
namespace {

constexpr int64_t kBlock = 128;

struct BlockJob {
  Input x;
  ScaleRule rule;
  uint8_t* row;
  float* row_scale;
  uint8_t* col;
  float* col_scale;
  int64_t row_pitch;  // of the scales
  int64_t col_pitch;
};

template <typename F, typename T>
TED_FN void scales_of(const MagnitudeOf<T> (&magnitude)[kBlock], ScaleRule rule, float (&scale)[kBlock],
                      float (&inverse)[kBlock]) {
  for (int64_t i = 0; i < kBlock; ++i) {
    scale[i] = scale_from_amax(Magnitude<T>::widen(magnitude[i]), F::max, Largest<T>::value, rule);
    inverse[i] = 1.0f / scale[i];
  }
}

TED_FN uint8_t* row_place(const BlockJob& job, int64_t row, int64_t col) {
  return job.row + row * job.x.cols + col;
}

template <typename F, typename T>
void rows_of_tile(const BlockJob& job, TileRows<T> x, int64_t m, int64_t k, int64_t height, int64_t width) {
  alignas(64) MagnitudeOf<T> magnitude[kBlock] = {};
  alignas(64) float scale[kBlock];
  alignas(64) float inverse[kBlock];
  for (int64_t r = 0; r < height; ++r) {
    prefetch_next_tile<kBlock>(x[r]);
    magnitude[r] = largest_magnitude(x[r], kBlock);
  }
  scales_of<F, T>(magnitude, job.rule, scale, inverse);
  __builtin_memcpy(job.row_scale + k / kBlock * job.row_pitch + m, inverse, height * sizeof(float));
  for (int64_t r = 0; r < height; ++r) {
    store_row<kBlock>(row_place(job, m + r, k), width,
                      [&](uint8_t* out) { encode_uniform<F>(x[r], kBlock, scale[r], out); });
  }
}

template <typename F, typename T>
void columns_of_tile(const BlockJob& job, TileRows<T> x, int64_t m, int64_t k, int64_t height,
                     int64_t width) {
  alignas(64) uint8_t codes[kBlock][kBlock];
  alignas(64) MagnitudeOf<T> magnitude[kBlock] = {};
  alignas(64) float scale[kBlock];
  alignas(64) float inverse[kBlock];
  for (int64_t r = 0; r < height; ++r) {
    prefetch_next_tile<kBlock>(x[r]);
    raise_magnitudes(x[r], kBlock, magnitude);
  }
  scales_of<F, T>(magnitude, job.rule, scale, inverse);
  __builtin_memcpy(job.col_scale + m / kBlock * job.col_pitch + k, inverse, width * sizeof(float));
  for (int64_t r = 0; r < height; ++r) encode_each<F>(x[r], kBlock, scale, codes[r]);
  transpose_tile(codes[0], kBlock, height, width, job.col + k * job.x.rows + m, job.x.rows);
}

template <typename F, typename T>
void square_tile(const BlockJob& job, TileRows<T> x, int64_t m, int64_t k, int64_t height, int64_t width) {
  alignas(64) uint8_t codes[kBlock][kBlock];
  MagnitudeOf<T> magnitude = 0;
  for (int64_t r = 0; r < height; ++r) {
    prefetch_next_tile<kBlock>(x[r]);
    magnitude = larger(magnitude, largest_magnitude(x[r], kBlock));
  }
  const float scale = scale_from_amax(Magnitude<T>::widen(magnitude), F::max, Largest<T>::value, job.rule);
  for (int64_t r = 0; r < height; ++r) {
    encode_uniform<F>(x[r], kBlock, scale, codes[r]);
    if (job.row != nullptr) __builtin_memcpy(row_place(job, m + r, k), codes[r], width);
  }
  if (job.row != nullptr) job.row_scale[m / kBlock * job.row_pitch + k / kBlock] = 1.0f / scale;
  if (job.col == nullptr) return;
  job.col_scale[k / kBlock * job.col_pitch + m / kBlock] = 1.0f / scale;
  transpose_tile(codes[0], kBlock, height, width, job.col + k * job.x.rows + m, job.x.rows);
}

}  // namespace

void quantize_block(const Source& x, int block_dim, float eps, bool power_of_2, Fp8 format, const Planes& out,
                    const float* noop, Lane lane) {
  if (skipped(noop)) return;
  const int64_t down = ceil_div(x.rows, kBlock);
  const int64_t across = ceil_div(x.cols, kBlock);
  // The inner size of the stored scales: 1-D ones lie transposed, one per row (or column) of the tensor.
  const int64_t row_inner = block_dim == 1 ? x.rows : across;
  const int64_t col_inner = block_dim == 1 ? x.cols : down;
  const BlockJob job{x,
                     ScaleRule{eps, power_of_2},
                     out.row_data,
                     static_cast<float*>(out.row_scale),
                     out.col_data,
                     static_cast<float*>(out.col_scale),
                     round_up(row_inner, 4),
                     round_up(col_inner, 4)};
  const int64_t row_outer = block_dim == 1 ? across : down;
  const int64_t col_outer = block_dim == 1 ? down : across;
  constexpr int64_t bytes = sizeof(float);
  clear_padding(reinterpret_cast<uint8_t*>(job.row_scale), row_outer, job.row_pitch * bytes, row_outer,
                row_inner * bytes);
  clear_padding(reinterpret_cast<uint8_t*>(job.col_scale), col_outer, job.col_pitch * bytes, col_outer,
                col_inner * bytes);
  with_types(x.dtype, format, [&](auto element, auto fp8) {
    using T = decltype(element);
    using F = decltype(fp8);
    for_each_tile(x.rows, x.cols, kBlock, kBlock, lane,
                  [&](int64_t m, int64_t k, int64_t height, int64_t width) {
                    alignas(64) T padded[kBlock][kBlock];
                    const TileRows<T> rows = load_tile(x, m, k, height, width, padded);
                    if (block_dim == 2) return square_tile<F, T>(job, rows, m, k, height, width);
                    if (job.row != nullptr) rows_of_tile<F, T>(job, rows, m, k, height, width);
                    if (job.col != nullptr) columns_of_tile<F, T>(job, rows, m, k, height, width);
                  });
  });
}

TED_END_VARIANT
