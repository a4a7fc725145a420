// Per-tensor casts of a matrix that is made in registers.
#include "cast.cuh"
#include "patch_source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F, Way kWay>
__global__ void __launch_bounds__(PatchConfig::kThreads, WayConfig<kWay>::kBlocksPerSm)
    cast_patches_kernel(const __grid_constant__ Made x, ByteMatrix row_out, ByteMatrix col_out, CastScale from) {
  extern __shared__ __align__(16) float memory[];
  if (is_noop(from.noop)) return;
  __shared__ uint32_t maxima[PatchConfig::kThreads / 32];
  const float scale = tensor_scale<F, PatchConfig::kThreads>(from, maxima);
  uint32_t word = 0u;
  const auto cast = [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
    if (from.seen != nullptr) word = max_of_patch(patch, word);
    write_tile<bf16_t, F, WayConfig<kWay>::kWhole>(patch, scale, tile, inside, row_out, col_out,
                                                   *static_cast<ByteStage*>(work_area<kWay>(memory)));
  };
  for_each_patch<kWay, SquareTile>(x, true, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, memory, cast);
  record_amax<bf16_t, PatchConfig::kThreads>(from, word, maxima);
}

}  // namespace

bool launch_cast_patches(const Made& x, Fp8 format, const ByteMatrix& row_out, const ByteMatrix& col_out,
                         const CastScale& from, Lane lane) {
  const Way wanted = way_of(x, row_out.is_whole() && col_out.is_whole());
  const auto start = [&](auto way, auto values) {
    constexpr Way kWay = decltype(way)::value;
    const auto kernel = cast_patches_kernel<TypeOf<decltype(values)>, kWay>;
    const int stage = col_out.data != nullptr ? sizeof(ByteStage) : 0;
    launch_way<kWay>("cast_patches_kernel", kernel, stage, x, from.noop, lane, row_out, col_out, from);
  };
  // What is gated is made faster by source.cuh.
  return start_way<Way::kNorm, Way::kWholeNorm, Way::kActivation, Way::kRectified, Way::kSlope, Way::kBiased,
                   Way::kBiasedSlope>(wanted, format, start);
}

}  // namespace cuda
}  // namespace te_dist
