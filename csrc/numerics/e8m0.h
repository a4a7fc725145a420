// E8M0: a power of two in one byte, 2^(code - 127); 0xFF is NaN. MXFP8's block scale.
#pragma once

#include "portability.h"

namespace te_dist {

// The scale of a block whose largest magnitude is amax, rounded UP so that no element saturates.
TED_FN uint8_t e8m0_from_amax(float amax, float reciprocal_fp8_max) {
  const uint32_t bits = bits_of(amax * reciprocal_fp8_max);  // never negative
  const uint32_t exponent = bits >> 23;
  const uint32_t mantissa = bits & 0x7FFFFFu;
  // Integers instead of && and ||: those are branches, and a host loop over this would not vectorise.
  const uint32_t tiny = static_cast<uint32_t>(exponent == 0u) & static_cast<uint32_t>(mantissa <= 0x400000u);
  const uint32_t inexact = static_cast<uint32_t>(mantissa > 0u) & static_cast<uint32_t>(exponent != 0xFEu);
  const uint32_t up = inexact & (tiny ^ 1u);
  uint32_t code = exponent + up;
  code = bits == kInfBits ? 0xFEu : code;
  code = (bits & kAbsMask) > kInfBits ? 0xFFu : code;
  return static_cast<uint8_t>(code);
}

TED_FN float decode_e8m0(uint8_t code) {
  uint32_t bits = static_cast<uint32_t>(code) << 23;
  bits = code == 0u ? 0x00400000u : bits;  // 2^-127 is subnormal
  bits = code == 0xFFu ? kNanBits : bits;
  return float_of(bits);
}

// 2^(127 - code), the factor that brings a block into fp8 range; the last two codes give subnormals.
TED_FN float e8m0_encode_factor(uint8_t code) {
  const uint32_t normal = (254u - code) << 23;
  const uint32_t subnormal = 0x00400000u >> (code & 1u);  // of 0xFE and 0xFF
  return float_of(code >= 0xFEu ? subnormal : normal);
}

}  // namespace te_dist
