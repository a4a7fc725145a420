// MXFP8, 1x32, of a norm's result, row plane alone: 3 bytes an element.
#include "mxfp8.cuh"
#include "norm_rows.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F, bool kCentered>
__global__ void __launch_bounds__(NormRowsConfig::kThreads, NormRowsConfig::kBlocksPerSm<8>)
    mxfp8_rows_kernel(const __grid_constant__ Made x, bool make_stats, MxOutput out) {
  extern __shared__ float4 memory[];
  if (is_noop(out.noop)) return;
  const int rank = RowTeam::rank();
  const int cols = static_cast<int>(x.cols);
  const int pitch = static_cast<int>(round_up(ceil_div(x.cols, MxConfig::kBlock), 4));
  for_each_norm_row<kCentered, 8>(
      x, make_stats, false, memory,
      [&](int64_t row, int, const TeamRow<8>& made) {
        uint32_t raw[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) raw[i] = largest_of_eight(made.vector[i]);
        uint32_t largest[2];
        max_over_quad<1, 2>(raw, largest, [](uint32_t a, uint32_t b) { return max(a, b); });
        const TwoCodes codes(code_of_raw<bf16_t, F>(largest[0]), code_of_raw<bf16_t, F>(largest[1]));
        uint8_t* scales = out.row_scale + row * pitch;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int at = 32 * (2 * (rank % 4) + k) + rank / 4;
          if (at < pitch) scales[at] = at * MxConfig::kBlock < cols ? static_cast<uint8_t>(codes.code[k]) : 0;
        }
        uint8_t* to = out.row_data.data + row * out.row_data.cols + 8 * rank;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint2 bytes = encode_eight<F>(made.vector[i], codes.factor_of<1>(i));
          if (1024 * i + 8 * rank < cols) store_bulk(reinterpret_cast<uint2*>(to + 1024 * i), bytes);
        }
      },
      [](int64_t) {});
  // The scales of rows that fill up the last 128.
  const int64_t padding = round_up(x.rows, TileConfig::kTile) - x.rows;
  for (int64_t row = blockIdx.x; row < padding; row += gridDim.x) {
    for (int at = static_cast<int>(threadIdx.x); at < pitch; at += NormRowsConfig::kThreads) {
      out.row_scale[(x.rows + row) * pitch + at] = 0;
    }
  }
}

}  // namespace

void launch_mxfp8_rows(const Made& x, bool make_stats, const MxOutput& out, Lane lane) {
  const auto kernel = x.centered ? mxfp8_rows_kernel<E4M3, true> : mxfp8_rows_kernel<E4M3, false>;
  launch_norm_rows<8>("mxfp8_rows_kernel", kernel, x, lane, make_stats, out);
}

}  // namespace cuda
}  // namespace te_dist
