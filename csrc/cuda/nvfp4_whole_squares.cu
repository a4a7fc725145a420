// NVFP4 of whole tiles in memory with scales of 16 x 16 blocks, of which there is a column plane.
#include "nvfp4_whole.cuh"

namespace te_dist {
namespace cuda {

bool is_nvfp4_whole_squares(const Input& x, const Nvfp4Options& options, const Planes& out) {
  return out.col_data != nullptr && is_whole<AsItIs, Codes::kSquares>(x, options, out);
}

void launch_nvfp4_whole_squares(const Input& x, const Nvfp4Options& options, const float* amax_row,
                                const float* amax_col, const NvParts& parts, Before before, const Planes& out,
                                const float* noop, Lane lane) {
  launch_whole<Codes::kSquares>(x, as_it_is(x), options, amax_row, amax_col, parts, before, out, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
