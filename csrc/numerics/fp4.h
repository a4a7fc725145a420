// E2M1: 0 .5 1 1.5 2 3 4 6 with a sign, as codes 0..7 plus 8. The format has no NaN: NaN becomes 6, and the
// block's scale, which is NaN then, carries it.
#pragma once

#include "portability.h"

namespace te_dist {

// Round to nearest, ties to the even code; the input may exceed 6 in magnitude (it saturates).
TED_FN uint8_t encode_e2m1(float value) {
  const uint32_t bits = bits_of(value);
  const float a = float_of(bits & kAbsMask);
  const uint32_t code = static_cast<uint32_t>(a > 0.25f) + static_cast<uint32_t>(a >= 0.75f) +
                        static_cast<uint32_t>(a > 1.25f) + static_cast<uint32_t>(a >= 1.75f) +
                        static_cast<uint32_t>(a > 2.5f) + static_cast<uint32_t>(a >= 3.5f) +
                        static_cast<uint32_t>(a > 5.0f);
  const uint32_t finite = code | ((bits >> 28) & 8u);
  return static_cast<uint8_t>((bits & kAbsMask) > kInfBits ? 7u : finite);
}

TED_FN float e2m1_step(float a) { return a < 2.0f ? 0.5f : (a < 4.0f ? 1.0f : 2.0f); }

// Stochastic rounding: add random/256 of a step, then round down to the grid. In whole 256ths of a step, so that no sum
// is rounded; what they cut off makes no difference.
TED_FN uint8_t encode_e2m1_stochastic(float value, uint32_t random_byte) {
  const uint32_t bits = bits_of(value);
  float a = float_of(bits & kAbsMask);
  a = a < 6.0f ? a : 6.0f;  // NaN, too
  const float part = e2m1_step(a) * (1.0f / 256.0f);
  const auto parts = static_cast<int32_t>(a * (a < 2.0f ? 512.0f : (a < 4.0f ? 256.0f : 128.0f)));
  const float t = static_cast<float>(parts + static_cast<int32_t>(random_byte)) * part;
  // Number of grid points not above t; past 6 there is none, so the result saturates by itself.
  const uint32_t code = static_cast<uint32_t>(t >= 0.5f) + static_cast<uint32_t>(t >= 1.0f) +
                        static_cast<uint32_t>(t >= 1.5f) + static_cast<uint32_t>(t >= 2.0f) +
                        static_cast<uint32_t>(t >= 3.0f) + static_cast<uint32_t>(t >= 4.0f) +
                        static_cast<uint32_t>(t >= 6.0f);
  const uint32_t finite = code | ((bits >> 28) & 8u);
  return static_cast<uint8_t>((bits & kAbsMask) > kInfBits ? 7u : finite);
}

TED_FN float decode_e2m1(uint8_t code) {
  // Codes 0 and 1 are the subnormals 0 and .5: (1 + code / 2) - 1. Rebiasing by a multiplication would cover
  // them too, but a subnormal float operand costs a CPU a hundred cycles.
  const uint32_t magnitude = code & 7u;
  const uint32_t sign = static_cast<uint32_t>(code & 8u) << 28;
  const uint32_t normal = (magnitude << 22) + (126u << 23);
  const uint32_t subnormal = bits_of(float_of(0x3F800000u + (magnitude << 22)) - 1.0f);
  return float_of((magnitude < 2u ? subnormal : normal) | sign);
}

// Two codes a byte, the even index in the low nibble.
TED_FN uint8_t pack_e2m1(uint8_t even, uint8_t odd) { return static_cast<uint8_t>(even | (odd << 4)); }

}  // namespace te_dist
