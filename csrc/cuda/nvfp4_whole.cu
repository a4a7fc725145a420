// NVFP4 of whole tiles in memory, of which there is a column plane: nvfp4_kernel.cuh is as fast for rows alone.
#include "nvfp4_whole.cuh"

namespace te_dist {
namespace cuda {

bool is_nvfp4_whole(const Input& x, const Nvfp4Options& options, const Planes& out) {
  return out.col_data != nullptr && is_whole<AsItIs>(x, options, out);
}

void launch_nvfp4_whole(const Input& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                        const NvParts& parts, Before before, const Planes& out, const float* noop, Lane lane) {
  launch_whole(x, as_it_is(x), options, amax_row, amax_col, parts, before, out, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
