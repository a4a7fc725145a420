// NVFP4 rounded to nearest, and the entry point for both kinds of rounding.
#include "amax.cuh"
#include "nvfp4_unwritten.cuh"

namespace te_dist {
namespace cuda {

namespace {

// Whether there is anything to quantize.
bool check_planes(const Source& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                  const Planes& out) {
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

bool check_nvfp4(const Source& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                 const Planes& out) {
  check::plain(x);
  return check_planes(x, options, amax_row, amax_col, out);
}

// What is made and never written. False: nothing was done.
bool quantize_nvfp4_unwritten(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                              float* room, const Planes& out, const float* noop, Lane lane) {
  const Made made = made_of(x, true);
  if (!check_planes(x, options, amax_row, amax_col, out) || options.rng != nullptr) return false;
  const bool norm = is_nvfp4_whole_norm(x, options, out);
  if (!norm && !is_nvfp4_activation(x, options, out)) return false;
  NvParts parts{};
  if (norm && options.hadamard && amax_col != nullptr) {
    launch_amax_nvfp4_norm(made, amax_row, amax_col, noop, lane);
  } else {
    if ((norm && takes_patches(made)) || multiprocessors() * kMostAmaxBlocksPerSm > kAmaxRoom) return false;
    check::required("room", room, 16);
    const AmaxOut to{amax_row != nullptr ? amax_row : amax_col, room};
    parts = NvParts{room, room, launch_amax_made(x, to, false, noop, lane), amax_row, amax_col};
  }
  if (norm) {
    launch_nvfp4_whole_norm(made, options, amax_row, amax_col, parts, out, noop, lane);
  } else {
    launch_nvfp4_activation(made, parts, out, noop, lane);
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

bool quantize_nvfp4_current(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                            float* room, const Planes& out, const float* noop, Lane lane) {
  if (x.written != nullptr) {
    Source written{};
    static_cast<Input&>(written) = Input{x.written, x.dtype, x.rows, x.cols, x.cols};
    const bool any = check_nvfp4(written, options, amax_row, amax_col, out);
    amax_nvfp4(x, options, amax_row, amax_col, noop, lane);
    if (any) quantize_nvfp4(written, options, amax_row, amax_col, out, noop, lane);
    return true;
  }
  if (is_summed(x)) {
    Source read = x;
    read.partials = nullptr;
    const bool any = check_nvfp4(read, options, amax_row, amax_col, out);
    amax_nvfp4(x, options, amax_row, amax_col, noop, lane);
    if (any) quantize_nvfp4(read, options, amax_row, amax_col, out, noop, lane);
    return true;
  }
  if (is_made(x)) return quantize_nvfp4_unwritten(x, options, amax_row, amax_col, room, out, noop, lane);
  const bool any = check_nvfp4(x, options, amax_row, amax_col, out);
  if (!any || options.rng != nullptr || !is_nvfp4_whole(x, options, out)) {
    amax_nvfp4(x, options, amax_row, amax_col, noop, lane);
    if (any) quantize_nvfp4(x, options, amax_row, amax_col, out, noop, lane);
    return true;
  }
  check::required("room", room, 16);
  const NvParts parts = launch_amax_nvfp4(x, options, amax_row, amax_col, room, noop, lane);
  launch_nvfp4_whole(x, options, amax_row, amax_col, parts, out, noop, lane);
  return true;
}

}  // namespace cuda
}  // namespace te_dist
