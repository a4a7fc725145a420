// amax of a norm's result: 2 bytes an element.
#include "amax.cuh"
#include "norm_rows.cuh"
#include "powers.cuh"

namespace te_dist {
namespace cuda {
namespace {

// In shared memory: what the warps of a block have found so far.
struct BlockAmax {
  uint32_t raw;
  uint32_t warps;

  // Whether all others have been here. One lane of each warp.
  __device__ __forceinline__ bool is_last(uint32_t found) {
    atomicMax(&raw, found);
    __threadfence_block();
    return atomicAdd(&warps, 1u) == NormRowsConfig::kThreads / 32 - 1;
  }
  __device__ __forceinline__ uint32_t largest() { return atomicMax(&raw, 0u); }
};

// kFull: rows have as many columns as fit.
template <bool kCentered, int kVectors, int kHeld, bool kFull>
__global__ void __launch_bounds__(NormRowsConfig::kThreads, NormRowsConfig::kBlocksPerSm<kVectors>)
    amax_norm_kernel(const __grid_constant__ Made x, bool make_stats, AmaxOut out, const float* noop) {
  extern __shared__ float4 memory[];
  __shared__ BlockAmax of_block;
  let_next_kernel_start();
  if (is_noop(noop)) return;
  using Held = TeamRow<kVectors, kHeld>;
  using W = Words<bf16_t>;
  const int rank = RowTeam::rank();
  if (threadIdx.x == 0) of_block = BlockAmax{0u, 0u};  // before the barrier behind which rows begin
  uint32_t largest = 0u;
  for_each_norm_row<kCentered, kVectors, kHeld, kFull>(
      x, make_stats, false, memory,
      [&](int64_t, int, const Held& made) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (!kFull && Held::offset_of(i) + 8 * rank >= x.cols) continue;
          const uint4& v = made.vector[i];
          largest = larger_pair(largest, larger_pair(v.x, v.y, v.z, v.w));
        }
      },
      [](int64_t) {});
  largest = magnitudes(largest);
  if (out.parts == nullptr) return raise_amax_by_warps<bf16_t>(out.amax, largest);
  // Teams end at different times: the last warp has them all.
  const uint32_t raw = __reduce_max_sync(kFullWarp, W::fold(largest));
  if (threadIdx.x % 32 == 0 && of_block.is_last(raw)) give_amax(out, W::to_float_of_raw(of_block.largest()));
}

template <int kVectors, int kHeld, bool kFull = false>
int launch_held(const Made& x, bool make_stats, const AmaxOut& out, const float* noop, Lane lane) {
  static_assert(NormRowsConfig::kBlocksPerSm<kVectors> <= kMostAmaxBlocksPerSm, "room for their parts");
  const auto kernel = x.centered ? amax_norm_kernel<true, kVectors, kHeld, kFull>
                                 : amax_norm_kernel<false, kVectors, kHeld, kFull>;
  return launch_norm_rows<kVectors, kHeld>("amax_norm_kernel", kernel, x, lane, make_stats, out, noop);
}

}  // namespace

int launch_amax_norm(const Made& x, bool make_stats, const AmaxOut& out, const float* noop, Lane lane) {
  if (takes_patches(x)) {
    launch_amax_norm_patches(x, out.amax, noop, lane);
    return 0;
  }
  if (x.cols > NormRowsConfig::kColumns) {
    return launch_held<NormRowsConfig::kLongVectors, 1>(x, make_stats, out, noop, lane);
  }
  if (x.cols == NormRowsConfig::kColumns) {
    return launch_held<NormRowsConfig::kVectors, 1, true>(x, make_stats, out, noop, lane);
  }
  int blocks = 0;
  with_held_rows(x.cols, [&](auto held) {
    blocks = launch_held<NormRowsConfig::kVectors, held>(x, make_stats, out, noop, lane);
  });
  return blocks;
}

}  // namespace cuda
}  // namespace te_dist
