// |act| goes up and down in three stretches of bf16 values, so that the outermost values of each decide its amax.
// tests/test_producers.py checks the stretches over all bf16 values.
//
//   x >= 0                |act| grows with x        a: the largest as signed integer
//   -0 ... trough         |act| grows with |x|      b: the largest up to the trough
//   trough ...            |act| falls with |x|      c: the smallest behind the trough
//   -inf                  is a NaN                  d: the largest as unsigned integer
//
// As integers, the bits of negative values are ordered by magnitude, and behind infinity come NaNs, which a and
// d keep. Where a stretch is empty its integer is one of another stretch, and does no harm.
#pragma once

#include "activation.cuh"
#include "amax.cuh"

namespace te_dist {
namespace cuda {
namespace {

// The bits of the negative value where |act| is largest.
__host__ __device__ constexpr uint32_t trough_of(Activation kind) {
  return kind == Activation::kSilu ? 0xBFA8u : kind == Activation::kGelu ? 0xBF4Eu : 0xBF43u;
}

__device__ __forceinline__ uint32_t activated_magnitude(Activation kind, uint32_t raw) {
  float value = to_float(bf16_t{static_cast<uint16_t>(raw)});
  with_activation(kind, [&](auto tag) { value = activate<decltype(tag)::kind>(value).value; });
  return magnitude_bits(to_bf16(value));
}

// Two bf16 values a word, each half on its own. b and c: distances from the bits behind the trough, modulo 2^16.
class Stretches {
 public:
  __device__ __forceinline__ explicit Stretches(Activation kind)
      : behind_(trough_of(kind) + 1u), minus_behind_((0x10000u - behind_) * 0x10001u) {}

  __device__ __forceinline__ void take(uint32_t word) {
    take_ends(word);
    take_trough(word);
  }
  // a and d alone.
  __device__ __forceinline__ void take_ends(uint32_t word) {
    a_ = __vmaxs2(a_, word);
    d_ = __vmaxu2(d_, word);
  }
  // b and c. Once there is a value from 1 on, |act| of any trough is below the amax, and these need not be known.
  __device__ __forceinline__ void take_trough(uint32_t word) {
    b_ = __viaddmax_u16x2(word, minus_behind_, b_);
    c_ = __viaddmin_u16x2(word, minus_behind_, c_);
  }
  __device__ __forceinline__ bool has_from_one_on() const {
    constexpr int kOne = 0x3F800000;
    return static_cast<int>(a_) >= kOne || static_cast<int>(a_ << 16) >= kOne;
  }
  __device__ __forceinline__ void take(const uint4& v) {
    take(v.x);
    take(v.y);
    take(v.z);
    take(v.w);
  }

  // In each half the lowest value, where one is negative, or a NaN, as an unsigned integer.
  __device__ __forceinline__ uint32_t lowest() const { return d_; }

  // Of all threads of a block, by one of them. A lane of a warp makes one of the four.
  template <int kThreads>
  __device__ __forceinline__ void give(Activation kind, const AmaxOut& out) const {
    constexpr unsigned kWarps = kThreads / 32;
    __shared__ uint32_t of_warp[kWarps][4];
    const unsigned which = threadIdx.x % 4u;
    const uint32_t mine[4] = {a_ ^ 0x80008000u, b_, ~c_, d_};  // as maxima of unsigned integers
#pragma unroll
    for (unsigned k = 0u; k < 4u; ++k) {
      const uint32_t raw = __reduce_max_sync(kFullWarp, Words<bf16_t>::fold(mine[k]));
      if (threadIdx.x % 32u == k) of_warp[threadIdx.x / 32u][k] = raw;
    }
    __syncthreads();
    if (threadIdx.x >= 32u) return;
    uint32_t raw = 0u;
    for (unsigned warp = threadIdx.x / 4u; warp < kWarps; warp += 8u) raw = max(raw, of_warp[warp][which]);
#pragma unroll
    for (unsigned apart = 4u; apart < 32u; apart *= 2u) raw = max(raw, __shfl_xor_sync(kFullWarp, raw, apart));
    // Where b or c is what it was at first, the other one tells, or there was nothing.
    const bool tells = raw != 0u || which == 0u || which == 3u;
    const uint32_t ends = which == 0u ? raw ^ 0x8000u : raw;
    const uint32_t trough = (which == 1u ? raw : ~raw) + behind_;
    const bool is_trough = which == 1u || which == 2u;
    const uint32_t made = tells ? activated_magnitude(kind, is_trough ? trough : ends) : 0u;
    const uint32_t largest = __reduce_max_sync(kFullWarp, made);
    if (threadIdx.x == 0u) give_amax(out, float_of(largest));
  }

 private:
  uint32_t behind_;
  uint32_t minus_behind_;
  uint32_t a_ = 0x80008000u;
  uint32_t b_ = 0u;
  uint32_t c_ = 0xFFFFFFFFu;
  uint32_t d_ = 0u;
};

}  // namespace
}  // namespace cuda
}  // namespace te_dist
