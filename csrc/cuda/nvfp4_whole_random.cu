// NVFP4 of whole tiles in memory, rounded at random. Rows may be alone.
#include "nvfp4_whole.cuh"

namespace te_dist {
namespace cuda {

bool is_nvfp4_whole_random(const Input& x, const Nvfp4Options& options, const Planes& out) {
  return is_whole<AsItIs, Codes::kRandom>(x, options, out);
}

void launch_nvfp4_whole_random(const Input& x, const Nvfp4Options& options, const float* amax_row,
                               const float* amax_col, const NvParts& parts, Before before, const Planes& out,
                               const float* noop, Lane lane) {
  launch_whole<Codes::kRandom>(x, as_it_is(x), options, amax_row, amax_col, parts, before, out, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
