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
  int parts;     // 0, or how many blocks' amaxes there are at `amax` (AmaxOut)
  float* whole;  // of those, the amax of all goes here
  ScaleRule rule;
  float* scale_inv;
  float* seen;  // null, or raised to the tensor's amax on the way (delayed scaling)
  const float* noop;
};

// As cast_current, of an amax in parts.
void cast_of_parts(const Source& x, const float* parts, int count, float* amax, ScaleRule rule, Fp8 format,
                   uint8_t* row, uint8_t* col, float* scale_inv, const float* noop, Lane lane);

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

// All threads of the block. maxima: one word per warp, record_amax's if it likes.
template <typename F, int kThreads>
__device__ __forceinline__ float tensor_scale(const CastScale& from, uint32_t* maxima) {
  const bool first = blockIdx.x == 0 && threadIdx.x == 0;
  float scale;
  if (from.scale != nullptr) {
    scale = *from.scale;
  } else {
    const float amax = from.parts != 0 ? amax_of_parts<kThreads>(from.amax, from.parts, maxima) : *from.amax;
    if (first && from.parts != 0) *from.whole = amax;
    scale = scale_from_amax(amax, F::max, kFloatMax, from.rule);
  }
  if (first && from.scale_inv != nullptr) *from.scale_inv = 1.0f / scale;
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
