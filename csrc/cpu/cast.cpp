// Per-tensor scaling: the amax, and the cast with a scale given or derived from an amax.
#include "../numerics/scale.h"
#include "tile.h"
#include "transpose.h"

TED_BEGIN_VARIANT
namespace {

constexpr int64_t kRun = 16384;  // elements of one task of an elementwise kernel
constexpr int64_t kTile = 128;

uint32_t tensor_magnitude(const Input& input, Lane lane) {
  const Input x = flattened(input);
  const int64_t runs = ceil_div(x.cols, kRun);
  Maxima result{};
  with_float(x.dtype, [&](auto element) {
    using T = decltype(element);
    result = max_over_tasks(x.rows * runs, x.rows * x.cols, lane, [&](int64_t task) {
      const int64_t col = task % runs * kRun;
      const T* data = row_of<T>(x, task / runs) + col;
      return Maxima{bits_of(Magnitude<T>::widen(largest_magnitude(data, smaller(kRun, x.cols - col)))), 0u};
    });
  });
  return result.row;
}

template <typename F, typename T>
void cast_rows(const Input& input, float scale, uint8_t* row, Lane lane) {
  const Input x = flattened(input);
  for_each_tile(x.rows, x.cols, 1, kRun, lane, [&](int64_t m, int64_t k, int64_t, int64_t width) {
    encode_uniform<F>(row_of<T>(x, m) + k, width, scale, row + m * x.cols + k);
  });
}

template <typename F, typename T>
void cast_tile(const Input& input, float scale, uint8_t* row, uint8_t* col, int64_t m, int64_t k,
               int64_t height, int64_t width) {
  alignas(64) T padded[kTile][kTile];
  alignas(64) uint8_t codes[kTile][kTile];
  const TileRows<T> x = load_tile(input, m, k, height, width, padded);
  for (int64_t r = 0; r < height; ++r) {
    prefetch_next_tile<kTile>(x[r]);
    encode_uniform<F>(x[r], kTile, scale, codes[r]);
    if (row != nullptr)
      __builtin_memcpy(row + (m + r) * input.cols + k, codes[r], static_cast<size_t>(width));
  }
  transpose_tile(codes[0], kTile, height, width, col + k * input.rows + m, input.rows);
}

void cast_with(const Input& x, float scale, Fp8 format, uint8_t* row, uint8_t* col, Lane lane) {
  with_types(x.dtype, format, [&](auto element, auto fp8) {
    using T = decltype(element);
    using F = decltype(fp8);
    if (col == nullptr && row != nullptr) cast_rows<F, T>(x, scale, row, lane);
    if (col == nullptr) return;
    for_each_tile(x.rows, x.cols, kTile, kTile, lane,
                  [&](int64_t m, int64_t k, int64_t height, int64_t width) {
                    cast_tile<F, T>(x, scale, row, col, m, k, height, width);
                  });
  });
}

}  // namespace

void amax(const Source& x, float* amax, bool accumulate, const float* noop, Lane lane) {
  if (skipped(noop)) return;
  const uint32_t found = tensor_magnitude(x, lane);
  const uint32_t before = accumulate ? bits_of(*amax) & kAbsMask : 0u;
  *amax = amax_of_bits(larger(found, before));
}

void cast_scaled(const Source& x, const float* scale, Fp8 format, uint8_t* row, uint8_t* col, float* scale_inv,
                 float* seen, const float* noop, Lane lane) {
  if (skipped(noop)) return;
  const float factor = *scale;
  if (seen != nullptr) amax(x, seen, true, nullptr, lane);  // a second read: caches and cores make it cheap here
  if (scale_inv != nullptr) *scale_inv = 1.0f / factor;
  cast_with(x, factor, format, row, col, lane);
}

void cast_current(const Source& x, const float* amax, float eps, bool power_of_2, Fp8 format, uint8_t* row,
                  uint8_t* col, float* scale_inv, const float* noop, Lane lane) {
  if (skipped(noop)) return;
  const float largest = format == Fp8::kE4M3 ? E4M3::max : E5M2::max;
  const float scale = scale_from_amax(*amax, largest, kFloatMax, ScaleRule{eps, power_of_2});
  cast_scaled(x, &scale, format, row, col, scale_inv, nullptr, nullptr, lane);
}

void quantize_current(const Source& x, float* seen, float eps, bool power_of_2, Fp8 format, uint8_t* row,
                      uint8_t* col, float* scale_inv, const float* noop, Lane lane) {
  if (skipped(noop)) return;
  amax(x, seen, false, nullptr, lane);
  cast_current(x, seen, eps, power_of_2, format, row, col, scale_inv, nullptr, lane);
}

TED_END_VARIANT
