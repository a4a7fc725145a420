// NVFP4 of what is made in whole tiles and never written: norms, which are made for the amaxes and once more for the
// codes, and activations without a gate, whose amax follows from their operand.
#pragma once

#include "norm_rows.cuh"
#include "nvfp4_kernel.cuh"
#include "nvfp4_parts.cuh"

namespace te_dist {
namespace cuda {

// ---------------------------------------------------------------------------------------------- activations
// Whether launch_nvfp4_activation takes it: a row plane alone, of an activation whose amax is that of its operand's
// outermost values (goes_up_and_down).
bool is_nvfp4_activation(const Source& x, const Nvfp4Options& options, const Planes& out);
void launch_nvfp4_activation(const Made& x, const NvParts& parts, const Planes& out, const float* noop, Lane lane);

// Either plane or both, where activations take few instructions: launch_amax_nvfp4_norm, is_nvfp4_whole and
// launch_nvfp4_whole for these.
void launch_amax_nvfp4_activation(const Made& x, float* amax_row, float* amax_col, const ToBlank& blank,
                                  const float* noop, Lane lane);
bool is_nvfp4_whole_activation(const Source& x, const Nvfp4Options& options, const Planes& out);
void launch_nvfp4_whole_activation(const Made& x, const Nvfp4Options& options, const float* amax_row,
                                   const float* amax_col, const NvParts& parts, const Planes& out, const float* noop,
                                   Lane lane);

// ---------------------------------------------------------------------------------------------- norms
// Both amaxes, in place; the column path's of what the transform makes, with the standard signs. The statistics where
// x.order says so. amax_row may be null. blank: filled then.
void launch_amax_nvfp4_norm(const Made& x, float* amax_row, float* amax_col, const ToBlank& blank, const float* noop,
                            Lane lane);
// The same of an RMSNorm's long rows, whose statistics are missing. False: nothing was done.
bool launch_amax_nvfp4_norm_rows(const Made& x, float* amax_row, float* amax_col, const ToBlank& blank,
                                 const float* noop, Lane lane);
// A LayerNorm's.
bool launch_amax_nvfp4_layer_rows(const Made& x, float* amax_row, float* amax_col, const ToBlank& blank,
                                  const float* noop, Lane lane);

// is_nvfp4_whole and launch_nvfp4_whole for a norm whose statistics are there. The row plane may be alone.
bool is_nvfp4_whole_norm(const Source& x, const Nvfp4Options& options, const Planes& out);
void launch_nvfp4_whole_norm(const Made& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                             const NvParts& parts, const Planes& out, const float* noop, Lane lane);

// Whether there are shifts or biases. The kernels are apart: an RMSNorm has no registers for them.
inline bool is_shifted(const Made& x) { return x.centered || x.bias.data != nullptr; }

// Four neighbours of a vector along K, from a multiple of four on; `none` where there is no vector.
__device__ __forceinline__ float4 load_vector_four(const RowView& from, int64_t col, float none) {
  if (from.data == nullptr) return make_float4(none, none, none, none);
  if (from.dtype == Float::kF32) {
    return __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(from.data) + col));
  }
  const uint2 v = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from.data) + col));
  const auto at = [&](uint32_t word, int i) {
    return from.dtype == Float::kBF16 ? Words<bf16_t>::element(word, i) : Words<fp16_t>::element(word, i);
  };
  return make_float4(at(v.x, 0), at(v.x, 1), at(v.y, 0), at(v.y, 1));
}

__device__ __forceinline__ float4 load_four_gains(const Made& x, int64_t col) {
  float4 gain = load_vector_four(x.weight, col, 1.0f);
  if (x.zero_centered) gain = make_float4(gain.x + 1.0f, gain.y + 1.0f, gain.z + 1.0f, gain.w + 1.0f);
  return gain;
}

}  // namespace cuda
}  // namespace te_dist
