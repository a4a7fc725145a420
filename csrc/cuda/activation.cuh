// Activations of eight values: one body per activation, chosen by a branch outside of the loops over rows.
#pragma once

#include "../numerics/activation.h"
#include "common.cuh"

namespace te_dist {
namespace cuda {

template <Activation kKind>
struct ActivationTag {
  static constexpr Activation kind = kKind;
};

template <typename Body>
__device__ __forceinline__ void with_activation(Activation kind, const Body& body) {
  switch (kind) {
    case Activation::kSilu: return body(ActivationTag<Activation::kSilu>{});
    case Activation::kGelu: return body(ActivationTag<Activation::kGelu>{});
    case Activation::kQuickGelu: return body(ActivationTag<Activation::kQuickGelu>{});
    case Activation::kRelu: return body(ActivationTag<Activation::kRelu>{});
    case Activation::kSquaredRelu: return body(ActivationTag<Activation::kSquaredRelu>{});
  }
}

__device__ __forceinline__ void add_eight(float (&v)[8], const float (&other)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] += other[j];
}

// x <- act(x), times `second` where gated.
template <Activation kKind>
__device__ __forceinline__ void activate_eight(float (&x)[8], const float (&second)[8], bool gated) {
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = activate<kKind>(x[j]).value;
  if (!gated) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] *= second[j];
}

// x <- the gradient of act's argument, second <- that of the other factor where gated.
template <Activation kKind>
__device__ __forceinline__ void differentiate_eight(float (&x)[8], float (&second)[8], const float (&grad)[8],
                                                    bool gated) {
  if (!gated) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = grad[j] * activate<kKind>(x[j]).slope;
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const ValueAndSlope at = activate<kKind>(x[j]);
    x[j] = grad[j] * second[j] * at.slope;
    second[j] = grad[j] * at.value;
  }
}

}  // namespace cuda
}  // namespace te_dist
