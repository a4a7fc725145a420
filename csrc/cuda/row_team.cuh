// The sums of rows by a team of 128 threads, and the statistics that norms make of them.
//
// Order of the sums: te_dist/reference_producers.py.
#pragma once

#include "row.cuh"

namespace te_dist {
namespace cuda {

// ---------------------------------------------------------------------------------------------- sums of rows
__device__ __forceinline__ float fold_eight(const float (&a)[8]) {
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

// Of every kLanes lanes.
template <int kLanes = 32>
__device__ __forceinline__ float fold_lanes(float v) {
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) v += __shfl_xor_sync(kFullWarp, v, half);
  return v;
}

// Divides sums of rows. By a power of two a product gives the same quotient, for a tenth of the instructions.
class RowCount {
 public:
  __device__ __forceinline__ explicit RowCount(int64_t count)
      : count_(static_cast<float>(count)), inverse_((count & (count - 1)) == 0 ? 1.0f / count_ : 0.0f) {}
  __device__ __forceinline__ float divide(float sum) const {
    return inverse_ != 0.0f ? sum * inverse_ : __fdiv_rn(sum, count_);
  }

 private:
  float count_;
  float inverse_;
};

// Of a row, and what squares of distances from there add up to. How: _spread of te_dist/reference_producers.py.
struct RowSpread {
  float mean;
  float squares;
};

// What a thread knows of a group of columns, of which eight neighbouring ones have eight each of every 1024: sums of
// distances from the group's first value, or its second one, and of their squares.
struct GroupShare {
  static constexpr int kGroups = 16;
  static constexpr int kCols = 64;
  float first;
  float sum;
  float squares;

  static __device__ __forceinline__ float first_of(float first, float second) {
    return fabsf(second) < fabsf(first) ? second : first;
  }
  static __device__ __forceinline__ float size_of(int group, int columns) {
    constexpr int kAll = kGroups * kCols;
    const int rest = columns % kAll - group * kCols;
    return static_cast<float>(columns / kAll * kCols + max(0, min(rest, kCols)));
  }
};

// The same, for as long as values come.
class ShareOfGroup {
 public:
  __device__ __forceinline__ explicit ShareOfGroup(float first) : first_(first) {}

  // Value j of a vector of eight. Of what lies behind a row's end, and is zero, nothing is added.
  __device__ __forceinline__ void add(float value, int j, bool inside) {
    const float apart = value - (inside ? first_ : 0.0f);
    sum_[j % 4] += apart;
    squares_[j % 4] = fused_multiply_add(apart, apart, squares_[j % 4]);
  }
  __device__ __forceinline__ GroupShare share() const {
    const auto fold = [](const float(&of)[4]) { return (of[0] + of[2]) + (of[1] + of[3]); };
    return GroupShare{first_, fold(sum_), fold(squares_)};
  }

 private:
  float first_;
  float sum_[4] = {};
  float squares_[4] = {};
};

// first, sum, squares, size: of group lane % kGroups, whatever lane. In all lanes.
__device__ __forceinline__ RowSpread spread_of_groups(float first, float sum, float squares, float size,
                                                      const RowCount& count) {
  constexpr int kGroups = GroupShare::kGroups;
  const float mean = count.divide(fold_lanes<kGroups>(fused_multiply_add(size, first, sum)));
  const float off = mean - first;
  const float twice = fused_multiply_add(size, off, -2.0f * sum);
  const float all = fold_lanes<kGroups>(fused_multiply_add(off, twice, squares));
  return RowSpread{mean, all < 0.0f ? 0.0f : all};
}

// 128 neighbouring threads that hold rows, kRows at once: thread t has elements 1024 i + 8 t .. 8 t + 7 of each.
template <int kRows>
class TeamOfRows {
 public:
  static constexpr int kThreads = 128;
  static constexpr int kScratch = 2 * kRows * kThreads;  // floats of shared memory a team

  // number: of the team in its block, up to 3; scratch: the block's, kScratch floats per team.
  __device__ __forceinline__ TeamOfRows(float* scratch, int number)
      : scratch_(scratch + number * kScratch), number_(number) {}

  static __device__ __forceinline__ int rank() { return static_cast<int>(threadIdx.x % kThreads); }

  // v: what fold_eight makes of the thread's accumulators of each row; becomes the sums of all threads', in all of them
  // or in the first 32. Two buffers in turn: who is a sum ahead writes the other.
  template <bool kEverywhere = true>
  __device__ __forceinline__ void add_up(float (&v)[kRows]) {
    float* vectors = scratch_ + turn_ * kRows * kThreads;
    turn_ ^= 1;
#pragma unroll
    for (int r = 0; r < kRows; ++r) vectors[r * kThreads + rank()] = v[r];
    meet();
    if (!kEverywhere && rank() >= 32) return;
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float* s = vectors + r * kThreads;
      v[r] = fold_lanes((s[lane] + s[64 + lane]) + (s[32 + lane] + s[96 + lane]));
    }
  }
  // mine: of each row, the thread's share of its group's. columns: of a row.
  template <bool kEverywhere = true>
  __device__ __forceinline__ void spread(GroupShare (&mine)[kRows], int columns, const RowCount& count,
                                         RowSpread (&of)[kRows]) {
    constexpr int kGroups = GroupShare::kGroups;
    float* groups = scratch_ + turn_ * kRows * kThreads;
    turn_ ^= 1;
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float* to = groups + r * 3 * kGroups + rank() / 8;
      const float sum = fold_lanes<8>(mine[r].sum);
      const float squares = fold_lanes<8>(mine[r].squares);
      if (lane % 8 == 0) to[0] = mine[r].first, to[kGroups] = sum, to[2 * kGroups] = squares;
    }
    meet();
    if (!kEverywhere && rank() >= 32) return;
    const int group = lane % kGroups;
    const float size = GroupShare::size_of(group, columns);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float* from = groups + r * 3 * kGroups + group;
      of[r] = spread_of_groups(from[0], from[kGroups], from[2 * kGroups], size, count);
    }
  }
  template <bool kEverywhere = true>
  __device__ __forceinline__ float sum(const float (&accumulators)[8]) {
    static_assert(kRows == 1, "add_up is for several");
    float v[1] = {fold_eight(accumulators)};
    add_up<kEverywhere>(v);
    return v[0];
  }

 private:
  __device__ __forceinline__ void meet() const {
    switch (number_) {  // numbers that the compiler sees: it reserves no others
      case 0: asm volatile("bar.sync 1, 128;" ::: "memory"); break;
      case 1: asm volatile("bar.sync 2, 128;" ::: "memory"); break;
      case 2: asm volatile("bar.sync 3, 128;" ::: "memory"); break;
      default: asm volatile("bar.sync 4, 128;" ::: "memory");
    }
  }

  float* scratch_;
  int number_;
  int turn_ = 0;
};

using RowTeam = TeamOfRows<1>;

struct RowStats {
  float mean;
  float rstd;

  // What the normalized x * rstd lacks; -0 for RMSNorm: x + -0 is x.
  __device__ __forceinline__ float shift(bool centered) const { return centered ? -(mean * rstd) : -0.0f; }
};

__device__ __forceinline__ float reciprocal_deviation(float square_sum, const RowCount& count, float eps) {
  return __fdiv_rn(1.0f, __fsqrt_rn(count.divide(square_sum) + eps));
}

// bf16 rows of whole, aligned vectors in the registers of a team: kRows of them, of kEach vectors a thread.
template <int kVectors, int kRows = 1>
struct TeamRow {
  static constexpr int kEach = kVectors / kRows;
  static constexpr int kColumns = kEach * 1024;
  uint4 vector[kVectors];

  // The row, of those held, that vector i is of, and how far right of 8 * rank.
  static __device__ __forceinline__ int row_of(int i) { return i / kEach; }
  static __device__ __forceinline__ int offset_of(int i) { return i % kEach * 1024; }

  // Vectors from `first` on of row r; zeros behind its end. kKeep: somebody reads them again soon, out of L2.
  template <bool kKeep = false>
  __device__ __forceinline__ void load(const uint4* row, int first, int vectors, int r = 0) {
    const uint64_t keep = kKeep ? keep_in_l2() : 0u;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = first + i * RowTeam::kThreads + RowTeam::rank();
      if (kKeep) {
        vector[r * kEach + i] = load_kept(row + at, at < vectors, keep);
      } else {
        vector[r * kEach + i] = at < vectors ? __ldcg(row + at) : make_uint4(0u, 0u, 0u, 0u);
      }
    }
  }
  // Keeps the compiler from holding on to what it has unpacked: two registers an element.
  __device__ __forceinline__ void forget_unpacked() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      uint4& v = vector[i];
      asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
    }
  }
  __device__ __forceinline__ void add_squares(float (&total)[8], int r = 0) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      float v[8];
      unpack_eight<bf16_t>(vector[r * kEach + i], v);
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j] = fused_multiply_add(v[j], v[j], total[j]);
    }
  }
  // Of the thread's group, if these are a row's first vectors.
  __device__ __forceinline__ float first_of_group(int r = 0) const {
    const uint32_t two = __shfl_sync(kFullWarp, vector[r * kEach].x, static_cast<int>(threadIdx.x % 32 / 8 * 8));
    return GroupShare::first_of(Words<bf16_t>::element(two, 0), Words<bf16_t>::element(two, 1));
  }
  __device__ __forceinline__ void add_to_group(ShareOfGroup& sums, int first, int vectors, int r = 0) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool inside = first + i * RowTeam::kThreads + RowTeam::rank() < vectors;
      float v[8];
      unpack_eight<bf16_t>(vector[r * kEach + i], v);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums.add(v[j], j, inside);
    }
  }
};

// How many rows fit TeamRow<8> together.
inline int rows_at_once(int64_t cols) {
  return cols <= TeamRow<8, 4>::kColumns ? 4 : cols <= TeamRow<8, 2>::kColumns ? 2 : 1;
}

// The statistics of whole rows, in all threads of the team.
template <bool kCentered, int kVectors, int kRows>
__device__ __forceinline__ void stats_of_held(TeamOfRows<kRows>& team, TeamRow<kVectors, kRows>& held, int vectors,
                                              float eps, RowStats (&stats)[kRows]) {
  const RowCount count(8 * vectors);
  RowSpread spread[kRows];
  if constexpr (kCentered) {
    GroupShare share[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      ShareOfGroup sums(held.first_of_group(r));
      held.add_to_group(sums, 0, vectors, r);
      share[r] = sums.share();
      if (kRows > 1) held.forget_unpacked();
    }
    team.spread(share, 8 * vectors, count, spread);
  } else {
    float sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float squares[8] = {};
      held.add_squares(squares, r);
      sum[r] = fold_eight(squares);
      if (kRows > 1) held.forget_unpacked();
    }
    team.add_up(sum);
#pragma unroll
    for (int r = 0; r < kRows; ++r) spread[r] = RowSpread{0.0f, sum[r]};
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    stats[r] = RowStats{spread[r].mean, reciprocal_deviation(spread[r].squares, count, eps)};
  }
  held.forget_unpacked();
}

// The statistics of a row of which `held` has the first vectors, in the first warp of the team. kWhole: it has all.
// The row is not needed any more, but others will read it.
template <bool kCentered, bool kWhole, int kVectors>
__device__ __forceinline__ RowStats stats_of_row(RowTeam& team, TeamRow<kVectors>& held, const uint4* row, int vectors,
                                                 float eps) {
  constexpr int kStep = kVectors * RowTeam::kThreads;
  const RowCount count(vectors * 8);
  // add(first): of the vectors held.
  const auto each = [&](const auto& add) {
    add(0);
#pragma unroll 1
    for (int first = kStep; !kWhole && first < vectors; first += kStep) {
      held.template load<true>(row, first, vectors);
      add(first);
    }
  };
  RowSpread spread[1] = {};
  if constexpr (kCentered) {
    ShareOfGroup sums(held.first_of_group());
    each([&](int first) { held.add_to_group(sums, first, vectors); });
    GroupShare share[1] = {sums.share()};
    team.template spread<false>(share, vectors * 8, count, spread);
  } else {
    float squares[8] = {};
    each([&](int) { held.add_squares(squares); });
    spread[0].squares = team.sum<false>(squares);
  }
  if (RowTeam::rank() >= 32) return RowStats{0.0f, 0.0f};
  return RowStats{spread[0].mean, reciprocal_deviation(spread[0].squares, count, eps)};
}

}  // namespace cuda
}  // namespace te_dist
