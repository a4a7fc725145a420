// What every CUDA file needs: launch checks, dispatch from run-time dtype codes to types, and floats as they
// sit in 32-bit words.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../api.h"
#include "../check.h"
#include "../numerics/fp8.h"
#include "../numerics/half.h"

namespace te_dist {
namespace cuda {

constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// ---------------------------------------------------------------------------------------------- host
inline cudaStream_t stream_of(Lane lane) {
  return reinterpret_cast<cudaStream_t>(static_cast<std::intptr_t>(lane));
}

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) check::fail_at_run_time(what, cudaGetErrorString(status));
}

inline void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 blocks, int threads, Lane lane,
            const Arguments&... arguments) {
  kernel<<<blocks, threads, 0, stream_of(lane)>>>(arguments...);
  check_launch(name);
}

// Whether the current device runs code that was compiled for compute capability 9.0 or above: with clusters, copies of
// boxes, and kernels that start early. Not what a driver translates for it of older code, which leaves these out.
bool runs_hopper_code();

// Whether launches go into a graph.
inline bool is_captured(Lane lane) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream_of(lane), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// The same with dynamic shared memory, of a kernel that may start before the one in front of it in the stream has
// ended, on GPUs that have that. It calls wait_for_kernel_before in front of what depends on it; everything before that
// one has ended. Not in graphs, which not every driver lets have such pairs.
template <typename... Parameters, typename... Arguments>
void launch_close(const char* name, void (*kernel)(Parameters...), dim3 blocks, int threads, int bytes, Lane lane,
                  const Arguments&... arguments) {
  cudaLaunchAttribute close{};
  close.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  close.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream_of(lane);
  config.attrs = &close;
  config.numAttrs = !is_captured(lane) && runs_hopper_code() ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), name);
}

// A number that the current device has more than none of. Asked for at every launch, so remembered. Two threads that
// race here store the same number.
template <cudaDeviceAttr kWhat>
int device_attribute() {
  constexpr int kDevices = 64;
  static int known[kDevices] = {};
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (device < kDevices && known[device] != 0) return known[device];
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, kWhat, device), "cudaDeviceGetAttribute");
  if (device < kDevices) known[device] = value;
  return value;
}

int multiprocessors();  // of the current device, or as few as limit_multiprocessors says

inline bool aligned(const void* pointer, int bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<unsigned>(bytes) == 0;
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline int grid_size(int64_t blocks) {
  TED_CHECK(blocks >= 0 && blocks <= 0x7FFFFFFF, "the tensor needs ", blocks, " thread blocks");
  return static_cast<int>(blocks);
}

// Not a matrix that only needs to be read.
inline bool is_made(const Source& x) { return x.kind != Produce::kPlain || x.partials != nullptr; }

// A matrix in memory whose columns are added up.
inline bool is_summed(const Source& x) { return x.kind == Produce::kPlain && x.partials != nullptr; }

template <typename T>
struct Tag {
  using type = T;
};

// The T of a Tag<T>.
template <typename TagOfT>
using TypeOf = typename TagOfT::type;

template <typename Body>
void dispatch_float(Float dtype, Body&& body) {
  switch (dtype) {
    case Float::kF32: return body(Tag<float>{});
    case Float::kF16: return body(Tag<fp16_t>{});
    case Float::kBF16: return body(Tag<bf16_t>{});
  }
  TED_CHECK(false, "unknown dtype code ", static_cast<int>(dtype));
}

template <typename Body>
void dispatch_fp8(Fp8 format, Body&& body) {
  switch (format) {
    case Fp8::kE4M3: return body(Tag<E4M3>{});
    case Fp8::kE5M2: return body(Tag<E5M2>{});
  }
  TED_CHECK(false, "unknown fp8 format code ", static_cast<int>(format));
}

// body(Tag of the input's type, Tag of the format).
template <typename Body>
void dispatch_cast(Float dtype, Fp8 format, Body&& body) {
  dispatch_float(dtype, [&](auto input) { dispatch_fp8(format, [&](auto fp8) { body(input, fp8); }); });
}

// Checks what a block-scaled cast is given; true where neither data nor scales are to be written.
inline bool nothing_to_quantize(const Input& x, const Planes& out, std::uintptr_t scale_bytes) {
  check::input(x);
  const bool empty = x.rows == 0 || x.cols == 0;
  check::planes(out, scale_bytes, empty);
  return empty || (out.row_data == nullptr && out.col_data == nullptr);
}

// ---------------------------------------------------------------------------------------------- device
// Blocks of the next kernel in the stream may take the place of this one's, as they end.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until it has ended, and what it wrote can be read.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ bool is_noop(const float* noop) { return noop != nullptr && *noop != 0.0f; }

// Floats of type T in 32-bit words. A raw magnitude is the element's own bits without the sign: its unsigned
// order is the order of magnitudes in every one of the types, so two 16-bit ones are compared by one
// instruction.
template <typename T>
struct Words {
  using Raw = uint16_t;
  static constexpr int per_word = 2;
  static __device__ __forceinline__ uint32_t magnitude(uint32_t word) { return word & 0x7FFF7FFFu; }
  static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
  static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b, uint32_t c) {
    return __vimax3_u16x2(a, b, c);
  }
  // One raw magnitude out of a word of them.
  static __device__ __forceinline__ uint32_t fold(uint32_t word) { return ::max(word & 0xFFFFu, word >> 16); }
  static __device__ __forceinline__ float to_float_of_raw(uint32_t raw) {
    return to_float(T{static_cast<uint16_t>(raw)});
  }
  static __device__ __forceinline__ float element(uint32_t word, int i) {
    return to_float_of_raw(i == 0 ? word & 0xFFFFu : word >> 16);
  }
  static __device__ __forceinline__ uint32_t place(Raw bits, int i) {
    return static_cast<uint32_t>(bits) << (16 * i);
  }
};

// The upper half of a word is a bf16 in place already: one AND instead of two shifts.
template <>
__device__ __forceinline__ float Words<bf16_t>::element(uint32_t word, int i) {
  return float_of(i == 0 ? word << 16 : word & 0xFFFF0000u);
}

template <>
struct Words<float> {
  using Raw = uint32_t;
  static constexpr int per_word = 1;
  static __device__ __forceinline__ uint32_t magnitude(uint32_t word) { return word & kAbsMask; }
  static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b) { return ::max(a, b); }
  static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b, uint32_t c) {
    return __vimax3_u32(a, b, c);
  }
  static __device__ __forceinline__ uint32_t fold(uint32_t word) { return word; }
  static __device__ __forceinline__ float to_float_of_raw(uint32_t raw) { return float_of(raw); }
  static __device__ __forceinline__ float element(uint32_t word, int) { return float_of(word); }
  static __device__ __forceinline__ uint32_t place(Raw bits, int) { return bits; }
};

// Two floats to bf16, `low` in the low half; the same function as to_bf16, but for the bits of a NaN.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Sums of two bf16 values each, rounded to bf16. Those of floats round to the same: where they are inexact already, the
// smaller value is too small to matter.
__device__ __forceinline__ uint32_t add_bf16(uint32_t a, uint32_t b) {
  constexpr uint32_t kOnes = 0x3F803F80u;
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(kOnes), "r"(b));
  return sum;
}

__device__ __forceinline__ uint32_t subtract_bf16(uint32_t a, uint32_t b) {
  constexpr uint32_t kMinusOnes = 0xBF80BF80u;
  uint32_t difference;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(difference) : "r"(b), "r"(kMinusOnes), "r"(a));
  return difference;
}

// The same words to each row of words.
template <int kRows, int kWords>
__device__ __forceinline__ void add_to_rows(uint32_t (&word)[kRows][kWords], const uint32_t (&row)[kWords]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) word[i][w] = add_bf16(word[i][w], row[w]);
  }
}

// Two values to two fp8 bytes, `low` in the low byte; the same function as encode_fp8.
template <typename F>
__device__ __forceinline__ uint32_t encode_pair(float low, float high) {
  return convert_fp8x2<F>(low, high);
}

template <typename F>
__device__ __forceinline__ uint32_t encode_four(float a, float b, float c, float d) {
  return encode_pair<F>(a, b) | (encode_pair<F>(c, d) << 16);
}

// How bulk data passes L2: what is written may go first ("streaming"). What is read may not, or a cast to two planes
// takes up to a tenth longer: lines of a plane that are written in parts have to wait there for the rest.
template <typename V>
__device__ __forceinline__ V load_bulk(const V* from) {
  return __ldg(from);
}

// But what has been read a short while ago, and will not be again, may go.
template <typename V>
__device__ __forceinline__ V load_last(const V* from) {
  return __ldcs(from);
}

template <typename V>
__device__ __forceinline__ void store_bulk(V* to, V value) {
  __stcs(to, value);
}

// What is loaded by way of this stays in L2 as long as there is anything else to drop.
__device__ __forceinline__ uint64_t keep_in_l2() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Zeros where there is nothing.
__device__ __forceinline__ uint4 load_kept(const uint4* from, bool there, uint64_t keep) {
  uint4 v = make_uint4(0u, 0u, 0u, 0u);
  asm volatile(
      "{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %4, 0;\n\t"
      "@there ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%5], %6;\n\t}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "r"(there ? 1u : 0u), "l"(from), "l"(keep));
  return v;
}

// What a kernel fills with set bits on the way, so that a later one sees what nobody has written.
struct ToBlank {
  uint4* data;
  unsigned count;

  // By the threads of a block.
  __device__ __forceinline__ void fill() const {
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) data[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
};

// Brings the line of 128 bytes at `from` into L2.
__device__ __forceinline__ void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Four scale bytes; the buffer's rows are multiples of four bytes, but nobody promised an aligned start.
__device__ __forceinline__ void store_scale_word(uint8_t* out, uint32_t word) {
  if ((reinterpret_cast<std::uintptr_t>(out) & 3u) == 0) {
    *reinterpret_cast<uint32_t*>(out) = word;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = static_cast<uint8_t>(word >> (8 * i));
}

}  // namespace cuda
}  // namespace te_dist
