// SiLU, GELU and quick-GELU of bf16 values, rounded to bf16, in few instructions and without a table: by the GPU's own
// approximations, which differ from numerics/activation.h by less than what rounds away. That this is so for every one
// of the 65536 values is a matter of their last bits, and was seen on Hopper (tests/test_nvfp4_column_amax.py runs
// through those that are not plainly 0, x / 2 or x). Other GPUs may have other last bits, and go other ways.
#pragma once

#include "activation.cuh"
#include "row.cuh"

namespace te_dist {
namespace cuda {

inline bool has_fast_activations() { return device_attribute<cudaDevAttrComputeCapabilityMajor>() == 9; }

__device__ __forceinline__ float approximate_power(float exponent) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
}

__device__ __forceinline__ float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What 2 is raised to in 1 / (1 + 2^t).
template <Activation kKind>
__device__ __forceinline__ float fast_exponent(float x) {
  if (kKind == Activation::kSilu) return x * -0x1.715476p+0f;
  if (kKind == Activation::kQuickGelu) return x * -0x1.3a4cbep+1f;
  return x * fused_multiply_add(-0x1.a5a7cep-4f, x * x, -0x1.26aec2p+1f);
}

template <Activation kKind>
__device__ __forceinline__ float fast_activation(float x) {
  const float exponent = fminf(fast_exponent<kKind>(x), 125.0f);
  return x * approximate_reciprocal(1.0f + approximate_power(exponent));
}

// Of the two values in a word of bf16.
template <Activation kKind>
__device__ __forceinline__ uint32_t activation_of_word(uint32_t word) {
  return pack_bf16(fast_activation<kKind>(Words<bf16_t>::element(word, 0)),
                   fast_activation<kKind>(Words<bf16_t>::element(word, 1)));
}

// body(tag) for an activation that there is a fast way to; false: there is none.
template <typename Body>
bool with_fast_activation(Activation kind, const Body& body) {
  switch (kind) {
    case Activation::kSilu: body(ActivationTag<Activation::kSilu>{}); return true;
    case Activation::kGelu: body(ActivationTag<Activation::kGelu>{}); return true;
    case Activation::kQuickGelu: body(ActivationTag<Activation::kQuickGelu>{}); return true;
    default: return false;
  }
}

}  // namespace cuda
}  // namespace te_dist
