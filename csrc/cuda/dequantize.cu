// Dequantizers: plane [R, C] -> [R, C], or [C, R] where the plane is a transposed one. fp8 to bf16 moves 3
// bytes an element, fp4 2.5.
//
// A block takes 64 x 64 values, a thread 16 of one line: one 16-byte load (8 for fp4), and exactly one block
// of NVFP4 or one group of its Hadamard transform. A transposed result crosses shared memory as floats.
#include "../numerics/e8m0.h"
#include "../numerics/hadamard.h"
#include "../numerics/nvfp4.h"
#include "common.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct DequantizeConfig {
  static constexpr int kThreads = 256;
  static constexpr int kTile = 64;
  static constexpr int kRun = 16;  // values per thread
  static constexpr int kRuns = kTile / kRun;
};
constexpr int kTile = DequantizeConfig::kTile;
constexpr int kRun = DequantizeConfig::kRun;

enum class ScaleKind : int { kTensor, kBlock1d, kBlock2d, kMxRow, kMxColumn };

struct PlaneShape {
  int64_t lines;    // R
  int64_t values;   // C
  bool transposed;  // the result is [C, R]
};

struct Fp8Plane {
  const uint8_t* data;
  const void* scale;
  ScaleKind kind;
  int64_t pitch;  // scales per row of the scale buffer
  Fp8 format;
  bool vector;  // every line starts on a 16-byte boundary
};

struct Fp4Plane {
  const uint8_t* data;
  const uint8_t* scale;
  const float* amax;
  bool hadamard;
  uint32_t signs;
  bool vector;  // every line starts on an 8-byte boundary
};

template <typename T>
struct Result {
  T* data;
  int64_t cols;
  bool vector;  // every row starts on a 16-byte boundary
};

// ---------------------------------------------------------------------------------------------- sources
template <typename F>
__device__ __forceinline__ void decode_run(const uint32_t (&codes)[4], float (&v)[kRun]) {
#pragma unroll
  for (int j = 0; j < kRun; ++j) v[j] = decode_fp8<F>(static_cast<uint8_t>(codes[j / 4] >> (8 * (j % 4))));
}

// kWords words of a line's bytes; what lies beyond `count` bytes is zero.
template <int kWords>
__device__ __forceinline__ void load_bytes(const uint8_t* from, int64_t count, bool vector,
                                           uint32_t (&words)[kWords]) {
  if (vector && count >= 4 * kWords) {
    // Aligned to all of it; the compiler makes one load of the words.
    struct alignas(4 * kWords) Vector {
      uint32_t word[kWords];
    };
    const Vector loaded = *reinterpret_cast<const Vector*>(from);
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = loaded.word[w];
    return;
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = 0u;
#pragma unroll
  for (int j = 0; j < 4 * kWords; ++j) {
    if (j < count) words[j / 4] |= static_cast<uint32_t>(from[j]) << (8 * (j % 4));
  }
}

// One scale for the whole run; kMxColumn has a scale per value instead.
__device__ __forceinline__ float run_scale(const Fp8Plane& plane, int64_t line, int64_t value) {
  const auto* floats = static_cast<const float*>(plane.scale);
  switch (plane.kind) {
    case ScaleKind::kTensor: return floats[0];
    case ScaleKind::kBlock1d: return floats[value / 128 * plane.pitch + line];
    case ScaleKind::kBlock2d: return floats[line / 128 * plane.pitch + value / 128];
    default: return decode_e8m0(static_cast<const uint8_t*>(plane.scale)[line * plane.pitch + value / 32]);
  }
}

__device__ __forceinline__ void read_run(const Fp8Plane& plane, const PlaneShape& shape, int64_t line,
                                         int64_t value, float (&v)[kRun]) {
  uint32_t codes[4];
  load_bytes(plane.data + line * shape.values + value, shape.values - value, plane.vector, codes);
  if (plane.format == Fp8::kE4M3) {
    decode_run<E4M3>(codes, v);
  } else {
    decode_run<E5M2>(codes, v);
  }
  if (plane.kind == ScaleKind::kMxColumn) {
    // The buffer is padded to 128 values, so a whole run of scales can be read at the end of a line, too.
    const uint8_t* scales = static_cast<const uint8_t*>(plane.scale) + line / 32 * plane.pitch + value;
#pragma unroll
    for (int j = 0; j < kRun; ++j) v[j] *= decode_e8m0(scales[j]);
    return;
  }
  const float scale = run_scale(plane, line, value);
#pragma unroll
  for (int j = 0; j < kRun; ++j) v[j] *= scale;
}

__device__ __forceinline__ void read_run(const Fp4Plane& plane, const PlaneShape& shape, int64_t line,
                                         int64_t value, float (&v)[kRun]) {
  uint32_t codes[2];
  const int64_t bytes = shape.values / 2;
  load_bytes(plane.data + line * bytes + value / 2, bytes - value / 2, plane.vector, codes);
  const int64_t pitch = round_up(ceil_div(shape.values, kNvfp4Block), 4);
  const float scale = decode_fp8<E4M3>(plane.scale[line * pitch + value / kNvfp4Block]);
  const float amax = *plane.amax;
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    v[j] = nvfp4_decode(static_cast<uint8_t>((codes[j / 8] >> (4 * (j % 8))) & 15u), scale, amax);
  }
  if (plane.hadamard) hadamard16_inverse(v, plane.signs);
}

// ---------------------------------------------------------------------------------------------- results
__device__ __forceinline__ void pack_run(const float (&v)[kRun], uint32_t (&words)[kRun], Tag<float>) {
#pragma unroll
  for (int j = 0; j < kRun; ++j) words[j] = bits_of(v[j]);
}

template <typename T>
__device__ __forceinline__ void pack_run(const float (&v)[kRun], uint32_t (&words)[kRun / 2], Tag<T>) {
#pragma unroll
  for (int j = 0; j < kRun / 2; ++j) {
    words[j] = from_float<T>(v[2 * j]).bits | (static_cast<uint32_t>(from_float<T>(v[2 * j + 1]).bits) << 16);
  }
}

template <typename T>
__device__ __forceinline__ void write_run(const Result<T>& out, int64_t row, int64_t col,
                                          const float (&v)[kRun]) {
  T* to = out.data + row * out.cols + col;
  if (out.vector && col + kRun <= out.cols) {
    constexpr int kWords = kRun / Words<T>::per_word;
    uint32_t words[kWords];
    pack_run(v, words, Tag<T>{});
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      reinterpret_cast<uint4*>(to)[w / 4] = make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    if (col + j < out.cols) to[j] = from_float<T>(v[j]);
  }
}

template <typename T, typename Plane>
__global__ void __launch_bounds__(DequantizeConfig::kThreads)
    dequantize_kernel(Plane plane, PlaneShape shape, Result<T> out) {
  constexpr int kPitch = kTile + 1;
  __shared__ float crossing[kTile * kPitch];
  const unsigned across = static_cast<unsigned>(ceil_div(shape.values, kTile));
  const unsigned down = blockIdx.x / across;
  const int64_t line0 = static_cast<int64_t>(down) * kTile;
  const int64_t value0 = static_cast<int64_t>(blockIdx.x - down * across) * kTile;
  const int major = threadIdx.x / DequantizeConfig::kRuns;
  const int minor = threadIdx.x % DequantizeConfig::kRuns * kRun;

  float v[kRun];
  const bool present = line0 + major < shape.lines && value0 + minor < shape.values;
  if (present) read_run(plane, shape, line0 + major, value0 + minor, v);
  if (!shape.transposed) {
    if (present) write_run(out, line0 + major, value0 + minor, v);
    return;
  }
  if (present) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) crossing[(minor + j) * kPitch + major] = v[j];
  }
  __syncthreads();
  if (value0 + major >= shape.values || line0 + minor >= shape.lines) return;
#pragma unroll
  for (int j = 0; j < kRun; ++j) v[j] = crossing[major * kPitch + minor + j];
  write_run(out, value0 + major, line0 + minor, v);
}

// ---------------------------------------------------------------------------------------------- launch
template <typename Plane>
void launch_dequantize(const Plane& plane, const PlaneShape& shape, const Output& out, const char* name,
                       Lane lane) {
  const int blocks = grid_size(ceil_div(shape.lines, kTile) * ceil_div(shape.values, kTile));
  dispatch_float(out.dtype, [&](auto output) {
    using T = TypeOf<decltype(output)>;
    const bool vector = aligned(out.data, 16) && out.cols * static_cast<int64_t>(sizeof(T)) % 16 == 0;
    const Result<T> result{static_cast<T*>(out.data), out.cols, vector};
    launch(name, dequantize_kernel<T, Plane>, blocks, DequantizeConfig::kThreads, lane, plane, shape, result);
  });
}

PlaneShape plane_shape(const Output& out, bool transposed) {
  return transposed ? PlaneShape{out.cols, out.rows, true} : PlaneShape{out.rows, out.cols, false};
}

// True where there is nothing to do; checks the pointers otherwise.
bool nothing_to_do(const Output& out, const void* data, const void* scale, std::uintptr_t scale_bytes) {
  check::output(out);
  if (out.rows == 0 || out.cols == 0) return true;
  check::required("the quantized data", data);
  check::required("the scale", scale, scale_bytes);
  return false;
}

void launch_fp8(const uint8_t* data, const void* scale, ScaleKind kind, int64_t pitch, Fp8 format,
                const PlaneShape& shape, const Output& out, const char* name, Lane lane) {
  check::fp8(format);
  const bool vector = aligned(data, 16) && shape.values % 16 == 0;
  launch_dequantize(Fp8Plane{data, scale, kind, pitch, format, vector}, shape, out, name, lane);
}

}  // namespace

void dequantize_tensor(const uint8_t* data, bool columnwise, Fp8 format, const float* scale_inv,
                       const Output& out, Lane lane) {
  if (nothing_to_do(out, data, scale_inv, sizeof(float))) return;
  launch_fp8(data, scale_inv, ScaleKind::kTensor, 0, format, plane_shape(out, columnwise), out,
             "dequantize_tensor", lane);
}

void dequantize_block(const uint8_t* data, const float* scale, bool columnwise, int block_dim, Fp8 format,
                      const Output& out, Lane lane) {
  check::block_dim(block_dim);
  if (nothing_to_do(out, data, scale, sizeof(float))) return;
  const PlaneShape shape = plane_shape(out, columnwise);
  const bool one_d = block_dim == 1;
  const int64_t pitch = round_up(one_d ? shape.lines : ceil_div(shape.values, 128), 4);
  launch_fp8(data, scale, one_d ? ScaleKind::kBlock1d : ScaleKind::kBlock2d, pitch, format, shape, out,
             "dequantize_block", lane);
}

void dequantize_mxfp8(const uint8_t* data, const uint8_t* scale, bool columnwise, Fp8 format,
                      const Output& out, Lane lane) {
  if (nothing_to_do(out, data, scale, 1)) return;
  const PlaneShape shape = plane_shape(out, false);  // the column plane is not transposed
  const int64_t pitch = columnwise ? round_up(shape.values, 128) : round_up(ceil_div(shape.values, 32), 4);
  launch_fp8(data, scale, columnwise ? ScaleKind::kMxColumn : ScaleKind::kMxRow, pitch, format, shape, out,
             "dequantize_mxfp8", lane);
}

void dequantize_nvfp4(const uint8_t* data, const uint8_t* scale, const float* amax, bool columnwise,
                      const Nvfp4Options& options, const Output& out, Lane lane) {
  if (nothing_to_do(out, data, scale, 1)) return;
  check::required("amax", amax, sizeof(float));
  const PlaneShape shape = plane_shape(out, columnwise);
  check::nibbles(columnwise ? "rows" : "columns", shape.values);
  const bool hadamard = columnwise && options.hadamard;
  if (hadamard) check::hadamard(options, out.rows);
  const bool vector = aligned(data, 8) && shape.values % 16 == 0;
  launch_dequantize(Fp4Plane{data, scale, amax, hadamard, options.signs, vector}, shape, out,
                    "dequantize_nvfp4", lane);
}

}  // namespace cuda
}  // namespace te_dist
