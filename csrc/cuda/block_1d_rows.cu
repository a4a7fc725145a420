// Blockwise fp8 with 1x128 scales of a norm's result, row plane alone: 3 bytes an element.
#include <type_traits>

#include "block_1d_whole.cuh"
#include "norm_rows.cuh"

namespace te_dist {
namespace cuda {
namespace {

// Eight blocks of eight values each of a lane, and their scale: that of block block_of_lane() or, without kPowers,
// lane % 8.
template <typename F, bool kPowers, int kHeld>
class LaneBlocks {
 public:
  __device__ __forceinline__ LaneBlocks(TeamRow<8, kHeld>& made, const BlockOutput& out) : made_(made) {
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
  TeamRow<8, kHeld>& made_;
  PowerScaler scaler_;
  float scale_;
};

// kFull: rows have as many columns as fit.
template <typename F, bool kCentered, bool kPowers, int kHeld, bool kFull>
__global__ void __launch_bounds__(NormRowsConfig::kThreads, NormRowsConfig::kBlocksPerSm<8>)
    block_1d_rows_kernel(const __grid_constant__ Made x, bool make_stats, BlockOutput out) {
  extern __shared__ float4 memory[];
  if (is_noop(out.noop)) return;
  using Blocks = LaneBlocks<F, kPowers, kHeld>;
  using Held = TeamRow<8, kHeld>;
  const int rank = RowTeam::rank();
  const int cols = kFull ? Held::kColumns : static_cast<int>(x.cols);
  // Of the last four rows, where the 16 lanes find them that share blocks. In memory, because registers are short.
  __shared__ float4 inverse[NormRowsConfig::kThreads / 2];
  const int block = Blocks::mine();
  float4* mine = inverse + threadIdx.x / 16 * 8 + block % Held::kEach;
  for_each_norm_row<kCentered, 8, kHeld, kFull>(
      x, make_stats, false, memory,
      [&](int64_t row, int number, Held& made) {
        const Blocks blocks(made, out);
        if (rank % 16 < 8) reinterpret_cast<float*>(mine)[number + Held::row_of(block)] = blocks.inverse();
        uint8_t* to = out.row_data.data + row * out.row_data.cols + 8 * rank;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint2 bytes = blocks.encoded(i);
          if (i > 0 && Held::offset_of(i) == 0) to += out.row_data.cols;
          const bool there = kHeld == 1 || row + Held::row_of(i) < x.rows;
          if (there && Held::offset_of(i) + 8 * rank < cols) {
            store_bulk(reinterpret_cast<uint2*>(to + Held::offset_of(i)), bytes);
          }
        }
      },
      [&](int64_t first) {
        if (kHeld > 1) __syncwarp();
        const int64_t line = 8 * block + rank / 16;
        if (rank % 16 < 8 && Held::row_of(block) == 0 && line * 128 < cols) {
          float* to = out.row_scale + line * out.row_pitch + first;
          float4 v = *mine;  // zeros for rows that are not there
          if (first + 1 >= x.rows) v.y = 0.0f;
          if (first + 2 >= x.rows) v.z = 0.0f;
          if (first + 3 >= x.rows) v.w = 0.0f;
          if ((reinterpret_cast<std::uintptr_t>(to) & 15u) == 0) {
            *reinterpret_cast<float4*>(to) = v;
          } else {
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
          }
        }
        if (kHeld > 1) __syncwarp();
      });
}

}  // namespace

void launch_block_1d_rows(const Made& x, bool make_stats, const BlockOutput& out, Lane lane) {
  const auto choose = [&](auto powers, auto held, auto full) {
    const auto kernel = x.centered ? block_1d_rows_kernel<E4M3, true, powers, held, full>
                                   : block_1d_rows_kernel<E4M3, false, powers, held, full>;
    launch_norm_rows<8, held>("block_1d_rows_kernel", kernel, x, lane, make_stats, out);
  };
  constexpr std::integral_constant<int, 1> kOne;
  if (!out.whole) return choose(std::false_type{}, kOne, std::false_type{});
  if (x.cols == NormRowsConfig::kColumns) return choose(std::true_type{}, kOne, std::true_type{});
  with_held_rows(x.cols, [&](auto held) { choose(std::true_type{}, held, std::false_type{}); });
}

}  // namespace cuda
}  // namespace te_dist
