// Rows of any float type, eight neighbours at a time.
//
// The type is a run-time value here: a branch per eight elements costs little, compiling everything three
// times costs more.
#pragma once

#include "common.cuh"

namespace te_dist {
namespace cuda {

// ---------------------------------------------------------------------------------------------- pairs
__device__ __forceinline__ uint4 pack_eight_bf16(const float (&v)[8]) {
  return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

__device__ __forceinline__ uint4 add_bf16(const uint4& a, const uint4& b) {
  return make_uint4(add_bf16(a.x, b.x), add_bf16(a.y, b.y), add_bf16(a.z, b.z), add_bf16(a.w, b.w));
}

template <typename T>
__device__ __forceinline__ void unpack_eight(const uint4& from, float (&v)[8]) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = Words<T>::element(words[j / 2], j % 2);
}

// Eight bf16 values times a factor, as bytes.
template <typename F>
__device__ __forceinline__ uint2 encode_eight(const uint4& from, float factor) {
  float v[8];
  unpack_eight<bf16_t>(from, v);
  return make_uint2(encode_four<F>(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor),
                    encode_four<F>(v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor));
}

// The largest raw magnitude of eight bf16 values.
__device__ __forceinline__ uint32_t largest_of_eight(const uint4& v) {
  using W = Words<bf16_t>;
  return W::fold(W::max(W::max(W::magnitude(v.x), W::magnitude(v.y)), W::magnitude(v.z), W::magnitude(v.w)));
}

// ---------------------------------------------------------------------------------------------- eights
// Eight elements as they lie in memory; `high` is used by fp32 alone.
struct Eight {
  uint4 low;
  uint4 high;
};

__host__ __device__ __forceinline__ int size_of(Float dtype) { return dtype == Float::kF32 ? 4 : 2; }

// A row, or a vector along K. vector: it starts on a 16-byte boundary.
struct RowView {
  const void* data;
  Float dtype;
  int64_t cols;
  bool vector;

  __device__ __forceinline__ RowView at_row(int64_t row, int64_t stride) const {
    return RowView{static_cast<const char*>(data) + row * stride * size_of(dtype), dtype, cols, vector};
  }
};

inline RowView row_view(const void* data, Float dtype, int64_t cols) {
  return RowView{data, dtype, cols, aligned(data, 16)};
}

// A vector that may not be there, and counts as bf16 then.
inline RowView row_or_none(const void* data, Float dtype, int64_t cols) {
  return row_view(data, data != nullptr ? dtype : Float::kBF16, cols);
}

// The rows of a matrix: all of them start where vectors may be loaded, or none does.
inline RowView row_view(const void* data, Float dtype, int64_t rows, int64_t cols, int64_t stride) {
  return RowView{data, dtype, cols, aligned(data, 16) && (rows <= 1 || stride * size_of(dtype) % 16 == 0)};
}

// Elements [col, col + 8); zeros behind the row's end.
__device__ __forceinline__ Eight load_eight(const RowView& row, int64_t col) {
  Eight result{make_uint4(0u, 0u, 0u, 0u), make_uint4(0u, 0u, 0u, 0u)};
  const char* from = static_cast<const char*>(row.data) + col * size_of(row.dtype);
  if (row.vector && col + 8 <= row.cols) {
    result.low = __ldg(reinterpret_cast<const uint4*>(from));
    if (row.dtype == Float::kF32) result.high = __ldg(reinterpret_cast<const uint4*>(from) + 1);
    return result;
  }
  uint32_t words[8] = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (col + j >= row.cols) continue;
    if (row.dtype == Float::kF32) {
      words[j] = __ldg(reinterpret_cast<const uint32_t*>(from) + j);
    } else {
      words[j / 2] |= static_cast<uint32_t>(__ldg(reinterpret_cast<const uint16_t*>(from) + j)) << (16 * (j % 2));
    }
  }
  result.low = make_uint4(words[0], words[1], words[2], words[3]);
  result.high = make_uint4(words[4], words[5], words[6], words[7]);
  return result;
}

__device__ __forceinline__ void to_floats(const Eight& from, Float dtype, float (&v)[8]) {
  if (dtype == Float::kBF16) {
    unpack_eight<bf16_t>(from.low, v);
  } else if (dtype == Float::kF16) {
    unpack_eight<fp16_t>(from.low, v);
  } else {
    const uint32_t words[8] = {from.low.x,  from.low.y,  from.low.z,  from.low.w,
                               from.high.x, from.high.y, from.high.z, from.high.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = float_of(words[j]);
  }
}

__device__ __forceinline__ Eight to_eight(const float (&v)[8], Float dtype) {
  Eight result{make_uint4(0u, 0u, 0u, 0u), make_uint4(0u, 0u, 0u, 0u)};
  if (dtype == Float::kBF16) {
    result.low = pack_eight_bf16(v);
  } else if (dtype == Float::kF16) {
    const auto two = [&](int j) {
      return static_cast<uint32_t>(to_fp16(v[j]).bits) | static_cast<uint32_t>(to_fp16(v[j + 1]).bits) << 16;
    };
    result.low = make_uint4(two(0), two(2), two(4), two(6));
  } else {
    result.low = make_uint4(bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
    result.high = make_uint4(bits_of(v[4]), bits_of(v[5]), bits_of(v[6]), bits_of(v[7]));
  }
  return result;
}

// `row` is where to write, its data is not const.
__device__ __forceinline__ void store_eight(const RowView& row, int64_t col, const Eight& value) {
  char* to = static_cast<char*>(const_cast<void*>(row.data)) + col * size_of(row.dtype);
  if (row.vector && col + 8 <= row.cols) {
    store_bulk(reinterpret_cast<uint4*>(to), value.low);
    if (row.dtype == Float::kF32) store_bulk(reinterpret_cast<uint4*>(to) + 1, value.high);
    return;
  }
  const uint32_t words[8] = {value.low.x,  value.low.y,  value.low.z,  value.low.w,
                             value.high.x, value.high.y, value.high.z, value.high.w};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (col + j >= row.cols) continue;
    if (row.dtype == Float::kF32) {
      reinterpret_cast<uint32_t*>(to)[j] = words[j];
    } else {
      reinterpret_cast<uint16_t*>(to)[j] = static_cast<uint16_t>(words[j / 2] >> (16 * (j % 2)));
    }
  }
}

// The same of a row that consists of whole, aligned eights: a few instructions.
__device__ __forceinline__ Eight load_whole_eight(const RowView& row, int64_t col) {
  Eight result{make_uint4(0u, 0u, 0u, 0u), make_uint4(0u, 0u, 0u, 0u)};
  if (col >= row.cols) return result;
  const char* from = static_cast<const char*>(row.data) + col * size_of(row.dtype);
  result.low = __ldg(reinterpret_cast<const uint4*>(from));
  if (row.dtype == Float::kF32) result.high = __ldg(reinterpret_cast<const uint4*>(from) + 1);
  return result;
}

// A vector's eight values, or what leaves everything as it is where there is no vector. kWhole: of aligned
// eights.
template <bool kWhole = false>
__device__ __forceinline__ void load_vector(const RowView& from, int64_t col, float none, float (&v)[8]) {
  if (from.data != nullptr) {
    return to_floats(kWhole ? load_whole_eight(from, col) : load_eight(from, col), from.dtype, v);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = none;
}

constexpr float kNoBias = -0.0f;  // x + -0 is x, for x = -0 too
constexpr uint32_t kNoBiases = 0x80008000u;  // two of them as bf16

template <bool kWhole = false>
__device__ __forceinline__ void load_gain(const RowView& weight, bool zero_centered, int64_t col, float (&v)[8]) {
  load_vector<kWhole>(weight, col, 1.0f, v);
  if (!zero_centered) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] += 1.0f;
}

// The first 16 bytes of eight of a vector of aligned eights: all of them, or four of fp32. Two of `none` in each word
// where there is no vector: see row_or_none. kWhole: col is inside.
template <bool kWhole>
__device__ __forceinline__ uint4 load_first(const RowView& from, int64_t col, uint32_t none) {
  if (from.data == nullptr || (!kWhole && col >= from.cols)) return make_uint4(none, none, none, none);
  return __ldg(reinterpret_cast<const uint4*>(static_cast<const char*>(from.data) + col * size_of(from.dtype)));
}

// Some of their values, from `first` on, a multiple of how many. loaded: of load_first.
template <bool kWhole, int kCount>
__device__ __forceinline__ void values_of_some(const RowView& from, int64_t col, const uint4& loaded, int first,
                                               float (&v)[kCount]) {
  const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
  if (from.dtype == Float::kBF16) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) v[j] = Words<bf16_t>::element(words[(first + j) / 2], j % 2);
  } else if (from.dtype == Float::kF16) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) v[j] = Words<fp16_t>::element(words[(first + j) / 2], j % 2);
  } else {
    uint4 later = loaded;
    if (first + kCount > 4 && (kWhole || col < from.cols)) {
      later = __ldg(reinterpret_cast<const uint4*>(static_cast<const float*>(from.data) + col) + 1);
    }
    const uint32_t later_words[4] = {later.x, later.y, later.z, later.w};
#pragma unroll
    for (int j = 0; j < kCount; ++j) v[j] = float_of((first + j < 4 ? words : later_words)[(first + j) % 4]);
  }
}

// ---------------------------------------------------------------------------------------------- norms
// What a norm makes of a value; shift: of RowStats (row_team.cuh).
__device__ __forceinline__ float norm_of(float v, float rstd, float shift, float gain, float bias) {
  return fused_multiply_add(fused_multiply_add(v, rstd, shift), gain, bias);
}

// Of the two values in a word of bf16. kShifted: there are shifts or biases.
template <bool kShifted>
__device__ __forceinline__ uint32_t norm_of_word(uint32_t word, float rstd, float shift, float2 gain, float2 bias) {
  const float low = Words<bf16_t>::element(word, 0);
  const float high = Words<bf16_t>::element(word, 1);
  if (!kShifted) return pack_bf16(low * rstd * gain.x, high * rstd * gain.y);
  return pack_bf16(norm_of(low, rstd, shift, gain.x, bias.x), norm_of(high, rstd, shift, gain.y, bias.y));
}

__device__ __forceinline__ void apply_norm(float (&v)[8], float rstd, float shift, const float (&gain)[8],
                                           const float (&bias)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    v[j] = norm_of(v[j], rstd, shift, gain[j], bias[j]);
  }
}

}  // namespace cuda
}  // namespace te_dist
