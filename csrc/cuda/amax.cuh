// The amax launcher, shared by amax() and by NVFP4's global amaxes.
#pragma once

#include "common.cuh"

namespace te_dist {
namespace cuda {

// Zeroes up to two amaxes on the stream (a null one is skipped), unless noop says otherwise. A launch of its own:
// block 0 could do it while others read, if all blocks were on the GPU at once. But such a (cooperative) launch does
// not start beside a collective that holds some multiprocessors, and that may wait for what another rank has yet to
// start.
void launch_amax_reset(float* first, float* second, const float* noop, Lane lane);

// Writes the amax of x to both destinations; second may be null.
void launch_amax(const Input& x, float* first, float* second, bool accumulate, const float* noop, Lane lane);

// The same of a matrix that is made on the fly.
void launch_amax_made(const Source& x, float* amax, bool accumulate, const float* noop, Lane lane);

// The same of an activation without bias or gate, whose operand is fused (check::fused); false: x is something
// else. Raises what is in `amax`.
bool launch_amax_activation(const Source& x, float* amax, const float* noop, Lane lane);

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
