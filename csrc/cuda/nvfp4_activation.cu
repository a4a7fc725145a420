// NVFP4's row plane of an activation without a gate, whose sigmoids, if any, come from a table: on GPUs that have no
// faster ones (nvfp4_whole_activation.cu). Its amax is found at the price of reading the operand (amax_activation.cu,
// amax_biased.cu), so that it is made once, here, and never written.
#include "amax.cuh"
#include "nvfp4_four_rows.cuh"
#include "nvfp4_unwritten.cuh"
#include "patch_source.cuh"

namespace te_dist {
namespace cuda {
namespace {

template <Way kWay>
__global__ void __launch_bounds__(PatchConfig::kThreads, WayConfig<kWay>::kBlocksPerSm)
    nvfp4_activation_kernel(const __grid_constant__ Made x, NvPlane plane, NvParts parts, const float* noop) {
  constexpr int kTile = TileConfig::kTile;
  extern __shared__ __align__(16) float memory[];
  __shared__ PlaneScales scales;
  __shared__ alignas(8) uint8_t of_blocks[kTile][NvTile<bf16_t>::kRowScales];
  if (is_noop(noop)) return;
  const int line = static_cast<int>(threadIdx.x);
  const int patch_row = line / 16 * TileConfig::kPatch;
  const int patch_col = line % 16 * TileConfig::kPatch;
  if (line < 32) {  // a barrier follows, behind which tiles begin
    const float amax = amax_of_parts(parts.row, parts.count);
    if (blockIdx.x == 0u && line == 0) *parts.row_amax = amax;
    scales.fill(amax, false);
  }
  const auto quantize = [&](const Patch<bf16_t>& patch, const TilePlace& tile, bool) {
    const HeldScales held(scales);
    uint8_t* to = plane.data.data + (tile.row + patch_row) * plane.data.cols + (tile.col + patch_col) / 2;
    with_raises<false>(scales, [&](auto raised) {
#pragma unroll
      for (int first = 0; first < TileConfig::kPatch; first += FourRows::kRows) {
        FourRows rows;
#pragma unroll
        for (int i = 0; i < FourRows::kRows; ++i) {
#pragma unroll
          for (int w = 0; w < 4; ++w) rows.word[i][w] = patch.word[first + i][w];
        }
        const auto none = [](bool) {};
        uint8_t* const there = to + first * plane.data.cols;
        const ScalesOfFour of(rows, held);
        of.write(&of_blocks[patch_row + first + line % 2 * 2][line % 16 / 2]);
        // Looked at first: if they were after easy codes are written, all rows would stay in registers until then.
        if (__all_sync(kFullWarp, of.are_easy())) {
          write_four_rows<false, raised.value>(rows, of, there, plane.data.cols, none);
        } else {
          write_four_hard_rows<false>(rows, of, scales.global, there, plane.data.cols, none);
        }
      }
    });
    __syncthreads();
    if (line < kTile) {
      store_scales(scales_of(plane, tile.row + line, tile.col / kBlock),
                   *reinterpret_cast<const uint2*>(of_blocks[line]));
    }
  };
  // The operand's end is what L2 may still hold.
  for_each_patch<kWay, SquareTile>(x, true, patch_row, patch_col, memory, quantize);
}

}  // namespace

bool is_nvfp4_activation(const Source& x, const Nvfp4Options& options, const Planes& out) {
  if (!goes_up_and_down(x) || x.partials != nullptr || out.col_data != nullptr || options.two_d ||
      options.rng != nullptr || !aligned(out.row_scale, 8)) {
    return false;
  }
  const Way way = way_of(made_of(x, false), nv_row_plane<bf16_t>(x, out, nullptr).data.is_whole());
  return way == Way::kActivation || way == Way::kRectified || way == Way::kBiased;
}

void launch_nvfp4_activation(const Made& x, const NvParts& parts, const Planes& out, const float* noop, Lane lane) {
  const Input like{x.data, Float::kBF16, x.rows, x.cols, x.stride};
  const auto start = [&](auto way) {
    constexpr Way kWay = decltype(way)::value;
    launch_way<kWay>("nvfp4_activation_kernel", nvfp4_activation_kernel<kWay>, 0, x, noop, lane,
                     nv_row_plane<bf16_t>(like, out, nullptr), parts, noop);
  };
  if (x.biased) return start(WayTag<Way::kBiasedStreamed>{});
  is_rectifier(x.activation) ? start(WayTag<Way::kRectified>{}) : start(WayTag<Way::kStreamed>{});
}

}  // namespace cuda
}  // namespace te_dist
