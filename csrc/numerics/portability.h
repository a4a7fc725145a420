// What lets one set of numerics compile for the host and for the device.
//
// Every function of this folder is TED_FN: internal linkage and always inlined. The host kernels are
// compiled several times with different instruction sets (see cpu/), so an out-of-line copy shared by the
// linker could carry AVX-512 code into the baseline path.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TED_FN static __host__ __device__ __forceinline__
#else
#define TED_FN static inline __attribute__((always_inline))
#endif

// In front of a short loop with constant bounds: unrolled early, its arrays become registers, and a loop
// around it vectorises on the host.
#if defined(__CUDA_ARCH__)
#define TED_UNROLL _Pragma("unroll")
#elif defined(__CUDACC__)
#define TED_UNROLL  // nvcc's pass for the host knows neither pragma
#else
#define TED_UNROLL _Pragma("GCC unroll 16")
#endif

namespace te_dist {

using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

constexpr float kFloatMax = 3.40282346638528859812e+38f;
constexpr uint32_t kAbsMask = 0x7FFFFFFFu;
constexpr uint32_t kInfBits = 0x7F800000u;
constexpr uint32_t kNanBits = 0x7FC00000u;  // the one NaN we ever store

TED_FN uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

TED_FN float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

TED_FN constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
TED_FN constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// a * b + c, rounded once.
TED_FN float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

}  // namespace te_dist
