// Block scales, their factors, and values to packed E2M1 codes: the functions of numerics/nvfp4.h and
// numerics/fp4.h, written for few instructions.
#pragma once

#include "../numerics/nvfp4.h"
#include "common.cuh"

namespace te_dist {
namespace cuda {

// ---------------------------------------------------------------------------------------------- scales
struct NvScale {
  uint32_t code;
  float factor;
  bool plain;  // the factor is right, no NaN, and no value scales past 6.9
};

// E4M3 to float; the same function as decode_fp8.
__device__ __forceinline__ float decode_scale(uint32_t code) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("{.reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 pair, %1; mov.b32 {low, high}, pair; "
      "cvt.f32.f16 %0, low;}"
      : "=f"(value)
      : "h"(static_cast<uint16_t>(code)));
  return value;
#else
  return decode_fp8<E4M3>(static_cast<uint8_t>(code));
#endif
}

// 1 / x for exponent fields 1 to 252. It is what the compiler makes of a division, without the branch to what
// handles the others.
__device__ __forceinline__ float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return __fmaf_rn(y, -__fmaf_rn(x, y, -1.0f), y);
#else
  return 1.0f / x;
#endif
}

// nvfp4_block_scale and nvfp4_encode_factor. Not plain: the factor is exact_factor's.
__device__ __forceinline__ NvScale make_scale(float amax, const Nvfp4Global& global) {
  NvScale scale;
  scale.code = encode_fp8<E4M3>(amax * global.encode_sixth);
  const float x = decode_scale(scale.code) * global.decode;
  const bool zero = x == 0.0f;
  const bool usual = bits_of(x) - 0x00800000u < 0x7E000000u;
  scale.factor = zero ? kFloatMax : reciprocal(x);
  scale.plain = (zero || usual) && amax * scale.factor < 6.9f;
  return scale;
}

__device__ __forceinline__ float exact_factor(uint32_t code, const Nvfp4Global& global) {
  const float factor = 1.0f / (decode_scale(code) * global.decode);
  return factor > kFloatMax ? kFloatMax : factor;  // a NaN stays NaN
}

__device__ __forceinline__ bool is_nan(float factor) { return (bits_of(factor) & kAbsMask) > kInfBits; }

// ---------------------------------------------------------------------------------------------- single codes
// E2M1's steps are 1/2, 1 and 2, so the code of a magnitude a is the least of three roundings to an integer,
// 2a, a + 2 and a/2 + 4. Adding 2^23 is what rounds; the sum's bits are the code on top of those of 2^23.
constexpr float kCodeBase = 8388608.0f;

// encode_e2m1 of a magnitude below 7: ties go to even in all three roundings.
__device__ __forceinline__ uint32_t code_over_base(float a) {
  return __vimin3_u32(bits_of(__fmaf_rn(a, 2.0f, kCodeBase)), bits_of(a + (kCodeBase + 2.0f)),
                      bits_of(__fmaf_rn(a, 0.5f, kCodeBase + 4.0f)));
}

// encode_e2m1_stochastic of a magnitude up to 6, with byte `at` of `random`. The products are exact, and sums are
// rounded down, which leaves them above E2M1's numbers if they are.
__device__ __forceinline__ uint32_t random_code_over_base(float a, uint32_t random, int at) {
  const float twice_the_step = float_of(bits_of(fmaxf(a, 1.0f)) & kInfBits);  // a's power of two, from 1 on
  const float byte_over_base = float_of(__byte_perm(random, bits_of(kCodeBase), 0x7440u | at));
  const float share = __fmaf_rn(byte_over_base, 1.0f / 512.0f, kCodeBase / -512.0f);
  const float t = __fmaf_rd(share, twice_the_step, a);
  return __vimin3_u32(bits_of(__fmaf_rd(t, 2.0f, kCodeBase)), bits_of(__fadd_rd(t, kCodeBase + 2.0f)),
                      bits_of(__fmaf_rd(t, 0.5f, kCodeBase + 4.0f)));
}

// ---------------------------------------------------------------------------------------------- packed codes
// code(i), over the base, to bits 4 i of the result, without the base.
template <int kCount, typename Code>
__device__ __forceinline__ uint32_t join_codes(const Code& code) {
  uint32_t codes = code(kCount - 1);
#pragma unroll
  for (int i = kCount - 2; i >= 0; --i) codes = codes * 16u + code(i);
  return codes - 0xFB000000u;  // what four or eight bases add up to, modulo 2^32
}

// The signs of 8 16-bit floats, element i's in bit 4 i + 3.
__device__ __forceinline__ uint32_t signs_of_eight(const uint32_t* word) {
  const uint32_t low = __byte_perm(word[0], word[1], 0x7351);   // elements 0 2 1 3
  const uint32_t high = __byte_perm(word[2], word[3], 0x7351);  // elements 4 6 5 7
  const uint32_t even = __byte_perm(low, high, 0x5410);
  const uint32_t odd = __byte_perm(low, high, 0x7632);
  return (odd & 0x80808080u) | ((even >> 4) & 0x08080808u);
}

template <typename E, int kCount>
__device__ __forceinline__ uint32_t signs_of(const uint32_t* word) {
  if constexpr (sizeof(E) == 2) {
    return signs_of_eight(word);
  } else {
    uint32_t signs = 0u;
#pragma unroll
    for (int i = 0; i < kCount; ++i) signs |= (word[i] & 0x80000000u) >> (28 - 4 * i);
    return signs;
  }
}

template <typename E>
__device__ __forceinline__ float magnitude_of(const uint32_t* word, int i) {
  return fabsf(Words<E>::element(word[i / Words<E>::per_word], i % Words<E>::per_word));
}

// Eight bf16 values of a plain block, or of one that make_plain has seen.
__device__ __forceinline__ uint32_t pack_plain(const uint32_t* word, float factor) {
  return join_codes<8>([&](int i) { return code_over_base(magnitude_of<bf16_t>(word, i) * factor); }) +
         signs_of_eight(word);
}

// Makes bf16 values fit for pack_plain where NvScale::plain is false, which is rare: magnitudes that scale
// past 6.9 shrink to one that scales to about 6, and a block of NaN becomes one of sixes.
template <int kWords>
__device__ __forceinline__ void make_plain(uint32_t (&word)[kWords], float& factor) {
  const bool nan = is_nan(factor);
  factor = nan ? 6.0f : factor;
  const uint32_t limit = (bits_of(6.0f * (1.0f / factor)) >> 16) * 0x00010001u;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint32_t magnitude = Words<bf16_t>::magnitude(word[w]);
    const uint32_t clamped = __vminu2(magnitude, limit);
    word[w] = nan ? 0x3F803F80u : clamped | (word[w] ^ magnitude);
  }
}

// kCount (4 or 8) values of any block. code(a, i): of a magnitude up to 6, over the base. A NaN among the
// values makes the block's factor NaN, and that makes all codes 7, so nothing else has to look for one.
template <typename E, int kCount, typename Code>
__device__ __forceinline__ uint32_t pack_any(const uint32_t* word, float factor, const Code& code) {
  const uint32_t codes =
      join_codes<kCount>([&](int i) { return code(fminf(magnitude_of<E>(word, i) * factor, 6.0f), i); });
  return is_nan(factor) ? 0x77777777u : codes + signs_of<E, kCount>(word);
}

template <typename E, int kCount>
__device__ __forceinline__ uint32_t pack_nearest(const uint32_t* word, float factor) {
  return pack_any<E, kCount>(word, factor, [](float a, int) { return code_over_base(a); });
}

// Value i takes byte i of `random`.
template <typename E, int kCount>
__device__ __forceinline__ uint32_t pack_random(const uint32_t* word, float factor, const uint32_t* random) {
  return pack_any<E, kCount>(
      word, factor, [&](float a, int i) { return random_code_over_base(a, random[i / 4], i % 4); });
}

}  // namespace cuda
}  // namespace te_dist
