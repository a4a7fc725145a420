// The scale of a per-tensor cast, and the launcher for matrices that are made on the fly.
#pragma once

#include "../numerics/scale.h"
#include "amax.cuh"
#include "tile.cuh"

namespace te_dist {
namespace cuda {

struct Made;

struct CastScale {
  const float* scale;  // null: current scaling, from amax by rule
  const float* amax;
  ScaleRule rule;
  float* scale_inv;
  float* seen;  // null, or raised to the tensor's amax on the way (delayed scaling)
  const float* noop;
};

// A word of raw magnitudes of each thread into from.seen. All threads of the block; `maxima`: one word per warp.
template <typename T, int kThreads>
__device__ __forceinline__ void record_amax(const CastScale& from, uint32_t word, uint32_t* maxima) {
  if (from.seen == nullptr) return;
  const uint32_t raw = block_max<kThreads>(Words<T>::fold(word), maxima);
  if (threadIdx.x == 0) atomic_amax(from.seen, Words<T>::to_float_of_raw(raw));
}

// The same of a patch: what it adds to a thread's word.
template <typename T>
__device__ __forceinline__ uint32_t max_of_patch(const Patch<T>& patch, uint32_t word) {
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) word = Words<T>::max(word, patch.row_max(i));
  return word;
}

template <typename F>
__device__ __forceinline__ float tensor_scale(const CastScale& from) {
  const float scale =
      from.scale != nullptr ? *from.scale : scale_from_amax(*from.amax, F::max, kFloatMax, from.rule);
  if (blockIdx.x == 0 && threadIdx.x == 0 && from.scale_inv != nullptr) *from.scale_inv = 1.0f / scale;
  return scale;
}

void launch_cast_made(const Source& x, Fp8 format, uint8_t* row, uint8_t* col, const CastScale& from,
                      Lane lane);
// To E4M3; x is as norm_rows.cuh wants it (by_rows).
void launch_cast_rows(const Made& x, bool make_stats, uint8_t* row, const CastScale& from, Lane lane);
// false: this is made in another way (as are small matrices).
bool launch_cast_patches(const Made& x, Fp8 format, const ByteMatrix& row_out, const ByteMatrix& col_out,
                         const CastScale& from, Lane lane);

}  // namespace cuda
}  // namespace te_dist
