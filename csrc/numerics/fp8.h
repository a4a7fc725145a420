// E4M3 and E5M2: saturating casts that round to nearest even. Infinity saturates; NaN becomes 0x7F.
#pragma once

#include "portability.h"

namespace te_dist {

struct E4M3 {
  static constexpr int code = 0;
  static constexpr int bias = 7;
  static constexpr int mantissa = 3;
  static constexpr float max = 448.0f;
  static constexpr float reciprocal_max = 1.0f / 448.0f;
  static constexpr uint32_t max_bits = 0x43E00000u;
};

struct E5M2 {
  static constexpr int code = 1;
  static constexpr int bias = 15;
  static constexpr int mantissa = 2;
  static constexpr float max = 57344.0f;
  static constexpr float reciprocal_max = 1.0f / 57344.0f;
  static constexpr uint32_t max_bits = 0x47600000u;
};

#if defined(__CUDACC__)
// The hardware cast of two values, `low` into the low byte. In PTX, because cuda_fp8.h costs each file a second of
// compile time. It is the same function as encode_fp8 below: the GPU tests compare them over all 16-bit floats.
template <typename F>
static __device__ __forceinline__ uint32_t convert_fp8x2(float low, float high) {
  uint16_t pair;
  if (F::code == E4M3::code) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
}
#endif

template <typename F>
TED_FN uint8_t encode_fp8(float value) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint8_t>(convert_fp8x2<F>(value, 0.0f));
#else
  constexpr int shift = 23 - F::mantissa;
  constexpr uint32_t min_normal = static_cast<uint32_t>(128 - F::bias) << 23;
  // A float whose ulp is the fp8 subnormal step: adding it makes the float adder round to that step.
  constexpr uint32_t aligner = static_cast<uint32_t>(127 + 23 + 1 - F::bias - F::mantissa) << 23;

  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & kAbsMask;
  const uint32_t clamped = magnitude > F::max_bits ? F::max_bits : magnitude;
  const uint32_t normal =
      ((clamped + ((1u << (shift - 1)) - 1u) + ((clamped >> shift) & 1u)) >> shift) -
      (static_cast<uint32_t>(127 - F::bias) << F::mantissa);
  const uint32_t subnormal = bits_of(float_of(clamped) + float_of(aligner)) - aligner;
  const uint32_t finite = (clamped < min_normal ? subnormal : normal) | sign;
  return static_cast<uint8_t>(magnitude > kInfBits ? 0x7Fu : finite);
#endif
}

template <typename F>
TED_FN float decode_fp8(uint8_t code) {
  constexpr uint32_t aligner = static_cast<uint32_t>(127 + 23 + 1 - F::bias - F::mantissa) << 23;
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7Fu;
  const uint32_t normal = (magnitude << (23 - F::mantissa)) + (static_cast<uint32_t>(127 - F::bias) << 23);
  // An integer beside the aligner is that many subnormal steps. (One multiplication would rebias both kinds,
  // but a subnormal float operand costs a CPU a hundred cycles.)
  const uint32_t subnormal = bits_of(float_of(aligner + magnitude) - float_of(aligner));
  uint32_t bits = magnitude < (1u << F::mantissa) ? subnormal : normal;
  if (F::code == E4M3::code) {
    bits = (code & 0x7Fu) == 0x7Fu ? kNanBits : bits;
  } else {
    bits = (code & 0x7Fu) > 0x7Cu ? kNanBits : ((code & 0x7Fu) == 0x7Cu ? kInfBits : bits);
  }
  return float_of(bits | sign);
}

}  // namespace te_dist
