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

  // Of all threads of a block, by one of them. scratch: a word per warp.
  template <int kThreads>
  __device__ __forceinline__ void give(Activation kind, const AmaxOut& out, uint32_t* scratch) const {
    // All four as maxima of unsigned integers.
    const auto largest = [&](uint32_t word) {
      __syncthreads();
      return block_max<kThreads>(Words<bf16_t>::fold(word), scratch);
    };
    const uint32_t a = largest(a_ ^ 0x80008000u) ^ 0x8000u;
    const uint32_t b = largest(b_) + behind_;
    const uint32_t c = ~largest(~c_) + behind_;
    const uint32_t d = largest(d_);
    if (threadIdx.x != 0) return;
    const uint32_t positive = max(activated_magnitude(kind, a), activated_magnitude(kind, d));
    const uint32_t negative = max(activated_magnitude(kind, b), activated_magnitude(kind, c));
    give_amax(out, float_of(max(positive, negative)));
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
