// NVFP4's two global amaxes of what a LayerNorm makes of long rows (nvfp4_amax_rows.cuh). By tiles
// (nvfp4_amax_norm.cu), rows pass L2 twice, which takes as long as two copies of half the matrix would.
#include "nvfp4_amax_rows.cuh"
#include "nvfp4_norm_nearly.cuh"

namespace te_dist {
namespace cuda {
namespace {

// ---------------------------------------------------------------------------------------------- statistics
// What blocks have sent: of each row's 16 groups of columns (GroupShare), two from every one.
struct LayerParts {
  float4 part[PlaceInRow::kRowsOfMember][GroupShare::kGroups];  // a float of each four is nothing
  static constexpr int kBytes = PlaceInRow::kRowsOfMember * GroupShare::kGroups * sizeof(float4);
};

struct LayerStats {
  float rstd[kBlock];
  float shift[kBlock];
  alignas(16) uint32_t both[kBlock];  // in bf16, rstd below shift
  static constexpr int kBytes = kBlock * 3 * sizeof(float);
};

// As TeamOfRows::spread, of which 16 lanes have a row.
class LayerMaker : PlaceOfMaker {
  static_assert(kLanes == GroupShare::kGroups, "a lane for each group");

 public:
  __device__ __forceinline__ explicit LayerMaker(const Made& x)
      : x_(x), count_(x.cols), size_(GroupShare::size_of(lane(), static_cast<int>(x.cols))) {}

  static __device__ __forceinline__ float4 read(const LayerParts& parts) { return parts.part[row()][lane()]; }

  __device__ __forceinline__ void make(const float4& part, int first_row, LayerStats& stats, Arrival& arrival) const {
    const RowSpread spread = spread_of_groups(part.x, part.y, part.z, size_, count_);
    const float rstd = reciprocal_deviation(spread.squares, count_, x_.eps);
    const float shift = RowStats{spread.mean, rstd}.shift(true);
    if (sends()) {
      send(stats.rstd, rstd, arrival);
      send(stats.shift, shift, arrival);
      send(stats.both, float_of(pack_bf16(rstd, shift)), arrival);
    } else if (writes()) {
      x_.mean[first_row + row()] = spread.mean;
      x_.rstd[first_row + row()] = rstd;
    }
  }

 private:
  const Made& x_;
  RowCount count_;
  float size_;
};

// Of a thread in its group: eight neighbours have one.
class LayerShare : PlaceInRow {
 public:
  __device__ __forceinline__ explicit LayerShare(const Made& x)
      : pieces_(static_cast<int>(x.cols) / NvNormRows::kStep) {}

  // With those of the neighbours added up.
  __device__ __forceinline__ GroupShare of(const uint4* stage) const {
    const uint4* mine = vectors(stage);
    const uint32_t two = __shfl_sync(kFullWarp, mine[0].x, static_cast<int>(threadIdx.x % 32 / 8 * 8));
    ShareOfGroup sums(GroupShare::first_of(Words<bf16_t>::element(two, 0), Words<bf16_t>::element(two, 1)));
#pragma unroll
    for (int k = 0; k < NvNormRows::kVectors; ++k) {
      const bool inside = 2 * k + lane() / 8 < pieces_;  // behind a row's end lie zeros
      float v[8];
      unpack_eight<bf16_t>(mine[k * NvNormRows::kLanes], v);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums.add(v[j], j, inside);
    }
    GroupShare share = sums.share();
    share.sum = fold_lanes<8>(share.sum);
    share.squares = fold_lanes<8>(share.squares);
    return share;
  }
  // By the first neighbour.
  __device__ __forceinline__ void send(const GroupShare& share, LayerParts& parts, Arrival& arrival) const {
    if (lane() % 8 != 0) return;
    const int group = cluster_member() + lane() / 8 * NvNormRows::kCluster;
    send_to_member(&parts.part[row() % kRowsOfMember][group], maker(),
                   make_float4(share.first, share.sum, share.squares, 0.0f), &arrival);
  }

 private:
  int pieces_;
};

// ---------------------------------------------------------------------------------------------- columns
class LayerColumns : public RisingColumns<true> {
 public:
  __device__ __forceinline__ LayerColumns(const Made& x, float* amax_row, float* amax_col, uint32_t (&known)[2])
      : RisingColumns(x, amax_row, amax_col, known) {
    if (inside(col_)) nearly_ = NormNearly<2>(x, col_);
    bounds_ = NearlyBounds(nearly_.most_gain(), nearly_.most_bias());
  }

  __device__ __forceinline__ void take(const uint4* stage, const LayerStats& stats) {
    const uint2* words = words_of(stage);
    uint32_t largest = 0u;
    NeighbourSums sums[2];
#pragma unroll
    for (int first = 0; first < kBlock; first += 8) {
      uint32_t n[8][2];
#pragma unroll
      for (int four = 0; four < 8; four += 4) {
        const uint4 both = *reinterpret_cast<const uint4*>(&stats.both[first + four]);
        const uint32_t of_row[4] = {both.x, both.y, both.z, both.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint2 two = words[(first + four + i) * kWordsOfRow + threadIdx.x % 32];
          n[four + i][0] = two.x, n[four + i][1] = two.y;
          nearly_.make(of_row[i], n[four + i]);
        }
      }
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        largest = larger_pair(largest, larger_pair(larger_pair(n[0][w], n[1][w], n[2][w], n[3][w]),
                                                   larger_pair(n[4][w], n[5][w], n[6][w], n[7][w])));
        sums[w].add([&](int i) { return n[i][w]; });
      }
    }
    const uint32_t most = W::max(sums[0].largest(), sums[1].largest());
    if (hear()) know();
    const uint32_t shift = bits_of(stats.shift[threadIdx.x % kBlock]) & kAbsMask;
    const float rest = bounds_.rest(float_of(__reduce_max_sync(kFullWarp, shift)));
    const bool rises = KnownAmax::reaches(magnitudes(largest), row_limit_ - rest) ||
                       KnownAmax::reaches(most, column_limit_ - 16.0f * rest);
    const uint32_t rising = __ballot_sync(kFullWarp, rises);
    if (rising == 0u) return;
    raise(rising, words, stats.rstd, stats.shift);
    know();
  }

 private:
  __device__ __forceinline__ void know() {
    if (with_rows_) row_limit_ = of_rows_.limit(NearlyBounds::kOfRows);
    column_limit_ = of_columns_.limit(NearlyBounds::kOfColumns);
  }

  NormNearly<2> nearly_;
  NearlyBounds bounds_;
  float row_limit_ = float_of(kInfBits);
  float column_limit_ = 0.0f;
};

struct LayerRows {
  using Parts = LayerParts;
  using Stats = LayerStats;
  using Maker = LayerMaker;
  using Share = LayerShare;
  using Columns = LayerColumns;
};

}  // namespace

bool launch_amax_nvfp4_layer_rows(const Made& x, float* amax_row, float* amax_col, const ToBlank& blank,
                                  const float* noop, Lane lane) {
  return x.centered && launch_amax_rows<LayerRows>(x, amax_row, amax_col, blank, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
