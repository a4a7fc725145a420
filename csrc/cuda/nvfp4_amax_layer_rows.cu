// NVFP4's two global amaxes of what a LayerNorm makes of long rows (nvfp4_amax_rows.cuh). By tiles
// (nvfp4_amax_norm.cu), rows pass L2 twice, which takes as long as two copies of half the matrix would.
#include "nvfp4_amax_rows.cuh"
#include "nvfp4_norm_nearly.cuh"

namespace te_dist {
namespace cuda {
namespace {

// ---------------------------------------------------------------------------------------------- statistics
// What blocks have sent: of each row's 16 groups of columns (GroupShare), two from every one. Where they lie keeps
// lanes that have neighbouring rows off each other's banks.
struct LayerParts {
  static constexpr int kBytes = kBlock * GroupShare::kGroups * 3 * 4;  // a float of each four is not sent

  float4 part[kBlock][GroupShare::kGroups];

  static __device__ __forceinline__ int place(int row, int group) { return group ^ (row % 4 * 2); }
};

struct LayerStats {
  float rstd[kBlock];
  float shift[kBlock];
  alignas(16) uint32_t both[kBlock];  // in bf16, rstd below shift
  float most_shift;
};

// TeamOfRows::spread, of which two lanes have a row: one its even groups, the other its odd ones.
class LayerMaker {
 public:
  __device__ __forceinline__ explicit LayerMaker(const Made& x) : x_(x), count_(x.cols) {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) size_[j] = GroupShare::size_of(group(j), static_cast<int>(x.cols));
  }

  __device__ __forceinline__ void make(const LayerParts& parts, LayerStats& stats, int first_row) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = lane / 2;
    float4 of[kOfLane];
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) of[j] = parts.part[row][LayerParts::place(row, group(j))];
    const auto fold = [&](const auto& at) {
      float v[kOfLane];
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) v[j] = at(j);
      const float folded = fold_eight(v);
      return folded + __shfl_xor_sync(kFullWarp, folded, 1);
    };
    const float mean = count_.divide(fold([&](int j) { return fused_multiply_add(size_[j], of[j].x, of[j].y); }));
    const float squares = fold([&](int j) {
      const float off = mean - of[j].x;
      return fused_multiply_add(off, fused_multiply_add(size_[j], off, -2.0f * of[j].y), of[j].z);
    });
    const float rstd = reciprocal_deviation(squares < 0.0f ? 0.0f : squares, count_, x_.eps);
    const float shift = RowStats{mean, rstd}.shift(true);
    const uint32_t most = __reduce_max_sync(kFullWarp, bits_of(shift) & kAbsMask);
    if (lane == 0) stats.most_shift = float_of(most);
    if (lane % 2 != 0) return;
    stats.rstd[row] = rstd;
    stats.shift[row] = shift;
    stats.both[row] = pack_bf16(rstd, shift);
    if (first_row < 0) return;
    x_.mean[first_row + row] = mean;
    x_.rstd[first_row + row] = rstd;
  }

 private:
  static constexpr int kOfLane = GroupShare::kGroups / 2;

  static __device__ __forceinline__ int group(int j) { return 2 * j + static_cast<int>(threadIdx.x % 2); }

  const Made& x_;
  RowCount count_;
  float size_[kOfLane];
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
  // To all blocks, by each neighbour to one.
  __device__ __forceinline__ void send(const GroupShare& share, LayerParts& parts, Arrival& arrival) const {
    static_assert(NvNormRows::kCluster == 8, "as many as neighbours");
    const int group = cluster_member() + lane() / 8 * NvNormRows::kCluster;
    float4& to = parts.part[row()][LayerParts::place(row(), group)];
    send_to_member(&to.x, lane() % 8, share.first, &arrival);
    send_to_member(&to.y, lane() % 8, share.sum, &arrival);
    send_to_member(&to.z, lane() % 8, share.squares, &arrival);
  }

 private:
  int pieces_;
};

// ---------------------------------------------------------------------------------------------- columns
class LayerColumns : public RisingColumns<true> {
  static constexpr unsigned kOften = 4u;

 public:
  __device__ __forceinline__ LayerColumns(const Made& x, float* amax_row, float* amax_col, uint32_t (&known)[2])
      : RisingColumns(x, amax_row, amax_col, known) {
    if (inside(col_)) nearly_ = NormNearly<2>(x, col_);
    most_gain_ = nearly_.most_gain();
    most_bias_ = nearly_.most_bias();
  }

  __device__ __forceinline__ void take(const uint4* stage, const LayerStats& stats) {
    const uint2* words = words_of(stage);
    uint32_t largest = 0u;
    NeighbourSums sums[2];
#pragma unroll
    for (int first = 0; first < kBlock; first += 4) {
      const uint4 both = *reinterpret_cast<const uint4*>(&stats.both[first]);
      const uint32_t of_row[4] = {both.x, both.y, both.z, both.w};
      uint32_t n[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 two = words[(first + i) * kWordsOfRow + threadIdx.x % 32];
        n[i][0] = two.x, n[i][1] = two.y;
        nearly_.make(of_row[i], n[i]);
      }
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        largest = larger_pair(largest, larger_pair(n[0][w], n[1][w], n[2][w], n[3][w]));
        sums[w].add([&](int i) { return n[i][w]; }, first);
      }
    }
    const uint32_t most = W::max(sums[0].largest(), sums[1].largest());
    const float rest = NearlyBounds::rest(stats.most_shift, most_gain_, most_bias_);
    // Ever more rarely, as what is known changes less and less, and this takes a tenth of the time.
    if (rounds_ < kOften || rounds_ % kOften == 0u) hear();
    ++rounds_;
    const bool rises =
        (with_rows_ && of_rows_.may_be_topped_by(magnitudes(largest), NearlyBounds::kOfRows, rest)) ||
        of_columns_.may_be_topped_by(most, NearlyBounds::kOfColumns, 16.0f * rest);
    const uint32_t rising = __ballot_sync(kFullWarp, rises);
    if (rising != 0u) raise(rising, words, stats.rstd, stats.shift);
  }

 private:
  NormNearly<2> nearly_;
  float most_gain_;
  float most_bias_;
  unsigned rounds_ = 0u;
};

struct LayerRows {
  using Parts = LayerParts;
  using Stats = LayerStats;
  using Maker = LayerMaker;
  using Share = LayerShare;
  using Columns = LayerColumns;
};

}  // namespace

bool launch_amax_nvfp4_layer_rows(const Made& x, float* amax_row, float* amax_col, const float* noop, Lane lane) {
  return x.centered && launch_amax_rows<LayerRows>(x, amax_row, amax_col, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
