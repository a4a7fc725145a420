// Activations in few instructions and without a table: those with a sigmoid by the GPU's own approximations of 2^t and
// 1 / x. They need no clamps: where 2^t is above 2^126 its reciprocal would be subnormal, and is 0, as it is defined.
//
// Of bf16 values, and rounded to bf16, they differ from numerics/activation.h by less than what rounds away. That this
// is so for every one of the 65536 values is a matter of their last bits, and was seen on Hopper
// (tests/test_nvfp4_column_amax.py runs through those that are not plainly 0, x / 2 or x). Other GPUs may have other
// last bits, and go other ways. Of other values: activation_guarded.cuh.
#pragma once

#include "activation.cuh"
#include "row.cuh"

namespace te_dist {
namespace cuda {

inline bool has_fast_activation(Activation kind) {
  return is_rectifier(kind) || device_attribute<cudaDevAttrComputeCapabilityMajor>() == 9;
}

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

template <Activation kKind>
__device__ __forceinline__ float fast_activation(float x) {
  if constexpr (is_rectifier(kKind)) return activate<kKind>(x).value;
  return x * approximate_reciprocal(1.0f + approximate_power(sigmoid_exponent(kKind, x)));
}

// Of the two values in a word of bf16.
template <Activation kKind>
__device__ __forceinline__ uint32_t activation_of_word(uint32_t word) {
  return pack_bf16(fast_activation<kKind>(Words<bf16_t>::element(word, 0)),
                   fast_activation<kKind>(Words<bf16_t>::element(word, 1)));
}

// body(tag) for the activation: with_activation on the host.
template <typename Body>
void with_fast_activation(Activation kind, const Body& body) {
  switch (kind) {
    case Activation::kSilu: return body(ActivationTag<Activation::kSilu>{});
    case Activation::kGelu: return body(ActivationTag<Activation::kGelu>{});
    case Activation::kQuickGelu: return body(ActivationTag<Activation::kQuickGelu>{});
    case Activation::kRelu: return body(ActivationTag<Activation::kRelu>{});
    case Activation::kSquaredRelu: return body(ActivationTag<Activation::kSquaredRelu>{});
  }
}

}  // namespace cuda
}  // namespace te_dist
