// NVFP4's two-level scales: an fp32 amax for the whole tensor, an E4M3 scale for every 16 values.
#pragma once

#include "fp4.h"
#include "fp8.h"

namespace te_dist {

constexpr int kNvfp4Block = 16;

struct Nvfp4Global {
  float encode;        // Senc
  float decode;        // Sdec = 1 / Senc
  float encode_sixth;  // Senc * fl32(1/6): what turns a block's amax into its scale
};

// Nothing is asked of the quotient: GCC 13 takes one that is infinite for one by zero, and drops other comparisons of
// amax.
TED_FN Nvfp4Global nvfp4_global(float amax) {
  constexpr uint32_t kPastLargest = 0x05280000u;  // 2688 / 2^128, the last amax by which the quotient is infinite
  const uint32_t bits = bits_of(amax);
  const uint32_t magnitude = bits & kAbsMask;
  float encode = (448.0f * 6.0f) / amax;  // NaN of a NaN
  encode = bits <= kPastLargest ? kFloatMax : encode;
  encode = (magnitude == 0u || magnitude == kInfBits) ? 1.0f : encode;
  return Nvfp4Global{encode, 1.0f / encode, encode * (1.0f / 6.0f)};
}

TED_FN uint8_t nvfp4_block_scale(float block_amax, const Nvfp4Global& global) {
  return encode_fp8<E4M3>(block_amax * global.encode_sixth);
}

TED_FN float nvfp4_encode_factor(uint8_t block_scale, const Nvfp4Global& global) {
  const float factor = 1.0f / (decode_fp8<E4M3>(block_scale) * global.decode);
  return factor > kFloatMax ? kFloatMax : factor;  // a NaN stays NaN
}

TED_FN float nvfp4_decode(uint8_t code, float block_scale, float amax) {
  return decode_e2m1(code) * block_scale * amax * (1.0f / (6.0f * 448.0f));
}

}  // namespace te_dist
