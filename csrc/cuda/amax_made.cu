// amax of a matrix that is made on the fly: the activations whose tiles have to be made for it, and the way to the
// others.
#include "amax.cuh"
#include "norm_rows.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

__global__ void __launch_bounds__(MadeConfig::kThreads, MadeConfig::kBlocksPerSm)
    amax_made_kernel(const __grid_constant__ Made x, AmaxOut out, const float* noop) {
  extern __shared__ uint4 memory[];
  __shared__ uint32_t maxima[TileConfig::kThreads / 32];
  if (is_noop(noop)) return;
  uint32_t word = 0u;
  for_each_made_tile(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, false, memory,
                     [&](const Patch<bf16_t>& patch, const TilePlace&, bool) {
#pragma unroll
                       for (int i = 0; i < TileConfig::kPatch; ++i) {
                         word = Words<bf16_t>::max(word, patch.row_max(i));
                       }
                     });
  const uint32_t raw = block_max<TileConfig::kThreads>(Words<bf16_t>::fold(word), maxima);
  if (threadIdx.x == 0) give_amax(out, Words<bf16_t>::to_float_of_raw(raw));
}

}  // namespace

int launch_amax_made(const Source& x, const AmaxOut& out, bool accumulate, const float* noop, Lane lane) {
  static_assert(MadeConfig::kBlocksPerSm <= kMostAmaxBlocksPerSm, "room for their parts");
  TED_CHECK(x.partials == nullptr, "amax makes no column sums: the cast that follows does");
  TED_CHECK(x.kind != Produce::kPlain, "the amax of a matrix in memory is not made");
  const Made made = made_of(x, true);
  const bool norm = x.kind == Produce::kNorm;
  const bool in_place = out.parts == nullptr || (norm && takes_patches(made));
  const AmaxOut to{out.amax, in_place ? nullptr : out.parts};
  if (in_place && !accumulate) launch_amax_reset(out.amax, nullptr, noop, lane);
  int blocks = 0;
  if (goes_up_and_down(x)) {
    blocks = made.biased ? launch_amax_biased(made, to, noop, lane) : launch_amax_activation(x, to, noop, lane);
  } else if (norm) {
    blocks = launch_amax_norm(made, x.make_stats, to, noop, lane);
  } else {
    blocks = launch_made("amax_made_kernel", amax_made_kernel, made, lane, to, noop);
  }
  return in_place ? 0 : blocks;
}

}  // namespace cuda
}  // namespace te_dist
