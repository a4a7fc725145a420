// NVFP4's two global amaxes of a bf16 matrix in memory, in whole tiles, where the column path is transformed: 2 bytes an
// element. As nvfp4_amax.cu, but that operands come by boxes, and that columns are bounded: of most, the first stage of
// their transform tells that they are below what the block has found.
#include "nvfp4_amax.cuh"
#include "nvfp4_kernel.cuh"
#include "warp_boxes.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct NvAmaxBoxed {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBlocksPerSm = 3;
};

__global__ void __launch_bounds__(NvAmaxBoxed::kThreads, NvAmaxBoxed::kBlocksPerSm)
    nvfp4_amax_boxed_kernel(const __grid_constant__ CUtensorMap boxes, unsigned across, Taper work, uint32_t signs,
                            AmaxOut amax_row, AmaxOut amax_col, const float* noop) {
  using W = Words<bf16_t>;
  constexpr int kWarps = NvAmaxBoxed::kWarps;
  __shared__ uint32_t scratch[kWarps];
  __shared__ uint32_t known;
  __shared__ WarpArrivals<kWarps> arrivals;
  extern __shared__ __align__(128) uint4 memory[];
  let_next_kernel_start();
  if (is_noop(noop)) return;
  if (threadIdx.x == 0u) known = 0u;
  WarpReader<kWarps> reader(memory, arrivals, boxes, across, work.items_of_warp<kWarps>());
  __syncthreads();
  ColumnAmax columns(nullptr, &known);
  uint32_t row_word = 0u;
  uint32_t col_bits = 0u;
  work.for_each<kWarps>([&](unsigned) {
    NvPatch<bf16_t, 2> patch;
    reader.take(patch);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) row_word = max_of_words<bf16_t>(patch.word[i], row_word);
    if (signs != kHadamardSigns) flip_rows(patch, signs ^ kHadamardSigns);
    uint32_t sums = 0u;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      NeighbourSums of_word;
#pragma unroll
      for (int first = 0; first < kBlock; first += 8) {
        of_word.add([&](int i) { return patch.word[first + i][w]; });
      }
      sums = W::max(sums, of_word.largest());
    }
    if (!columns.may_rise(sums)) return;
    columns.hear();  // asked for only where it may spare the rest
    if (!columns.may_rise(sums)) return;
    const uint32_t largest = amax_of_columns(patch);
    columns.raise(largest);
    col_bits = max(col_bits, largest);
  });
  give_amaxes<bf16_t, NvAmaxBoxed::kThreads>(row_word, col_bits, amax_row, amax_col, scratch);
}

}  // namespace

int launch_amax_nvfp4_boxed(const Input& x, uint32_t signs, const AmaxOut& amax_row, const AmaxOut& amax_col,
                            const float* noop, Lane lane) {
  using Config = NvAmaxBoxed;
  static_assert(Config::kBlocksPerSm + Taper::kSmallBlocksPerSm <= kMostAmaxBlocksPerSm, "room for their parts");
  if (!WarpBoxes::has_boxes(x)) return 0;
  const int64_t across = x.cols / WarpBoxes::kCols;
  const int64_t most = static_cast<int64_t>(multiprocessors()) * Config::kBlocksPerSm;
  const Taper work = Taper::of(x.rows / kBlock * across, Config::kWarps, most);
  const int blocks = work.blocks(Config::kWarps);
  constexpr int kBytes = WarpBoxes::bytes(Config::kWarps);
  check_cuda(cudaFuncSetAttribute(nvfp4_amax_boxed_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "shared memory for boxes");
  const CUtensorMap boxes = WarpBoxes::map(static_cast<const bf16_t*>(x.data), x.rows, x.cols, x.stride);
  nvfp4_amax_boxed_kernel<<<blocks, Config::kThreads, kBytes, stream_of(lane)>>>(
      boxes, static_cast<unsigned>(across), work, signs, amax_row, amax_col, noop);
  check_launch("nvfp4_amax_boxed_kernel");
  return blocks;
}

}  // namespace cuda
}  // namespace te_dist
