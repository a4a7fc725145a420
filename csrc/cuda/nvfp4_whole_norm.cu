// NVFP4 of what a norm makes of whole tiles. A thread makes its 16 rows, four at a time, where boxes have put their
// operand, writes the codes of rows on the way, and finds what columns need in that place.
//
// (Branches between four rows and their codes cost nothing here: without them an RMSNorm's both planes are almost 1 %
// slower, and a LayerNorm's as fast.)
#include "nvfp4_unwritten.cuh"
#include "nvfp4_whole.cuh"

namespace te_dist {
namespace cuda {
namespace {

// kCentered: a LayerNorm, which is always shifted. (One kernel for it and an RMSNorm with a bias: 1 % slower.)
template <bool kShifted, bool kCentered>
struct FromNorm {
  static constexpr bool kMade = true;
  static constexpr bool kMadeAhead = false;
  static constexpr int kLanes = NvConfig::kLanes;
  // Of a tile's columns, the first and the last four of each lane's eight apart.
  struct Shared {
    float4 gain[2][kLanes];
    float4 bias[kShifted ? 2 : 1][kShifted ? kLanes : 1];
  };
  Made x;

  __device__ __forceinline__ void prepare(Shared& shared, int64_t tile_col) const {
    wait_for_kernel_before();  // which has made the statistics
    static_assert(2 * kLanes == 32, "a warp's lanes");
    const int at = static_cast<int>(threadIdx.x % 32u);
    const int64_t col = tile_col + at * 4;
    shared.gain[at % 2][at / 2] = load_four_gains(x, col);
    if (kShifted) shared.bias[at % 2][at / 2] = load_vector_four(x.bias, col, kNoBias);
  }

  // Statistics of four rows are on their way while those before are made.
  class Taker {
   public:
    __device__ __forceinline__ Taker(const FromNorm& from, const Shared& shared, int64_t row, int lane)
        : from_(from), shared_(shared), lane_(lane), row_(row) {
      ask();
    }
    __device__ __forceinline__ void take(uint4* mine, bool kept, FourRows& rows) {
      rows.load(mine);
      const float rstds[4] = {rstd_.x, rstd_.y, rstd_.z, rstd_.w};
      float shifts[4] = {-0.0f, -0.0f, -0.0f, -0.0f};
      if (kCentered) {
        const float means[4] = {mean_.x, mean_.y, mean_.z, mean_.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) shifts[i] = RowStats{means[i], rstds[i]}.shift(true);
      }
      row_ += FourRows::kRows;
      if (row_ % kBlock != 0) ask();
      make(rstds, shifts, rows);
      if (kept) rows.store(mine);
    }

   private:
    __device__ __forceinline__ void ask() {
      rstd_ = *reinterpret_cast<const float4*>(from_.x.rstd + row_);
      if (kCentered) mean_ = *reinterpret_cast<const float4*>(from_.x.mean + row_);
    }
    __device__ __forceinline__ void make(const float (&rstds)[4], const float (&shifts)[4], FourRows& rows) const {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 gain = shared_.gain[half][lane_];
        const float4 bias = kShifted ? shared_.bias[half][lane_] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < NvWhole::kRowsAtOnce; ++i) {
          uint32_t& first = rows.word[i][2 * half];
          uint32_t& second = rows.word[i][2 * half + 1];
          first = norm_of_word<kShifted>(first, rstds[i], shifts[i], make_float2(gain.x, gain.y),
                                         make_float2(bias.x, bias.y));
          second = norm_of_word<kShifted>(second, rstds[i], shifts[i], make_float2(gain.z, gain.w),
                                          make_float2(bias.z, bias.w));
        }
      }
    }

    const FromNorm& from_;
    const Shared& shared_;
    int lane_;
    int64_t row_;
    float4 rstd_;
    float4 mean_;
  };
};

}  // namespace

bool is_nvfp4_whole_norm(const Source& x, const Nvfp4Options& options, const Planes& out) {
  return x.kind == Produce::kNorm && x.partials == nullptr && aligned(x.rstd, 16) && aligned(x.mean, 16) &&
         is_whole<FromNorm<true, true>>(x, options, out);
}

void launch_nvfp4_whole_norm(const Made& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                             const NvParts& parts, const Planes& out, const float* noop, Lane lane) {
  const Input operand{x.data, Float::kBF16, x.rows, x.cols, x.stride};
  const auto start = [&](const auto& from) {
    launch_whole(operand, from, options, amax_row, amax_col, parts, Before::kFindsAmaxes, out, noop, lane);
  };
  if (x.centered) return start(FromNorm<true, true>{x});
  if (is_shifted(x)) return start(FromNorm<true, false>{x});
  start(FromNorm<false, false>{x});
}

}  // namespace cuda
}  // namespace te_dist
