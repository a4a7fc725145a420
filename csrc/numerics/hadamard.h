// The 16x16 randomised Hadamard transform on NVFP4's column plane: y = x . diag(signs) . H16 . 0.25.
//
// The sum runs as a butterfly of four stages in fp32 (strides 1, 2, 4, 8), and the result is rounded to bf16:
// that order is part of the definition. A sum of zero is +0, as one that begins with +0 is in any order: so any order
// will do where all sums on the way are fp32 numbers. The transform is orthogonal, so two operands of a GEMM that are both
// transformed along the contracted dimension give the product of the untransformed ones.
#pragma once

#include "half.h"

namespace te_dist {

// Bit i set: element i is negated. 0 is the transform without random signs.
constexpr uint32_t kHadamardSigns = 0xD7E8u;

TED_FN float flip_sign(float value, uint32_t signs, int i) {
  return float_of(bits_of(value) ^ (((signs >> i) & 1u) << 31));
}

// One stage on the eight pairs (i, i + kStride).
template <int kStride>
TED_FN void butterfly_stage(float (&v)[16]) {
  TED_UNROLL
  for (int pair = 0; pair < 8; ++pair) {
    const int i = pair / kStride * 2 * kStride + pair % kStride;
    const float a = v[i];
    const float b = v[i + kStride];
    v[i] = a + b;
    v[i + kStride] = a - b;
  }
}

TED_FN void butterfly16(float (&v)[16]) {
  butterfly_stage<1>(v);
  butterfly_stage<2>(v);
  butterfly_stage<4>(v);
  butterfly_stage<8>(v);
}

// What the butterfly leaves, as a result that is yet to be rounded to bf16.
TED_FN float transformed(float sum) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(sum, 0.25f, 0.0f);
#else
  return (sum + 0.0f) * 0.25f;
#endif
}

// In place; the inputs are bf16 values held in floats, and so are the results.
TED_FN void hadamard16(float (&v)[16], uint32_t signs) {
  TED_UNROLL
  for (int i = 0; i < 16; ++i) v[i] = flip_sign(v[i], signs, i);
  butterfly16(v);
  TED_UNROLL
  for (int i = 0; i < 16; ++i) v[i] = to_float(to_bf16(transformed(v[i])));
}

// The way back, in fp32, for dequantize.
TED_FN void hadamard16_inverse(float (&v)[16], uint32_t signs) {
  butterfly16(v);
  TED_UNROLL
  for (int i = 0; i < 16; ++i) v[i] = flip_sign(v[i] * 0.25f, signs, i);
}

}  // namespace te_dist
