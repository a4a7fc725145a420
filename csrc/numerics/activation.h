// Activations and their slopes, the same bits everywhere: an own exponential from additions, products and fused
// multiply-adds, because no two math libraries round alike. te_dist/reference_producers.py mirrors each line.
#pragma once

#include "portability.h"

namespace te_dist {

// The codes that cross the Python boundary (te_dist/producers.py holds the same numbers).
enum class Activation : int { kGelu = 0, kQuickGelu = 1, kRelu = 2, kSquaredRelu = 3, kSilu = 4 };

// The others are their argument times a sigmoid.
TED_FN constexpr bool is_rectifier(Activation kind) {
  return kind == Activation::kRelu || kind == Activation::kSquaredRelu;
}

// 1 / x, rounded correctly, for x in [1, 2^128); 0 in the place of what would be subnormal, where x is above 2^126. On
// a GPU: what a division compiles to, without the branch for the rest.
TED_FN float reciprocal_above_one(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return __fmaf_rn(y, -__fmaf_rn(x, y, -1.0f), y);
#else
  return x > 0x1p126f ? 0.0f : 1.0f / x;
#endif
}

// 2^t for t in [-125, 127], to 1.7e-7. Anything for a NaN: the products around it carry the NaN.
TED_FN float exp2_bounded(float t) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = t + kShift;
  const float f = t - (shifted - kShift);
  float p = 0x1.5bba14p-10f;
  p = fused_multiply_add(p, f, 0x1.3cea88p-7f);
  p = fused_multiply_add(p, f, 0x1.c6b752p-5f);
  p = fused_multiply_add(p, f, 0x1.ebf9bcp-3f);
  p = fused_multiply_add(p, f, 0x1.62e42ap-1f);
  p = fused_multiply_add(p, f, 1.0f);
  return float_of(bits_of(p) + (bits_of(shifted) << 23));
}

// 1 / (1 + 2^t), and 0 where t is above 126.
TED_FN float sigmoid(float t) {
#if defined(__CUDA_ARCH__)
  t = fmaxf(fminf(t, 127.0f), -125.0f);  // one instruction each, which drops a NaN: see above
#else
  t = t > 127.0f ? 127.0f : t;
  t = t < -125.0f ? -125.0f : t;
#endif
  return reciprocal_above_one(1.0f + exp2_bounded(t));
}

struct ValueAndSlope {
  float value;
  float slope;
};

// GELU is its tanh form: x * sigmoid(x * (a + b x^2)), since (1 + tanh(u)) / 2 = sigmoid(2 u).
constexpr float kGeluA = 0x1.988454p+0f;       // 2 sqrt(2 / pi)
constexpr float kGeluThreeB = 0x1.b6676cp-3f;  // 3 b = 3 * 0.044715 a
constexpr float kQuickGelu = 0x1.b3b646p+0f;   // 1.702

// value = x * s; slope = s * (1 + w (1 - s)), w = x times the slope of the sigmoid's argument.
TED_FN ValueAndSlope gate_by_sigmoid(float x, float t, float w) {
  const float s = sigmoid(t);
  return ValueAndSlope{x * s, s * fused_multiply_add(w, 1.0f - s, 1.0f)};
}

// What 2 is raised to in the sigmoid of SiLU, GELU and quick-GELU: -log2(e) times the argument.
TED_FN float sigmoid_exponent(Activation kind, float x) {
  if (kind == Activation::kQuickGelu) return x * -0x1.3a4cbep+1f;
  if (kind == Activation::kSilu) return x * -0x1.715476p+0f;
  return x * fused_multiply_add(-0x1.a5a7d0p-4f, x * x, -0x1.26aec2p+1f);  // b and a
}

// Slopes times x, with which the slopes of these activations are made.
TED_FN float sigmoid_slope(Activation kind, float x) {
  if (kind == Activation::kQuickGelu) return kQuickGelu * x;
  if (kind == Activation::kSilu) return x;
  return x * fused_multiply_add(kGeluThreeB, x * x, kGeluA);
}

// The compiler drops what the caller does not use.
template <Activation kKind>
TED_FN ValueAndSlope activate(float x) {
  if (kKind == Activation::kRelu) {
    const bool off = x <= 0.0f;  // a NaN is not
    return ValueAndSlope{off ? 0.0f : x, off ? 0.0f : 1.0f};
  }
  if (kKind == Activation::kSquaredRelu) {
    const float positive = x <= 0.0f ? 0.0f : x;
    return ValueAndSlope{positive * positive, positive + positive};
  }
  return gate_by_sigmoid(x, sigmoid_exponent(kKind, x), sigmoid_slope(kKind, x));
}

}  // namespace te_dist
