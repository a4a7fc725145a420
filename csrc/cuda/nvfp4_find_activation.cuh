// The search for NVFP4's two global amaxes of what an activation without a gate makes. The row path's follows from the
// operand's outermost values (stretches.cuh). For the column path's, columns are bounded by their operand, in bf16, two
// values an instruction; few have to be made and transformed.
#pragma once

#include "activation_fast.cuh"
#include "nvfp4_find.cuh"
#include "powers.cuh"
#include "stretches.cuh"

namespace te_dist {
namespace cuda {
namespace {

// Of x >= 0, x or x (p + q x), the smaller one; of others x, but `trough` at most. All numbers are bf16.
struct Parabola {
  uint32_t p;
  uint32_t q;
  uint32_t trough;

  // Of the two values in a word.
  __device__ __forceinline__ uint32_t of(uint32_t word) const {
    uint32_t made;
    asm("{\n\t.reg .b32 t;\n\t"
        "fma.rn.bf16x2 t, %1, %2, %3;\n\t"
        "fma.rn.bf16x2 t, %1, t, %4;\n\t"
        "min.NaN.bf16x2 t, %1, t;\n\t"
        "max.NaN.bf16x2 %0, t, %5;\n\t}"
        : "=r"(made)
        : "r"(word), "r"(q * 0x10001u), "r"(p * 0x10001u), "r"(0x80008000u), "r"(trough * 0x10001u));
    return made;
  }
};

// Two such tell of an activation with a sigmoid. tests/test_nvfp4_column_amax.py runs through all values.
template <Activation kKind>
struct ActivationBound {
  // No activation is larger in magnitude than `bound`, as a sigmoid stays below 1 and below 1/2 + z/4; p and q are so
  // much larger than they have to be that roundings do no harm. Not of minus infinity, which becomes a NaN (kLowest).
  static constexpr uint32_t kP = 0x3F02u;
  static constexpr uint32_t kQ = kKind == Activation::kSilu ? 0x3E82u : 0x3EDCu;
  static constexpr uint32_t kTrough = kKind == Activation::kSilu ? 0xBE90u : 0xBE30u;
  static constexpr uint32_t kLowest = 0xFF80u;

  // None is further from `near` than kOff.
  static constexpr uint32_t kNearP = kKind == Activation::kSilu ? 0x3F03u : 0x3F08u;
  static constexpr uint32_t kNearQ = kKind == Activation::kSilu ? 0x3E1Cu : 0x3E78u;
  static constexpr uint32_t kNearTrough = kKind == Activation::kSilu ? 0xBE0Fu : 0xBDAEu;
  static constexpr float kOff = kKind == Activation::kSilu ? 0.14f : 0.085f;

  // With some sign.
  static __device__ __forceinline__ uint32_t bound(uint32_t word) { return Parabola{kP, kQ, kTrough}.of(word); }
  static __device__ __forceinline__ uint32_t near(uint32_t word) {
    return Parabola{kNearP, kNearQ, kNearTrough}.of(word);
  }
};

// These are made as easily as bounded. However low an operand is, they are 0.
template <bool kSquared>
struct RectifierBound {
  static constexpr uint32_t kLowest = 0x10000u;
  static constexpr float kOff = 0.0f;

  static __device__ __forceinline__ uint32_t bound(uint32_t word) { return near(word); }
  static __device__ __forceinline__ uint32_t near(uint32_t word) {
    uint32_t made;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(made) : "r"(word), "r"(0u));
    if (kSquared) asm("fma.rn.bf16x2 %0, %1, %1, %2;" : "=r"(made) : "r"(made), "r"(0u));
    return made;
  }
};
template <>
struct ActivationBound<Activation::kRelu> : RectifierBound<false> {};
template <>
struct ActivationBound<Activation::kSquaredRelu> : RectifierBound<true> {};

// Whether one of a lane's columns may raise what is known of their amax. In a column behind a bias, values have much in
// common, and add up to far more than its transform; what neighbours differ by tells of that, where kOff is little to
// what is known.
template <typename Bound>
__device__ __forceinline__ bool may_rise(const NvPatch<bf16_t, 2>& patch, bool biased, const ColumnAmax& columns) {
  using W = Words<bf16_t>;
  constexpr float kFarAbove = 24.0f;
  if (!biased || columns.known() <= kFarAbove * Bound::kOff) {
    const auto sum = [&](int w) {
      return sum_of_magnitudes<kBlock>([&](int i) { return Bound::bound(patch.word[i][w]); });
    };
    return columns.may_rise_here(W::max(sum(0), sum(1)));
  }
  const auto sum = [&](int w) {
    NeighbourSums sums;
#pragma unroll
    for (int first = 0; first < kBlock; first += 8) {
      uint32_t near[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) near[i] = Bound::near(patch.word[first + i][w]);
      sums.add([&](int i) { return near[i]; });
    }
    return sums.largest();
  };
  return columns.may_rise_here(W::max(sum(0), sum(1)), static_cast<float>(kBlock) * Bound::kOff);
}

// Of a warp.
template <Activation kKind>
class ActivationFinder : public ColumnFinder {
 public:
  // bias: may be null.
  __device__ __forceinline__ ActivationFinder(const bf16_t* data, int64_t stride, const bf16_t* bias,
                                              const ColumnFinder& columns)
      : ColumnFinder(columns), data_(data), stride_(stride), bias_(bias), found_(kKind) {}

  // 16 rows of 128 columns of the operand, of which a lane takes four.
  __device__ __forceinline__ void take(const SearchPlace& place, const SearchPlace& ahead) {
    const int64_t col = static_cast<int64_t>(place.col) + threadIdx.x % 32u * 4u;
    const bf16_t* from = data_ + place.row * stride_ + col;
    Patch patch;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) load_words(from + i * stride_, patch.word[i]);
    prefetch(data_, stride_, ahead);
    if (bias_ != nullptr) {
      const uint2 biases = __ldg(reinterpret_cast<const uint2*>(bias_ + col));
      add_to_rows(patch.word, {biases.x, biases.y});
    }
    each_word(patch, [&](uint32_t word) { found_.take_ends(word); });
    if (!from_one_on_) {
      from_one_on_ = __any_sync(kFullWarp, found_.has_from_one_on());
      if (!from_one_on_) each_word(patch, [&](uint32_t word) { found_.take_trough(word); });
    }
    wait_for_kernel_before();  // which zeroes both, while the first operands are on their way
    columns_.hear();
    const bool low = W::fold(found_.lowest()) >= Bound::kLowest;
    const bool rises = low || may_rise<Bound>(patch, bias_ != nullptr, columns_);
    raise(patch, __ballot_sync(kFullWarp, rises), [](uint32_t word) { return activation_of_word<kKind>(word); });
    columns_.ask();
  }

  // All that the block has found is said, when threads come back.
  __device__ __forceinline__ void give() {
    give_largest();
    found_.template give<Search::kWarps * 32>(kKind, AmaxOut{&state_.row, nullptr});
  }

 private:
  using Bound = ActivationBound<kKind>;

  const bf16_t* data_;
  int64_t stride_;
  const bf16_t* bias_;
  Stretches found_;
  bool from_one_on_ = false;  // any of the warp's values: nearly always, and then the trough needs no more work
};

}  // namespace
}  // namespace cuda
}  // namespace te_dist
