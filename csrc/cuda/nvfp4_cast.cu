// NVFP4 rounded to nearest, and the entry point for both kinds of rounding.
#include "nvfp4_kernel.cuh"

namespace te_dist {
namespace cuda {

void quantize_nvfp4(const Source& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                    const Planes& out, const float* noop, Lane lane) {
  check::plain(x);
  if (nothing_to_quantize(x, out, 1)) return;
  if (out.row_data != nullptr) {
    check::nibbles("columns", x.cols);
    check::required("amax_row", amax_row, sizeof(float));
  }
  if (out.col_data != nullptr) {
    check::nibbles("rows", x.rows);
    check::hadamard(options, x.rows);
    check::required("amax_col", amax_col, sizeof(float));
  }
  if (options.rng != nullptr) return launch_nvfp4_random(x, options, amax_row, amax_col, out, noop, lane);
  if (launch_nvfp4_whole(x, options, amax_row, amax_col, out, noop, lane)) return;
  launch_nvfp4<false>(x, options, amax_row, amax_col, out, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
