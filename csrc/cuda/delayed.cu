// Delayed scaling's step for all scales of a layer in one launch: a block per scale.
#include "../numerics/scale.h"
#include "amax.cuh"

namespace te_dist {
namespace cuda {
namespace {

constexpr int kAdvanceThreads = 256;

__global__ void __launch_bounds__(kAdvanceThreads)
    advance_scales_kernel(float* history, float* scales, const float* largest, int64_t length, int64_t count,
                          int margin, bool most_recent) {
  __shared__ uint32_t scratch[kAdvanceThreads / 32];
  float* column = history + blockIdx.x;
  const float newest = column[0];
  uint32_t amax = bits_of(newest) & kAbsMask;
  for (int64_t row = threadIdx.x; row < length && !most_recent; row += kAdvanceThreads) {
    amax = max(amax, bits_of(column[row * count]) & kAbsMask);
  }
  amax = block_max<kAdvanceThreads>(amax, scratch);
  if (threadIdx.x == 0) {
    scales[blockIdx.x] = delayed_scale(float_of(amax), largest[blockIdx.x], scales[blockIdx.x], margin);
  }
  // Rolls by -1 in place: every thread has read its successor before any writes.
  for (int64_t base = 0; base < length; base += kAdvanceThreads) {
    const int64_t row = base + threadIdx.x;
    __syncthreads();
    const float moved = row + 1 < length ? column[(row + 1) * count] : newest;
    __syncthreads();
    if (row < length) column[row * count] = row == 0 ? 0.0f : moved;
  }
}

}  // namespace

void advance_scales(float* history, float* scales, const float* largest, int64_t length, int64_t count,
                    int margin, bool most_recent, Lane lane) {
  check::advance(history, scales, largest, length, count);
  if (count == 0) return;
  launch("advance_scales_kernel", advance_scales_kernel, grid_size(count), kAdvanceThreads, lane, history, scales,
         largest, length, count, margin, most_recent);
}

}  // namespace cuda
}  // namespace te_dist
