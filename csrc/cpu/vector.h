// The inner loops: short, branch-free and restrict-qualified, so that the compiler vectorises each of them.
#pragma once

#include "kernel.h"

TED_BEGIN_VARIANT
namespace {

// Magnitudes keep the width of the input while they are compared: twice as many fit a register for bf16 and
// fp16, and the integer order is the order of magnitudes with every NaN on top.
template <typename T>
struct Magnitude {
  using type = uint16_t;
  TED_FN uint16_t of(T value) { return value.bits & 0x7FFFu; }
  TED_FN float widen(uint16_t magnitude) { return amax_of_bits(magnitude_bits(T{magnitude})); }
};

template <>
struct Magnitude<float> {
  using type = uint32_t;
  TED_FN uint32_t of(float value) { return bits_of(value) & kAbsMask; }
  TED_FN float widen(uint32_t magnitude) { return amax_of_bits(magnitude); }
};

template <typename T>
using MagnitudeOf = typename Magnitude<T>::type;

template <typename M>
TED_FN M larger(M a, M b) {
  return a > b ? a : b;
}

template <typename T>
TED_FN MagnitudeOf<T> largest_magnitude(const T* __restrict x, int64_t n) {
  MagnitudeOf<T> result = 0;
  for (int64_t i = 0; i < n; ++i) result = larger(result, Magnitude<T>::of(x[i]));
  return result;
}

// result[b] <- the maximum of kBlock neighbours, for kCount values in all. Halving by pairs keeps the
// registers full where a loop per block would be too short to vectorise.
template <int kBlock, int kCount, typename M>
TED_FN void maxima_of_neighbours(const M* __restrict values, M* __restrict result) {
  if constexpr (kBlock == 2) {
    for (int i = 0; i < kCount / 2; ++i) result[i] = larger(values[2 * i], values[2 * i + 1]);
  } else {
    M half[kCount / 2];
    for (int i = 0; i < kCount / 2; ++i) half[i] = larger(values[2 * i], values[2 * i + 1]);
    maxima_of_neighbours<kBlock / 2, kCount / 2>(half, result);
  }
}

// One magnitude per block of kBlock along a row of kWidth elements.
template <int kBlock, int kWidth, typename T>
TED_FN void block_magnitudes(const T* __restrict x, MagnitudeOf<T>* __restrict result) {
  MagnitudeOf<T> magnitude[kWidth];
  for (int i = 0; i < kWidth; ++i) magnitude[i] = Magnitude<T>::of(x[i]);
  maxima_of_neighbours<kBlock, kWidth>(magnitude, result);
}

// result[i] <- max(result[i], |x[i]|): a step down the rows, for one amax per column.
template <typename T>
TED_FN void raise_magnitudes(const T* __restrict x, int64_t n, MagnitudeOf<T>* __restrict result) {
  for (int64_t i = 0; i < n; ++i) result[i] = larger(result[i], Magnitude<T>::of(x[i]));
}

template <typename F, typename T>
TED_FN void encode_uniform(const T* __restrict x, int64_t n, float scale, uint8_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = encode_fp8<F>(to_float(x[i]) * scale);
}

template <typename F, typename T>
TED_FN void encode_each(const T* __restrict x, int64_t n, const float* __restrict scale,
                        uint8_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = encode_fp8<F>(to_float(x[i]) * scale[i]);
}

template <typename F, typename T>
TED_FN void decode_uniform(const uint8_t* __restrict data, int64_t n, float scale, T* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = from_float<T>(decode_fp8<F>(data[i]) * scale);
}

template <typename F, typename T>
TED_FN void decode_each(const uint8_t* __restrict data, int64_t n, const float* __restrict scale,
                        T* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = from_float<T>(decode_fp8<F>(data[i]) * scale[i]);
}

}  // namespace
TED_END_VARIANT
