// The amax launcher, shared by amax() and by NVFP4's global amaxes.
#pragma once

#include <cooperative_groups.h>

#include "common.cuh"

namespace te_dist {
namespace cuda {

struct Made;

// What an amax kernel's blocks raise at their end.
struct Raise {
  float* first;
  float* second;  // may be null
  bool zero;      // ZeroFirst has to, before that
  const float* noop;
};

// Zeroes up to two amaxes on the stream (a null one is skipped), unless noop says otherwise.
void launch_amax_reset(float* first, float* second, const float* noop, Lane lane);

// Writes the amax of x to both destinations; second may be null.
void launch_amax(const Input& x, float* first, float* second, bool accumulate, const float* noop, Lane lane);

// The amax of a matrix that is made on the fly.
void launch_amax_made(const Source& x, float* amax, bool accumulate, const float* noop, Lane lane);

// The same of an activation without bias or gate, whose operand is fused (check::fused); false: x is something
// else.
bool launch_amax_activation(const Source& x, const Raise& raise, bool accumulate, Lane lane);

// The same of a norm. `make_stats`: x.mean and x.rstd are written, else read; x.order says the same.
void launch_amax_norm(const Made& x, bool make_stats, const Raise& raise, bool accumulate, Lane lane);
void launch_amax_norm_patches(const Made& x, float* amax, const float* noop, Lane lane);  // raises what is there

// Starts kernel(arguments..., raise), which raises amaxes behind zeros, or what is there if they accumulate.
template <typename Kernel, typename... Arguments>
void launch_raising(const char* name, Kernel kernel, const Grid& grid, Raise raise, bool accumulate, Lane lane,
                    const Arguments&... arguments) {
  raise.zero = !accumulate && fits_at_once(kernel, grid);
  if (!accumulate && !raise.zero) launch_amax_reset(raise.first, raise.second, raise.noop, lane);
  launch_grid(name, kernel, grid, raise.zero, lane, arguments..., raise);
}

// `word` of raw magnitudes and 16 bytes of elements.
template <typename T>
__device__ __forceinline__ uint32_t max_of_vector(uint32_t word, const uint4& v) {
  using W = Words<T>;
  const uint32_t low = W::max(W::magnitude(v.x), W::magnitude(v.y));
  const uint32_t high = W::max(W::magnitude(v.z), W::magnitude(v.w));
  return W::max(word, W::max(low, high));
}

// What a whole block of threads holds, as one raw magnitude, in thread 0. `scratch`: one word per warp.
template <int kThreads>
__device__ __forceinline__ uint32_t block_max(uint32_t raw, uint32_t* scratch) {
  raw = __reduce_max_sync(kFullWarp, raw);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = raw;
  __syncthreads();
  if (threadIdx.x < 32) {
    raw = threadIdx.x < kThreads / 32 ? scratch[threadIdx.x] : 0u;
    raw = __reduce_max_sync(kFullWarp, raw);
  }
  return raw;
}

// Zeroes what a launch is to raise, in that launch, which saves one before it: block 0 does, while all others are
// reading. The blocks are all there at once (launch_raising). Made and waited for by all threads.
class ZeroFirst {
 public:
  __device__ __forceinline__ explicit ZeroFirst(const Raise& raise) : raise_(raise) {
    if (!raise_.zero) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      if (raise_.first != nullptr) *raise_.first = 0.0f;
      if (raise_.second != nullptr) *raise_.second = 0.0f;
    }
    token_ = cooperative_groups::this_grid().barrier_arrive();
  }
  __device__ __forceinline__ void wait() {
    if (raise_.zero) cooperative_groups::this_grid().barrier_wait(static_cast<Token&&>(token_));
  }

 private:
  using Token = cooperative_groups::grid_group::arrival_token;
  const Raise& raise_;
  Token token_ = 0;
};

// Magnitude bits are ordered as unsigned integers, NaN above all, so the integer atomic is the float maximum.
__device__ __forceinline__ void atomic_amax(float* amax, float value) {
  atomicMax(reinterpret_cast<unsigned int*>(amax), bits_of(amax_of_bits(bits_of(value))));
}

// A word of raw magnitudes of each thread into `amax`, warp by warp: for blocks whose warps end at different times.
template <typename T>
__device__ __forceinline__ void raise_amax_by_warps(float* amax, uint32_t word) {
  const uint32_t raw = __reduce_max_sync(kFullWarp, Words<T>::fold(word));
  const float value = Words<T>::to_float_of_raw(raw);
  // Most find a larger one there.
  const auto* there = reinterpret_cast<const unsigned int*>(amax);
  if (threadIdx.x % 32 == 0 && bits_of(amax_of_bits(bits_of(value))) > __ldcg(there)) atomic_amax(amax, value);
}

}  // namespace cuda
}  // namespace te_dist
