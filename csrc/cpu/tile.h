// Tiles of the input and of its row plane. Tiles always have their full width: at the right edge of the
// tensor they are copied into a buffer and padded with zeros, so that every inner loop has a constant length.
#pragma once

#include "vector.h"

TED_BEGIN_VARIANT
namespace {

template <typename T>
struct TileRows {
  const T* data;
  int64_t pitch;
  const T* operator[](int64_t r) const { return data + r * pitch; }
};

template <int64_t kRows, int64_t kWidth, typename T>
TED_FN TileRows<T> load_tile(const Input& x, int64_t m, int64_t k, int64_t height, int64_t width,
                             T (&padded)[kRows][kWidth]) {
  const T* data = row_of<T>(x, m) + k;
  if (width == kWidth) return TileRows<T>{data, x.stride};
  for (int64_t r = 0; r < height; ++r) {
    __builtin_memset(padded[r], 0, sizeof(padded[r]));
    __builtin_memcpy(padded[r], data + r * x.stride, static_cast<size_t>(width) * sizeof(T));
  }
  return TileRows<T>{padded[0], kWidth};
}

// The row's continuation in the next tile. A tile takes a few lines from each of many pages, which the
// hardware does not foresee; without this the loads are most of the time of a cast. (A prefetch past the end
// is harmless.)
template <int64_t kWidth, typename T>
TED_FN void prefetch_next_tile(const T* row) {
  const char* next = reinterpret_cast<const char*>(row) + kWidth * sizeof(T);
  TED_UNROLL
  for (int64_t i = 0; i < static_cast<int64_t>(kWidth * sizeof(T)); i += kLine) __builtin_prefetch(next + i);
}

// encode(out) writes kWidth codes: straight to their place, or through a buffer where the tensor is narrower.
template <int64_t kWidth, typename Encode>
TED_FN void store_row(uint8_t* place, int64_t width, const Encode& encode) {
  alignas(64) uint8_t buffer[kWidth];
  uint8_t* out = width == kWidth ? place : buffer;
  encode(out);
  if (out == buffer) __builtin_memcpy(place, buffer, static_cast<size_t>(width));
}

}  // namespace
TED_END_VARIANT
