// NVFP4 of what a norm makes of whole tiles. A thread makes its 16 rows, four at a time, where boxes have put their
// operand, writes the codes of rows on the way, and finds what columns need in that place.
#include "nvfp4_unwritten.cuh"
#include "nvfp4_whole.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <bool kShifted>
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

  template <typename Rows>
  __device__ __forceinline__ void take(const Shared& shared, int64_t row, int lane, const Rows& mine, bool kept,
                                       FourRows& rows) const {
    rows.load(mine);
    make(shared, row, lane, rows);
    if (kept) rows.store(mine);
  }

  __device__ __forceinline__ void make(const Shared& shared, int64_t row, int lane, FourRows& rows) const {
    const float4 rstd = *reinterpret_cast<const float4*>(x.rstd + row);
    const float rstds[4] = {rstd.x, rstd.y, rstd.z, rstd.w};
    float shifts[4] = {-0.0f, -0.0f, -0.0f, -0.0f};
    if (kShifted && x.centered) {
      const float4 mean = *reinterpret_cast<const float4*>(x.mean + row);
      const float means[4] = {mean.x, mean.y, mean.z, mean.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) shifts[i] = RowStats{means[i], rstds[i]}.shift(true);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 gain = shared.gain[half][lane];
      const float4 bias = kShifted ? shared.bias[half][lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
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
};

}  // namespace

bool is_nvfp4_whole_norm(const Source& x, const Nvfp4Options& options, const Planes& out) {
  return x.kind == Produce::kNorm && x.partials == nullptr && aligned(x.rstd, 16) && aligned(x.mean, 16) &&
         is_whole<FromNorm<true>>(x, options, out);
}

void launch_nvfp4_whole_norm(const Made& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                             const NvParts& parts, const Planes& out, const float* noop, Lane lane) {
  const Input operand{x.data, Float::kBF16, x.rows, x.cols, x.stride};
  const auto start = [&](const auto& from) {
    launch_whole(operand, from, options, amax_row, amax_col, parts, Before::kFindsAmaxes, out, noop, lane);
  };
  if (is_shifted(x)) return start(FromNorm<true>{x});
  start(FromNorm<false>{x});
}

}  // namespace cuda
}  // namespace te_dist
