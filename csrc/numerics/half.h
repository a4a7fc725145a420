// bf16 and fp16 to and from float, branch-free so that host loops over them vectorise.
#pragma once

#include "portability.h"

namespace te_dist {

// The dtype codes that cross the Python boundary (te_dist/kernels holds the same numbers).
enum class Float : int { kF32 = 0, kF16 = 1, kBF16 = 2 };

struct bf16_t {
  uint16_t bits;
};
struct fp16_t {
  uint16_t bits;
};

TED_FN float to_float(float value) { return value; }

TED_FN float to_float(bf16_t value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

TED_FN float to_float(fp16_t value) {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  const uint32_t magnitude = value.bits & 0x7FFFu;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  // An integer beside 0.5 is that many steps of 2^-24, the subnormals' ulp.
  const uint32_t subnormal = bits_of(float_of(0x3F000000u + magnitude) - 0.5f);
  const uint32_t finite = magnitude < 0x0400u ? subnormal : normal;
  const uint32_t special = magnitude >= 0x7C00u ? kInfBits : 0u;  // inf, NaN: the mantissa is in place
  return float_of(finite | special | sign);
#endif
}

TED_FN bf16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & kAbsMask) > kInfBits;
  return bf16_t{static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded)};
}

TED_FN fp16_t to_fp16(float value) {
#if defined(__CUDA_ARCH__)
  fp16_t narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
#else
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & kAbsMask;
  // Normal result: round to nearest even on the 13 dropped bits and rebias by 112.
  const uint32_t normal = (magnitude + 0x0FFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Subnormal result: adding 0.5 aligns the ulp to 2^-24, the float adder rounds.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;  // 2^-14
  result = magnitude >= 0x477FF000u ? 0x7C00u : result;            // rounds past 65504
  result = magnitude > kInfBits ? 0x7E00u : result;
  return fp16_t{static_cast<uint16_t>(result | sign)};
#endif
}

// Overloads on the wanted type, because a specialisation cannot be static.
TED_FN float narrow_to(float, float value) { return value; }
TED_FN bf16_t narrow_to(bf16_t, float value) { return to_bf16(value); }
TED_FN fp16_t narrow_to(fp16_t, float value) { return to_fp16(value); }

template <typename T>
TED_FN T from_float(float value) {
  return narrow_to(T{}, value);
}

// |value| as float bits. Unsigned order of these bits is the order of magnitudes, and every NaN lies above
// infinity, so an integer maximum is an amax that never loses a NaN.
template <typename T>
TED_FN uint32_t magnitude_bits(T value) {
  return bits_of(to_float(value)) & kAbsMask;
}

// An amax as it is stored: one canonical NaN, so that equal tensors have equal bytes.
TED_FN float amax_of_bits(uint32_t magnitude) {
  return float_of(magnitude > kInfBits ? kNanBits : magnitude);
}

template <typename T>
struct Largest;
template <>
struct Largest<float> {
  static constexpr float value = kFloatMax;
};
template <>
struct Largest<bf16_t> {
  static constexpr float value = 3.38953138925153547590e+38f;
};
template <>
struct Largest<fp16_t> {
  static constexpr float value = 65504.0f;
};

}  // namespace te_dist
