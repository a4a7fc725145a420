// Dequantizers: plane [R, C] -> [R, C], or [C, R] where the plane is a transposed one. fp8 to bf16 moves 3
// bytes an element, fp4 2.5.
//
// Lines of whole, aligned vectors that stay lines: a thread takes eight values of each of some lines, and its
// neighbours' lie beside them, those to be read and those to be written.
//
// Others: a block takes 64 x 64 values, a thread 16 of one line: one 16-byte load (8 for fp4), and exactly one block
// of NVFP4 or one group of its Hadamard transform. A transposed result crosses shared memory as floats.
#include "../numerics/e8m0.h"
#include "../numerics/hadamard.h"
#include "../numerics/nvfp4.h"
#include "row.cuh"

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
  static constexpr int kLines = 4;  // that a thread of dequantize_lines_kernel takes eight values of
  const uint8_t* data;
  const void* scale;
  ScaleKind kind;
  int64_t pitch;  // scales per row of the scale buffer
  Fp8 format;
  bool vector;  // every line starts on a 16-byte boundary
};

struct Fp4Plane {
  static constexpr int kLines = 8;
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

// ---------------------------------------------------------------------------------------------- lines
// Threads of a block side by side, a power of two, and below one another.
struct LinesConfig {
  static constexpr int kThreads = 256;
  static constexpr int kEight = 8;  // values of a line that a thread takes
};
constexpr int kEight = LinesConfig::kEight;

// Eight codes and their scale as they lie in memory: all of a thread's loads are on their way before it looks at any.
struct Fp8Eight {
  uint2 codes;
  uint2 scale;  // bits of a float, a byte, or eight bytes
};
struct Fp4Eight {
  uint32_t codes;
  uint8_t scale;
};

__device__ __forceinline__ Fp8Eight load_codes(const Fp8Plane& plane, int64_t line, int64_t value, int64_t values) {
  const auto* floats = static_cast<const uint32_t*>(plane.scale);
  const auto* bytes = static_cast<const uint8_t*>(plane.scale);
  Fp8Eight eight{load_last(reinterpret_cast<const uint2*>(plane.data + line * values + value)), make_uint2(0u, 0u)};
  switch (plane.kind) {
    case ScaleKind::kTensor: eight.scale.x = __ldg(floats); break;
    case ScaleKind::kBlock1d: eight.scale.x = __ldg(floats + value / 128 * plane.pitch + line); break;
    case ScaleKind::kBlock2d: eight.scale.x = __ldg(floats + line / 128 * plane.pitch + value / 128); break;
    case ScaleKind::kMxRow: eight.scale.x = __ldg(bytes + line * plane.pitch + value / 32); break;
    case ScaleKind::kMxColumn:
      eight.scale = __ldg(reinterpret_cast<const uint2*>(bytes + line / 32 * plane.pitch + value));
  }
  return eight;
}

__device__ __forceinline__ Fp4Eight load_codes(const Fp4Plane& plane, int64_t line, int64_t value, int64_t values) {
  const int64_t pitch = round_up(values / kNvfp4Block, 4);
  return {load_last(reinterpret_cast<const uint32_t*>(plane.data + (line * values + value) / 2)),
          __ldg(plane.scale + line * pitch + value / kNvfp4Block)};
}

__device__ __forceinline__ float2 halves_to_floats(uint32_t pair) {
  float2 v;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(pair));
  return v;
}

// Two codes of fp8: the same function as decode_fp8, but for the bits of a NaN, which no product keeps.
__device__ __forceinline__ float2 decode_pair(uint32_t codes, Fp8 format) {
#if __CUDA_ARCH__ >= 890
  uint32_t pair;
  const auto two = static_cast<uint16_t>(codes);
  if (format == Fp8::kE4M3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(two));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(two));
  }
  return halves_to_floats(pair);
#else
  const auto low = static_cast<uint8_t>(codes);
  const auto high = static_cast<uint8_t>(codes >> 8);
  if (format == Fp8::kE4M3) return make_float2(decode_fp8<E4M3>(low), decode_fp8<E4M3>(high));
  return make_float2(decode_fp8<E5M2>(low), decode_fp8<E5M2>(high));
#endif
}

__device__ __forceinline__ void decode_eight(const Fp8Plane& plane, const Fp8Eight& eight, float (&v)[kEight]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float2 two = decode_pair((k < 2 ? eight.codes.x : eight.codes.y) >> (16 * (k % 2)), plane.format);
    v[2 * k] = two.x, v[2 * k + 1] = two.y;
  }
  if (plane.kind != ScaleKind::kMxColumn) {
    const float scale = plane.kind == ScaleKind::kMxRow ? decode_e8m0(static_cast<uint8_t>(eight.scale.x))
                                                        : float_of(eight.scale.x);
#pragma unroll
    for (int j = 0; j < kEight; ++j) v[j] *= scale;
    return;
  }
#pragma unroll
  for (int j = 0; j < kEight; ++j) {
    v[j] *= decode_e8m0(static_cast<uint8_t>((j < 4 ? eight.scale.x : eight.scale.y) >> (8 * (j % 4))));
  }
}

// nvfp4_decode. The bits of E2M1 are those of a fp16 number, 2^-14 times as large, and its product with a scale is
// exact either way.
__device__ __forceinline__ void decode_eight(const Fp4Plane& plane, const Fp4Eight& eight, float (&v)[kEight]) {
  const float scale = decode_pair(eight.scale, Fp8::kE4M3).x * 16384.0f;
  const float amax = *plane.amax;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // values i and i + 4
    const uint32_t codes = eight.codes >> (4 * i);
    const float2 two = halves_to_floats(((codes << 9) & 0x0E000E00u) | ((codes << 12) & 0x80008000u));
    v[i] = two.x * scale * amax * (1.0f / (6.0f * 448.0f));
    v[i + 4] = two.y * scale * amax * (1.0f / (6.0f * 448.0f));
  }
}

__device__ __forceinline__ uint32_t pack_two(float low, float high, Tag<bf16_t>) { return pack_bf16(low, high); }
__device__ __forceinline__ uint32_t pack_two(float low, float high, Tag<fp16_t>) {
  return to_fp16(low).bits | (static_cast<uint32_t>(to_fp16(high).bits) << 16);
}

template <typename T>
__device__ __forceinline__ void store_floats(T* to, const float (&v)[kEight]) {
  constexpr int kWords = kEight / Words<T>::per_word;
  uint32_t word[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    if constexpr (sizeof(T) == 4) {
      word[w] = bits_of(v[w]);
    } else {
      word[w] = pack_two(v[2 * w], v[2 * w + 1], Tag<T>{});
    }
  }
#pragma unroll
  for (int w = 0; w < kWords; w += 4) {
    store_bulk(reinterpret_cast<uint4*>(to) + w / 4, make_uint4(word[w], word[w + 1], word[w + 2], word[w + 3]));
  }
}

template <typename T, typename Plane>
__global__ void __launch_bounds__(LinesConfig::kThreads)
    dequantize_lines_kernel(Plane plane, PlaneShape shape, T* out, unsigned across, unsigned side_by_side) {
  const unsigned down = blockIdx.x / across;
  const unsigned below = LinesConfig::kThreads / side_by_side;
  const int64_t eight = static_cast<int64_t>(blockIdx.x - down * across) * side_by_side + threadIdx.x % side_by_side;
  const int64_t value = eight * kEight;
  constexpr int kLines = Plane::kLines;
  const int64_t first = static_cast<int64_t>(down) * below * kLines + threadIdx.x / side_by_side;
  if (value >= shape.values) return;
  decltype(load_codes(plane, 0, 0, 0)) codes[kLines];
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    const int64_t line = first + i * below;
    if (line < shape.lines) codes[i] = load_codes(plane, line, value, shape.values);
  }
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    const int64_t line = first + i * below;
    if (line >= shape.lines) return;
    float v[kEight];
    decode_eight(plane, codes[i], v);
    store_floats(out + line * shape.values + value, v);
  }
}

// Whether dequantize_lines_kernel takes the plane of a result of aligned lines.
bool has_lines(const Fp8Plane& plane) {
  return plane.vector && (plane.kind != ScaleKind::kMxColumn || aligned(plane.scale, 8));
}
bool has_lines(const Fp4Plane& plane) { return plane.vector && !plane.hadamard; }

// ---------------------------------------------------------------------------------------------- launch
template <typename T, typename Plane>
void launch_lines(const Plane& plane, const PlaneShape& shape, T* out, const char* name, Lane lane) {
  const int64_t eights = shape.values / kEight;
  int64_t side_by_side = 16;
  while (side_by_side < eights && side_by_side < LinesConfig::kThreads) side_by_side *= 2;
  const int64_t across = ceil_div(eights, side_by_side);
  const int64_t lines = LinesConfig::kThreads / side_by_side * Plane::kLines;
  const int blocks = grid_size(ceil_div(shape.lines, lines) * across);
  launch(name, dequantize_lines_kernel<T, Plane>, blocks, LinesConfig::kThreads, lane, plane, shape, out,
         static_cast<unsigned>(across), static_cast<unsigned>(side_by_side));
}

template <typename Plane>
void launch_dequantize(const Plane& plane, const PlaneShape& shape, const Output& out, const char* name,
                       Lane lane) {
  dispatch_float(out.dtype, [&](auto output) {
    using T = TypeOf<decltype(output)>;
    const bool vector = aligned(out.data, 16) && out.cols * static_cast<int64_t>(sizeof(T)) % 16 == 0;
    const Result<T> result{static_cast<T*>(out.data), out.cols, vector};
    if (vector && !shape.transposed && has_lines(plane)) {
      return launch_lines(plane, shape, result.data, name, lane);
    }
    const int blocks = grid_size(ceil_div(shape.lines, kTile) * ceil_div(shape.values, kTile));
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
