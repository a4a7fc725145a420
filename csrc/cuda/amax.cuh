// The amax launcher, shared by amax() and by NVFP4's global amaxes.
#pragma once

#include "common.cuh"

namespace te_dist {
namespace cuda {

struct Made;

// Where an amax goes. In place: every block raises it, and who launches them zeroes it before. Or, where a cast
// follows that takes the largest of them, each block's own into `parts`: a launch less.
struct AmaxOut {
  float* amax;
  float* parts;  // null: in place
};

// Of any kernel here on a multiprocessor, so that it is known whether all blocks have room for their parts.
constexpr int kMostAmaxBlocksPerSm = 5;

// Zeroes up to two amaxes on the stream (a null one is skipped), and blanks, unless noop says otherwise. A launch of
// its own: block 0 could do it while others read, if all blocks were on the GPU at once. But such a (cooperative)
// launch does not start beside a collective that holds some multiprocessors, and that may wait for what another rank
// has yet to start.
void launch_amax_reset(float* first, float* second, const float* noop, Lane lane, const ToBlank& blank = {});

// Launchers return how many parts there are; 0: the amax is in place, as it may be even if there was room for parts.
// second: null, or where the amax goes as well (in place).
int launch_amax(const Input& x, const AmaxOut& out, float* second, bool accumulate, const float* noop, Lane lane,
                const ToBlank& blank = {});

// The same of a matrix that is made on the fly.
int launch_amax_made(const Source& x, const AmaxOut& out, bool accumulate, const float* noop, Lane lane);

// Activations without a gate, whose operand is fused (check::fused). As all launchers of one kind of what is made, it
// raises what is in out.amax, and returns the number of blocks.
inline bool goes_up_and_down(const Source& x) { return x.kind == Produce::kActivation && !x.gated; }
int launch_amax_activation(const Source& x, const AmaxOut& out, const float* noop, Lane lane);
// Those with a bias.
int launch_amax_biased(const Made& x, const AmaxOut& out, const float* noop, Lane lane);

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

// What a block has found. One thread of it. Parts are read four at a time, so that the last block's fill up the four.
__device__ __forceinline__ void give_amax(const AmaxOut& out, float value) {
  if (out.parts == nullptr) return atomic_amax(out.amax, value);
  const float amax = amax_of_bits(bits_of(value));
  out.parts[blockIdx.x] = amax;
  if (blockIdx.x + 1u != gridDim.x) return;
  static_assert(kAmaxRoom % 4 == 0, "room for four");
  for (unsigned i = gridDim.x; i % 4u != 0u; ++i) out.parts[i] = amax;
}

// The largest of all blocks' parts, in all lanes of a warp. All loads are on their way at once, as whoever asks waits.
// Not by way of L1: the kernel that wrote them may have run beside this one. parts: aligned to 16 bytes.
__device__ __forceinline__ float amax_of_parts(const float* parts, int count) {
  constexpr int kLoads = kAmaxRoom / 128;
  const int first = static_cast<int>(threadIdx.x % 32) * 4;
  uint4 four[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = first + i * 128;
    four[i] = at < count ? __ldcg(reinterpret_cast<const uint4*>(parts + at)) : make_uint4(0u, 0u, 0u, 0u);
  }
  uint32_t largest = 0u;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    largest = __vimax3_u32(__vimax3_u32(largest, four[i].x, four[i].y), four[i].z, four[i].w);
  }
  return float_of(__reduce_max_sync(kFullWarp, largest));
}

// The same in all threads of the block, of a kernel that has ended. scratch: one word per warp.
template <int kThreads>
__device__ __forceinline__ float amax_of_parts(const float* parts, int count, uint32_t* scratch) {
  constexpr int kEach = (kAmaxRoom - 1) / kThreads + 1;
  const auto* bits = reinterpret_cast<const uint32_t*>(parts);
  uint32_t largest = 0u;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    if (at < count) largest = max(largest, __ldg(bits + at));
  }
  largest = __reduce_max_sync(kFullWarp, largest);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = largest;
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
  return float_of(__reduce_max_sync(kFullWarp, lane < kThreads / 32 ? scratch[lane] : 0u));
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
