// A norm's gradient in one pass: 6 bytes an element. bf16 rows of up to 8192 elements.
//
// A block of 512 threads takes 16 rows, the groups g and g + 8 of a tile of 128; rows on their way wait in a ring in
// shared memory. Thread t has columns 1024 i + 2 t and the next one: two of the 1024 accumulators of a row's sum, and
// the sums of its own columns, which stay in registers. The 8 blocks of a tile are a cluster and fold their column
// sums through each other's shared memory.
#include "norm_grad.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct RowsConfig {
  static constexpr int kThreads = 512;
  static constexpr int kCluster = 8;   // blocks of a tile
  static constexpr int kGroup = 8;     // rows
  static constexpr int kRows = 2 * kGroup;
  static constexpr int kPairs = 8;     // of columns a thread
  static constexpr int kMostColumns = kPairs * 2 * kThreads;
  static constexpr int kRingBytes = 96 << 10;
  static constexpr int kMostAhead = 8;  // rows in the ring
};

struct RowsShape {
  int ring;          // rows in the ring
  int row_bytes;     // of one operand
  int sums;          // pairs of floats in one set of column sums
};

// The sums over a row of two values, in all threads. scratch: 2 x 128 floats, another one each time.
__device__ __forceinline__ float2 block_sums(float2 first, float2 second, float* scratch) {
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {
    first.x += __shfl_xor_sync(kFullWarp, first.x, distance);
    first.y += __shfl_xor_sync(kFullWarp, first.y, distance);
    second.x += __shfl_xor_sync(kFullWarp, second.x, distance);
    second.y += __shfl_xor_sync(kFullWarp, second.y, distance);
  }
  if (threadIdx.x % 4 == 0) {
    scratch[threadIdx.x / 4] = first.x + first.y;
    scratch[128 + threadIdx.x / 4] = second.x + second.y;
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto vectors = [&](const float* s) { return (s[lane] + s[64 + lane]) + (s[32 + lane] + s[96 + lane]); };
  return make_float2(fold_lanes(vectors(scratch)), fold_lanes(vectors(scratch + 128)));
}

__device__ __forceinline__ void copy_row(char* to, const void* from, int bytes) {
  for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes; at += RowsConfig::kThreads * 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to + at))),
                 "l"(static_cast<const char*>(from) + at)
                 : "memory");
  }
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ int cluster_member() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// What lies at `here` in the shared memory of another block of the cluster.
__device__ __forceinline__ float2 load_of_member(const float2* here, int member) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(here))), "r"(member));
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
  return value;
}

__device__ __forceinline__ float2 pair_of(uint32_t word) {
  return make_float2(Words<bf16_t>::element(word, 0), Words<bf16_t>::element(word, 1));
}

__global__ void __cluster_dims__(RowsConfig::kCluster, 1, 1) __launch_bounds__(RowsConfig::kThreads, 1)
    norm_grad_rows_kernel(const __grid_constant__ NormGradTask task, RowsShape shape) {
  constexpr int kPairs = RowsConfig::kPairs;
  constexpr int kThreads = RowsConfig::kThreads;
  extern __shared__ uint4 memory[];
  __shared__ float scratch[2][256];
  char* ring = reinterpret_cast<char*>(memory);
  auto* saved = reinterpret_cast<float2*>(ring + shape.ring * 2 * shape.row_bytes);
  const int member = cluster_member();
  const int64_t tile = blockIdx.x / RowsConfig::kCluster;
  const int thread = static_cast<int>(threadIdx.x);
  const int cols = static_cast<int>(task.x.cols);
  const float count = static_cast<float>(cols);
  const bool centered = task.mean != nullptr;

  // Row i of the block: group `member` first, then the group that folds with it.
  const auto row_of = [&](int i) {
    return tile * 128 + (member + (i / RowsConfig::kGroup) * RowsConfig::kCluster) * RowsConfig::kGroup +
           i % RowsConfig::kGroup;
  };
  const auto fetch = [&](int i) {
    if (i < RowsConfig::kRows && row_of(i) < task.rows) {
      char* to = ring + i % shape.ring * 2 * shape.row_bytes;
      const int64_t row = row_of(i);
      copy_row(to, static_cast<const bf16_t*>(task.x.data) + row * task.stride, shape.row_bytes);
      copy_row(to + shape.row_bytes, static_cast<const bf16_t*>(task.grad.data) + row * task.grad_stride,
               shape.row_bytes);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int i = 0; i < shape.ring - 1; ++i) fetch(i);

  float2 gain[kPairs];
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int64_t col = 1024 * p + 2 * thread;
    gain[p] = make_float2(0.0f, 0.0f);
    if (col >= cols) continue;
    float v[8];
    // Two of them; a vector of eight would be another thread's.
    const RowView two{static_cast<const char*>(task.weight.data) + col * size_of(task.weight.dtype),
                      task.weight.dtype, 2, false};
    to_floats(load_eight(two, 0), task.weight.dtype, v);
    gain[p] = task.zero_centered ? make_float2(v[0] + 1.0f, v[1] + 1.0f) : make_float2(v[0], v[1]);
  }

  float2 weight_sum[kPairs];
  float2 bias_sum[kPairs];
#pragma unroll 1
  for (int i = 0; i < RowsConfig::kRows; ++i) {
    if (i % RowsConfig::kGroup == 0) {
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        if (i != 0) {
          saved[p * kThreads + thread] = weight_sum[p];
          if (task.bias_partials != nullptr) saved[shape.sums + p * kThreads + thread] = bias_sum[p];
        }
        weight_sum[p] = bias_sum[p] = make_float2(0.0f, 0.0f);
      }
    }
    const int64_t row = row_of(i);
    if (row >= task.rows) {
      fetch(RowsConfig::kRows);  // nothing, but it counts
      continue;
    }
    const float rstd = task.rstd[row];
    const float mean = centered ? task.mean[row] : 0.0f;
    // The ring holds rows i .. i + ring - 2: all but ring - 2 of the copies must be there, row i's.
    switch (shape.ring) {
      case 3: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
      case 4: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
      case 5: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
      case 6: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
      case 7: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
      default: asm volatile("cp.async.wait_group 6;" ::: "memory");
    }
    __syncthreads();  // row i is there for all, and nobody reads row i - 1 any more: its place is filled again
    fetch(i + shape.ring - 1);
    const auto* x = reinterpret_cast<const uint32_t*>(ring + i % shape.ring * 2 * shape.row_bytes);
    const auto* grad = reinterpret_cast<const uint32_t*>(ring + (i % shape.ring * 2 + 1) * shape.row_bytes);
    uint32_t x_word[kPairs];
    uint32_t grad_word[kPairs];
    float2 along = make_float2(0.0f, 0.0f);
    float2 inner = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const bool there = 1024 * p + 2 * thread < cols;
      x_word[p] = there ? x[p * kThreads + thread] : 0u;
      grad_word[p] = there ? grad[p * kThreads + thread] : 0u;
      if (!there) continue;
      const float2 xs = pair_of(x_word[p]);
      const float2 dy = pair_of(grad_word[p]);
      const float2 normal = make_float2((xs.x - mean) * rstd, (xs.y - mean) * rstd);
      const float2 scaled = make_float2(dy.x * gain[p].x, dy.y * gain[p].y);
      inner.x += scaled.x;
      inner.y += scaled.y;
      along.x += scaled.x * normal.x;
      along.y += scaled.y * normal.y;
      weight_sum[p].x += dy.x * normal.x;
      weight_sum[p].y += dy.y * normal.y;
      bias_sum[p].x += dy.x;
      bias_sum[p].y += dy.y;
    }
    const float2 sums = block_sums(along, inner, scratch[i % 2]);
    const float slope = __fdiv_rn(sums.x, count);
    const float offset = centered ? __fdiv_rn(sums.y, count) : 0.0f;
    auto* to = reinterpret_cast<uint32_t*>(static_cast<bf16_t*>(const_cast<void*>(task.dx.data)) + row * cols);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      if (1024 * p + 2 * thread >= cols) continue;
      const float2 xs = pair_of(x_word[p]);
      const float2 dy = pair_of(grad_word[p]);
      const float2 normal = make_float2((xs.x - mean) * rstd, (xs.y - mean) * rstd);
      const float low = ((dy.x * gain[p].x - offset) - normal.x * slope) * rstd;
      const float high = ((dy.y * gain[p].y - offset) - normal.y * slope) * rstd;
      store_bulk(to + p * kThreads + thread, pack_bf16(low, high));
    }
  }

  // saved <- group g + group g + 8, then the cluster folds.
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    float2& weight = saved[p * kThreads + thread];
    weight = make_float2(weight.x + weight_sum[p].x, weight.y + weight_sum[p].y);
    if (task.bias_partials == nullptr) continue;
    float2& bias = saved[shape.sums + p * kThreads + thread];
    bias = make_float2(bias.x + bias_sum[p].x, bias.y + bias_sum[p].y);
  }
  cluster_barrier();
  const int slice = shape.sums / RowsConfig::kCluster;
  for (int q = 0; q < 2; ++q) {
    float* partials = q == 0 ? task.weight_partials : task.bias_partials;
    if (partials == nullptr) continue;
    for (int at = member * slice + thread; at < (member + 1) * slice && 2 * at < cols; at += kThreads) {
      float2 v[RowsConfig::kCluster];
#pragma unroll
      for (int b = 0; b < RowsConfig::kCluster; ++b) v[b] = load_of_member(saved + q * shape.sums + at, b);
#pragma unroll
      for (int half = RowsConfig::kCluster / 2; half > 0; half /= 2) {
#pragma unroll
        for (int b = 0; b < half; ++b) v[b] = make_float2(v[b].x + v[b + half].x, v[b].y + v[b + half].y);
      }
      partials[tile * cols + 2 * at] = v[0].x;
      partials[tile * cols + 2 * at + 1] = v[0].y;
    }
  }
  cluster_barrier();  // others may still read here
}

}  // namespace

bool launch_norm_grad_rows(const NormGradTask& task, Lane lane) {
  const bool vectors = task.x.vector && task.grad.vector && task.dx.vector && task.x.cols % 8 == 0;
  if (task.x.dtype != Float::kBF16 || !vectors || task.x.cols > RowsConfig::kMostColumns) return false;
  const int row_bytes = static_cast<int>(task.x.cols) * 2;
  const int64_t ring = larger(3, smaller(RowsConfig::kMostAhead, RowsConfig::kRingBytes / (2 * row_bytes)));
  const RowsShape shape{static_cast<int>(ring), row_bytes, RowsConfig::kPairs * RowsConfig::kThreads};
  const int sets = task.bias_partials != nullptr ? 2 : 1;
  const int bytes = shape.ring * 2 * row_bytes + sets * shape.sums * static_cast<int>(sizeof(float2));
  check_cuda(cudaFuncSetAttribute(norm_grad_rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "shared memory for rows");
  const int blocks = grid_size(ceil_div(task.rows, 128) * RowsConfig::kCluster);
  norm_grad_rows_kernel<<<blocks, RowsConfig::kThreads, bytes, stream_of(lane)>>>(task, shape);
  check_launch("norm_grad_rows_kernel");
  return true;
}

}  // namespace cuda
}  // namespace te_dist
