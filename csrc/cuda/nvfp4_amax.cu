// NVFP4's two global amaxes, of the tensor and of its transformed columns. Reads every element once: bf16
// moves 2 bytes an element.
#include "nvfp4_amax.cuh"
#include "nvfp4_parts.cuh"
#include "taper.cuh"

namespace te_dist {
namespace cuda {
namespace {

// bf16 in patches of half the size: while threads work on their last ones, nothing is read.
template <typename T>
struct NvAmaxConfig {
  static constexpr int kThreads = sizeof(T) == 2 ? 256 : 320;
  static constexpr int kBlocksPerSm = sizeof(T) == 2 ? 3 : 2;
  using Patch = NvPatch<T, sizeof(T) == 2 ? 2 : 4>;
};

// Both global amaxes where the column path is transformed. A warp takes a patch a lane at a time, side by side.
template <typename T>
__global__ void __launch_bounds__(NvAmaxConfig<T>::kThreads, NvAmaxConfig<T>::kBlocksPerSm)
    nvfp4_amax_kernel(NvInput<T> x, unsigned across, Taper work, uint32_t signs, AmaxOut amax_row, AmaxOut amax_col,
                      ToBlank blank, const float* noop) {
  using Patch = typename NvAmaxConfig<T>::Patch;
  constexpr int kThreads = NvAmaxConfig<T>::kThreads;
  constexpr unsigned kWarps = kThreads / 32;
  __shared__ uint32_t scratch[kWarps];
  let_next_kernel_start();
  if (is_noop(noop)) return;
  if (blockIdx.x == 0u) blank.fill();
  uint32_t row_word = 0u;
  uint32_t col_bits = 0u;
  work.for_each<kWarps>([&](unsigned at) {
    const unsigned down = at / across;
    const int64_t column_of_patches = static_cast<int64_t>(at - down * across) * 32 + threadIdx.x % 32;
    Patch patch;
    load_nv_patch(x, static_cast<int64_t>(down) * kBlock, column_of_patches * Patch::kCols, patch);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) row_word = max_of_words<T>(patch.word[i], row_word);
    if (signs != kHadamardSigns) flip_rows(patch, signs ^ kHadamardSigns);
#pragma unroll
    for (int j = 0; j < Patch::kCols; ++j) {
      float v[kBlock];
      column_values(patch, j, v);
      flip_standard(v);
      col_bits = transformed_amax(v, col_bits);
    }
  });
  give_amaxes<T, kThreads>(row_word, col_bits, amax_row, amax_col, scratch);
}

}  // namespace

NvParts launch_amax_nvfp4(const Input& x, const Nvfp4Options& options, float* amax_row, float* amax_col, float* room,
                          const float* noop, Lane lane) {
  NvParts parts{};
  const bool has_room = room != nullptr && multiprocessors() * kMostAmaxBlocksPerSm <= kAmaxRoom;
  if (has_room) parts.tables = nv_tables(room);
  const AmaxOut row{amax_row, has_room ? room : nullptr};
  const AmaxOut col{amax_col, has_room ? room + kAmaxRoom : nullptr};
  if (!options.hadamard) {
    const AmaxOut& first = amax_row != nullptr ? row : col;
    parts.count = launch_amax(x, first, amax_row != nullptr ? amax_col : nullptr, false, noop, lane,
                              parts.to_blank());
    parts.row = parts.col = first.parts;
  } else {
    if (!has_room) launch_amax_reset(amax_row, amax_col, noop, lane);
    parts.row = row.parts;
    parts.col = col.parts;
    dispatch_nv_patch(x.dtype, [&](auto values) {
      using T = TypeOf<decltype(values)>;
      using Config = NvAmaxConfig<T>;
      static_assert(Config::kBlocksPerSm + Taper::kSmallBlocksPerSm <= kMostAmaxBlocksPerSm, "room for their parts");
      const int64_t across = ceil_div(x.cols, 32 * Config::Patch::kCols);
      constexpr int kWarps = Config::kThreads / 32;
      const int64_t most = static_cast<int64_t>(multiprocessors()) * Config::kBlocksPerSm;
      const Taper work = Taper::of(x.rows / kBlock * across, kWarps, most);
      const int blocks = work.blocks(kWarps);
      if (has_room) parts.count = blocks;
      launch("nvfp4_amax_kernel", nvfp4_amax_kernel<T>, blocks, Config::kThreads, lane, nv_input(values, x),
             static_cast<unsigned>(across), work, options.signs, row, col, parts.to_blank(), noop);
    });
  }
  parts.row_amax = amax_row;
  parts.col_amax = amax_col;
  return parts;
}

void amax_nvfp4(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                const float* noop, Lane lane) {
  const bool passes = x.written != nullptr || is_summed(x);
  if (!passes) check::plain(x);
  check::hadamard(options, x.rows);
  if (passes) return launch_amax_nvfp4_made(x, options, amax_row, amax_col, noop, lane);
  if (amax_row == nullptr && amax_col == nullptr) return;
  const bool empty = x.rows == 0 || x.cols == 0;
  if (empty && options.hadamard) return launch_amax_reset(amax_row, amax_col, noop, lane);
  launch_amax_nvfp4(x, options, amax_row, amax_col, nullptr, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
