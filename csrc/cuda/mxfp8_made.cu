// MXFP8 of a matrix that is made on the fly. 1x32 and E4M3 are what most are, and have faster kernels.
#include "mxfp8_whole.cuh"
#include "norm_rows.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F, bool kWhole>
__global__ void __launch_bounds__(MadeConfig::kThreads, MadeConfig::kBlocksPerSm)
    mxfp8_made_kernel(const __grid_constant__ Made x, MxOutput out) {
  extern __shared__ uint4 memory[];
  __shared__ MxScales<MxSquare> scales;
  if (is_noop(out.noop)) return;
  const MxPlace at = MxSquare::place();
  const bool columns = out.col_data.data != nullptr;
  for_each_made_tile(x, false, at.row, at.col, columns || !kWhole, memory,
                     [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                       if constexpr (kWhole) {
                         if (columns) {
                           quantize_whole_tile<F, true>(patch, tile, out, scales);
                         } else {
                           quantize_whole_rows<F, true>(patch, tile, out);
                         }
                       } else {
                         quantize_tile<bf16_t, F>(patch, tile, inside, out, scales);
                       }
                     });
}

}  // namespace

void launch_mxfp8_made(const Source& x, Fp8 format, const MxOutput& out, Lane lane) {
  const Made made = made_of(x, true);
  const bool usual = format == Fp8::kE4M3 && !out.two_d;
  if (usual && out.col_data.data == nullptr && out.row_data.vector && by_rows(made)) {
    return launch_mxfp8_rows(made, x.make_stats, out, lane);
  }
  if (launch_mxfp8_patches(made, format, out, lane)) return;
  const bool whole = out.whole && made.is_whole();
  const auto kernel = format == Fp8::kE5M2 ? (whole ? mxfp8_made_kernel<E5M2, true> : mxfp8_made_kernel<E5M2, false>)
                                           : (whole ? mxfp8_made_kernel<E4M3, true> : mxfp8_made_kernel<E4M3, false>);
  launch_made("mxfp8_made_kernel", kernel, made, lane, out);
}

}  // namespace cuda
}  // namespace te_dist
