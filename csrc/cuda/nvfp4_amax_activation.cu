// NVFP4's two global amaxes of what an activation without a gate makes of whole tiles: 2 bytes an element.
// The row path's follows from the operand's outermost values (stretches.cuh). For the column path's, columns are
// bounded by their operand, in bf16, two values an instruction; few have to be made and transformed (ColumnAmax), most
// of those by the whole warp.
#include "activation_fast.cuh"
#include "divisor.cuh"
#include "nvfp4_amax.cuh"
#include "nvfp4_unwritten.cuh"
#include "powers.cuh"
#include "stretches.cuh"
#include "taper.cuh"

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
template <typename Bound, bool kBiased>
__device__ __forceinline__ bool may_rise(const NvPatch<bf16_t, 2>& patch, const ColumnAmax& columns) {
  using W = Words<bf16_t>;
  constexpr float kFarAbove = 24.0f;
  if (!kBiased || columns.known() <= kFarAbove * Bound::kOff) {
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

struct NvActivationAmax {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSm = 3;
  static constexpr int kFew = 8;  // lanes whose columns a warp takes one after another, rather than all lanes' at once
};

// What transformed_amax makes of the four columns that one lane has, with two values a lane. Where operands are is no
// lane's own any more.
template <Activation kKind>
__device__ __forceinline__ uint32_t transformed_by_warp(const NvPatch<bf16_t, 2>& patch, unsigned whose,
                                                        uint4 (&operands)[kBlock / 2]) {
  const unsigned lane = threadIdx.x % 32u;
  const unsigned row = lane % 16u;
  __syncwarp();  // all have read the last ones
  if (lane == whose) {
#pragma unroll
    for (int i = 0; i < kBlock; i += 2) {
      const auto& word = patch.word;
      operands[i / 2] = make_uint4(word[i][0], word[i][1], word[i + 1][0], word[i + 1][1]);
    }
  }
  __syncwarp();
  const uint32_t word = activation_of_word<kKind>(reinterpret_cast<const uint32_t*>(operands)[row * 2u + lane / 16u]);
  return transformed_across_lanes(word);
}

// A warp takes 16 rows at a time, and a lane four columns of them. kBiased: a branch would keep the compiler from
// mixing what comes before it with what comes after.
template <Activation kKind, bool kBiased>
__global__ void __launch_bounds__(NvActivationAmax::kThreads, NvActivationAmax::kBlocksPerSm)
    nvfp4_amax_activation_kernel(const bf16_t* data, int64_t stride, const bf16_t* bias, unsigned across,
                                 Divisor by_across, Taper work, float* amax_row, float* amax_col, const float* noop) {
  constexpr unsigned kWarps = NvActivationAmax::kThreads / 32;
  using Bound = ActivationBound<kKind>;
  using W = Words<bf16_t>;
  __shared__ uint32_t scratch[kWarps];
  __shared__ uint4 operands[kWarps][kBlock / 2];
  __shared__ uint32_t known;
  let_next_kernel_start();
  if (is_noop(noop)) return;
  if (threadIdx.x == 0u) known = 0u;
  __syncthreads();
  ColumnAmax columns(amax_col, known);
  Stretches found(kKind);
  bool from_one_on = false;  // any of the warp's values: nearly always, and then the trough needs no more work
  if (work.is_small()) {  // others know much already
    wait_for_kernel_before();
    columns.ask_now();
  }
  work.for_each<kWarps>([&](unsigned at) {
    const unsigned down = by_across.quotient(at);
    const int64_t col = static_cast<int64_t>((at - down * across) * 32u + threadIdx.x % 32u) * 4;
    const bf16_t* from = data + static_cast<int64_t>(down) * kBlock * stride + col;
    NvPatch<bf16_t, 2> patch;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) load_words(from + i * stride, patch.word[i]);
    if (kBiased) {
      const uint2 biases = __ldg(reinterpret_cast<const uint2*>(bias + col));
      add_to_rows(patch.word, {biases.x, biases.y});
    }
    const auto each_word = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) body(patch.word[i][0]), body(patch.word[i][1]);
    };
    each_word([&](uint32_t word) { found.take_ends(word); });
    if (!from_one_on) {
      from_one_on = __any_sync(kFullWarp, found.has_from_one_on());
      if (!from_one_on) each_word([&](uint32_t word) { found.take_trough(word); });
    }
    wait_for_kernel_before();  // which zeroes both, while the first operands are on their way
    columns.hear();
    const bool low = W::fold(found.lowest()) >= Bound::kLowest;
    uint32_t rising = __ballot_sync(kFullWarp, low || may_rise<Bound, kBiased>(patch, columns));
    if (rising != 0u) {
      uint32_t largest = 0u;
      if (__popc(rising) <= NvActivationAmax::kFew) {
#pragma unroll 1
        for (; rising != 0u; rising &= rising - 1u) {
          const unsigned whose = static_cast<unsigned>(__ffs(static_cast<int>(rising))) - 1u;
          largest = max(largest, transformed_by_warp<kKind>(patch, whose, operands[threadIdx.x / 32]));
        }
      } else {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
#pragma unroll
          for (int w = 0; w < 2; ++w) patch.word[i][w] = activation_of_word<kKind>(patch.word[i][w]);
        }
        largest = amax_of_columns(patch);
      }
      columns.raise(largest);
    }
    columns.ask();
  });
  if (amax_row != nullptr) found.give<NvActivationAmax::kThreads>(kKind, AmaxOut{amax_row, nullptr}, scratch);
}

}  // namespace

void launch_amax_nvfp4_activation(const Made& x, float* amax_row, float* amax_col, const ToBlank& blank,
                                  const float* noop, Lane lane) {
  launch_amax_reset(amax_row, amax_col, noop, lane, blank);
  using Config = NvActivationAmax;
  const int64_t across = x.cols / TileConfig::kTile;
  constexpr int kWarps = Config::kThreads / 32;
  const int64_t most = static_cast<int64_t>(multiprocessors()) * Config::kBlocksPerSm;
  const Taper work = Taper::of(x.rows / kBlock * across, kWarps, most);
  with_fast_activation(x.activation, [&](auto tag) {
    constexpr Activation kKind = decltype(tag)::kind;
    const auto kernel = x.bias.data != nullptr ? nvfp4_amax_activation_kernel<kKind, true>
                                               : nvfp4_amax_activation_kernel<kKind, false>;
    launch_close("nvfp4_amax_activation_kernel", kernel, work.blocks(kWarps), Config::kThreads, 0, lane, x.data,
                 x.stride, static_cast<const bf16_t*>(x.bias.data), static_cast<unsigned>(across),
                 Divisor::by(static_cast<unsigned>(across)), work, amax_row, amax_col, noop);
  });
}

}  // namespace cuda
}  // namespace te_dist
