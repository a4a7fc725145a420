// What a norm makes, nearly: in bf16, two values an instruction, and how far that may be off. NVFP4's amaxes of a norm
// are found by it.
#pragma once

#include "nvfp4_amax.cuh"
#include "nvfp4_unwritten.cuh"
#include "patch_source.cuh"
#include "powers.cuh"

namespace te_dist {
namespace cuda {
namespace {

// ---------------------------------------------------------------------------------------------- bounds
// What is made, y = (x * rstd + shift) * gain + bias, and what bf16 makes of it, n, with all four rounded to bf16, are
// apart by up to 4 |y| + 4 |bias| + 2 |shift * gain| times 2^-8, and a little more: six roundings, and their products.
struct NearlyBounds {
  // What rows may be, of a known amax, without raising it, before the rest is taken off: what 1 + 4.1 / 256 and the
  // rounding of y leave of it.
  static constexpr float kOfRows = 0.979f;
  // Four times an amax, which a transform of 16 is before its end. Of its magnitudes, those of the 16 values add up to
  // at most four times the largest, so that they may be apart by 16 / 256 of that; and sums in bf16 may take 8.2 / 512.
  static constexpr float kOfColumns = 3.68f;

  NearlyBounds() = default;
  // The largest magnitudes. What is too small for bf16 comes on top.
  __device__ __forceinline__ NearlyBounds(float gain, float bias)
      : of_all_(bias * (4.1f / 256.0f) + gain * 0x1p-112f + 0x1p-100f), of_shift_(gain * (2.1f / 256.0f)) {}

  __device__ __forceinline__ float rest(float shift) const { return fused_multiply_add(shift, of_shift_, of_all_); }

 private:
  float of_all_;
  float of_shift_;
};

// n of neighbouring columns, two a word.
template <int kWords>
struct NormNearly {
  uint32_t gain[kWords] = {};
  uint32_t bias[kWords] = {};

  NormNearly() = default;  // of columns that are not there: zeros
  __device__ __forceinline__ NormNearly(const Made& x, int64_t col) {
    load(x.weight, col, 1.0f, x.zero_centered ? 1.0f : 0.0f, gain);
    load(x.bias, col, kNoBias, 0.0f, bias);
  }
  // stats: a row's rstd below its shift.
  __device__ __forceinline__ void make(uint32_t stats, uint32_t (&word)[kWords]) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      asm("{\n\t.reg .b16 low, high;\n\t.reg .b32 rstd, shift;\n\t"
          "mov.b32 {low, high}, %1;\n\tmov.b32 rstd, {low, low};\n\tmov.b32 shift, {high, high};\n\t"
          "fma.rn.bf16x2 %0, %0, rstd, shift;\n\tfma.rn.bf16x2 %0, %0, %2, %3;\n\t}"
          : "+r"(word[w])
          : "r"(stats), "r"(gain[w]), "r"(bias[w]));
    }
  }
  __device__ __forceinline__ float most_gain() const { return largest(gain); }
  __device__ __forceinline__ float most_bias() const { return largest(bias); }

 private:
  static __device__ __forceinline__ void load(const RowView& from, int64_t col, float none, float more,
                                              uint32_t (&to)[kWords]) {
    if constexpr (kWords == 4) {
      if (from.data != nullptr && from.dtype == Float::kBF16 && more == 0.0f) {
        const uint4 v = load_first<true>(from, col, 0u);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        return;
      }
    }
#pragma unroll
    for (int w = 0; w < kWords; w += 2) {
      const float4 v = load_vector_four(from, col + 2 * w, none);
      to[w] = pack_bf16(v.x + more, v.y + more);
      to[w + 1] = pack_bf16(v.z + more, v.w + more);
    }
  }
  static __device__ __forceinline__ float largest(const uint32_t (&of)[kWords]) {
    uint32_t pair = of[0];
#pragma unroll
    for (int w = 1; w < kWords; ++w) pair = larger_pair(pair, of[w]);
    pair = magnitudes(pair);
    return float_of(max(low_float(pair), high_float(pair)));
  }
};

}  // namespace
}  // namespace cuda
}  // namespace te_dist
