// How many multiprocessors work is laid out for, and what code the GPU runs.
#include <atomic>

#include "common.cuh"

namespace te_dist {
namespace cuda {
namespace {

std::atomic<int> limit{0};

// Never started: all kernels are compiled for the same GPUs, so that one tells of all.
__global__ void any_kernel() {}

bool has_hopper_code() {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, any_kernel), "cudaFuncGetAttributes");
  return attributes.ptxVersion >= 90;
}

}  // namespace

// Asked for at every launch, and remembered, as device_attribute does.
bool runs_hopper_code() {
  constexpr int kDevices = 64;
  enum Known : int8_t { kUnasked, kNo, kYes };
  static Known known[kDevices] = {};
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kDevices) return has_hopper_code();
  if (known[device] == kUnasked) known[device] = has_hopper_code() ? kYes : kNo;
  return known[device] == kYes;
}

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
