// MXFP8 of a matrix in memory, and the entry point.
#include "mxfp8_whole.cuh"
#include "whole_tile.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename T, typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<T>)
    mxfp8_kernel(TileInput<T> x, TileRegion region, MxOutput out) {
  __shared__ MxScales<MxSquare> scales;
  if (is_noop(out.noop)) return;
  const TilePlace tile = tile_place(region, blockIdx.x);
  const bool inside = tile_inside(tile, x.rows, x.cols);
  const MxPlace at = MxSquare::place();
  Patch<T> patch;
  load_patch(x, tile.row + at.row, tile.col + at.col, inside, patch);
  quantize_tile<T, F>(patch, tile, inside, out, scales);
}

template <typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<bf16_t>)
    mxfp8_whole_kernel(TileInput<bf16_t> x, TileRegion region, unsigned ahead, MxOutput out) {
  __shared__ MxScales<MxWide> scales;
  if (is_noop(out.noop)) return;
  const MxPlace at = MxWide::place();
  Patch<bf16_t> patch;
  const TilePlace tile = load_whole_tile<MxWide>(x, region, blockIdx.x, ahead, false, at.row, at.col, patch);
  quantize_whole_tile<F>(patch, tile, out, scales);
}

}  // namespace

void quantize_mxfp8(const Source& x, bool two_d, Fp8 format, const Planes& out, const float* noop, Lane lane) {
  const bool made = is_made(x);
  if (!made) check::plain(x);
  if (nothing_to_quantize(x, out, 1)) return;
  const MxOutput to{byte_matrix(out.row_data, x.rows, x.cols, 8),
                    byte_matrix(out.col_data, x.rows, x.cols, 8),
                    static_cast<uint8_t*>(out.row_scale),
                    static_cast<uint8_t*>(out.col_scale),
                    two_d,
                    noop,
                    !two_d && x.cols % 8 == 0 && aligned(out.row_data, 8) && aligned(out.col_data, 8),
                    round_up(ceil_div(x.cols, MxConfig::kBlock), 4),
                    round_up(x.cols, TileConfig::kTile)};
  if (made) return launch_mxfp8_made(x, format, to, lane);
  const auto kernel_for = [](auto input, auto fp8) {
    return mxfp8_kernel<TypeOf<decltype(input)>, TypeOf<decltype(fp8)>>;
  };
  const auto whole_for = [](auto fp8) { return mxfp8_whole_kernel<TypeOf<decltype(fp8)>>; };
  launch_tiles<MxWide>("mxfp8_kernel", kernel_for, whole_for, x, format, to.whole, 0, lane, to);
}

}  // namespace cuda
}  // namespace te_dist
