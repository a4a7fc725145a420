// How many multiprocessors work is laid out for.
#include <atomic>

#include "common.cuh"

namespace te_dist {
namespace cuda {
namespace {

std::atomic<int> limit{0};

}  // namespace

int limit_multiprocessors(int64_t most) {
  TED_CHECK(most >= 0 && most <= 0x7FFFFFFF, "a GPU is limited to a number of multiprocessors, or to 0 for all, got ",
            most);
  limit.store(static_cast<int>(most), std::memory_order_relaxed);
  return multiprocessors();
}

int multiprocessors() {
  const int there = device_attribute<cudaDevAttrMultiProcessorCount>();
  const int most = limit.load(std::memory_order_relaxed);
  return most == 0 ? there : static_cast<int>(smaller(most, there));
}

}  // namespace cuda
}  // namespace te_dist
