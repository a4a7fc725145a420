// amax of an activation with a bias, at the price of reading its operand: |act| is at most |x|, and below zero at most
// what it is in its trough, so few sums of operand and bias can be the largest. Only those are activated.
#include "activation_guarded.cuh"
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

__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// Bits that those of no |act| exceed, of values from `low` to `high`. in_trough: the largest |act| below zero. Above
// all of a NaN, and of minus infinity, which becomes one.
__device__ __forceinline__ uint32_t bound_of(Activation kind, float low, float high, uint32_t in_trough) {
  if (kind == Activation::kSquaredRelu) high = larger_or_nan(high, 0.0f) * high;
  const auto below = static_cast<int>(bits_of(fmaxf(-low, 0.0f)));
  const int negative = low == -INFINITY ? 0x7FFFFFFF : min(below, static_cast<int>(in_trough));
  return static_cast<uint32_t>(max(static_cast<int>(bits_of(high)), negative));
}

__global__ void __launch_bounds__(BiasedConfig::kThreads, BiasedConfig::kBlocksPerSm)
    amax_biased_kernel(const __grid_constant__ Made x, AmaxOut out, const float* noop) {
  constexpr int kRows = BiasedConfig::kRows;
  constexpr unsigned kWarps = BiasedConfig::kThreads / 32;
  __shared__ uint32_t seen;  // bits of the largest |act| of the block so far
  if (is_noop(noop)) return;
  if (threadIdx.x == 0) seen = 0u;
  __syncthreads();
  const uint32_t in_trough = activated_magnitude(x.activation, trough_of(x.activation));
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
    const auto load = [&](int r) {
      return __ldg(reinterpret_cast<const uint4*>(x.data + min(row + r, last_row) * x.stride + col));
    };
    uint4 vector[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) vector[r] = load(r);
    float bias[8];
    load_vector<true>(x.bias, col, kNoBias, bias);
    float v[8];
    float high = -INFINITY;
    float low = INFINITY;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      unpack_eight<bf16_t>(vector[r], v);
      add_eight(v, bias);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        high = larger_or_nan(high, v[j]);
        low = fminf(low, v[j]);
      }
    }
    const uint32_t before = *static_cast<volatile uint32_t*>(&seen);
    if (__all_sync(kFullWarp, bound_of(x.activation, low, high, in_trough) <= before)) continue;
    uint32_t word = 0u;
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {  // loaded again: registers cannot be indexed
      unpack_eight<bf16_t>(load(r), v);
      add_eight(v, bias);
      with_activation(x.activation, [&](auto tag) {
        word = max_of_vector<bf16_t>(word, activated_eight<decltype(tag)::kind, false>(x.guard, v, v));
      });
    }
    const uint32_t raw = __reduce_max_sync(kFullWarp, Words<bf16_t>::fold(word));
    if (threadIdx.x % 32 == 0) atomicMax(&seen, bits_of(Words<bf16_t>::to_float_of_raw(raw)));
  }
  __syncthreads();
  if (threadIdx.x == 0) give_amax(out, float_of(seen));
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
