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
  if (nothing_to_quantize(x, out, 1)) return;
  const MxOutput to{byte_matrix(out.row_data, x.rows, x.cols, 8),
                    byte_matrix(out.col_data, x.rows, x.cols, 8),
                    static_cast<uint8_t*>(out.row_scale),
                    static_cast<uint8_t*>(out.col_scale),
                    two_d,
                    noop};
  if (made) return launch_mxfp8_made(x, format, to, lane);
  const auto kernel_for = [](auto input, auto fp8) {
    return mxfp8_kernel<TypeOf<decltype(input)>, TypeOf<decltype(fp8)>>;
  };
  launch_tiles("mxfp8_kernel", kernel_for, x, format, to, lane);
}

}  // namespace cuda
}  // namespace te_dist
