// Per-tensor casts of a norm's result, row plane alone: 3 bytes an element.
#include "cast.cuh"
#include "norm_rows.cuh"

namespace te_dist {
namespace cuda {
namespace {

// kFull: rows have as many columns as fit.
template <typename F, bool kCentered, int kHeld, bool kFull>
__global__ void __launch_bounds__(NormRowsConfig::kThreads, NormRowsConfig::kBlocksPerSm<8>)
    cast_rows_kernel(const __grid_constant__ Made x, bool make_stats, uint8_t* out, CastScale from) {
  extern __shared__ float4 memory[];
  __shared__ uint32_t maxima[NormRowsConfig::kThreads / 32];
  if (is_noop(from.noop)) return;
  const float scale = tensor_scale<F, NormRowsConfig::kThreads>(from, maxima);
  using Held = TeamRow<8, kHeld>;
  const int rank = RowTeam::rank();
  const int cols = kFull ? Held::kColumns : static_cast<int>(x.cols);
  uint32_t word = 0u;
  for_each_norm_row<kCentered, 8, kHeld, kFull>(
      x, make_stats, !make_stats, memory,
      [&](int64_t row, int, const Held& made) {
        uint8_t* to = out + row * cols + 8 * rank;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i > 0 && Held::offset_of(i) == 0) to += cols;
          const bool there = kHeld == 1 || row + Held::row_of(i) < x.rows;
          if (there && Held::offset_of(i) + 8 * rank < cols) {
            if (from.seen != nullptr) word = max_of_vector<bf16_t>(word, made.vector[i]);
            store_bulk(reinterpret_cast<uint2*>(to + Held::offset_of(i)), encode_eight<F>(made.vector[i], scale));
          }
        }
      },
      [](int64_t) {});
  if (from.seen != nullptr) raise_amax_by_warps<bf16_t>(from.seen, word);
}

}  // namespace

void launch_cast_rows(const Made& x, bool make_stats, uint8_t* row, const CastScale& from, Lane lane) {
  const auto choose = [&](auto held, auto full) {
    const auto kernel =
        x.centered ? cast_rows_kernel<E4M3, true, held, full> : cast_rows_kernel<E4M3, false, held, full>;
    launch_norm_rows<8, held>("cast_rows_kernel", kernel, x, lane, make_stats, row, from);
  };
  if (x.cols == NormRowsConfig::kColumns) return choose(std::integral_constant<int, 1>{}, std::true_type{});
  with_held_rows(x.cols, [&](auto held) { choose(held, std::false_type{}); });
}

}  // namespace cuda
}  // namespace te_dist
