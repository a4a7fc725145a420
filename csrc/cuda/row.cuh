// Rows of any float type, eight neighbours at a time, and the sum of a row by a team of 128 threads.
//
// The type is a run-time value here: a branch per eight elements costs little, compiling everything three times
// costs more. Order of the sums: te_dist/reference_producers.py.
#pragma once

#include "common.cuh"

namespace te_dist {
namespace cuda {

// ---------------------------------------------------------------------------------------------- pairs
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ uint4 pack_eight_bf16(const float (&v)[8]) {
  return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

template <typename T>
__device__ __forceinline__ void unpack_eight(const uint4& from, float (&v)[8]) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = Words<T>::element(words[j / 2], j % 2);
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

// A vector's eight values, or what leaves everything as it is where there is no vector. kWhole: of aligned eights.
template <bool kWhole = false>
__device__ __forceinline__ void load_vector(const RowView& from, int64_t col, float none, float (&v)[8]) {
  if (from.data != nullptr) {
    return to_floats(kWhole ? load_whole_eight(from, col) : load_eight(from, col), from.dtype, v);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = none;
}

constexpr float kNoBias = -0.0f;  // x + -0 is x, for x = -0 too

template <bool kWhole = false>
__device__ __forceinline__ void load_gain(const RowView& weight, bool zero_centered, int64_t col, float (&v)[8]) {
  load_vector<kWhole>(weight, col, 1.0f, v);
  if (!zero_centered) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] += 1.0f;
}

// ---------------------------------------------------------------------------------------------- sums of rows
__device__ __forceinline__ float fold_eight(const float (&a)[8]) {
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

__device__ __forceinline__ float fold_lanes(float v) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) v += __shfl_xor_sync(kFullWarp, v, half);
  return v;
}

// 128 neighbouring threads that hold a row: thread t has elements 1024 i + 8 t .. 8 t + 7.
class RowTeam {
 public:
  static constexpr int kThreads = 128;
  static constexpr int kScratch = 2 * kThreads;  // floats of shared memory a team

  // number: of the team in its block; scratch: the block's, kScratch floats per team.
  __device__ __forceinline__ RowTeam(float* scratch, int number)
      : scratch_(scratch + number * kScratch), first_(number == 0) {}

  static __device__ __forceinline__ int rank() { return static_cast<int>(threadIdx.x % kThreads); }

  // The sum of all threads' accumulators, in all of them. Two buffers in turn: who is a sum ahead writes the other.
  __device__ __forceinline__ float sum(const float (&accumulators)[8]) {
    float* vectors = scratch_ + turn_ * kThreads;
    turn_ ^= 1;
    vectors[rank()] = fold_eight(accumulators);
    if (first_) {  // at most two teams a block, and numbers that the compiler sees: it reserves no others
      asm volatile("bar.sync 1, 128;" ::: "memory");
    } else {
      asm volatile("bar.sync 2, 128;" ::: "memory");
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    return fold_lanes((vectors[lane] + vectors[64 + lane]) + (vectors[32 + lane] + vectors[96 + lane]));
  }

 private:
  float* scratch_;
  bool first_;
  int turn_ = 0;
};

struct RowStats {
  float mean;  // 0: RMSNorm, and x - 0 is x
  float rstd;
};

__device__ __forceinline__ float reciprocal_deviation(float square_sum, float count, float eps) {
  return __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(square_sum, count) + eps));
}

// A warp on a bf16 row of whole, aligned vectors: lane l has vectors 32 i + l. Reads the row once, twice if centered.
struct WarpRow {
  const uint4* row;
  int vectors;

  // term(value) into 4 x 8 accumulators, 8 vectors on their way at a time.
  template <typename Term>
  __device__ __forceinline__ float sum(const Term& term) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float total[4][8] = {};
    const auto load = [&](int at) { return __ldcg(row + at); };
    const auto add = [&](const uint4& v, float (&to)[8]) {
      float values[8];
      unpack_eight<bf16_t>(v, values);
#pragma unroll
      for (int j = 0; j < 8; ++j) to[j] += term(values[j]);
    };
    int first = lane;
#pragma unroll 1
    for (; first - lane + 256 <= vectors; first += 256) {
      uint4 v[8];
#pragma unroll
      for (int u = 0; u < 8; ++u) v[u] = load(first + 32 * u);
#pragma unroll
      for (int u = 0; u < 8; ++u) add(v[u], total[u % 4]);
    }
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      if (first + 32 * u < vectors) add(load(first + 32 * u), total[u % 4]);
    }
    return fold_lanes((fold_eight(total[0]) + fold_eight(total[2])) +
                      (fold_eight(total[1]) + fold_eight(total[3])));
  }

  __device__ __forceinline__ RowStats stats(bool centered, float eps) const {
    const float count = static_cast<float>(vectors * 8);
    const float mean = centered ? __fdiv_rn(sum([](float v) { return v; }), count) : 0.0f;
    const float squares = sum([&](float v) { return (v - mean) * (v - mean); });
    return RowStats{mean, reciprocal_deviation(squares, count, eps)};
  }
};

// What a norm makes of eight values.
__device__ __forceinline__ void apply_norm(float (&v)[8], const RowStats& stats, const float (&gain)[8],
                                           const float (&bias)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = (v[j] - stats.mean) * stats.rstd * gain[j] + bias[j];
}

}  // namespace cuda
}  // namespace te_dist
