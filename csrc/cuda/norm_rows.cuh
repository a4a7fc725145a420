// What a norm makes of bf16 rows, whole rows in the registers of a team of 128 threads: statistics and result from
// one read. Blocks stay, for the sake of gains and biases, which they keep in shared memory as floats. A team takes
// four neighbouring rows at a time; the eight teams of a multiprocessor hide each other's latency.
#pragma once

#include "made.cuh"

namespace te_dist {
namespace cuda {

struct NormRowsConfig {
  static constexpr int kTeams = 4;  // of a block
  static constexpr int kThreads = kTeams * RowTeam::kThreads;
  static constexpr int kRows = 4;      // of a team, one after another
  static constexpr int kVectors = 8;   // of a row that is quantized, a thread
  static constexpr int kLongVectors = 16;
  static constexpr int kColumns = kVectors * 1024;
  static constexpr int kLongColumns = kLongVectors * 1024;
  template <int kHeld>
  static constexpr int kBlocksPerSm = kHeld == kVectors ? 2 : 1;
};

// A vector along K as floats, the first and the last four of each eight apart: lanes that read neighbours meet every
// bank of shared memory once.
struct SharedVector {
  float4* low;
  float4* high;

  __device__ __forceinline__ void put(int vector, const float (&v)[8]) const {
    low[vector] = make_float4(v[0], v[1], v[2], v[3]);
    high[vector] = make_float4(v[4], v[5], v[6], v[7]);
  }
  __device__ __forceinline__ void take(int vector, float (&v)[8]) const {
    const float4 a = low[vector];
    const float4 b = high[vector];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
};

// held <- the result, in bf16. Behind the row's end gains are zero, and so is the result, or NaN where a statistic is
// not finite.
template <bool kCentered, int kVectors>
__device__ __forceinline__ void make_norm_row(const SharedVector& gains, const SharedVector& biases,
                                              const RowStats& stats, TeamRow<kVectors>& held) {
  const float shift = stats.shift(kCentered);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = RowTeam::kThreads * i + RowTeam::rank();
    float v[8];
    float gain[8];
    unpack_eight<bf16_t>(held.vector[i], v);
    gains.take(at, gain);
    if (kCentered) {
      float bias[8];
      biases.take(at, bias);
      apply_norm(v, stats.rstd, shift, gain, bias);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = v[j] * stats.rstd * gain[j];
    }
    held.vector[i] = pack_eight_bf16(v);
  }
}

// consume(row, i, made row) for the team's rows, i of four, and after(first row) after the four. backwards: starts
// with the last rows, which L2 may still hold. kFull: rows have all of kVectors, which saves comparisons.
template <bool kCentered, int kVectors, bool kFull, typename Consume, typename After>
__device__ __forceinline__ void for_each_norm_row(const Made& x, bool make_stats, bool backwards, float4* memory,
                                                  const Consume& consume, const After& after) {
  __shared__ float scratch[NormRowsConfig::kTeams * RowTeam::kScratch];
  const int number = static_cast<int>(threadIdx.x / RowTeam::kThreads);
  constexpr int kAll = kVectors * RowTeam::kThreads;
  const int vectors = kFull ? kAll : static_cast<int>(x.cols / 8);
  const SharedVector gains{memory, memory + kAll};
  const SharedVector biases{memory + 2 * kAll, memory + 3 * kAll};
  for (int at = static_cast<int>(threadIdx.x); at < kAll; at += NormRowsConfig::kThreads) {
    float v[8] = {};
    if (at < vectors) load_gain<true>(x.weight, x.zero_centered, 8 * at, v);
    gains.put(at, v);
    if (!kCentered) continue;
    load_vector<true>(x.bias, 8 * at, kNoBias, v);
    biases.put(at, v);
  }
  __syncthreads();
  RowTeam team(scratch, number);
  // Rows fit 32 bits (check::fused), and registers are short.
  const int rows = static_cast<int>(x.rows);
  const int fours = (rows + NormRowsConfig::kRows - 1) / NormRowsConfig::kRows;
  const int step = static_cast<int>(gridDim.x) * NormRowsConfig::kTeams;
#pragma unroll 1
  for (int four = static_cast<int>(blockIdx.x) * NormRowsConfig::kTeams + number; four < fours; four += step) {
    const int first = (backwards ? fours - 1 - four : four) * NormRowsConfig::kRows;
#pragma unroll 1
    for (int i = 0; i < NormRowsConfig::kRows && first + i < rows; ++i) {
      const int row = first + i;
      const auto* from = reinterpret_cast<const uint4*>(x.data + row * x.stride);
      TeamRow<kVectors> held;
      held.load(from, 0, vectors);
      RowStats stats;
      if (make_stats) {
        stats = stats_of_row<kCentered, true, true>(team, held, from, vectors, x.eps);
        if (RowTeam::rank() == 0) {
          if (kCentered) x.mean[row] = stats.mean;
          x.rstd[row] = stats.rstd;
        }
      } else {
        stats = RowStats{kCentered ? x.mean[row] : 0.0f, x.rstd[row]};
      }
      make_norm_row<kCentered>(gains, biases, stats, held);
      held.forget_unpacked();
      consume(row, i, held);
    }
    after(first);
  }
}

// Starts kernel(x, arguments...), which keeps rows as kVectors vectors a thread.
template <int kVectors, typename Kernel, typename... Arguments>
void launch_norm_rows(const char* name, Kernel kernel, const Made& x, Lane lane, const Arguments&... arguments) {
  constexpr int kMostBytes = kVectors * 1024 * 2 * static_cast<int>(sizeof(float));
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes),
             "shared memory for gains");
  const int bytes = x.centered ? kMostBytes : kMostBytes / 2;
  constexpr int kBlockRows = NormRowsConfig::kTeams * NormRowsConfig::kRows;
  const int64_t most = static_cast<int64_t>(multiprocessors()) * NormRowsConfig::kBlocksPerSm<kVectors>;
  const int blocks = grid_size(smaller(ceil_div(x.rows, kBlockRows), most));
  kernel<<<blocks, NormRowsConfig::kThreads, bytes, stream_of(lane)>>>(x, arguments...);
  check_launch(name);
}

// Whether the row plane of x can be quantized by rows.
inline bool by_rows(const Made& x) {
  return x.kind == Produce::kNorm && x.partials == nullptr && x.cols <= NormRowsConfig::kColumns &&
         (x.centered || x.bias.data == nullptr);
}

// `make_stats`: x.mean and x.rstd are written, else read.
void launch_amax_norm(const Made& x, bool make_stats, float* amax, const float* noop, Lane lane);

}  // namespace cuda
}  // namespace te_dist
