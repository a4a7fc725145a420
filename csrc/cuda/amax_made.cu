// amax of a matrix that is made on the fly. A norm: whole rows in registers, so that its statistics come from the same
// read. Activations: tiles.
#include "amax.cuh"
#include "norm_stats.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct AmaxNormConfig {
  static constexpr int kThreads = 256;
  static constexpr int kTeams = kThreads / RowTeam::kThreads;
  static constexpr int kBlocksPerSm = 3;
};

__global__ void __launch_bounds__(AmaxNormConfig::kThreads, AmaxNormConfig::kBlocksPerSm)
    amax_norm_kernel(const __grid_constant__ Made x, bool make_stats, float* amax, const float* noop) {
  __shared__ float scratch[AmaxNormConfig::kTeams * RowTeam::kScratch];
  __shared__ uint32_t maxima[AmaxNormConfig::kThreads / 32];
  if (is_noop(noop)) return;
  const int number = static_cast<int>(threadIdx.x / RowTeam::kThreads);
  RowTeam team(scratch, number);
  const int64_t step = static_cast<int64_t>(gridDim.x) * AmaxNormConfig::kTeams;
  uint32_t word = 0u;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * AmaxNormConfig::kTeams + number; row < x.rows; row += step) {
    HeldRow held(x.data + row * x.stride, x.cols);
    RowStats stats;
    if (make_stats) {
      stats = held.stats(x.centered, x.eps, team);
      if (RowTeam::rank() == 0) {
        if (x.centered) x.mean[row] = stats.mean;
        x.rstd[row] = stats.rstd;
      }
    } else {
      stats = RowStats{x.centered ? x.mean[row] : 0.0f, x.rstd[row]};
    }
    held.each([&](float (&v)[8], int64_t col) {
      float gain[8];
      float bias[8];
      load_gain<true>(x.weight, x.zero_centered, col, gain);
      load_vector<true>(x.bias, col, kNoBias, bias);
      apply_norm(v, stats, gain, bias);
      const uint4 made = pack_eight_bf16(v);
      using W = Words<bf16_t>;
      word = W::max(word, W::max(W::magnitude(made.x), W::magnitude(made.y)),
                    W::max(W::magnitude(made.z), W::magnitude(made.w)));
    });
  }
  const uint32_t raw = block_max<AmaxNormConfig::kThreads>(Words<bf16_t>::fold(word), maxima);
  if (threadIdx.x == 0) atomic_amax(amax, Words<bf16_t>::to_float_of_raw(raw));
}

__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<bf16_t>)
    amax_made_kernel(const __grid_constant__ Made x, float* amax, const float* noop) {
  extern __shared__ uint4 memory[];
  __shared__ uint32_t maxima[TileConfig::kThreads / 32];
  if (is_noop(noop)) return;
  uint32_t word = 0u;
  for_each_made_tile(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, memory,
                     [&](const Patch<bf16_t>& patch, const TilePlace&, bool) {
#pragma unroll
                       for (int i = 0; i < TileConfig::kPatch; ++i) {
                         word = Words<bf16_t>::max(word, patch.row_max(i));
                       }
                     });
  const uint32_t raw = block_max<TileConfig::kThreads>(Words<bf16_t>::fold(word), maxima);
  if (threadIdx.x == 0) atomic_amax(amax, Words<bf16_t>::to_float_of_raw(raw));
}

}  // namespace

void launch_amax_made(const Source& x, float* amax, bool accumulate, const float* noop, Lane lane) {
  TED_CHECK(x.partials == nullptr, "amax makes no column sums: the cast that follows does");
  const Made made = made_of(x, false);
  if (!accumulate) launch_amax_reset(amax, nullptr, noop, lane);
  if (x.kind == Produce::kNorm) {
    const int64_t most = static_cast<int64_t>(multiprocessors()) * AmaxNormConfig::kBlocksPerSm;
    const int blocks = grid_size(smaller(most, ceil_div(x.rows, AmaxNormConfig::kTeams)));
    amax_norm_kernel<<<blocks, AmaxNormConfig::kThreads, 0, stream_of(lane)>>>(made, x.make_stats, amax, noop);
    return check_launch("amax_norm_kernel");
  }
  allow_made_bytes(amax_made_kernel);
  amax_made_kernel<<<grid_size(made_blocks(made)), TileConfig::kThreads, made_bytes(made), stream_of(lane)>>>(
      made, amax, noop);
  check_launch("amax_made_kernel");
}

}  // namespace cuda
}  // namespace te_dist
