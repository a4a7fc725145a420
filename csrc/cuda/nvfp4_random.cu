// NVFP4 with stochastic rounding: its kernels are as many again, so they compile apart.
#include "nvfp4_kernel.cuh"

namespace te_dist {
namespace cuda {

void launch_nvfp4_random(const Input& x, const Nvfp4Options& options, const float* amax_row,
                         const float* amax_col, const Planes& out, const float* noop, Lane lane) {
  launch_nvfp4<true>(x, options, amax_row, amax_col, out, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
