// Delayed scaling's step: a history of amaxes in, scales out.
#include "../numerics/scale.h"
#include "kernel.h"

TED_BEGIN_VARIANT

void advance_scales(float* history, float* scales, const float* largest, int64_t length, int64_t count,
                    int margin, bool most_recent, Lane) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t amax = bits_of(history[i]) & kAbsMask;
    for (int64_t row = 1; row < length && !most_recent; ++row) {
      const uint32_t other = bits_of(history[row * count + i]) & kAbsMask;
      amax = other > amax ? other : amax;
    }
    scales[i] = delayed_scale(float_of(amax), largest[i], scales[i], margin);
    const float newest = history[i];
    for (int64_t row = 0; row + 1 < length; ++row) history[row * count + i] = history[(row + 1) * count + i];
    history[(length - 1) * count + i] = newest;
    history[i] = 0.0f;
  }
}

TED_END_VARIANT
