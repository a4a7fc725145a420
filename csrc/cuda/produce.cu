// Norms, activations, gradients and column sums of any float type, stride and alignment, written to memory.
//
// Blocks take 128 x 128 tiles, threads 8 rows of 8 columns, one row at a time. A gated gradient [M, 2 H] is
// made for columns c and H + c at once.
#include "activation.cuh"
#include "columns.cuh"
#include "produce.cuh"
#include "row_team.cuh"
#include "tile.cuh"

namespace te_dist {
namespace cuda {
namespace {

// ---------------------------------------------------------------------------------------------- statistics
struct StatsConfig {
  static constexpr int kThreads = 256;
  static constexpr int kTeams = kThreads / RowTeam::kThreads;
};

__global__ void __launch_bounds__(StatsConfig::kThreads)
    norm_stats_kernel(RowView x, int64_t rows, int64_t stride, float eps, float* mean, float* rstd) {
  __shared__ float scratch[StatsConfig::kTeams * RowTeam::kScratch];
  const int number = static_cast<int>(threadIdx.x / RowTeam::kThreads);
  RowTeam team(scratch, number);
  const RowCount count(x.cols);
  const int64_t step = static_cast<int64_t>(gridDim.x) * StatsConfig::kTeams;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * StatsConfig::kTeams + number; row < rows; row += step) {
    const RowView from = x.at_row(row, stride);
    // values(add): add(v, j, whether it is in the row) for all of the thread's.
    const auto values = [&](const auto& add) {
      for (int64_t col = 8 * RowTeam::rank(); col < x.cols; col += 1024) {
        float v[8];
        to_floats(load_eight(from, col), x.dtype, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) add(v[j], j, col + j < x.cols);
      }
    };
    RowSpread spread[1] = {};
    if (mean != nullptr) {
      const int64_t group = static_cast<int64_t>(RowTeam::rank() / 8) * GroupShare::kCols;
      float v[8] = {};
      if (group < x.cols) to_floats(load_eight(from, group), x.dtype, v);
      ShareOfGroup sums(group + 1 < x.cols ? GroupShare::first_of(v[0], v[1]) : v[0]);
      values([&](float value, int j, bool inside) {
        if (inside) sums.add(value, j, true);
      });
      GroupShare share[1] = {sums.share()};
      team.spread(share, static_cast<int>(x.cols), count, spread);
    } else {
      float squares[8] = {};
      values([&](float value, int j, bool inside) {
        if (inside) squares[j] = fused_multiply_add(value, value, squares[j]);
      });
      spread[0].squares = team.sum(squares);
    }
    const float result = reciprocal_deviation(spread[0].squares, count, eps);
    if (RowTeam::rank() != 0) continue;
    if (mean != nullptr) mean[row] = spread[0].mean;
    rstd[row] = result;
  }
}

// Fills x.mean (where there is one) and x.rstd.
void launch_norm_stats(const Source& x, Lane lane) {
  const int64_t blocks = smaller(ceil_div(x.rows, StatsConfig::kTeams), int64_t{32} * multiprocessors());
  norm_stats_kernel<<<grid_size(blocks), StatsConfig::kThreads, 0, stream_of(lane)>>>(
      row_view(x.data, x.dtype, x.rows, x.cols, x.stride), x.rows, x.stride, x.eps, x.mean, x.rstd);
  check_launch("norm_stats_kernel");
}

// ---------------------------------------------------------------------------------------------- matrices
struct ProduceTask {
  Produce kind;
  Activation activation;
  bool gated;
  bool zero_centered;
  int64_t rows;
  int64_t cols;   // H for a gated gradient
  int64_t pitch;  // columns of the made matrix
  int64_t stride;
  int64_t grad_stride;
  RowView first;
  RowView second;  // the other factor of a gated activation
  RowView grad;
  RowView weight;
  RowView bias;
  RowView second_bias;
  const float* mean;
  const float* rstd;
  RowView out;  // data null: none
  RowView second_out;
  float* partials;
};

struct ProduceColumns {
  float gain[8];
  float bias[8];
  float second_bias[8];
};

// v <- v + bias, rounded as if it had been in memory.
__device__ __forceinline__ void add_bias(const RowView& bias, const float (&biases)[8], Float dtype, float (&v)[8]) {
  if (bias.data == nullptr) return;
  add_eight(v, biases);
  to_floats(to_eight(v, dtype), dtype, v);
}

// Eight columns of a row, and those H further right of a gated gradient.
__device__ __forceinline__ void make_row(const ProduceTask& task, const ProduceColumns& columns, int64_t row,
                                         int64_t col, float (&v)[8], float (&second)[8]) {
  const Float dtype = task.first.dtype;
  to_floats(load_eight(task.first.at_row(row, task.stride), col), dtype, v);
  if (task.kind == Produce::kPlain) return;
  if (task.kind == Produce::kNorm) {
    const RowStats stats{task.mean != nullptr ? task.mean[row] : 0.0f, task.rstd[row]};
    return apply_norm(v, stats.rstd, stats.shift(task.mean != nullptr), columns.gain, columns.bias);
  }
  add_bias(task.bias, columns.bias, dtype, v);
  if (task.gated) {
    to_floats(load_eight(task.second.at_row(row, task.stride), col), dtype, second);
    add_bias(task.second_bias, columns.second_bias, dtype, second);
  }
  if (task.kind == Produce::kActivation) {
    return with_activation(task.activation,
                           [&](auto tag) { activate_eight<decltype(tag)::kind>(v, second, task.gated); });
  }
  float grad[8];
  to_floats(load_eight(task.grad.at_row(row, task.grad_stride), col), dtype, grad);
  with_activation(task.activation,
                  [&](auto tag) { differentiate_eight<decltype(tag)::kind>(v, second, grad, task.gated); });
}

// Rounds, stores where there is a place, and adds what was stored to the column sums.
__device__ __forceinline__ void finish_row(const ProduceTask& task, const RowView& out, int64_t row, int64_t col,
                                           float (&v)[8], float (&total)[8]) {
  const Eight made = to_eight(v, task.first.dtype);
  if (out.data != nullptr) store_eight(out.at_row(row, task.pitch), col, made);
  to_floats(made, task.first.dtype, v);
  add_eight(total, v);
}

__device__ __forceinline__ void store_sums(const ProduceTask& task, const TilePlace& tile, int64_t col,
                                           const float (&total)[8], GroupSums& sums) {
  __syncthreads();
  sums.put(static_cast<int>(threadIdx.x / 16), static_cast<int>(threadIdx.x % 16) * 8, total);
  __syncthreads();
  sums.store(task.partials + col, tile.row / TileConfig::kTile, tile.col, task.cols, task.pitch);
}

__global__ void __launch_bounds__(TileConfig::kThreads, 2) produce_kernel(const __grid_constant__ ProduceTask task) {
  __shared__ GroupSums sums;
  const TilePlace tile = tile_place(blockIdx.x, task.cols);
  const int64_t col = tile.col + threadIdx.x % 16 * 8;
  const int64_t first = tile.row + threadIdx.x / 16 * 8;
  const bool paired = task.kind == Produce::kActivationGrad && task.gated;
  ProduceColumns columns;
  load_gain(task.weight, task.zero_centered, col, columns.gain);
  load_vector(task.bias, col, kNoBias, columns.bias);
  load_vector(task.second_bias, col, kNoBias, columns.second_bias);
  float total[8] = {};
  float second_total[8] = {};
#pragma unroll 1
  for (int64_t row = first; row < min(first + 8, task.rows) && col < task.cols; ++row) {
    float v[8];
    float second[8];
    make_row(task, columns, row, col, v, second);
    finish_row(task, task.out, row, col, v, total);
    if (paired) finish_row(task, task.second_out, row, col, second, second_total);
  }
  if (task.partials == nullptr) return;
  store_sums(task, tile, 0, total, sums);
  if (paired) store_sums(task, tile, task.cols, second_total, sums);
}

const void* further(const void* data, int64_t elements, Float dtype) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * size_of(dtype);
}

ProduceTask task_of(const Source& x, void* out) {
  ProduceTask task{};
  task.kind = x.kind;
  task.activation = x.activation;
  task.gated = x.gated;
  task.zero_centered = x.zero_centered;
  task.rows = x.rows;
  const bool paired = x.kind == Produce::kActivationGrad && x.gated;
  task.cols = paired ? x.cols / 2 : x.cols;
  task.pitch = x.cols;
  task.stride = x.stride;
  task.grad_stride = x.grad_stride;
  const auto matrix = [&](const void* data, int64_t stride) {
    return row_view(data, x.dtype, task.rows, task.cols, stride);
  };
  task.first = matrix(x.data, x.stride);
  task.second = matrix(further(x.data, task.cols, x.dtype), x.stride);
  task.grad = matrix(x.grad, x.grad_stride);
  task.weight = row_view(x.weight.data, x.weight.dtype, task.cols);
  task.bias = row_view(x.bias.data, x.bias.dtype, task.cols);
  if (x.gated) {
    task.second_bias = row_view(further(x.bias.data, task.cols, x.bias.dtype), x.bias.dtype, task.cols);
  }
  task.mean = x.mean;
  task.rstd = x.rstd;
  task.out = matrix(out, task.pitch);
  task.second_out = matrix(further(out, task.cols, x.dtype), task.pitch);
  task.partials = x.partials;
  return task;
}

}  // namespace

void produce(const Source& x, const Output& out, Lane lane) {
  check::made(x, out);
  if (x.rows == 0 || x.cols == 0) return;
  if (check::is_fused(x) && aligned(out.data, 16)) return launch_produce_made(x, out, lane);
  if (x.make_stats) launch_norm_stats(x, lane);
  const ProduceTask task = task_of(x, out.data);
  produce_kernel<<<grid_size(tile_count(task.rows, task.cols)), TileConfig::kThreads, 0, stream_of(lane)>>>(task);
  check_launch("produce_kernel");
}

}  // namespace cuda
}  // namespace te_dist
