// A norm's gradient of any float type, stride and alignment, in two passes: the sums of every row, then tiles
// of 128 x 128 that write dx and the column sums.
#include "norm_grad.cuh"

#include "activation.cuh"
#include "columns.cuh"
#include "tile.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct SumsConfig {
  static constexpr int kThreads = 256;
  static constexpr int kTeams = kThreads / RowTeam::kThreads;
};

__device__ __forceinline__ RowStats stats_of(const NormGradTask& task, int64_t row) {
  return RowStats{task.mean != nullptr ? task.mean[row] : 0.0f, task.rstd[row]};
}

// grad, the normalized x and grad * gain of eight columns.
__device__ __forceinline__ void load_inner(const NormGradTask& task, int64_t row, int64_t col, const RowStats& stats,
                                           const float (&gain)[8], float (&grad)[8], float (&normal)[8],
                                           float (&inner)[8]) {
  to_floats(load_eight(task.x.at_row(row, task.stride), col), task.x.dtype, normal);
  to_floats(load_eight(task.grad.at_row(row, task.grad_stride), col), task.x.dtype, grad);
  const float shift = stats.shift(task.mean != nullptr);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    normal[j] = fused_multiply_add(normal[j], stats.rstd, shift);
    inner[j] = grad[j] * gain[j];
  }
}

// sums [2, M]: the means of inner * normalized x and of inner, times rstd.
__global__ void __launch_bounds__(SumsConfig::kThreads)
    norm_grad_sums_kernel(const __grid_constant__ NormGradTask task, float* sums) {
  __shared__ float scratch[SumsConfig::kTeams * RowTeam::kScratch];
  const int number = static_cast<int>(threadIdx.x / RowTeam::kThreads);
  RowTeam team(scratch, number);
  const RowCount count(task.x.cols);
  const int64_t step = static_cast<int64_t>(gridDim.x) * SumsConfig::kTeams;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * SumsConfig::kTeams + number; row < task.rows; row += step) {
    const RowStats stats = stats_of(task, row);
    float along[8] = {};
    float total[8] = {};
    for (int64_t col = 8 * RowTeam::rank(); col < task.x.cols; col += 1024) {
      float gain[8];
      float grad[8];
      float normal[8];
      float inner[8];
      load_gain(task.weight, task.zero_centered, col, gain);
      load_inner(task, row, col, stats, gain, grad, normal, inner);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (col + j >= task.x.cols) continue;
        along[j] = fused_multiply_add(inner[j], normal[j], along[j]);
        total[j] += inner[j];
      }
    }
    const float along_sum = team.sum(along);
    const float total_sum = team.sum(total);
    if (RowTeam::rank() != 0) continue;
    sums[row] = count.divide(along_sum) * stats.rstd;
    sums[task.rows + row] = task.mean != nullptr ? count.divide(total_sum) * stats.rstd : -0.0f;
  }
}

__device__ __forceinline__ void store_sums(const NormGradTask& task, float* partials, const TilePlace& tile,
                                           const float (&total)[8], GroupSums& sums) {
  if (partials == nullptr) return;
  __syncthreads();
  sums.put(static_cast<int>(threadIdx.x / 16), static_cast<int>(threadIdx.x % 16) * 8, total);
  __syncthreads();
  sums.store(partials, tile.row / TileConfig::kTile, tile.col, task.x.cols, task.x.cols);
}

__global__ void __launch_bounds__(TileConfig::kThreads)
    norm_grad_tile_kernel(const __grid_constant__ NormGradTask task, const float* row_sums) {
  __shared__ GroupSums sums;
  const TilePlace tile = tile_place(blockIdx.x, task.x.cols);
  const int64_t col = tile.col + threadIdx.x % 16 * 8;
  const int64_t first = tile.row + threadIdx.x / 16 * 8;
  float gain[8];
  load_gain(task.weight, task.zero_centered, col, gain);
  float weight_sum[8] = {};
  float bias_sum[8] = {};
#pragma unroll 1
  for (int64_t row = first; row < min(first + 8, task.rows) && col < task.x.cols; ++row) {
    const RowStats stats = stats_of(task, row);
    const float along = row_sums[row];
    const float offset = row_sums[task.rows + row];
    float grad[8];
    float normal[8];
    float inner[8];
    load_inner(task, row, col, stats, gain, grad, normal, inner);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      inner[j] = fused_multiply_add(inner[j], stats.rstd, -fused_multiply_add(normal[j], along, offset));
      weight_sum[j] = fused_multiply_add(grad[j], normal[j], weight_sum[j]);
      bias_sum[j] += grad[j];
    }
    store_eight(task.dx.at_row(row, task.x.cols), col, to_eight(inner, task.x.dtype));
  }
  store_sums(task, task.weight_partials, tile, weight_sum, sums);
  store_sums(task, task.bias_partials, tile, bias_sum, sums);
}

}  // namespace

void norm_backward(const NormGrad& from, const Output& dx, float* weight_partials, float* bias_partials,
                   float* workspace, Lane lane) {
  check::norm_made(from, dx, weight_partials, bias_partials);
  const Input& x = from.x;
  if (x.rows == 0 || x.cols == 0) return;
  check::required("the workspace", workspace, alignof(float));
  const NormGradTask task{row_view(x.data, x.dtype, x.rows, x.cols, x.stride),
                          row_view(from.grad, x.dtype, x.rows, x.cols, from.grad_stride),
                          row_view(dx.data, x.dtype, x.rows, x.cols, x.cols),
                          row_view(from.weight.data, from.weight.dtype, x.cols),
                          x.rows,
                          x.stride,
                          from.grad_stride,
                          from.zero_centered,
                          from.mean,
                          from.rstd,
                          weight_partials,
                          bias_partials};
  if (launch_norm_grad_rows(task, lane)) return;
  const int64_t blocks = smaller(ceil_div(x.rows, SumsConfig::kTeams), int64_t{32} * multiprocessors());
  norm_grad_sums_kernel<<<grid_size(blocks), SumsConfig::kThreads, 0, stream_of(lane)>>>(task, workspace);
  check_launch("norm_grad_sums_kernel");
  norm_grad_tile_kernel<<<grid_size(tile_count(x.rows, x.cols)), TileConfig::kThreads, 0, stream_of(lane)>>>(
      task, workspace);
  check_launch("norm_grad_tile_kernel");
}

}  // namespace cuda
}  // namespace te_dist
