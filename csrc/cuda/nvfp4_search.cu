// What a search begins with.
#include "nvfp4_search.cuh"

namespace te_dist {
namespace cuda {
namespace {

constexpr unsigned kThreads = 256;

__global__ void search_reset_kernel(SearchState* state, unsigned blocks, const float* noop) {
  let_next_kernel_start();
  if (is_noop(noop)) return;
  if (threadIdx.x == 0u) {
    state->row = state->col = 0.0f;
    state->done = state->tickets = state->claims = 0u;
  }
  for (unsigned i = threadIdx.x; i < blocks; i += kThreads) state->claimed[i] = 0u;
}

}  // namespace

void launch_search_reset(float* room, unsigned blocks, const float* noop, Lane lane) {
  launch("search_reset_kernel", search_reset_kernel, 1, kThreads, lane, reinterpret_cast<SearchState*>(room), blocks,
         noop);
}

}  // namespace cuda
}  // namespace te_dist
