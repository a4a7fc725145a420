// What a norm makes of bf16 rows, whole rows in the registers of a team of 128 threads: statistics and result from
// one read. Blocks stay, for the sake of gains and biases, which they keep in shared memory as floats. A team takes
// four neighbouring rows at a time, short ones two or four at once; the eight teams of a multiprocessor hide each
// other's latency.
#pragma once

#include <type_traits>

#include "made.cuh"
#include "row_team.cuh"

namespace te_dist {
namespace cuda {

struct AmaxOut;

struct NormRowsConfig {
  static constexpr int kTeams = 4;  // of a block
  static constexpr int kThreads = kTeams * RowTeam::kThreads;
  static constexpr int kRows = 4;      // of a team, before it goes on to others
  static constexpr int kVectors = 8;   // a thread, of the rows that are held at once
  static constexpr int kLongVectors = 16;
  static constexpr int kColumns = kVectors * 1024;
  static constexpr int kLongColumns = kLongVectors * 1024;
  template <int kOfThread>
  static constexpr int kBlocksPerSm = kOfThread == kVectors ? 2 : 1;
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
  // Half of eight: registers are short.
  __device__ __forceinline__ float4 take(int vector, int half) const { return half == 0 ? low[vector] : high[vector]; }
};

// held <- the result, in bf16. Behind a row's end gains are zero, and so is the result, or NaN where a statistic or the
// shift is not finite: who takes maxima of more than a block of 128 looks where rows end.
template <bool kCentered, int kVectors, int kHeld>
__device__ __forceinline__ void make_norm_rows(const SharedVector& gains, const SharedVector& biases,
                                               const RowStats (&stats)[kHeld], TeamRow<kVectors, kHeld>& held) {
  constexpr int kEach = kVectors / kHeld;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = RowTeam::kThreads * i + RowTeam::rank();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 gain = gains.take(at, half);
      const float4 bias = kCentered ? biases.take(at, half) : make_float4(kNoBias, kNoBias, kNoBias, kNoBias);
#pragma unroll
      for (int r = 0; r < kHeld; ++r) {
        uint4& vector = held.vector[r * kEach + i];
        const float shift = stats[r].shift(kCentered);
        const auto two = [&](uint32_t& word, float2 gains, float2 biases) {
          word = norm_of_word<kCentered>(word, stats[r].rstd, shift, gains, biases);
        };
        two(half == 0 ? vector.x : vector.z, make_float2(gain.x, gain.y), make_float2(bias.x, bias.y));
        two(half == 0 ? vector.y : vector.w, make_float2(gain.z, gain.w), make_float2(bias.z, bias.w));
      }
    }
  }
}

// consume(row, i, made) for the team's rows, kHeld at once, of which `row` is the first and the i-th of four, and
// after(first row) after the four. Rows that are not there are zeros. backwards: starts with the last rows, which L2
// may still hold. kFull: rows have all vectors, which saves comparisons.
template <bool kCentered, int kVectors, int kHeld, bool kFull, typename Consume, typename After>
__device__ __forceinline__ void for_each_norm_row(const Made& x, bool make_stats, bool backwards, float4* memory,
                                                  const Consume& consume, const After& after) {
  using Held = TeamRow<kVectors, kHeld>;
  __shared__ float scratch[NormRowsConfig::kTeams * TeamOfRows<kHeld>::kScratch];
  const int number = static_cast<int>(threadIdx.x / RowTeam::kThreads);
  constexpr int kAll = Held::kColumns / 8;
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
  TeamOfRows<kHeld> team(scratch, number);
  // Rows fit 32 bits (check::fused), and registers are short.
  const int rows = static_cast<int>(x.rows);
  const int fours = (rows + NormRowsConfig::kRows - 1) / NormRowsConfig::kRows;
  const int step = static_cast<int>(gridDim.x) * NormRowsConfig::kTeams;
#pragma unroll 1
  for (int four = static_cast<int>(blockIdx.x) * NormRowsConfig::kTeams + number; four < fours; four += step) {
    const int first = (backwards ? fours - 1 - four : four) * NormRowsConfig::kRows;
#pragma unroll 1
    for (int i = 0; i < NormRowsConfig::kRows && first + i < rows; i += kHeld) {
      const int row = first + i;
      const auto there = [&](int r) { return r == 0 || row + r < rows; };
      Held held;
#pragma unroll
      for (int r = 0; r < kHeld; ++r) {
        held.load(reinterpret_cast<const uint4*>(x.data + (row + r) * x.stride), 0, there(r) ? vectors : 0, r);
      }
      RowStats stats[kHeld];
      if (make_stats) {
        stats_of_held<kCentered>(team, held, vectors, x.eps, stats);
        if (RowTeam::rank() == 0) {
#pragma unroll
          for (int r = 0; r < kHeld; ++r) {
            if (!there(r)) break;
            if (kCentered) x.mean[row + r] = stats[r].mean;
            x.rstd[row + r] = stats[r].rstd;
          }
        }
      } else {
#pragma unroll
        for (int r = 0; r < kHeld; ++r) {
          stats[r] = RowStats{kCentered && there(r) ? x.mean[row + r] : 0.0f, there(r) ? x.rstd[row + r] : 0.0f};
        }
      }
      make_norm_rows<kCentered>(gains, biases, stats, held);
      if (kHeld > 1 && !there(kHeld - 1)) {  // a bias is what a norm makes of nothing
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (!there(Held::row_of(v))) held.vector[v] = make_uint4(0u, 0u, 0u, 0u);
        }
      }
      held.forget_unpacked();
      consume(row, i, held);
    }
    after(first);
  }
}

// Starts kernel(x, arguments...), which holds kHeld rows at once as kVectors vectors a thread.
template <int kVectors, int kHeld, typename Kernel, typename... Arguments>
int launch_norm_rows(const char* name, Kernel kernel, const Made& x, Lane lane, const Arguments&... arguments) {
  constexpr int kMostBytes = TeamRow<kVectors, kHeld>::kColumns * 2 * static_cast<int>(sizeof(float));
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes),
             "shared memory for gains");
  const int bytes = x.centered ? kMostBytes : kMostBytes / 2;
  constexpr int kBlockRows = NormRowsConfig::kTeams * NormRowsConfig::kRows;
  const int64_t most = static_cast<int64_t>(multiprocessors()) * NormRowsConfig::kBlocksPerSm<kVectors>;
  const int blocks = grid_size(smaller(ceil_div(x.rows, kBlockRows), most));
  kernel<<<blocks, NormRowsConfig::kThreads, bytes, stream_of(lane)>>>(x, arguments...);
  check_launch(name);
  return blocks;
}

// go(how many rows to hold at once, as a constant) for rows of up to NormRowsConfig::kColumns.
template <typename Go>
void with_held_rows(int64_t cols, const Go& go) {
  switch (rows_at_once(cols)) {
    case 4: return go(std::integral_constant<int, 4>{});
    case 2: return go(std::integral_constant<int, 2>{});
    default: return go(std::integral_constant<int, 1>{});
  }
}

// Whether the row plane of x can be quantized by rows.
inline bool by_rows(const Made& x) {
  return x.kind == Produce::kNorm && x.partials == nullptr && x.cols <= NormRowsConfig::kColumns &&
         (x.centered || x.bias.data == nullptr);
}

// Whether the amax of x is taken tile by tile, in place: rows that fit no registers wait for their statistics in L2. So
// do those whose gains and biases are more than a block's shared memory may hold.
inline bool takes_patches(const Made& x) {
  constexpr int kLongBytes = NormRowsConfig::kLongColumns * 2 * static_cast<int>(sizeof(float));
  const bool long_rows = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= kLongBytes + 8192;
  return x.cols > (long_rows ? NormRowsConfig::kLongColumns : NormRowsConfig::kColumns) || (!x.centered && x.biased);
}

// Both raise what is in out.amax; the first one returns the number of its blocks. `make_stats`: x.mean and x.rstd are
// written, else read; x.order says the same.
int launch_amax_norm(const Made& x, bool make_stats, const AmaxOut& out, const float* noop, Lane lane);
void launch_amax_norm_patches(const Made& x, float* amax, const float* noop, Lane lane);

}  // namespace cuda
}  // namespace te_dist
