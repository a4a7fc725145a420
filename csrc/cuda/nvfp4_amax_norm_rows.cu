// NVFP4's two global amaxes of what an RMSNorm makes of long rows, in whole tiles: 2 bytes an element, read once.
//
// A cluster of four blocks takes 16 rows at a time, each block a quarter of their columns: those of 32 of the 128
// threads by whose sums statistics are defined (TeamOfRows). A warp has a row. What the rows' squares add up to goes
// through the blocks' shared memory, that of the next 16 rows while these are made, so that nobody waits for it. What
// is made takes the place of its operand in shared memory, where a thread finds the 16 rows of four columns. Rows on
// their way wait in a ring.
#include "clusters.cuh"
#include "copy.cuh"
#include "nvfp4_amax.cuh"
#include "nvfp4_unwritten.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct NvNormRows {
  static constexpr int kThreads = 512;
  static constexpr int kCluster = 4;
  static constexpr int kVectors = 8;  // of a row, a lane
  static constexpr int kStages = 3;
  static constexpr int kStage = kVectors * kThreads;       // vectors
  static constexpr int kGains = 2 * kVectors * 32;         // vectors of four floats
  static constexpr int kMostColumns = kVectors * 1024;
  static constexpr int kBytes = (kStages * kStage + kGains) * 16;
};
static_assert(NvNormRows::kThreads / 32 == kBlock, "a warp for each row");

// Sums of squares, of two times 16 rows in turn: of each row as many as it has lanes in the cluster.
struct RowParts {
  float part[2][kBlock][NvNormRows::kCluster][32];
};

__global__ void TED_IN_CLUSTERS_OF(NvNormRows::kCluster) __launch_bounds__(NvNormRows::kThreads, 1)
    nvfp4_amax_norm_rows_kernel(const __grid_constant__ Made x, AmaxOut amax_row, float* amax_col, const float* noop) {
  using Config = NvNormRows;
  constexpr int kVectors = Config::kVectors;
  extern __shared__ uint4 memory[];
  __shared__ RowParts parts;
  __shared__ uint32_t scratch[Config::kThreads / 32];
  let_next_kernel_start();
  if (is_noop(noop)) return;
  const int member = cluster_member();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int cols = static_cast<int>(x.cols);
  const int first_col = 8 * (32 * member + lane);  // of vector 0; vector k lies 1024 k further right
  const auto there = [&](int k) { return 1024 * k + first_col < cols; };
  const int groups = static_cast<int>(x.rows) / kBlock;
  const int step = static_cast<int>(gridDim.x) / Config::kCluster;
  const int first_group = static_cast<int>(blockIdx.x) / Config::kCluster;
  auto* const gains = reinterpret_cast<float4*>(memory + Config::kStages * Config::kStage);  // halves of eights apart
  uint4* const mine = memory + threadIdx.x;
  const auto vector_at = [&](int stage, int k) -> uint4& {
    return mine[stage * Config::kStage + k * Config::kThreads];
  };

  const auto row_of = [&](int group) { return group * kBlock + warp; };
  const auto fetch = [&](int group, int stage) {
    if (group < groups) {
      const bf16_t* from = x.data + row_of(group) * x.stride + first_col;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (there(k)) copy_async(&vector_at(stage, k), from + 1024 * k);
      }
    }
    commit_copies();
  };
  // The thread's share of a row's squares.
  const auto squares_of = [&](int stage) {
    float total[8] = {};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!there(k)) continue;
      float v[8];
      unpack_eight<bf16_t>(vector_at(stage, k), v);
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j] = fused_multiply_add(v[j], v[j], total[j]);
    }
    return fold_eight(total);
  };
  const auto send = [&](int turn, float part) {
#pragma unroll
    for (int to = 0; to < Config::kCluster; ++to) store_to_member(&parts.part[turn][warp][member][lane], to, part);
    cluster_arrive();
  };

#pragma unroll
  for (int s = 0; s < Config::kStages; ++s) fetch(first_group + s * step, s);
  if (warp < kVectors) {
    float v[8] = {};
    if (there(warp)) load_gain<true>(x.weight, x.zero_centered, 1024 * warp + first_col, v);
    gains[threadIdx.x] = make_float4(v[0], v[1], v[2], v[3]);
    gains[kVectors * 32 + threadIdx.x] = make_float4(v[4], v[5], v[6], v[7]);
  }
  wait_for_kernel_before();  // which zeroes both amaxes
  ColumnAmax columns(amax_col, false);
  const RowCount count(x.cols);
  uint32_t row_word = 0u;
  cluster_arrive();  // all blocks run
  cluster_wait();
  if (first_group < groups) {
    wait_for_all_but<Config::kStages - 1>();
    send(0, squares_of(0));
  }
  int stage = 0;
  int turn = 0;
#pragma unroll 1
  for (int group = first_group; group < groups; group += step) {
    const int next_stage = stage + 1 == Config::kStages ? 0 : stage + 1;
    const bool more = group + step < groups;
    wait_for_all_but<1>();
    const float next_part = more ? squares_of(next_stage) : 0.0f;
    cluster_wait();
    const float(&part)[Config::kCluster][32] = parts.part[turn][warp];
    const float sum = fold_lanes((part[0][lane] + part[2][lane]) + (part[1][lane] + part[3][lane]));
    turn ^= 1;
    if (more) send(turn, next_part);
    const float rstd = reciprocal_deviation(sum, count, x.eps);
    if (member == 0 && lane == 0) x.rstd[row_of(group)] = rstd;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      uint4& v = vector_at(stage, k);
      const float4 low = gains[k * 32 + lane];
      const float4 high = gains[(kVectors + k) * 32 + lane];
      const auto two = [&](uint32_t word, float first, float second) {
        return norm_of_word<false>(word, rstd, 0.0f, make_float2(first, second), make_float2(0.0f, 0.0f));
      };
      if (!there(k)) continue;
      const uint4 made = make_uint4(two(v.x, low.x, low.y), two(v.y, low.z, low.w), two(v.z, high.x, high.y),
                                    two(v.w, high.z, high.w));
      const uint32_t words[4] = {made.x, made.y, made.z, made.w};
      row_word = max_of_words<bf16_t>(words, row_word);
      v = made;
    }
    __syncthreads();
    // Four columns of the 16 rows.
    const int k = static_cast<int>(threadIdx.x) / 64;
    const int owner = static_cast<int>(threadIdx.x) % 64 / 2;
    if (1024 * k < cols) {  // whole warps: rows are whole tiles wide
      const uint4* eights = memory + stage * Config::kStage + k * Config::kThreads + owner;
      const auto* column = reinterpret_cast<const uint2*>(eights) + threadIdx.x % 2u;
      const bool inside = 1024 * k + 8 * (32 * member + owner) < cols;
      NvPatch<bf16_t, 2> patch;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const uint2 two = inside ? column[i * 32 * 2] : make_uint2(0u, 0u);
        patch.word[i][0] = two.x;
        patch.word[i][1] = two.y;
      }
      columns.ask();
      const auto sums = [&](int w) {
        return sum_of_magnitudes<kBlock>([&](int i) { return patch.word[i][w]; });
      };
      if (columns.may_rise(Words<bf16_t>::max(sums(0), sums(1)))) columns.raise(amax_of_columns(patch));
    }
    __syncthreads();  // until all have read what was made
    fetch(group + Config::kStages * step, stage);
    stage = next_stage;
  }
  give_row_amax<bf16_t, Config::kThreads>(row_word, amax_row, scratch);
}

}  // namespace

bool launch_amax_nvfp4_norm_rows(const Made& x, float* amax_row, float* amax_col, const float* noop, Lane lane) {
  constexpr int kBytesOfBlock = NvNormRows::kBytes + static_cast<int>(sizeof(RowParts)) + 1024;
  if (device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() < kBytesOfBlock) return false;
  if (!runs_hopper_code() || is_shifted(x) || !x.order.ordered || x.cols > NvNormRows::kMostColumns ||
      x.cols <= NvNormRows::kMostColumns / 2) {
    return false;
  }
  const auto kernel = nvfp4_amax_norm_rows_kernel;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, NvNormRows::kBytes),
             "shared memory for rows");
  constexpr int kCluster = NvNormRows::kCluster;
  // GPUs of one machine are alike.
  static const int64_t resident = resident_clusters(kernel, kCluster, NvNormRows::kThreads, NvNormRows::kBytes);
  const int64_t most = smaller(resident, larger(1, multiprocessors() / kCluster));
  const int64_t groups = x.rows / kBlock;
  if (groups < most) return false;
  launch_amax_reset(amax_row, amax_col, noop, lane);
  const int blocks = grid_size(most * kCluster);
  launch_close("nvfp4_amax_norm_rows_kernel", kernel, blocks, NvNormRows::kThreads, NvNormRows::kBytes, lane, x,
               AmaxOut{amax_row, nullptr}, amax_col, noop);
  return true;
}

}  // namespace cuda
}  // namespace te_dist
