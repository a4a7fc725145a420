// The scale that an amax asks for: per-tensor current scaling, and the 1x128 and 128x128 blocks.
#pragma once

#include "portability.h"

namespace te_dist {

struct ScaleRule {
  float eps;       // lower bound of the amax
  bool power_of_2; // round the scale down to a power of two
};

// overflow: what an infinite quotient becomes. Per tensor it is the largest float, per block the largest
// finite value of the input's dtype.
TED_FN float scale_from_amax(float amax, float fp8_max, float overflow, ScaleRule rule) {
  const float bounded = rule.eps > amax ? rule.eps : amax;  // a NaN amax stays
  // Not zero, infinite or NaN. An amax has no sign, so one test does, and a loop over it vectorises.
  const bool usable = bits_of(bounded) - 1u < kInfBits - 1u;
  float scale = usable ? fp8_max / bounded : 1.0f;
  scale = scale > kFloatMax ? overflow : scale;
  return rule.power_of_2 ? float_of(bits_of(scale) & 0xFF800000u) : scale;
}

// Delayed scaling: (fp8_max / amax) / 2^margin, where an amax that is 0, infinite or NaN keeps the old scale.
TED_FN float delayed_scale(float amax, float fp8_max, float old, int margin) {
  const bool usable = bits_of(amax) - 1u < kInfBits - 1u;
  const float divisor = float_of(static_cast<uint32_t>(127 + margin) << 23);
  const float fresh = fp8_max / (usable ? amax : 1.0f) / divisor;
  const float bounded = fresh > kFloatMax ? kFloatMax : fresh;
  return usable ? bounded : old;
}

}  // namespace te_dist
