// NVFP4's two global amaxes of what a norm makes, in whole tiles: 2 bytes an element. The norm's statistics are made in
// the same launch (bands.cuh).
#include "nvfp4_amax.cuh"
#include "nvfp4_unwritten.cuh"
#include "patch_source.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct NvNormAmax {
  static constexpr int kThreads = PatchConfig::kThreads;
  static constexpr int kBlocksPerSm = 4;
};

// A warp takes 16 rows of a tile, and a lane four columns of them.
template <bool kShifted>
__global__ void __launch_bounds__(NvNormAmax::kThreads, NvNormAmax::kBlocksPerSm)
    nvfp4_amax_norm_kernel(const __grid_constant__ Made x, AmaxOut amax_row, float* amax_col, const float* noop) {
  __shared__ uint32_t scratch[NvNormAmax::kThreads / 32];
  let_next_kernel_start();
  if (is_noop(noop)) return;
  const BandPiece piece =
      x.order.ordered ? band_piece(x.order, blockIdx.x) : band_tile(x.order, blockIdx.x);
  if (piece.stats) return make_band_stats(x, piece.band, piece.index);
  const NearPlace tile = place_in_band<SquareTile>(piece);
  const int row = tile.row + static_cast<int>(threadIdx.x / 32 * kBlock);
  const int col = tile.col + static_cast<int>(threadIdx.x % 32 * 4);
  NvPatch<bf16_t, 2> patch;
  const bf16_t* from = x.data + row * x.stride + col;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) load_words(from + i * x.stride, patch.word[i]);
  const float4 gain = load_four_gains(x, col);
  const float4 bias = load_vector_four(x.bias, col, kNoBias);
  wait_for_kernel_before();
  ColumnAmax columns(amax_col, nullptr);
  columns.ask_now();
  RowStats mine = peek_stats<kBlock>(x, row, true);
  await_stats<kBlock>(x, row, true, mine);
  const float shift_of_mine = mine.shift(x.centered);
  uint32_t row_word = 0u;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float rstd = __shfl_sync(kFullWarp, mine.rstd, i);
    const float shift = kShifted ? __shfl_sync(kFullWarp, shift_of_mine, i) : 0.0f;
    uint32_t(&word)[2] = patch.word[i];
    word[0] = norm_of_word<kShifted>(word[0], rstd, shift, make_float2(gain.x, gain.y), make_float2(bias.x, bias.y));
    word[1] = norm_of_word<kShifted>(word[1], rstd, shift, make_float2(gain.z, gain.w), make_float2(bias.z, bias.w));
    row_word = max_of_words<bf16_t>(word, row_word);
  }
  columns.hear();
  const auto sums = [&](int w) {
    return sum_of_magnitudes<kBlock>([&](int i) { return patch.word[i][w]; });
  };
  if (columns.may_rise(Words<bf16_t>::max(sums(0), sums(1)))) {
    columns.raise(amax_of_columns(patch));
  }
  give_row_amax<bf16_t, NvNormAmax::kThreads>(row_word, amax_row, scratch);
}

}  // namespace

void launch_amax_nvfp4_norm(const Made& x, float* amax_row, float* amax_col, const float* noop, Lane lane) {
  if (launch_amax_nvfp4_norm_rows(x, amax_row, amax_col, noop, lane)) return;
  if (x.order.ordered) {
    launch_mark_pending(Unmade{x.mean, x.rstd, x.rows, amax_row, amax_col}, noop, lane);
  } else {
    launch_amax_reset(amax_row, amax_col, noop, lane);
  }
  const auto kernel = is_shifted(x) ? nvfp4_amax_norm_kernel<true> : nvfp4_amax_norm_kernel<false>;
  launch_close("nvfp4_amax_norm_kernel", kernel, static_cast<int>(x.pieces), NvNormAmax::kThreads, 0, lane, x,
               AmaxOut{amax_row, nullptr}, amax_col, noop);
}

}  // namespace cuda
}  // namespace te_dist
