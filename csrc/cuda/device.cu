// How many multiprocessors work is laid out for.
#include <atomic>

#include "common.cuh"

namespace te_dist {
namespace cuda {
namespace {

std::atomic<int> limit{0};

}  // namespace

void limit_multiprocessors(int most) {
  TED_CHECK(most >= 0, "a GPU is limited to a number of multiprocessors, or to 0 for all, got ", most);
  limit.store(most, std::memory_order_relaxed);
}

int multiprocessors() {
  const int there = device_attribute<cudaDevAttrMultiProcessorCount>();
  const int most = limit.load(std::memory_order_relaxed);
  return most == 0 ? there : static_cast<int>(smaller(most, there));
}

}  // namespace cuda
}  // namespace te_dist
