// NVFP4's two global amaxes, of the tensor and of its transformed columns. Reads every element once: bf16
// moves 2 bytes an element.
#include "amax.cuh"
#include "nvfp4_kernel.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct NvAmaxConfig {
  static constexpr int kThreads = 320;  // few blocks, few parts
  static constexpr int kBlocksPerSm = 2;
};

// max|transform| of column j before the product with 0.25 and the rounding to bf16, which keep the order of
// magnitudes. The last stage's a + b and a - b: the larger magnitude of the two is |a| + |b|.
template <typename T>
__device__ __forceinline__ uint32_t transformed_amax(const NvPatch<T>& patch, int j, uint32_t largest) {
  float v[kBlock];
  column_values<T>(patch, j, v);
  flip_standard(v);
  butterfly_stage<1>(v);
  butterfly_stage<2>(v);
  butterfly_stage<4>(v);
  uint32_t sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum[i] = bits_of(fabsf(v[i]) + fabsf(v[i + 8]));
  }
#pragma unroll
  for (int i = 0; i < 8; i += 2) largest = __vimax3_u32(largest, sum[i], sum[i + 1]);
  // Two infinities: one of their sum and their difference is NaN.
  if (largest == kInfBits) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (bits_of(v[i] + v[i + 8]) << 1 > kInfBits << 1 || bits_of(v[i] - v[i + 8]) << 1 > kInfBits << 1)
        largest = kNanBits;
    }
  }
  return largest;
}

// Both global amaxes where the column path is transformed. A warp takes 16 rows x 512 bytes at a time.
template <typename T>
__global__ void __launch_bounds__(NvAmaxConfig::kThreads, NvAmaxConfig::kBlocksPerSm)
    nvfp4_amax_kernel(NvInput<T> x, unsigned across, unsigned items, uint32_t signs, AmaxOut amax_row,
                      AmaxOut amax_col, const float* noop) {
  constexpr int kWarps = NvAmaxConfig::kThreads / 32;
  __shared__ uint32_t scratch[kWarps];
  let_next_kernel_start();
  if (is_noop(noop)) return;
  uint32_t row_word = 0u;
  uint32_t col_bits = 0u;
  for (unsigned at = blockIdx.x * kWarps + threadIdx.x / 32; at < items; at += gridDim.x * kWarps) {
    const unsigned down = at / across;
    const int64_t column_of_patches = static_cast<int64_t>(at - down * across) * 32 + threadIdx.x % 32;
    NvPatch<T> patch;
    load_nv_patch(x, static_cast<int64_t>(down) * kBlock, column_of_patches * NvPatch<T>::kCols, patch);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) row_word = max_of_words<T>(patch.word[i], row_word);
    if (signs != kHadamardSigns) flip_rows(patch, signs ^ kHadamardSigns);
#pragma unroll
    for (int j = 0; j < NvPatch<T>::kCols; ++j) col_bits = transformed_amax<T>(patch, j, col_bits);
  }
  const uint32_t row_raw = block_max<NvAmaxConfig::kThreads>(Words<T>::fold(row_word), scratch);
  __syncthreads();
  const uint32_t col_raw = block_max<NvAmaxConfig::kThreads>(col_bits, scratch);
  if (threadIdx.x != 0) return;
  if (amax_row.amax != nullptr) give_amax(amax_row, Words<T>::to_float_of_raw(row_raw));
  if (amax_col.amax != nullptr) give_amax(amax_col, to_float(to_bf16(float_of(col_raw) * 0.25f)));
}

}  // namespace

NvParts launch_amax_nvfp4(const Input& x, const Nvfp4Options& options, float* amax_row, float* amax_col, float* room,
                          const float* noop, Lane lane) {
  static_assert(NvAmaxConfig::kBlocksPerSm <= kMostAmaxBlocksPerSm, "room for their parts");
  NvParts parts{};
  const bool has_room = room != nullptr && multiprocessors() * kMostAmaxBlocksPerSm <= kAmaxRoom;
  const AmaxOut row{amax_row, has_room ? room : nullptr};
  const AmaxOut col{amax_col, has_room ? room + kAmaxRoom : nullptr};
  if (!options.hadamard) {
    const AmaxOut& first = amax_row != nullptr ? row : col;
    parts.count = launch_amax(x, first, amax_row != nullptr ? amax_col : nullptr, false, noop, lane);
    parts.row = parts.col = first.parts;
  } else {
    if (!has_room) launch_amax_reset(amax_row, amax_col, noop, lane);
    parts.row = row.parts;
    parts.col = col.parts;
    dispatch_nv_patch(x.dtype, [&](auto values) {
      using T = TypeOf<decltype(values)>;
      const int64_t across = ceil_div(x.cols, 32 * NvPatch<T>::kCols);
      const int64_t items = grid_size(x.rows / kBlock * across);
      const int64_t most = static_cast<int64_t>(multiprocessors()) * NvAmaxConfig::kBlocksPerSm;
      const int blocks = grid_size(smaller(ceil_div(items, NvAmaxConfig::kThreads / 32), most));
      if (has_room) parts.count = blocks;
      launch("nvfp4_amax_kernel", nvfp4_amax_kernel<T>, blocks, NvAmaxConfig::kThreads, lane, nv_input(values, x),
             static_cast<unsigned>(across), static_cast<unsigned>(items), options.signs, row, col, noop);
    });
  }
  parts.row_amax = amax_row;
  parts.col_amax = amax_col;
  return parts;
}

void amax_nvfp4(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                const float* noop, Lane lane) {
  check::plain(x);
  check::hadamard(options, x.rows);
  if (amax_row == nullptr && amax_col == nullptr) return;
  const bool empty = x.rows == 0 || x.cols == 0;
  if (empty && options.hadamard) return launch_amax_reset(amax_row, amax_col, noop, lane);
  launch_amax_nvfp4(x, options, amax_row, amax_col, nullptr, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
