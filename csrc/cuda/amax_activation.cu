// amax of an activation without a bias or a gate, at the price of reading its operand.
#include "stretches.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct StretchConfig {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSm = 5;
  static constexpr int kUnroll = 4;            // vectors of 16 bytes per lane and chunk
  static constexpr int kChunk = 32 * kUnroll;  // vectors per chunk
};

__global__ void __launch_bounds__(StretchConfig::kThreads, StretchConfig::kBlocksPerSm)
    amax_activation_kernel(const uint4* data, int64_t rows, int64_t vectors, int64_t stride, int64_t chunks,
                           Activation kind, AmaxOut out, const float* noop) {
  constexpr int kWarps = StretchConfig::kThreads / 32;
  constexpr int kUnroll = StretchConfig::kUnroll;
  if (is_noop(noop)) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  Stretches found(kind);
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; item < rows * chunks;
       item += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t row = rows == 1 ? 0 : item / chunks;
    const int64_t first = (item - row * chunks) * StretchConfig::kChunk + lane;
    const uint4* from = data + row * stride;
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {  // behind the end: the last vector once more
      v[u] = __ldg(from + min(first + u * 32, vectors - 1));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) found.take(v[u]);
  }
  found.give<StretchConfig::kThreads>(kind, out);
}

}  // namespace

int launch_amax_activation(const Source& x, const AmaxOut& out, const float* noop, Lane lane) {
  static_assert(StretchConfig::kBlocksPerSm <= kMostAmaxBlocksPerSm, "room for their parts");
  const bool one_row = x.rows == 1 || x.stride == x.cols;
  const int64_t rows = one_row ? 1 : x.rows;
  const int64_t vectors = (one_row ? x.rows * x.cols : x.cols) / 8;
  const int64_t chunks = ceil_div(vectors, StretchConfig::kChunk);
  const int64_t wanted = ceil_div(rows * chunks, StretchConfig::kThreads / 32);
  const int64_t most = static_cast<int64_t>(multiprocessors()) * StretchConfig::kBlocksPerSm;
  const int blocks = grid_size(smaller(wanted, most));
  launch("amax_activation_kernel", amax_activation_kernel, blocks, StretchConfig::kThreads, lane,
         static_cast<const uint4*>(x.data), rows, vectors, x.stride / 8, chunks, x.activation, out, noop);
  return blocks;
}

}  // namespace cuda
}  // namespace te_dist
