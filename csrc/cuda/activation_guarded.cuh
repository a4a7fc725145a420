// Activations of floats, rounded to bf16, by activation_fast.cuh's approximations: a third of the instructions of
// numerics/activation.h, and the same bits.
//
// Both start with the same t. What follows differs by less than 2^-20 of the result: 2^-22 for 2^t and 2^-23 for 1 / x
// by PTX's bounds, 1.7e-7 for 2^t over there, and a rounding each for the sum, the products and the quotient. That is
// 16 units in the last place of a float. So both round to the same bf16 value, unless the approximation lies as near to
// the middle between two of them: then the pair is made anew, exactly. Two ends: both are 0 where t is above 126, for
// the next float is further away than they differ, and GPUs raise 2 to an integer exactly. Both are exactly x / 2 where
// that is subnormal, and its last place worth more.
#pragma once

#include "activation_fast.cuh"
#include "made.cuh"

namespace te_dist {
namespace cuda {

// Rare, and so kept out of the loops. The result of two values, times their seconds.
static __device__ __noinline__ uint32_t exact_pair(Activation kind, float2 x, float2 second) {
  float2 y = x;
  with_activation(kind, [&](auto tag) {
    y = make_float2(activate<decltype(tag)::kind>(x.x).value, activate<decltype(tag)::kind>(x.y).value);
  });
  return pack_bf16(y.x * second.x, y.y * second.y);
}

// act(x), times `second` where gated, of eight.
template <Activation kKind, bool kGated>
__device__ __forceinline__ uint4 activated_eight(const RoundingGuard& guard, const float (&x)[8],
                                                 const float (&second)[8]) {
  uint32_t word[4];
  uint32_t behind[4];
  uint32_t nearest = 0xFFFFFFFFu;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float y[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float value = x[2 * w + k];
      y[k] = fast_activation<kKind>(value);
      if (kGated) y[k] *= second[2 * w + k];
    }
    word[w] = pack_bf16(y[0], y[1]);
    if (is_rectifier(kKind)) continue;
    behind[w] = __byte_perm(bits_of(y[0]), bits_of(y[1]), 0x5410);
    nearest = __viaddmin_u16x2(behind[w], guard.shift, nearest);
  }
  if (!is_rectifier(kKind) && guard.has(nearest)) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (!guard.has(__vadd2(behind[w], guard.shift))) continue;
      const float2 seconds =
          kGated ? make_float2(second[2 * w], second[2 * w + 1]) : make_float2(1.0f, 1.0f);
      word[w] = exact_pair(kKind, make_float2(x[2 * w], x[2 * w + 1]), seconds);
    }
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

}  // namespace cuda
}  // namespace te_dist
