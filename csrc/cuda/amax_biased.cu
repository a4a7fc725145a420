// amax of an activation with a bias and without a gate, at the price of reading its operand: amax_activation.cu, but by
// rows, of which several share their biases.
#include "made.cuh"
#include "stretches.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct BiasedConfig {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSm = 5;
  static constexpr int kRows = 4;       // that a warp takes at once
  static constexpr int kCols = 32 * 8;  // and columns
};

__global__ void __launch_bounds__(BiasedConfig::kThreads, BiasedConfig::kBlocksPerSm)
    amax_biased_kernel(const __grid_constant__ Made x, AmaxOut out, const float* noop) {
  constexpr int kRows = BiasedConfig::kRows;
  constexpr unsigned kWarps = BiasedConfig::kThreads / 32;
  if (is_noop(noop)) return;
  Stretches found(x.activation);
  const auto cols = static_cast<int>(x.cols);
  const auto last_row = static_cast<int>(x.rows) - 1;
  const auto across = static_cast<unsigned>((cols - 1) / BiasedConfig::kCols + 1);
  const unsigned items = across * static_cast<unsigned>(last_row / kRows + 1);
  for (unsigned item = blockIdx.x * kWarps + threadIdx.x / 32; item < items; item += gridDim.x * kWarps) {
    const unsigned down = item / across;
    // Behind the end: the last row or vector once more.
    const int row = static_cast<int>(down) * kRows;
    const int col = min(static_cast<int>(item - down * across) * BiasedConfig::kCols +
                            static_cast<int>(threadIdx.x % 32) * 8, cols - 8);
    uint4 v[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      v[r] = __ldg(reinterpret_cast<const uint4*>(x.data + min(row + r, last_row) * x.stride + col));
    }
    const uint4 biases = load_first<true>(x.bias, col, kNoBiases);
#pragma unroll
    for (int r = 0; r < kRows; ++r) found.take(add_bf16(v[r], biases));
  }
  found.give<BiasedConfig::kThreads>(x.activation, out);
}

}  // namespace

int launch_amax_biased(const Made& x, const AmaxOut& out, const float* noop, Lane lane) {
  static_assert(BiasedConfig::kBlocksPerSm <= kMostAmaxBlocksPerSm, "room for their parts");
  const int64_t items = ceil_div(x.rows, BiasedConfig::kRows) * ceil_div(x.cols, BiasedConfig::kCols);
  const int64_t most = static_cast<int64_t>(multiprocessors()) * BiasedConfig::kBlocksPerSm;
  const int blocks = grid_size(smaller(ceil_div(items, BiasedConfig::kThreads / 32), most));
  launch("amax_biased_kernel", amax_biased_kernel, blocks, BiasedConfig::kThreads, lane, x, out, noop);
  return blocks;
}

}  // namespace cuda
}  // namespace te_dist
