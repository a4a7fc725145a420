// Blockwise fp8 with 1x128 scales of a norm's result, row plane alone: 3 bytes an element.
#include <type_traits>

#include "block_1d_whole.cuh"
#include "norm_rows.cuh"

namespace te_dist {
namespace cuda {
namespace {

// Eight blocks of eight values each of a lane, and their scale: that of block block_of_lane() or, without kPowers,
// lane % 8.
template <typename F, bool kPowers>
class LaneBlocks {
 public:
  __device__ __forceinline__ LaneBlocks(TeamRow<8>& made, const BlockOutput& out) : made_(made) {
    if (kPowers) {
      uint32_t maxima[4];
      maxima_of_rows([&](int i) { return made_.vector[i]; }, maxima);
      scale_ = float_of(power_of_lane<F>(maxima, out.eps_bits));
      if (__any_sync(kFullWarp, !all_finite(maxima))) bound();
    } else {
      uint32_t raw[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) raw[i] = largest_of_eight(made_.vector[i]);
      scale_ = block_scale<bf16_t, F>(max_of_rows(raw, static_cast<int>(threadIdx.x % 32)), out.rule);
    }
  }
  static __device__ __forceinline__ int mine() {
    return kPowers ? block_of_lane() : static_cast<int>(threadIdx.x % 8);
  }
  __device__ __forceinline__ float inverse() const {
    return kPowers ? inverse_of_power(bits_of(scale_)) : 1.0f / scale_;
  }
  __device__ __forceinline__ uint2 encoded(int i) const {
    const uint4& v = made_.vector[i];
    if (!kPowers) return encode_eight<F>(v, __shfl_sync(kFullWarp, scale_, i, 16));
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    return scaler_.template encode_eight<F>(words, power_of_block(bits_of(scale_), i));
  }

 private:
  __device__ __forceinline__ void bound() {  // see block_1d_whole.cuh
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint4& v = made_.vector[i];
      v = make_uint4(bounded_pair(v.x), bounded_pair(v.y), bounded_pair(v.z), bounded_pair(v.w));
    }
  }
  TeamRow<8>& made_;
  PowerScaler scaler_;
  float scale_;
};

// kFull: rows have kColumns, which saves comparisons. (Without all of them, the compiler holds on to what it unpacks of
// a LayerNorm's row for its second pass, and there are not registers enough.)
template <typename F, bool kCentered, bool kPowers, bool kFull>
__global__ void __launch_bounds__(NormRowsConfig::kThreads, NormRowsConfig::kBlocksPerSm<8>)
    block_1d_rows_kernel(const __grid_constant__ Made x, bool make_stats, BlockOutput out) {
  extern __shared__ float4 memory[];
  if (is_noop(out.noop)) return;
  using Blocks = LaneBlocks<F, kPowers>;
  const int rank = RowTeam::rank();
  const int cols = kFull ? NormRowsConfig::kColumns : static_cast<int>(x.cols);
  // Of the last four rows; a thread finds its own there. In memory, because registers are short.
  __shared__ float4 inverse[NormRowsConfig::kThreads / 2];
  float4* mine = inverse + threadIdx.x / 16 * 8 + threadIdx.x % 8;
  for_each_norm_row<kCentered, 8, kFull && !kCentered>(
      x, make_stats, false, memory,
      [&](int64_t row, int number, TeamRow<8>& made) {
        const Blocks blocks(made, out);
        if (rank % 16 < 8) reinterpret_cast<float*>(mine)[number] = blocks.inverse();
        uint8_t* to = out.row_data.data + row * out.row_data.cols + 8 * rank;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint2 bytes = blocks.encoded(i);
          if (1024 * i + 8 * rank < cols) store_bulk(reinterpret_cast<uint2*>(to + 1024 * i), bytes);
        }
      },
      [&](int64_t first) {
        const int64_t block = 8 * Blocks::mine() + rank / 16;
        if (rank % 16 >= 8 || block * 128 >= cols) return;
        float* to = out.row_scale + block * out.row_pitch + first;
        float4 v = *mine;  // zeros for rows that are not there
        if (first + 1 >= x.rows) v.y = 0.0f;
        if (first + 2 >= x.rows) v.z = 0.0f;
        if (first + 3 >= x.rows) v.w = 0.0f;
        if ((reinterpret_cast<std::uintptr_t>(to) & 15u) == 0) {
          *reinterpret_cast<float4*>(to) = v;
        } else {
          to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        }
      });
}

}  // namespace

void launch_block_1d_rows(const Made& x, bool make_stats, const BlockOutput& out, Lane lane) {
  const auto start = [&](auto kernel) {
    launch_norm_rows<8>("block_1d_rows_kernel", kernel, x, lane, make_stats, out);
  };
  const auto choose = [&](auto powers, auto full) {
    constexpr bool kPowers = decltype(powers)::value;
    constexpr bool kFull = decltype(full)::value;
    start(x.centered ? block_1d_rows_kernel<E4M3, true, kPowers, kFull>
                     : block_1d_rows_kernel<E4M3, false, kPowers, kFull>);
  };
  if (!out.whole) return choose(std::false_type{}, std::false_type{});
  x.cols == NormRowsConfig::kColumns ? choose(std::true_type{}, std::true_type{})
                                     : choose(std::true_type{}, std::false_type{});
}

}  // namespace cuda
}  // namespace te_dist
