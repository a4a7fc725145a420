// NVFP4 rounded to nearest, and the entry point for both kinds of rounding.
#include "nvfp4_kernel.cuh"

namespace te_dist {
namespace cuda {

namespace {

bool check_nvfp4(const Source& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                 const Planes& out) {
  check::plain(x);
  if (nothing_to_quantize(x, out, 1)) return false;
  if (out.row_data != nullptr) {
    check::nibbles("columns", x.cols);
    check::required("amax_row", amax_row, sizeof(float));
  }
  if (out.col_data != nullptr) {
    check::nibbles("rows", x.rows);
    check::hadamard(options, x.rows);
    check::required("amax_col", amax_col, sizeof(float));
  }
  return true;
}

}  // namespace

void quantize_nvfp4(const Source& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                    const Planes& out, const float* noop, Lane lane) {
  if (!check_nvfp4(x, options, amax_row, amax_col, out)) return;
  if (options.rng != nullptr) return launch_nvfp4_random(x, options, amax_row, amax_col, out, noop, lane);
  if (is_nvfp4_whole(x, options, out)) {
    return launch_nvfp4_whole(x, options, amax_row, amax_col, NvParts{}, out, noop, lane);
  }
  launch_nvfp4<false>(x, options, amax_row, amax_col, out, noop, lane);
}

void quantize_nvfp4_current(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                            float* room, const Planes& out, const float* noop, Lane lane) {
  const bool any = check_nvfp4(x, options, amax_row, amax_col, out);
  if (!any || options.rng != nullptr || !is_nvfp4_whole(x, options, out)) {
    amax_nvfp4(x, options, amax_row, amax_col, noop, lane);
    if (any) quantize_nvfp4(x, options, amax_row, amax_col, out, noop, lane);
    return;
  }
  check::required("room", room, 16);
  const NvParts parts = launch_amax_nvfp4(x, options, amax_row, amax_col, room, noop, lane);
  launch_nvfp4_whole(x, options, amax_row, amax_col, parts, out, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
