// What NVFP4's amax and cast share: how a thread holds its part of the tensor, and its columns' transform.
//
// Both kernels are bound by instructions before they are bound by memory, so everything stays in registers: a
// thread holds 16 rows of 16 bytes, one load a row. Its columns are whole blocks of the column plane.
//
// bf16 is what training feeds these kernels, and what they are tuned for. Floats hold fp16 exactly, so both
// other types share one instantiation, which converts fp16 as it loads: the build is a third shorter for it.
#pragma once

#include <type_traits>

#include "../numerics/hadamard.h"
#include "../numerics/nvfp4.h"
#include "tile.cuh"

namespace te_dist {
namespace cuda {

constexpr int kBlock = kNvfp4Block;

// 16 rows of 16 bytes, or of fewer, as bf16 or as floats.
template <typename T, int kWords = 4>
struct NvPatch {
  static constexpr int kCols = 4 * kWords / static_cast<int>(sizeof(T));
  static constexpr int kSharers = kBlock / kCols;  // threads that hold a row's block
  uint32_t word[kBlock][kWords];
};

// ---------------------------------------------------------------------------------------------- inputs
struct NvWideInput {
  const void* data;
  int64_t rows;
  int64_t cols;
  int64_t stride;
  bool vector;  // every row starts on a boundary of four values
  bool half;    // fp16, else float
};

template <typename T>
using NvInput = std::conditional_t<sizeof(T) == 2, TileInput<bf16_t>, NvWideInput>;

inline TileInput<bf16_t> nv_input(Tag<bf16_t>, const Input& x) { return tile_input<bf16_t>(x); }

inline NvWideInput nv_input(Tag<float>, const Input& x) {
  const bool half = x.dtype == Float::kF16;
  const bool rows_aligned = x.rows <= 1 || x.stride % 4 == 0;
  return NvWideInput{x.data, x.rows, x.cols, x.stride, rows_aligned && aligned(x.data, half ? 8 : 16), half};
}

template <typename Body>
void dispatch_nv_patch(Float dtype, Body&& body) {
  if (dtype == Float::kBF16) return body(Tag<bf16_t>{});
  body(Tag<float>{});
}

__device__ __forceinline__ void load_words(const void* from, uint32_t (&word)[4]) {
  const uint4 v = load_bulk(static_cast<const uint4*>(from));
  word[0] = v.x;
  word[1] = v.y;
  word[2] = v.z;
  word[3] = v.w;
}

__device__ __forceinline__ void load_words(const void* from, uint32_t (&word)[2]) {
  const uint2 v = load_bulk(static_cast<const uint2*>(from));
  word[0] = v.x;
  word[1] = v.y;
}

// What lies outside the tensor is zero.
template <int kWords>
__device__ __forceinline__ void load_nv_patch(const TileInput<bf16_t>& x, int64_t row, int64_t col,
                                              NvPatch<bf16_t, kWords>& patch) {
  constexpr int kCols = NvPatch<bf16_t, kWords>::kCols;
  const bf16_t* from = x.data + row * x.stride + col;
  if (x.vector && row + kBlock <= x.rows && col + kCols <= x.cols) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) load_words(from + i * x.stride, patch.word[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const auto* raw = reinterpret_cast<const uint16_t*>(from + i * x.stride);
      uint32_t word = 0u;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int j = w * 2 + e;
        if (row + i < x.rows && col + j < x.cols) word |= Words<bf16_t>::place(raw[j], e);
      }
      patch.word[i][w] = word;
    }
  }
}

__device__ __forceinline__ void load_four(const float* from, uint32_t (&word)[4]) { load_words(from, word); }

__device__ __forceinline__ void load_four(const fp16_t* from, uint32_t (&word)[4]) {
  const uint2 v = load_bulk(reinterpret_cast<const uint2*>(from));
#pragma unroll
  for (int j = 0; j < 4; ++j) word[j] = bits_of(Words<fp16_t>::element(j < 2 ? v.x : v.y, j % 2));
}

template <typename S>
__device__ __forceinline__ void load_wide_patch(const NvWideInput& x, int64_t row, int64_t col,
                                                NvPatch<float>& patch) {
  constexpr int kCols = NvPatch<float>::kCols;
  const S* from = static_cast<const S*>(x.data) + row * x.stride + col;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kBlock), x.rows - row));
  const int cols = static_cast<int>(min(static_cast<int64_t>(kCols), x.cols - col));
  if (x.vector && rows == kBlock && cols == kCols) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) load_four(from + i * x.stride, patch.word[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      patch.word[i][j] = i < rows && j < cols ? bits_of(to_float(from[i * x.stride + j])) : 0u;
    }
  }
}

__device__ __forceinline__ void load_nv_patch(const NvWideInput& x, int64_t row, int64_t col,
                                              NvPatch<float>& patch) {
  if (x.half) {
    load_wide_patch<fp16_t>(x, row, col, patch);
  } else {
    load_wide_patch<float>(x, row, col, patch);
  }
}

// ---------------------------------------------------------------------------------------------- values
// A word of raw magnitudes: the maximum over kCount (even) words and `start`.
template <typename T, int kCount>
__device__ __forceinline__ uint32_t max_of_words(const uint32_t (&word)[kCount], uint32_t start) {
  using W = Words<T>;
#pragma unroll
  for (int w = 0; w < kCount; w += 2) {
    start = W::max(start, W::magnitude(word[w]), W::magnitude(word[w + 1]));
  }
  return start;
}

// ---------------------------------------------------------------------------------------------- transform
// What the transform takes: column j as bf16 values, held in floats.
template <typename T, int kWords>
__device__ __forceinline__ void column_values(const NvPatch<T, kWords>& patch, int j, float (&v)[kBlock]) {
  constexpr int kPer = Words<T>::per_word;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    v[i] = Words<T>::element(patch.word[i][j / kPer], j % kPer);
    if (sizeof(T) == 4) v[i] = float_of(pack_bf16(v[i], 0.0f) << 16);
  }
}

// As flip_sign on all values, but the negations disappear in the additions that follow.
__device__ __forceinline__ void flip_standard(float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = ((kHadamardSigns >> i) & 1u) != 0 ? -v[i] : v[i];
}

// The transform of a column with the standard signs: pairs of bf16 values.
__device__ __forceinline__ void transform_column(float (&v)[kBlock], uint32_t (&pair)[kBlock / 2]) {
  flip_standard(v);
  butterfly16(v);
#pragma unroll
  for (int k = 0; k < kBlock / 2; ++k) pair[k] = pack_bf16(transformed(v[2 * k]), transformed(v[2 * k + 1]));
}

// butterfly16 but for its last stage, and the larger magnitudes behind that: of a + b and a - b, |a| + |b|.
__device__ __forceinline__ void butterfly_but_last(float (&v)[kBlock], uint32_t (&larger)[kBlock / 2]) {
  butterfly_stage<1>(v);
  butterfly_stage<2>(v);
  butterfly_stage<4>(v);
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) larger[i] = bits_of(fabsf(v[i]) + fabsf(v[i + kBlock / 2]));
}

// butterfly16 of the values that 16 lanes have.
__device__ __forceinline__ float butterfly_across_lanes(float v) {
#pragma unroll
  for (unsigned apart = 1u; apart < 16u; apart *= 2u) {
    const float other = __shfl_xor_sync(kFullWarp, v, apart);
    v = (threadIdx.x & apart) != 0u ? other - v : v + other;
  }
  return v;
}

// Where the transform was asked for with other signs than the standard ones.
template <typename T, int kWords>
__device__ __forceinline__ void flip_rows(NvPatch<T, kWords>& patch, uint32_t flips) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t mask = ((flips >> i) & 1u) != 0 ? (sizeof(T) == 2 ? 0x80008000u : 0x80000000u) : 0u;
#pragma unroll
    for (int w = 0; w < kWords; ++w) patch.word[i][w] ^= mask;
  }
}

}  // namespace cuda
}  // namespace te_dist
