// NVFP4's two global amaxes of a bf16 matrix that is made on the fly, and written on the way, for the cast. That has
// few instructions to spare for making it once more, and two operands are as much to read as the result to write and
// read. What is not written: see nvfp4_unwritten.cuh. Gated gradients: see nvfp4_pairs.cu. Or the amaxes of a matrix in
// memory, whose columns are added up on the way.
#include "made_store.cuh"
#include "nvfp4_maxima.cuh"
#include "patch_source.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <Way kWay>
__global__ void __launch_bounds__(PatchConfig::kThreads, WayConfig<kWay>::kBlocksPerSm)
    nvfp4_amax_patches_kernel(const __grid_constant__ Made x, const __grid_constant__ NvMadeOut out) {
  extern __shared__ __align__(16) float memory[];
  let_next_kernel_start();
  if (is_noop(out.noop)) return;
  NvMaxima maxima(out, WayConfig<kWay>::kTabled);
  const auto take = [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool) {
    store_patch(x, patch, tile, out.written);
    maxima.add(patch);
  };
  for_each_patch<kWay, SquareTile>(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, memory, take, false);
  maxima.give(out);
}

__global__ void __launch_bounds__(MadeConfig::kThreads, MadeConfig::kBlocksPerSm)
    nvfp4_amax_made_kernel(const __grid_constant__ Made x, const __grid_constant__ NvMadeOut out) {
  extern __shared__ uint4 rings[];
  let_next_kernel_start();
  if (is_noop(out.noop)) return;
  NvMaxima maxima(out, true);
  for_each_made_tile(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, false, rings,
                     [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool) {
                       store_patch(x, patch, tile, out.written);
                       maxima.add(patch);
                     });
  maxima.give(out);
}

}  // namespace

void launch_amax_nvfp4_made(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                            const float* noop, Lane lane) {
  check::fused(x);
  if (!is_summed(x)) check::required("the made matrix", x.written, 16);
  launch_amax_reset(amax_row, amax_col, noop, lane);
  const Made made = made_of(x, true);
  bf16_t* const written = is_summed(x) ? nullptr : static_cast<bf16_t*>(x.written);
  const NvMadeOut out{written, AmaxOut{amax_row, nullptr}, AmaxOut{amax_col, nullptr},
                      options.hadamard && amax_col != nullptr, options.signs, noop};
  if (made.paired()) return launch_amax_nvfp4_pairs(made, out, lane);
  const auto start = [&](auto way, auto) {
    constexpr Way kWay = decltype(way)::value;
    launch_way<kWay>("nvfp4_amax_patches_kernel", nvfp4_amax_patches_kernel<kWay>, 0, made, noop, lane, out);
  };
  // Any format: bf16 is written.
  const bool started = start_way<Way::kNorm, Way::kWholeNorm, Way::kActivation, Way::kGated, Way::kSlope, Way::kBiased,
                                 Way::kBiasedSlope>(way_of(made, true), Fp8::kE4M3, start);
  if (started) return;
  launch_made("nvfp4_amax_made_kernel", nvfp4_amax_made_kernel, made, lane, out);
}

}  // namespace cuda
}  // namespace te_dist
