// NVFP4's two global amaxes of what an RMSNorm makes of long rows (nvfp4_amax_rows.cuh).
#include "nvfp4_amax_rows.cuh"

namespace te_dist {
namespace cuda {
namespace {

// ---------------------------------------------------------------------------------------------- bounds
// What is made is a product of three magnitudes, of which statistics and gains are rounded up.
struct NormBounds {
  // Roundings to bf16 by which a bound may be too small: of two products, and of what is made.
  static constexpr int kOfValues = 3;
  static constexpr int kOfSums = kOfValues + 5;  // four sums of four rows each, and their sum
  static constexpr float kShare = 1.0f - kOfValues / 256.0f;
  // A product that is too small for bf16 is no bound. With gains up to kMostGain, and an amax from kLeastAmax on, such
  // do not matter.
  static constexpr float kMostGain = 0x1p20f;
  static constexpr float kLeastAmax = 0x1p-100f;
};

// Of two bf16 values each. With -0 added: GPUs before Hopper, for which this is compiled, have no other product.
__device__ __forceinline__ uint32_t times_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

// The first bf16 number from each magnitude on; NaN past `most`.
__device__ __forceinline__ uint32_t bounds_of(float low, float high, float most) {
  const auto bound = [&](float v) {
    const uint32_t bits = bits_of(v) & kAbsMask;
    return bits <= bits_of(most) ? (bits + 0xFFFFu) >> 16 : 0x7FC0u;
  };
  return __byte_perm(bound(low), bound(high), 0x5410);
}

// ---------------------------------------------------------------------------------------------- statistics
// What blocks have sent: eight sums of each row from every one.
struct RowParts {
  float4 part[PlaceInRow::kRowsOfMember][NvNormRows::kCluster * 2];
  static constexpr int kBytes = PlaceInRow::kRowsOfMember * NvNormRows::kCluster * 2 * sizeof(float4);
};

struct RmsStats {
  float rstd[kBlock];
  alignas(16) uint32_t bounds[kBlock];
  static constexpr int kBytes = kBlock * 2 * sizeof(float);
};

class RmsMaker : PlaceOfMaker {
  static_assert(kLanes == NvNormRows::kCluster * 2, "a lane for each four sums");

 public:
  __device__ __forceinline__ explicit RmsMaker(const Made& x) : x_(x), count_(x.cols) {}

  static __device__ __forceinline__ float4 read(const RowParts& parts) { return parts.part[row()][lane()]; }

  __device__ __forceinline__ void make(float4 sums, int first_row, RmsStats& stats, Arrival& arrival) const {
    // As TeamOfRows adds up: those 32, 16, 8, 4, 2 and 1 apart.
    sums.x = fold_lanes<kLanes>(sums.x), sums.y = fold_lanes<kLanes>(sums.y);
    sums.z = fold_lanes<kLanes>(sums.z), sums.w = fold_lanes<kLanes>(sums.w);
    const float rstd = reciprocal_deviation((sums.x + sums.z) + (sums.y + sums.w), count_, x_.eps);
    if (sends()) {
      send(stats.rstd, rstd, arrival);
      send(stats.bounds, float_of(bounds_of(rstd, rstd, kFloatMax)), arrival);
    } else if (writes()) {
      x_.rstd[first_row + row()] = rstd;
    }
  }

 private:
  const Made& x_;
  RowCount count_;
};

// The share of a thread in what the squares of its row add up to. Behind a row's end lie zeros.
struct SquareShare : PlaceInRow {
  __device__ __forceinline__ explicit SquareShare(const Made&) {}

  static __device__ __forceinline__ float of(const uint4* stage) {
    const uint4* mine = vectors(stage);
    float total[8] = {};
#pragma unroll
    for (int k = 0; k < NvNormRows::kVectors; ++k) {
      float v[8];
      unpack_eight<bf16_t>(mine[k * NvNormRows::kLanes], v);
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j] = fused_multiply_add(v[j], v[j], total[j]);
    }
    return fold_eight(total);
  }
  // With those of threads 64 apart added up, four by one lane.
  static __device__ __forceinline__ void send(float share, RowParts& parts, Arrival& arrival) {
    share += __shfl_xor_sync(kFullWarp, share, 8);
    const int half = lane() / 8;
    const auto of = [&](int i) { return __shfl_sync(kFullWarp, share, half * 4 + i, NvNormRows::kLanes); };
    const float4 sums = make_float4(of(0), of(1), of(2), of(3));
    if (lane() % 8 != 0) return;
    send_to_member(&parts.part[row() % kRowsOfMember][cluster_member() * 2 + half], maker(), sums, &arrival);
  }
};

// ---------------------------------------------------------------------------------------------- columns
class RmsColumns : public RisingColumns<false> {
 public:
  __device__ __forceinline__ RmsColumns(const Made& x, float* amax_row, float* amax_col, uint32_t (&known)[2])
      : RisingColumns(x, amax_row, amax_col, known) {
    if (!inside(col_)) return;
    const float4 gain = load_four_gains(x, col_);
    gain_bounds_[0] = bounds_of(gain.x, gain.y, NormBounds::kMostGain);
    gain_bounds_[1] = bounds_of(gain.z, gain.w, NormBounds::kMostGain);
  }

  __device__ __forceinline__ void take(const uint4* stage, const RmsStats& stats) {
    const uint2* words = words_of(stage);
    uint32_t sums[4][2];
    uint32_t largest[2] = {0u, 0u};
#pragma unroll
    for (int four = 0; four < kBlock; four += 4) {
      const uint4 of_four = *reinterpret_cast<const uint4*>(&stats.bounds[four]);
      const uint32_t rstd[4] = {of_four.x, of_four.y, of_four.z, of_four.w};
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        uint32_t bound[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint2 two = words[(four + i + r) * kWordsOfRow + threadIdx.x % 32];
          bound[r][0] = times_bf16(W::magnitude(two.x), rstd[i + r]);
          bound[r][1] = times_bf16(W::magnitude(two.y), rstd[i + r]);
#pragma unroll
          for (int w = 0; w < 2; ++w) sums[i + r][w] = four == 0 ? bound[r][w] : add_bf16(sums[i + r][w], bound[r][w]);
        }
#pragma unroll
        for (int w = 0; w < 2; ++w) largest[w] = W::max(largest[w], bound[0][w], bound[1][w]);
      }
    }
    uint32_t of_sums = 0u;
    uint32_t of_values = 0u;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const uint32_t sum = add_bf16(add_bf16(sums[0][w], sums[1][w]), add_bf16(sums[2][w], sums[3][w]));
      of_sums = W::max(of_sums, times_bf16(sum, gain_bounds_[w]));
      of_values = W::max(of_values, times_bf16(largest[w], gain_bounds_[w]));
    }
    hear();
    const uint32_t rising = __ballot_sync(kFullWarp, may_rise(of_sums, of_values));
    if (rising != 0u) raise(rising, words, stats.rstd, nullptr);
  }

 private:
  __device__ __forceinline__ bool may_rise(uint32_t of_sums, uint32_t of_values) const {
    using Bounds = NormBounds;
    if (of_columns_.known() < Bounds::kLeastAmax || of_columns_.may_rise_here<Bounds::kOfSums>(of_sums)) return true;
    return with_rows_ &&
           (of_rows_.known() < Bounds::kLeastAmax || of_rows_.is_topped_by(of_values, Bounds::kShare));
  }

  uint32_t gain_bounds_[2] = {0u, 0u};
};

struct RmsRows {
  using Parts = RowParts;
  using Stats = RmsStats;
  using Maker = RmsMaker;
  using Share = SquareShare;
  using Columns = RmsColumns;
};

}  // namespace

bool launch_amax_nvfp4_norm_rows(const Made& x, float* amax_row, float* amax_col, const ToBlank& blank,
                                 const float* noop, Lane lane) {
  return !is_shifted(x) && launch_amax_rows<RmsRows>(x, amax_row, amax_col, blank, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
