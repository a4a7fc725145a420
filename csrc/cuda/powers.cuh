// bf16 values times powers of two, which are bf16 values too, and their magnitudes: two of them, or one of them with
// its unpacking, an instruction.
#pragma once

#include "tile.cuh"

namespace te_dist {
namespace cuda {

// A float's bits are a pair of bf16: a power of two above, zero below. A value in both halves times that pair plus
// (-0, 0) is the scaled value, exact, above a zero: a float again. (x + -0 is x, for x = -0 too. A product that is too
// small for bf16 is a zero in fp8 anyway. Infinity times the zero is a NaN: not for infinities.)
static __constant__ uint32_t signed_zeros = 0x80000000u;  // in memory, or the compiler makes it anew for each value

class PowerScaler {
 public:
  __device__ __forceinline__ PowerScaler() : zeros_(signed_zeros) {}
  // Value 0 or 1 of a word.
  __device__ __forceinline__ float scaled(uint32_t word, int i, uint32_t power) const {
    uint16_t half[2];
    asm("mov.b32 {%0, %1}, %2;" : "=h"(half[0]), "=h"(half[1]) : "r"(word));
    uint32_t result;
    asm("{\n\t.reg .b32 both;\n\tmov.b32 both, {%1, %1};\n\tfma.rn.bf16x2 %0, both, %2, %3;\n\t}"
        : "=r"(result)
        : "h"(half[i]), "r"(power), "r"(zeros_));
    return float_of(result);
  }
  // Eight values, each with a power of its own or all with one.
  template <typename F>
  __device__ __forceinline__ uint2 encode_eight(const uint32_t (&word)[4], const uint32_t (&power)[8]) const {
    const auto at = [&](int j) { return scaled(word[j / 2], j % 2, power[j]); };
    return make_uint2(encode_four<F>(at(0), at(1), at(2), at(3)), encode_four<F>(at(4), at(5), at(6), at(7)));
  }
  template <typename F>
  __device__ __forceinline__ uint2 encode_eight(const uint32_t (&word)[4], uint32_t power) const {
    return encode_eight<F>(word, {power, power, power, power, power, power, power, power});
  }

 private:
  uint32_t zeros_;
};

// scale_from_amax for powers of two: 448 and 57344 are 1.75 times one, so the quotient's exponent follows from the
// amax's, and whether its mantissa is above 1.75.
template <typename F>
__device__ __forceinline__ uint32_t power_from_amax(uint32_t amax_bits, uint32_t eps_bits) {
  constexpr uint32_t kTop = (254u + (F::max_bits >> 23) - 127u) << 23;
  static_assert((F::max_bits & 0x7FFFFFu) == 0x600000u, "1.75 times a power of two");
  const uint32_t bounded = max(amax_bits, eps_bits);
  const uint32_t power = min(kTop - ((bounded + 0x1FFFFFu) & 0xFF800000u), 254u << 23);
  return bounded - 1u < kInfBits - 1u ? power : 127u << 23;
}

__device__ __forceinline__ float inverse_of_power(uint32_t power) {
  return float_of(max((254u << 23) - power, 0x00400000u));  // 1 / 2^127 is subnormal
}

// The larger magnitudes of two pairs, with some sign; NaNs stay.
__device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

__device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return larger_pair(larger_pair(a, b), larger_pair(c, d));
}

// The larger magnitudes of the two pairs, in the halves of one word.
__device__ __forceinline__ uint32_t fold_pairs(uint32_t first, uint32_t second) {
  return larger_pair(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
}

__device__ __forceinline__ uint32_t magnitudes(uint32_t pair) { return pair & 0x7FFF7FFFu; }

// Of a word of two magnitudes: a float's bits.
__device__ __forceinline__ uint32_t low_float(uint32_t pair) { return pair << 16; }
__device__ __forceinline__ uint32_t high_float(uint32_t pair) { return pair & 0xFFFF0000u; }

// The magnitudes in eight rows of eight values, row_of(i) four words: two rows in the halves of a word.
template <typename RowOf>
__device__ __forceinline__ void maxima_of_rows(const RowOf& row_of, uint32_t (&maxima)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 a = row_of(2 * i);
    const uint4 b = row_of(2 * i + 1);
    maxima[i] = fold_pairs(larger_pair(a.x, a.y, a.z, a.w), larger_pair(b.x, b.y, b.z, b.w));
  }
}

__device__ __forceinline__ bool is_finite(uint32_t pair) {
  pair = magnitudes(pair);
  return (pair & 0xFFFFu) < 0x7F80u && pair < 0x7F800000u;
}

// Whether all of what `maxima` are of is finite.
__device__ __forceinline__ bool all_finite(const uint32_t (&maxima)[4]) {
  return is_finite(larger_pair(maxima[0], maxima[1], maxima[2], maxima[3]));
}

// The magnitudes in a patch: of its rows, two in a word, and of its columns, in the words of a row.
struct PatchMaxima {
  uint32_t rows[4];
  uint32_t cols[4];

  __device__ __forceinline__ void of_rows(const Patch<bf16_t>& patch) {
    maxima_of_rows(
        [&](int i) { return make_uint4(patch.word[i][0], patch.word[i][1], patch.word[i][2], patch.word[i][3]); },
        rows);
  }
  __device__ __forceinline__ void of_columns(const Patch<bf16_t>& patch) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const auto at = [&](int i) { return patch.word[i][w]; };
      cols[w] = larger_pair(larger_pair(at(0), at(1), at(2), at(3)), larger_pair(at(4), at(5), at(6), at(7)));
    }
  }
};

// Two values of which infinities become the largest finite ones: where both saturate.
__device__ __forceinline__ uint32_t bounded_pair(uint32_t word) {
  const uint32_t low = (word & 0x7FFFu) == 0x7F80u ? 1u : 0u;
  const uint32_t high = (word & 0x7FFF0000u) == 0x7F800000u ? 0x10000u : 0u;
  return word - low - high;
}

// Writes over what PowerScaler made of infinities: the eight bytes at `to`.
template <typename F>
__device__ __forceinline__ void saturate_infinities(const uint32_t (&word)[4], uint8_t* to) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if ((word[w] & 0x7FFFu) == 0x7F80u) to[2 * w] = encode_fp8<F>(float_of(word[w] << 16));
    if ((word[w] & 0x7FFF0000u) == 0x7F800000u) to[2 * w + 1] = encode_fp8<F>(float_of(word[w] & 0xFFFF0000u));
  }
}

// Maxima over the four lanes that differ in the bits kBit and 2 kBit of their numbers, of four words each: a lane
// ends with word (number / kBit) % 4.
template <int kBit>
__device__ __forceinline__ uint32_t quad_maximum(const uint32_t (&all)[4]) {
  const bool upper = (threadIdx.x & (2 * kBit)) != 0;
  const bool odd = (threadIdx.x & kBit) != 0;
  uint32_t half[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, upper ? all[k] : all[2 + k], 2 * kBit);
    half[k] = larger_pair(upper ? all[2 + k] : all[k], other);
  }
  const uint32_t other = __shfl_xor_sync(kFullWarp, odd ? half[0] : half[1], kBit);
  return larger_pair(odd ? half[1] : half[0], other);
}

}  // namespace cuda
}  // namespace te_dist
