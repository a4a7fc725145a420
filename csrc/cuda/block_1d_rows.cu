// Blockwise fp8 with 1x128 scales of a norm's result, row plane alone: 3 bytes an element.
#include "block_1d.cuh"
#include "norm_rows.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F, bool kCentered>
__global__ void __launch_bounds__(NormRowsConfig::kThreads, NormRowsConfig::kBlocksPerSm<8>)
    block_1d_rows_kernel(const __grid_constant__ Made x, bool make_stats, BlockOutput out) {
  extern __shared__ float4 memory[];
  if (is_noop(out.noop)) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int rank = RowTeam::rank();
  // Of vector lane % 8, of the last four rows.
  float inverse[NormRowsConfig::kRows];
  for_each_norm_row<kCentered, 8>(
      x, make_stats, false, memory,
      [&](int64_t row, int number, const TeamRow<8>& made) {
        uint32_t raw[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) raw[i] = largest_of_eight(made.vector[i]);
        const float scale = block_scale<bf16_t, F>(max_of_rows(raw, lane), out.rule);
        const float value = 1.0f / scale;
#pragma unroll
        for (int k = 0; k < NormRowsConfig::kRows; ++k) {  // zeros for rows that are not there
          inverse[k] = k == number ? value : k > number ? 0.0f : inverse[k];
        }
        uint8_t* to = out.row_data.data + row * out.row_data.cols + 8 * rank;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float factor = __shfl_sync(kFullWarp, scale, (lane & 16) | i);
          const uint2 bytes = encode_eight<F>(made.vector[i], factor);
          if (1024 * i + 8 * rank < x.cols) store_bulk(reinterpret_cast<uint2*>(to + 1024 * i), bytes);
        }
      },
      [&](int64_t first) {
        const int64_t block = 8 * (lane % 8) + rank / 16;
        if (lane % 16 >= 8 || block * 128 >= x.cols) return;
        float* to = out.row_scale + block * round_up(x.rows, 4) + first;
        if ((reinterpret_cast<std::uintptr_t>(to) & 15u) == 0) {
          *reinterpret_cast<float4*>(to) = make_float4(inverse[0], inverse[1], inverse[2], inverse[3]);
        } else {
#pragma unroll
          for (int k = 0; k < NormRowsConfig::kRows; ++k) to[k] = inverse[k];
        }
      });
}

}  // namespace

void launch_block_1d_rows(const Made& x, bool make_stats, const BlockOutput& out, Lane lane) {
  const auto kernel = x.centered ? block_1d_rows_kernel<E4M3, true> : block_1d_rows_kernel<E4M3, false>;
  launch_norm_rows<8>("block_1d_rows_kernel", kernel, x, lane, make_stats, out);
}

}  // namespace cuda
}  // namespace te_dist
