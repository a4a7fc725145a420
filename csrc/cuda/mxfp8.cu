// MXFP8 of a matrix in memory, and the entry point.
#include "mxfp8.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename T, typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<T>)
    mxfp8_kernel(TileInput<T> x, MxOutput out) {
  __shared__ MxScales scales;
  if (is_noop(out.noop)) return;
  const TilePlace tile = tile_place(blockIdx.x, x.cols);
  const bool inside = tile_inside(tile, x.rows, x.cols);
  const MxPlace at = mx_place();
  Patch<T> patch;
  load_patch(x, tile.row + at.row, tile.col + at.col, inside, patch);
  quantize_tile<T, F>(patch, tile, inside, out, scales);
}

}  // namespace

void quantize_mxfp8(const Source& x, bool two_d, Fp8 format, const Planes& out, const float* noop, Lane lane) {
  const bool made = !two_d && is_made(x);
  if (!made) check::plain(x);
  const bool empty = x.rows == 0 || x.cols == 0;
  check::planes(out, 1, empty);
  if (empty || (out.row_data == nullptr && out.col_data == nullptr)) return;  // no scales either
  const MxOutput to{byte_matrix(out.row_data, x.rows, x.cols, 8),
                    byte_matrix(out.col_data, x.rows, x.cols, 8),
                    static_cast<uint8_t*>(out.row_scale),
                    static_cast<uint8_t*>(out.col_scale),
                    two_d,
                    noop};
  if (made) return launch_mxfp8_made(x, format, to, lane);
  const int blocks = grid_size(tile_count(x.rows, x.cols));
  dispatch_float(x.dtype, [&](auto input) {
    dispatch_fp8(format, [&](auto fp8) {
      using T = typename decltype(input)::type;
      using F = typename decltype(fp8)::type;
      mxfp8_kernel<T, F><<<blocks, TileConfig::kThreads, 0, stream_of(lane)>>>(tile_input<T>(x), to);
      check_launch("mxfp8_kernel");
    });
  });
}

}  // namespace cuda
}  // namespace te_dist
