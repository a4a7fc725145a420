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

// The cast of whole tiles that takes it; null: none does.
WholeCast* whole_cast(const Source& x, const Nvfp4Options& options, const Planes& out) {
  if (options.rng != nullptr) return is_nvfp4_whole_random(x, options, out) ? &launch_nvfp4_whole_random : nullptr;
  if (options.two_d) return is_nvfp4_whole_squares(x, options, out) ? &launch_nvfp4_whole_squares : nullptr;
  return is_nvfp4_whole(x, options, out) ? &launch_nvfp4_whole : nullptr;
}

// Of what check_nvfp4 has seen. parts, before: of whole tiles alone.
void cast_nvfp4(const Source& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                const NvParts& parts, Before before, const Planes& out, const float* noop, Lane lane) {
  if (const auto cast = whole_cast(x, options, out)) {
    return cast(x, options, amax_row, amax_col, parts, before, out, noop, lane);
  }
  const auto cast = options.rng != nullptr ? launch_nvfp4_random : launch_nvfp4<false>;
  cast(x, options, amax_row, amax_col, out, noop, lane);
}

// The matrix as it lies in memory, where the amax may have to write it.
Source written_or_plain(const Source& x) {
  Source read{};
  static_cast<Input&>(read) = x;
  if (x.written != nullptr) static_cast<Input&>(read) = Input{x.written, x.dtype, x.rows, x.cols, x.cols};
  return read;
}

// What is made and never written. False: nothing was done.
bool quantize_nvfp4_unwritten(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                              float* room, const Planes& out, const float* noop, Lane lane) {
  const Made made = made_of(x, true);
  if (!check_planes(x, options, amax_row, amax_col, out) || options.rng != nullptr) return false;
  const bool norm = is_nvfp4_whole_norm(x, options, out);
  const bool activation = is_nvfp4_whole_activation(x, options, out);
  if (!norm && !activation && !is_nvfp4_activation(x, options, out)) return false;
  NvParts parts{};
  if ((norm || activation) && options.hadamard && amax_col != nullptr) {
    check::required("room", room, 16);
    parts.tables = nv_tables(room);
    const auto find = norm ? launch_amax_nvfp4_norm : launch_amax_nvfp4_activation;
    find(made, amax_row, amax_col, parts.to_blank(), noop, lane);
  } else {
    if ((norm && takes_patches(made)) || multiprocessors() * kMostAmaxBlocksPerSm > kAmaxRoom) return false;
    check::required("room", room, 16);
    const AmaxOut to{amax_row != nullptr ? amax_row : amax_col, room};
    parts = NvParts{room, room, launch_amax_made(x, to, false, noop, lane), amax_row, amax_col, nullptr};
  }
  if (norm) {
    launch_nvfp4_whole_norm(made, options, amax_row, amax_col, parts, out, noop, lane);
  } else if (activation) {
    launch_nvfp4_whole_activation(made, options, amax_row, amax_col, parts, out, noop, lane);
  } else {
    launch_nvfp4_activation(made, parts, out, noop, lane);
  }
  return true;
}

}  // namespace

void quantize_nvfp4(const Source& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                    const Planes& out, const float* noop, Lane lane) {
  if (!check_nvfp4(x, options, amax_row, amax_col, out)) return;
  cast_nvfp4(x, options, amax_row, amax_col, NvParts{}, Before::kUnknown, out, noop, lane);
}

bool quantize_nvfp4_current(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                            float* room, const Planes& out, const float* noop, Lane lane) {
  const bool writes = x.written != nullptr;
  if (is_made(x) && !is_summed(x) && !writes) {
    return quantize_nvfp4_unwritten(x, options, amax_row, amax_col, room, out, noop, lane);
  }
  const Source read = written_or_plain(x);
  const bool any = check_nvfp4(read, options, amax_row, amax_col, out);
  NvParts parts{};
  if (any && !is_made(x) && whole_cast(x, options, out) != nullptr) {
    check::required("room", room, 16);
    parts = launch_amax_nvfp4(x, options, amax_row, amax_col, room, noop, lane);
  } else {
    amax_nvfp4(x, options, amax_row, amax_col, noop, lane);
  }
  const Before before = writes ? Before::kWritesToo : Before::kFindsAmaxes;
  if (any) cast_nvfp4(read, options, amax_row, amax_col, parts, before, out, noop, lane);
  return true;
}

}  // namespace cuda
}  // namespace te_dist
