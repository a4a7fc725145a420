// NVFP4's two global amaxes of what a norm makes, in whole tiles: 2 bytes an element. The norm's statistics are made in
// the same launch (bands.cuh).
//
// Little of it is made: in bf16, two values an instruction, comes near enough to tell of most rows and columns that
// they are below what is known already.
#include "nvfp4_norm_nearly.cuh"
#include "patch_source.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct NvNormAmax {
  static constexpr int kThreads = PatchConfig::kThreads;
  static constexpr int kBlocksPerSm = 4;
  static constexpr int kRows = kBlock / 2;  // of a lane, and as many in the lane 16 apart
  static constexpr int kFew = 4;  // eights of columns that a warp makes one after another, rather than all at once
};

// ---------------------------------------------------------------------------------------------- what is made
template <bool kShifted>
__device__ __forceinline__ void make_four(const RowStats& stats, bool centered, const float4& gain, const float4& bias,
                                          uint32_t (&word)[2]) {
  const float shift = stats.shift(centered);
  word[0] = norm_of_word<kShifted>(word[0], stats.rstd, shift, make_float2(gain.x, gain.y),
                                   make_float2(bias.x, bias.y));
  word[1] = norm_of_word<kShifted>(word[1], stats.rstd, shift, make_float2(gain.z, gain.w),
                                   make_float2(bias.z, bias.w));
}

// Of 16 rows of eight columns, in each lane four values of one row: transformed_amax. stats: of rows lane % 16.
template <bool kShifted>
__device__ __forceinline__ uint32_t transformed_eight(const Made& x, const RowStats& stats, int row, int col) {
  row += static_cast<int>(threadIdx.x % 16);
  col += static_cast<int>(threadIdx.x % 32 / 16) * 4;
  uint32_t word[2];
  load_words(x.data + row * x.stride + col, word);
  make_four<kShifted>(stats, x.centered, load_four_gains(x, col), load_vector_four(x.bias, col, kNoBias), word);
  return max(transformed_across_lanes(word[0]), transformed_across_lanes(word[1]));
}

// Of 16 rows of 128 columns, in each lane four columns: their largest, and what they are transformed.
template <bool kShifted>
__device__ __forceinline__ void raise_by_all(const Made& x, const RowStats& stats, int row, int col, KnownAmax& rows,
                                             ColumnAmax& columns) {
  col += static_cast<int>(threadIdx.x % 32 * 4);
  const float4 gain = load_four_gains(x, col);
  const float4 bias = load_vector_four(x.bias, col, kNoBias);
  NvPatch<bf16_t, 2> patch;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) load_words(x.data + (row + i) * x.stride + col, patch.word[i]);
  uint32_t row_word = 0u;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const RowStats of_row{__shfl_sync(kFullWarp, stats.mean, i), __shfl_sync(kFullWarp, stats.rstd, i)};
    make_four<kShifted>(of_row, x.centered, gain, bias, patch.word[i]);
    row_word = max_of_words<bf16_t>(patch.word[i], row_word);
  }
  const uint32_t raw = __reduce_max_sync(kFullWarp, Words<bf16_t>::fold(row_word));
  rows.raise(Words<bf16_t>::to_float_of_raw(raw));
  columns.raise(amax_of_columns(patch));
}

// A warp takes 16 rows of a tile, and a lane eight columns of eight of them.
template <bool kShifted>
__global__ void __launch_bounds__(NvNormAmax::kThreads, NvNormAmax::kBlocksPerSm)
    nvfp4_amax_norm_kernel(const __grid_constant__ Made x, float* amax_row, float* amax_col, const float* noop) {
  constexpr int kRows = NvNormAmax::kRows;
  using W = Words<bf16_t>;
  let_next_kernel_start();
  if (is_noop(noop)) return;
  const BandPiece piece =
      x.order.ordered ? band_piece(x.order, blockIdx.x) : band_tile(x.order, blockIdx.x);
  if (piece.stats) return make_band_stats(x, piece.band, piece.index);
  const NearPlace tile = place_in_band<SquareTile>(piece);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int first = lane / 16 * kRows;
  const int row = tile.row + static_cast<int>(threadIdx.x / 32) * kBlock;
  const int col = tile.col + lane % 16 * 8;
  uint32_t word[kRows][4];
  const bf16_t* from = x.data + (row + first) * x.stride + col;
#pragma unroll
  for (int i = 0; i < kRows; ++i) load_words<bf16_t>(from + i * x.stride, word[i]);
  const NormNearly<4> nearly(x, col);
  wait_for_kernel_before();
  KnownAmax rows(amax_row);
  ColumnAmax columns(amax_col);
  rows.ask_now();
  columns.ask_now();
  RowStats mine = peek_stats<kBlock>(x, row, true);
  await_stats<kBlock>(x, row, true, mine);
  const float shift = mine.shift(x.centered);
  const uint32_t stats = pack_bf16(mine.rstd, shift);
  uint32_t largest = 0u;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    nearly.make(__shfl_sync(kFullWarp, stats, first + i), word[i]);
    largest = larger_pair(largest, larger_pair(word[i][0], word[i][1], word[i][2], word[i][3]));
  }
  const EightRows rows_here(first != 0);
  const auto sum = [&](int w) {
    const uint32_t mine = rows_here.largest([&](int i) { return word[i][w]; });
    return add_bf16(mine, __shfl_xor_sync(kFullWarp, mine, 16));
  };
  const uint32_t sums = W::max(W::max(sum(0), sum(1)), W::max(sum(2), sum(3)));
  const float most_shift = float_of(__reduce_max_sync(kFullWarp, bits_of(shift) & kAbsMask));
  const float rest = NearlyBounds(nearly.most_gain(), nearly.most_bias()).rest(most_shift);
  rows.hear();
  columns.hear();
  const bool rises = amax_row != nullptr && rows.may_be_topped_by(magnitudes(largest), NearlyBounds::kOfRows, rest);
  const bool is_all = __any_sync(kFullWarp, rises);
  const bool here = columns.may_be_topped_by(sums, NearlyBounds::kOfColumns, 16.0f * rest);
  uint32_t rising = __ballot_sync(kFullWarp, here) & 0xFFFFu;  // both halves of the warp have the same
  if (is_all || __popc(rising) > NvNormAmax::kFew) {
    return raise_by_all<kShifted>(x, mine, row, tile.col, rows, columns);
  }
  if (rising == 0u) return;
  uint32_t found = 0u;
#pragma unroll 1
  for (; rising != 0u; rising &= rising - 1u) {
    const int eight = __ffs(static_cast<int>(rising)) - 1;
    found = max(found, transformed_eight<kShifted>(x, mine, row, tile.col + eight * 8));
  }
  columns.raise(found);
}

}  // namespace

void launch_amax_nvfp4_norm(const Made& x, float* amax_row, float* amax_col, const ToBlank& blank, const float* noop,
                            Lane lane) {
  if (launch_amax_nvfp4_norm_rows(x, amax_row, amax_col, blank, noop, lane)) return;
  if (launch_amax_nvfp4_layer_rows(x, amax_row, amax_col, blank, noop, lane)) return;
  if (x.order.ordered) {
    launch_mark_pending(Unmade{x.mean, x.rstd, x.rows, amax_row, amax_col, blank}, noop, lane);
  } else {
    launch_amax_reset(amax_row, amax_col, noop, lane, blank);
  }
  const auto kernel = is_shifted(x) ? nvfp4_amax_norm_kernel<true> : nvfp4_amax_norm_kernel<false>;
  launch_close("nvfp4_amax_norm_kernel", kernel, static_cast<int>(x.pieces), NvNormAmax::kThreads, 0, lane, x, amax_row,
               amax_col, noop);
}

}  // namespace cuda
}  // namespace te_dist
