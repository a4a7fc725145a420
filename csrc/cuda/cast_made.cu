// Per-tensor casts of a matrix that is made on the fly: 3 bytes an element for one plane, 4 for both, plus
// what the producer reads beyond one operand.
#include "cast.cuh"
#include "norm_rows.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <typename F, bool kWhole>
__global__ void __launch_bounds__(MadeConfig::kThreads, MadeConfig::kBlocksPerSm)
    cast_made_kernel(const __grid_constant__ Made x, ByteMatrix row_out, ByteMatrix col_out, CastScale from) {
  extern __shared__ uint4 memory[];
  __shared__ uint32_t maxima[MadeConfig::kThreads / 32];
  if (is_noop(from.noop)) return;
  const float scale = tensor_scale<F, MadeConfig::kThreads>(from, maxima);
  const bool columns = col_out.data != nullptr;
  uint32_t word = 0u;
  for_each_made_tile(x, true, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, columns, memory,
                     [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
                       // The stage takes the place of patches: all threads have theirs.
                       if (columns) __syncthreads();
                       write_tile<bf16_t, F, kWhole>(patch, scale, tile, inside, row_out, col_out,
                                                     *static_cast<ByteStage*>(made_stage(memory)));
                       if (from.seen != nullptr) word = max_of_patch(patch, word);
                     });
  record_amax<bf16_t, MadeConfig::kThreads>(from, word, maxima);
}

}  // namespace

void launch_cast_made(const Source& x, Fp8 format, uint8_t* row, uint8_t* col, const CastScale& from,
                      Lane lane) {
  const Made made = made_of(x, true);
  if (format == Fp8::kE4M3 && col == nullptr && row != nullptr && aligned(row, 8) && by_rows(made)) {
    return launch_cast_rows(made, x.make_stats, row, from, lane);
  }
  const ByteMatrix row_out = byte_matrix(row, x.rows, x.cols, 8);
  const ByteMatrix col_out = byte_matrix(col, x.cols, x.rows, 16);
  if (launch_cast_patches(made, format, row_out, col_out, from, lane)) return;
  const bool whole = made.is_whole() && row_out.is_whole() && col_out.is_whole();
  dispatch_fp8(format, [&](auto fp8) {
    using F = TypeOf<decltype(fp8)>;
    const auto kernel = whole ? cast_made_kernel<F, true> : cast_made_kernel<F, false>;
    launch_made("cast_made_kernel", kernel, made, lane, row_out, col_out, from);
  });
}

}  // namespace cuda
}  // namespace te_dist
