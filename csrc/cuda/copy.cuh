// Copies to shared memory that nobody waits for yet.
#pragma once

#include "common.cuh"

namespace te_dist {
namespace cuda {

// 16 bytes to shared memory, past L1; zeros where there is no source. (With a cache hint for L2, ptxas 13.0
// makes instructions of it that the GPU refuses.)
__device__ __forceinline__ void copy_async(uint4* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

// The same where there is one.
__device__ __forceinline__ void copy_async(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}

// Ends a group of the thread's copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all groups but the last kGroups are there.
template <int kGroups>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Until all of the thread's copies are there.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace cuda
}  // namespace te_dist
