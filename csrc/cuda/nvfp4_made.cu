// NVFP4's two global amaxes of a bf16 matrix that is made on the fly, and written on the way, for the cast. That has
// few instructions to spare for making it once more, and two operands are as much to read as the result to write and
// read. What is not written: see nvfp4_unwritten.cuh. Or the amaxes of a matrix in memory, whose columns are added up
// on the way.
#include "made_store.cuh"
#include "nvfp4_amax.cuh"
#include "patch_source.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct NvMadeOut {
  bf16_t* written;
  AmaxOut amax_row;
  AmaxOut amax_col;
  bool hadamard;
  uint32_t signs;
  const float* noop;
};

// Of the patches that a thread has met.
class NvMaxima {
 public:
  __device__ __forceinline__ explicit NvMaxima(const NvMadeOut& out)
      : hadamard_(out.hadamard), columns_(out.hadamard ? out.amax_col.amax : nullptr) {
    signs_ = out.signs >> (is_lower() ? 8 : 0);
  }

  __device__ __forceinline__ void add(const Patch<bf16_t>& patch) {
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) row_word_ = max_of_words<bf16_t>(patch.word[i], row_word_);
    if (hadamard_) add_transformed(patch);
  }

  __device__ __forceinline__ void give(const NvMadeOut& out) const {
    __shared__ uint32_t scratch[TileConfig::kThreads / 32];
    if (hadamard_) return give_row_amax<bf16_t, TileConfig::kThreads>(row_word_, out.amax_row, scratch);
    const uint32_t raw = block_max<TileConfig::kThreads>(Words<bf16_t>::fold(row_word_), scratch);
    if (threadIdx.x != 0) return;
    const float amax = Words<bf16_t>::to_float_of_raw(raw);  // of both
    if (out.amax_row.amax != nullptr) give_amax(out.amax_row, amax);
    if (out.amax_col.amax != nullptr) give_amax(out.amax_col, amax);
  }

 private:
  static __device__ __forceinline__ bool is_lower() { return (threadIdx.x & 16u) != 0u; }

  // 16 rows are those of two lanes, 16 apart.
  __device__ __forceinline__ void add_transformed(const Patch<bf16_t>& patch) {
    columns_.ask();
    uint32_t largest = 0u;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t mine = sum_of_magnitudes<TileConfig::kPatch>([&](int i) { return patch.word[i][w]; });
      largest = Words<bf16_t>::max(largest, add_bf16(mine, __shfl_xor_sync(kFullWarp, mine, 16)));
    }
    if (columns_.may_rise(largest)) columns_.raise(transformed(patch));
  }

  // Each takes four of their eight columns. Whose rows are whose makes no difference to transformed_amax, once their
  // signs are right.
  __device__ __forceinline__ uint32_t transformed(const Patch<bf16_t>& patch) const {
    NvPatch<bf16_t, 2> columns;
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) {
      const uint32_t flip = ((signs_ >> i) & 1u) != 0u ? 0x80008000u : 0u;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const uint32_t left = patch.word[i][w] ^ flip;
        const uint32_t right = patch.word[i][w + 2] ^ flip;
        columns.word[i][w] = is_lower() ? right : left;
        columns.word[i + 8][w] = __shfl_xor_sync(kFullWarp, is_lower() ? left : right, 16);
      }
    }
    uint32_t largest = 0u;
#pragma unroll
    for (int j = 0; j < NvPatch<bf16_t, 2>::kCols; ++j) {
      float v[kBlock];
      column_values(columns, j, v);
      largest = transformed_amax(v, largest);
    }
    return largest;
  }

  uint32_t row_word_ = 0u;
  uint32_t signs_;  // of this thread's rows
  bool hadamard_;
  ColumnAmax columns_;
};

template <Way kWay>
__global__ void __launch_bounds__(PatchConfig::kThreads, WayConfig<kWay>::kBlocksPerSm)
    nvfp4_amax_patches_kernel(const __grid_constant__ Made x, const __grid_constant__ NvMadeOut out) {
  extern __shared__ __align__(16) float memory[];
  let_next_kernel_start();
  if (is_noop(out.noop)) return;
  NvMaxima maxima(out);
  const auto take = [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool) {
    store_patch(x, patch, tile, out.written);
    maxima.add(patch);
  };
  for_each_patch<kWay, SquareTile>(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, memory, take, false);
  maxima.give(out);
}

__global__ void __launch_bounds__(MadeConfig::kThreads, MadeConfig::kBlocksPerSm)
    nvfp4_amax_made_kernel(const __grid_constant__ Made x, const __grid_constant__ NvMadeOut out) {
  extern __shared__ uint4 rings[];
  let_next_kernel_start();
  if (is_noop(out.noop)) return;
  NvMaxima maxima(out);
  for_each_made_tile(x, false, threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, false, rings,
                     [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool) {
                       store_patch(x, patch, tile, out.written);
                       maxima.add(patch);
                     });
  maxima.give(out);
}

}  // namespace

void launch_amax_nvfp4_made(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                            const float* noop, Lane lane) {
  check::fused(x);
  if (!is_summed(x)) check::required("the made matrix", x.written, 16);
  launch_amax_reset(amax_row, amax_col, noop, lane);
  const Made made = made_of(x, true);
  bf16_t* const written = is_summed(x) ? nullptr : static_cast<bf16_t*>(x.written);
  const NvMadeOut out{written, AmaxOut{amax_row, nullptr}, AmaxOut{amax_col, nullptr},
                      options.hadamard && amax_col != nullptr, options.signs, noop};
  const auto start = [&](auto way, auto) {
    constexpr Way kWay = decltype(way)::value;
    launch_way<kWay>("nvfp4_amax_patches_kernel", nvfp4_amax_patches_kernel<kWay>, 0, made, noop, lane, out);
  };
  // Any format: bf16 is written.
  const bool started = start_way<Way::kNorm, Way::kWholeNorm, Way::kActivation, Way::kGated, Way::kSlope, Way::kPaired,
                                 Way::kBiased, Way::kBiasedSlope>(way_of(made, true), Fp8::kE4M3, start);
  if (started) return;
  launch_made("nvfp4_amax_made_kernel", nvfp4_amax_made_kernel, made, lane, out);
}

}  // namespace cuda
}  // namespace te_dist
