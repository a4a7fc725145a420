// A norm's gradient in one pass: 6 bytes an element. bf16 rows of up to 8192 elements.
//
// A block takes 16 rows of a tile of 128, the groups g and g + 8. The 8 blocks of a tile are a cluster and fold their
// column sums through each other's shared memory. Clusters stay and take tile after tile: rows on their way wait in a
// ring in shared memory, and those of the next tile are on their way while this one's sums are folded. Short rows leave
// room for several blocks on a multiprocessor, which hide each other's latency.
#include "clusters.cuh"
#include "norm_grad.cuh"
#include "row_block.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct RowsConfig {
  static constexpr int kThreads = RowBlock::kThreads;
  static constexpr int kCluster = 8;  // blocks of a tile
  static constexpr int kGroup = 8;    // rows
  static constexpr int kRows = 2 * kGroup;
  static constexpr int kSpan = kThreads * 16;  // bytes that a block copies at once
};

// kPairs: of columns a thread, 2, 4 or 8.
template <int kPairs>
struct RowsOf {
  static constexpr int kMostColumns = kPairs * 2 * RowsConfig::kThreads;
  static constexpr int kSums = kPairs * RowsConfig::kThreads;  // pairs of floats in one set of column sums
  static constexpr int kSpans = kPairs == 8 ? 2 : 1;           // of a row
  static constexpr int kRing = kPairs == 8 ? 3 : kPairs == 4 ? 4 : 6;
  static constexpr int kBlocksPerSm = kPairs == 8 ? 1 : kPairs == 4 ? 2 : 3;

  static constexpr int bytes(int cols, int sets) {
    return kRing * 4 * cols + sets * kSums * static_cast<int>(sizeof(float2));
  }
  // For the longest rows, whatever a call's: a graph may hold a launch that needs it.
  static constexpr int kMostBytes = bytes(kMostColumns, 2);
  // Not every GPU lets a block have so much, and what the kernel has besides.
  static bool fits() {
    constexpr int kBesides = RowBlock::kScratch * static_cast<int>(sizeof(float)) +
                             2 * RowsConfig::kRows * static_cast<int>(sizeof(RowStats));
    return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= kMostBytes + kBesides;
  }
};

// The thread's part of a row of up to kSpans spans; kFull: of as many.
template <int kSpans, bool kFull>
__device__ __forceinline__ void copy_row(unsigned to, const bf16_t* from, int bytes) {
  const int at = static_cast<int>(threadIdx.x) * 16;
  const char* source = reinterpret_cast<const char*>(from) + at;
#pragma unroll
  for (int span = 0; span < kSpans; ++span) {
    if (kFull || at + span * RowsConfig::kSpan < bytes) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at + span * RowsConfig::kSpan),
                   "l"(source + span * RowsConfig::kSpan)
                   : "memory");
    }
  }
}

// Until all copies but those of the youngest kYoungest rows are there.
template <int kYoungest>
__device__ __forceinline__ void wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kYoungest) : "memory");
}

// The sums of a tile's columns: every block folds those of an eighth of them.
template <int kPairs>
__device__ __forceinline__ void fold_sums(const NormGradTask& task, const float2* saved, int64_t tile, int member) {
  constexpr int kSums = RowsOf<kPairs>::kSums;
  constexpr int kSlice = kSums / RowsConfig::kCluster;
  const int cols = static_cast<int>(task.x.cols);
  if (static_cast<int>(threadIdx.x) >= kSlice) return;
  const int at = member * kSlice + static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int set = 0; set < 2; ++set) {
    float* partials = set == 0 ? task.weight_partials : task.bias_partials;
    if (partials == nullptr || 2 * at >= cols) continue;
    float2 v[RowsConfig::kCluster];
#pragma unroll
    for (int b = 0; b < RowsConfig::kCluster; ++b) v[b] = load_of_member(saved + set * kSums + at, b);
    const auto fold = [](float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); };
    const float2 total = fold(fold(fold(v[0], v[4]), fold(v[2], v[6])), fold(fold(v[1], v[5]), fold(v[3], v[7])));
    partials[tile * cols + 2 * at] = total.x;
    partials[tile * cols + 2 * at + 1] = total.y;
  }
}

// kFull: rows have kMostColumns.
template <int kPairs, bool kCentered, bool kFull>
__global__ void TED_IN_CLUSTERS_OF(RowsConfig::kCluster)
    __launch_bounds__(RowsConfig::kThreads, RowsOf<kPairs>::kBlocksPerSm)
        norm_grad_rows_kernel(const __grid_constant__ NormGradTask task) {
  using Rows = RowsOf<kPairs>;
  constexpr int kRing = Rows::kRing;
  constexpr int kThreads = RowsConfig::kThreads;
  constexpr int kRows = RowsConfig::kRows;
  extern __shared__ uint4 memory[];
  __shared__ float scratch[RowBlock::kScratch];
  __shared__ RowStats row_stats[2][kRows];  // of this tile and of the next
  const int cols = kFull ? Rows::kMostColumns : static_cast<int>(task.x.cols);
  const int row_bytes = 2 * cols;
  const char* ring = reinterpret_cast<const char*>(memory);
  auto* saved = reinterpret_cast<float2*>(reinterpret_cast<char*>(memory) + kRing * 2 * row_bytes);
  const int member = cluster_member();
  // Rows fit 32 bits (launch_norm_grad_rows).
  const int rows = static_cast<int>(task.rows);
  const int first_tile = static_cast<int>(blockIdx.x) / RowsConfig::kCluster;
  const int step = static_cast<int>(gridDim.x) / RowsConfig::kCluster;
  const int tiles = ((rows + 127) / 128 - first_tile + step - 1) / step;
  const int thread = static_cast<int>(threadIdx.x);
  const RowCount count(cols);
  const bool with_bias = task.bias_partials != nullptr;

  // Row i of this block in its tile t: group `member` first, then the group that folds with it. They ascend.
  const auto row_of = [&](int t, int i) {
    return (first_tile + t * step) * 128 +
           (member + (i / RowsConfig::kGroup) * RowsConfig::kCluster) * RowsConfig::kGroup + i % RowsConfig::kGroup;
  };
  const unsigned ring_address = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  // Row i, which may be one of the next tile, into a slot of the ring.
  const auto fetch = [&](int t, int i, int slot) {
    t += i / kRows;
    const int row = row_of(t, i % kRows);
    if (t < tiles && row < rows) {
      const unsigned to = ring_address + slot * 2 * row_bytes;
      copy_row<Rows::kSpans, kFull>(to, static_cast<const bf16_t*>(task.x.data) + row * task.stride, row_bytes);
      copy_row<Rows::kSpans, kFull>(to + row_bytes, static_cast<const bf16_t*>(task.grad.data) + row * task.grad_stride,
                                    row_bytes);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const auto load_stats = [&](int t) {
    if (thread >= kRows || t >= tiles) return;
    const int row = row_of(t, thread);
    if (row < rows) row_stats[t % 2][thread] = RowStats{kCentered ? task.mean[row] : 0.0f, task.rstd[row]};
  };
#pragma unroll 1
  for (int i = 0; i < kRing; ++i) fetch(0, i, i);
  load_stats(0);
  float2 gain[kPairs];
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    gain[p] = load_gain_pair(task.weight, task.zero_centered, 1024 * p + 2 * thread);
  }
  wait_but<kRing - 1>();
  __syncthreads();

  int slot = 0;  // of the row at hand
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    load_stats(t + 1);  // seen behind the barriers of this tile's rows
    float2 weight_sum[kPairs];
    float2 bias_sum[kPairs];
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) {
      if (i % RowsConfig::kGroup == 0) {
        if (i != 0 && t != 0) cluster_wait();  // the others have read the last tile's sums
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          if (i != 0) {
            saved[p * kThreads + thread] = weight_sum[p];
            if (with_bias) saved[Rows::kSums + p * kThreads + thread] = bias_sum[p];
          }
          weight_sum[p] = bias_sum[p] = make_float2(0.0f, 0.0f);
        }
      }
      const int row = row_of(t, i);
      if (row >= rows) continue;  // and so are all that follow
      const float rstd = row_stats[t % 2][i].rstd;
      const float shift = row_stats[t % 2][i].shift(kCentered);
      const auto* x = reinterpret_cast<const uint32_t*>(ring + slot * 2 * row_bytes) + thread;
      const auto* grad = reinterpret_cast<const uint32_t*>(ring + (slot * 2 + 1) * row_bytes) + thread;
      float2 normal[kPairs];
      uint32_t grad_word[kPairs];
      float2 along = make_float2(0.0f, 0.0f);
      float2 inner = make_float2(0.0f, 0.0f);
      // Behind the row's end gain and gradient are zero, and add zeros; their column sums go nowhere.
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const bool there = kFull || 1024 * p + 2 * thread < cols;
        grad_word[p] = there ? grad[p * kThreads] : 0u;
        const float2 xs = pair_of(there ? x[p * kThreads] : 0u);
        const float2 dy = pair_of(grad_word[p]);
        normal[p] = there ? fma_pair(xs, rstd, shift) : make_float2(0.0f, 0.0f);
        const float2 scaled = make_float2(dy.x * gain[p].x, dy.y * gain[p].y);
        if (kCentered) inner = make_float2(inner.x + scaled.x, inner.y + scaled.y);
        along = fma_pair(scaled, normal[p], along);
        weight_sum[p] = fma_pair(dy, normal[p], weight_sum[p]);
        // Of a LayerNorm in any case: a choice costs more than the sum.
        if (kCentered || with_bias) bias_sum[p] = make_float2(bias_sum[p].x + dy.x, bias_sum[p].y + dy.y);
      }
      // The next row is to be there when all have passed the barrier of the sums; then nobody reads this one any
      // more.
      wait_but<kRing - 2>();
      float slope;
      float offset = -0.0f;
      if (kCentered) {
        const float2 means = RowBlock::sum(along, inner, scratch, i % 2 * 2,
                                           [&](float sum) { return count.divide(sum) * rstd; });
        slope = means.x;
        offset = means.y;
      } else {
        slope = count.divide(RowBlock::sum(along, scratch, i % 2)) * rstd;
      }
      fetch(t, i + kRing, slot);
      slot = slot + 1 == kRing ? 0 : slot + 1;
      bf16_t* dx = static_cast<bf16_t*>(const_cast<void*>(task.dx.data)) + static_cast<int64_t>(row) * cols;
      auto* to = reinterpret_cast<uint32_t*>(dx) + thread;
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const float2 dy = pair_of(grad_word[p]);
        const float2 taken = fma_pair(normal[p], slope, offset);
        const float2 v = make_float2(fused_multiply_add(dy.x * gain[p].x, rstd, -taken.x),
                                     fused_multiply_add(dy.y * gain[p].y, rstd, -taken.y));
        if (kFull || 1024 * p + 2 * thread < cols) store_bulk(to + p * kThreads, pack_bf16(v.x, v.y));
      }
    }

    // saved <- group g + group g + 8, then the cluster folds.
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      float2& weight = saved[p * kThreads + thread];
      weight = make_float2(weight.x + weight_sum[p].x, weight.y + weight_sum[p].y);
      if (!with_bias) continue;
      float2& bias = saved[Rows::kSums + p * kThreads + thread];
      bias = make_float2(bias.x + bias_sum[p].x, bias.y + bias_sum[p].y);
    }
    cluster_arrive_with_shared();
    cluster_wait();
    fold_sums<kPairs>(task, saved, first_tile + t * step, member);
    cluster_arrive_with_shared();  // nothing is to be seen, and what was read of others is in the totals, stored by now
  }
  cluster_wait();  // others may still read here
}

template <int kPairs, bool kCentered, bool kFull>
void launch(const NormGradTask& task, Lane lane) {
  using Rows = RowsOf<kPairs>;
  const auto kernel = norm_grad_rows_kernel<kPairs, kCentered, kFull>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Rows::kMostBytes),
             "shared memory for rows");
  // GPUs of one machine are alike.
  static const int64_t resident =
      resident_clusters(kernel, RowsConfig::kCluster, RowsConfig::kThreads, Rows::kMostBytes);
  const int64_t room = multiprocessors() * Rows::kBlocksPerSm / RowsConfig::kCluster;
  const int64_t most = larger(1, smaller(resident, room));
  const int blocks = grid_size(smaller(ceil_div(task.rows, 128), most) * RowsConfig::kCluster);
  const int bytes = Rows::bytes(static_cast<int>(task.x.cols), task.bias_partials != nullptr ? 2 : 1);
  kernel<<<blocks, RowsConfig::kThreads, bytes, stream_of(lane)>>>(task);
  check_launch("norm_grad_rows_kernel");
}

template <int kPairs, bool kFull>
void launch(const NormGradTask& task, Lane lane) {
  task.mean != nullptr ? launch<kPairs, true, kFull>(task, lane) : launch<kPairs, false, kFull>(task, lane);
}

}  // namespace

bool launch_norm_grad_rows(const NormGradTask& task, Lane lane) {
  const int64_t cols = task.x.cols;
  const bool vectors = task.x.vector && task.grad.vector && task.dx.vector && cols % 8 == 0;
  if (!runs_hopper_code() || task.x.dtype != Float::kBF16 || !vectors || cols > RowsOf<8>::kMostColumns) return false;
  if (task.rows > 0x7FFF0000) return false;
  if (!(cols > RowsOf<4>::kMostColumns ? RowsOf<8>::fits() : RowsOf<4>::fits())) return false;
  if (cols == RowsOf<8>::kMostColumns) {
    launch<8, true>(task, lane);
  } else if (cols > RowsOf<4>::kMostColumns) {
    launch<8, false>(task, lane);
  } else if (cols == RowsOf<4>::kMostColumns) {
    launch<4, true>(task, lane);
  } else if (cols > RowsOf<2>::kMostColumns) {
    launch<4, false>(task, lane);
  } else {
    launch<2, false>(task, lane);
  }
  return true;
}

}  // namespace cuda
}  // namespace te_dist
