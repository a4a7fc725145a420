// amax of a matrix that is made on the fly. A norm: whole rows in registers, so that its statistics come from the same
// read. Activations: tiles.
#include "amax.cuh"
#include "row_block.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

// Rows of up to kPairs * 1024 columns, the next two on their way while one is worked on.
template <int kPairs, bool kCentered>
__global__ void __launch_bounds__(RowBlock::kThreads, kPairs == 8 ? 2 : 1)
    amax_norm_kernel(const __grid_constant__ Made x, bool make_stats, float* amax, const float* noop) {
  __shared__ float scratch[RowBlock::kScratch];
  __shared__ uint32_t maxima[RowBlock::kThreads / 32];
  if (is_noop(noop)) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int cols = static_cast<int>(x.cols);
  const float count = static_cast<float>(cols);
  float2 gain[kPairs];
  float2 bias[kPairs];
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    gain[p] = load_gain_pair(x.weight, x.zero_centered, 1024 * p + 2 * thread);
    bias[p] = load_pair(x.bias, 1024 * p + 2 * thread, kNoBias);
  }
  const auto load = [&](int64_t row, uint32_t (&word)[kPairs]) {
    const auto* from = reinterpret_cast<const uint32_t*>(x.data + row * x.stride) + thread;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      word[p] = row < x.rows && 1024 * p + 2 * thread < cols ? __ldg(from + p * RowBlock::kThreads) : 0u;
    }
  };
  uint32_t largest = 0u;
  uint32_t next[kPairs];
  load(blockIdx.x, next);
  int turn = 0;
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < x.rows; row += gridDim.x) {
    uint32_t word[kPairs];
#pragma unroll
    for (int p = 0; p < kPairs; ++p) word[p] = next[p];
    load(row + gridDim.x, next);
    RowStats stats{0.0f, 0.0f};
    if (make_stats) {
      if (kCentered) {
        float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          const float2 v = pair_of(word[p]);
          total = make_float2(total.x + v.x, total.y + v.y);
        }
        stats.mean = __fdiv_rn(RowBlock::sum(total, scratch, turn), count);
        turn = (turn + 1) % 4;
      }
      float2 squares = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        if (kCentered && 1024 * p + 2 * thread >= cols) continue;  // zeros minus the mean
        float2 v = pair_of(word[p]);
        if (kCentered) v = make_float2(v.x - stats.mean, v.y - stats.mean);
        squares = make_float2(squares.x + v.x * v.x, squares.y + v.y * v.y);
      }
      stats.rstd = reciprocal_deviation(RowBlock::sum(squares, scratch, turn), count, x.eps);
      turn = (turn + 1) % 4;
      if (thread == 0) {
        if (kCentered) x.mean[row] = stats.mean;
        x.rstd[row] = stats.rstd;
      }
    } else {
      stats = RowStats{kCentered ? x.mean[row] : 0.0f, x.rstd[row]};
    }
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      if (kCentered && 1024 * p + 2 * thread >= cols) continue;
      float2 v = pair_of(word[p]);
      if (kCentered) v = make_float2(v.x - stats.mean, v.y - stats.mean);
      v = make_float2(v.x * stats.rstd * gain[p].x, v.y * stats.rstd * gain[p].y);
      if (kCentered) v = make_float2(v.x + bias[p].x, v.y + bias[p].y);
      largest = Words<bf16_t>::max(largest, Words<bf16_t>::magnitude(pack_bf16(v.x, v.y)));
    }
  }
  const uint32_t raw = block_max<RowBlock::kThreads>(Words<bf16_t>::fold(largest), maxima);
  if (threadIdx.x == 0) atomic_amax(amax, Words<bf16_t>::to_float_of_raw(raw));
}

template <int kPairs>
void launch_amax_norm(const Made& x, bool make_stats, float* amax, const float* noop, Lane lane) {
  const int blocks = grid_size(smaller(x.rows, (kPairs == 8 ? 2 : 1) * static_cast<int64_t>(multiprocessors())));
  const auto kernel = x.centered ? amax_norm_kernel<kPairs, true> : amax_norm_kernel<kPairs, false>;
  kernel<<<blocks, RowBlock::kThreads, 0, stream_of(lane)>>>(x, make_stats, amax, noop);
  check_launch("amax_norm_kernel");
}

__global__ void __launch_bounds__(MadeConfig::kThreads, MadeConfig::kBlocksPerSm)
    amax_made_kernel(const __grid_constant__ Made x, float* amax, const float* noop) {
  extern __shared__ uint4 memory[];
  __shared__ uint32_t maxima[TileConfig::kThreads / 32];
  if (is_noop(noop)) return;
  uint32_t word = 0u;
  for_each_made_tile<true>(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, false, memory,
                     [&](const Patch<bf16_t>& patch, const TilePlace&, bool) {
#pragma unroll
                       for (int i = 0; i < TileConfig::kPatch; ++i) {
                         word = Words<bf16_t>::max(word, patch.row_max(i));
                       }
                     });
  const uint32_t raw = block_max<TileConfig::kThreads>(Words<bf16_t>::fold(word), maxima);
  if (threadIdx.x == 0) atomic_amax(amax, Words<bf16_t>::to_float_of_raw(raw));
}

}  // namespace

void launch_amax_made(const Source& x, float* amax, bool accumulate, const float* noop, Lane lane) {
  TED_CHECK(x.partials == nullptr, "amax makes no column sums: the cast that follows does");
  TED_CHECK(x.kind != Produce::kPlain, "the amax of a matrix in memory is not made");
  const Made made = made_of(x, false);
  if (!accumulate) launch_amax_reset(amax, nullptr, noop, lane);
  if (x.kind == Produce::kNorm) {
    TED_CHECK(x.cols <= 16384, "the amax of a norm takes rows of up to 16384 elements, got ", x.cols);
    TED_CHECK(x.bias.data == nullptr || x.mean != nullptr, "the amax of an RMSNorm takes no bias");
    return x.cols <= 8192 ? launch_amax_norm<8>(made, x.make_stats, amax, noop, lane)
                          : launch_amax_norm<16>(made, x.make_stats, amax, noop, lane);
  }
  launch_made("amax_made_kernel", amax_made_kernel, amax_made_kernel, made, lane, amax, noop);
}

}  // namespace cuda
}  // namespace te_dist
