// MXFP8, 1x32, of a matrix that is made on the fly.
#include "mxfp8.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<bf16_t>)
    mxfp8_made_kernel(const __grid_constant__ Made x, MxOutput out) {
  extern __shared__ uint4 memory[];
  __shared__ MxScales scales;
  if (is_noop(out.noop)) return;
  const MxPlace at = mx_place();
  for_each_made_tile(x, false, at.row, at.col, memory,
                     [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                       quantize_tile<bf16_t, F>(patch, tile, inside, out, scales);
                     });
}

}  // namespace

void launch_mxfp8_made(const Source& x, Fp8 format, const MxOutput& out, Lane lane) {
  const Made made = made_of(x, true);
  if (made.order.counters != nullptr) launch_bands_reset(made.order, lane);
  dispatch_fp8(format, [&](auto fp8) {
    using F = typename decltype(fp8)::type;
    allow_made_bytes(mxfp8_made_kernel<F>);
    mxfp8_made_kernel<F>
        <<<grid_size(made_blocks(made)), TileConfig::kThreads, made_bytes(made), stream_of(lane)>>>(made, out);
    check_launch("mxfp8_made_kernel");
  });
}

}  // namespace cuda
}  // namespace te_dist
