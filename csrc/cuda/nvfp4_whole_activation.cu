// NVFP4 of what an activation without a gate makes of whole tiles. Those with a bias and those without have kernels of
// their own: a branch would keep the compiler from mixing what comes before it with what comes after.
#include "activation_fast.cuh"
#include "nvfp4_unwritten.cuh"
#include "nvfp4_whole.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <Activation kKind, bool kBiased>
struct FromActivation {
  static constexpr bool kMade = false;
  static constexpr bool kMadeAhead = true;
  struct Shared {
    uint4 biases[NvConfig::kLanes];  // of a tile's columns
  };
  using Taker = TakesRows;
  const bf16_t* bias;  // null unless kBiased

  __device__ __forceinline__ void prepare(Shared& shared, int64_t tile_col) const {
    const unsigned lane = threadIdx.x % 32u;
    if (!kBiased || lane >= NvConfig::kLanes) return;
    shared.biases[lane] = __ldg(reinterpret_cast<const uint4*>(bias + tile_col) + lane);
  }
  __device__ __forceinline__ void make_ahead(const Shared& shared, int lane, uint4* mine) const {
    uint4 biases = make_uint4(0u, 0u, 0u, 0u);
    if (kBiased) biases = shared.biases[lane];
#pragma unroll 1
    for (int row = 0; row < kBlock; row += FourRows::kRows, mine += FourRows::kRows * NvConfig::kThreads) {
      FourRows rows;
      rows.load(mine);
      if (kBiased) add_to_rows(rows.word, {biases.x, biases.y, biases.z, biases.w});
#pragma unroll
      for (int i = 0; i < FourRows::kRows; ++i) {
#pragma unroll
        for (int w = 0; w < 4; ++w) rows.word[i][w] = activation_of_word<kKind>(rows.word[i][w]);
      }
      rows.store(mine);
    }
  }
};

}  // namespace

bool is_nvfp4_whole_activation(const Source& x, const Nvfp4Options& options, const Planes& out) {
  return goes_up_and_down(x) && x.partials == nullptr && has_fast_activation(x.activation) &&
         is_whole<FromActivation<Activation::kSilu, true>>(x, options, out);
}

void launch_nvfp4_whole_activation(const Made& x, const Nvfp4Options& options, const float* amax_row,
                                   const float* amax_col, const NvParts& parts, const Planes& out, const float* noop,
                                   Lane lane) {
  const Input operand{x.data, Float::kBF16, x.rows, x.cols, x.stride};
  const auto start = [&](const auto& from) {
    launch_whole(operand, from, options, amax_row, amax_col, parts, Before::kFindsAmaxes, out, noop, lane);
  };
  const auto* const bias = static_cast<const bf16_t*>(x.bias.data);
  with_fast_activation(x.activation, [&](auto tag) {
    constexpr Activation kKind = decltype(tag)::kind;
    if (bias != nullptr) return start(FromActivation<kKind, true>{bias});
    start(FromActivation<kKind, false>{nullptr});
  });
}

}  // namespace cuda
}  // namespace te_dist
