// Host side of made.cuh and bands.cuh: what may be made on the fly, and the statistics that its tiles wait for.
#include "made.cuh"
#include "row_team.cuh"
#include "tile.cuh"

namespace te_dist {
namespace cuda {
namespace {

constexpr int kMarkThreads = 256;

__global__ void mark_pending_kernel(Unmade what, const float* noop) {
  let_next_kernel_start();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kMarkThreads + threadIdx.x;
  if (is_noop(noop)) return;
  if (blockIdx.x == 0u) what.blank.fill();
  if (row >= what.rows) return;
  what.rstd[row] = float_of(kPendingBits);
  if (what.mean != nullptr) what.mean[row] = float_of(kPendingBits);
  if (row != 0) return;
  if (what.first_amax != nullptr) *what.first_amax = 0.0f;
  if (what.second_amax != nullptr) *what.second_amax = 0.0f;
}

// In units in the last place of a float. By PTX's bounds the approximations are off by 16 at most. On Hopper their
// sigmoids differ from the definition's by 5.3 * 2^-24 of themselves, seen over all floats, and the products add up to
// 3 units. Which GPU runs is known here alone: one that is newer may translate Hopper's code.
RoundingGuard rounding_guard() {
  const uint32_t units = device_attribute<cudaDevAttrComputeCapabilityMajor>() == 9 ? 10u : 24u;
  return RoundingGuard{(0x8000u + units) * 0x10001u, 2u * units << 16};
}

}  // namespace

void launch_mark_pending(const Unmade& what, const float* noop, Lane lane) {
  launch("mark_pending_kernel", mark_pending_kernel, grid_size(ceil_div(what.rows, kMarkThreads)), kMarkThreads, lane,
         what, noop);
}

Made made_of(const Source& x, bool with_stats) {
  check::fused(x);
  Made made{};
  made.kind = x.kind;
  made.activation = x.activation;
  made.gated = x.gated;
  made.zero_centered = x.zero_centered;
  made.centered = x.mean != nullptr;
  made.biased = x.bias.data != nullptr;
  made.eps = x.eps;
  made.rows = x.rows;
  made.cols = made.paired() ? x.cols / 2 : x.cols;
  made.pitch = x.cols;
  made.data = static_cast<const bf16_t*>(x.data);
  made.stride = x.stride;
  made.grad = static_cast<const bf16_t*>(x.grad);
  made.grad_stride = x.grad_stride;
  made.weight = row_view(x.weight.data, x.weight.dtype, made.cols);
  made.bias = row_or_none(x.bias.data, x.bias.dtype, made.cols);
  if (x.gated && x.bias.data != nullptr) {
    const auto* second = static_cast<const char*>(x.bias.data) + made.cols * size_of(x.bias.dtype);
    made.second_bias = row_view(second, x.bias.dtype, made.cols);
  }
  made.guard = rounding_guard();
  made.mean = x.mean;
  made.rstd = x.rstd;
  made.partials = x.partials;
  const bool ordered = with_stats && x.make_stats;
  made.order = bands_of(x.rows, made.cols, ordered, rows_at_once(made.cols));
  const int64_t pieces = ordered ? band_pieces(made.order) : tile_count(made.rows, made.cols);
  made.pieces = static_cast<unsigned>(grid_size(pieces));
  return made;
}

}  // namespace cuda
}  // namespace te_dist
