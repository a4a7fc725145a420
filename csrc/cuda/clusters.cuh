// Clusters: blocks that run at the same time and see each other's shared memory. Hopper was the first to have them;
// kernels are compiled for older GPUs, too, which never start them (runs_hopper_code).
#pragma once

#include "boxes.cuh"
#include "common.cuh"

namespace te_dist {
namespace cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TED_IN_CLUSTERS_OF(blocks) __cluster_dims__(blocks, 1, 1)

// A barrier of all threads of a cluster, in two steps. What is written before the first one is seen behind the second.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The first step, where what was written to the block's own shared memory is all that others are to see. The one above
// waits until all that its thread has written lies in L2, and all that it has asked for is there.
__device__ __forceinline__ void cluster_arrive_with_shared() {
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  cluster_arrive();
#endif
}

__device__ __forceinline__ int cluster_member() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Where `here` lies in the shared memory of another block of the cluster.
__device__ __forceinline__ unsigned place_of_member(const void* here, int member) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(here)), "r"(member));
  return address;
}
__device__ __forceinline__ float2 load_of_member(const float2* here, int member) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(place_of_member(here, member)));
  return value;
}
// To where `here` lies there. Its bytes are among those that `arrival` expects there: who waits for it sees them.
__device__ __forceinline__ void send_to_member(float* here, int member, float value, Arrival* arrival) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   place_of_member(here, member)),
               "f"(value), "r"(place_of_member(arrival, member))
               : "memory");
}
__device__ __forceinline__ void send_to_member(float4* here, int member, const float4& value, Arrival* arrival) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   place_of_member(here, member)),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(place_of_member(arrival, member))
               : "memory");
}
#else
#define TED_IN_CLUSTERS_OF(blocks)
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_arrive_with_shared() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ int cluster_member() { return 0; }
__device__ __forceinline__ float2 load_of_member(const float2* here, int) { return *here; }
__device__ __forceinline__ void send_to_member(float* here, int, float value, Arrival*) { *here = value; }
__device__ __forceinline__ void send_to_member(float4* here, int, const float4& value, Arrival*) { *here = value; }
#endif

// How many clusters of a kernel run at once. 0: a part of a GPU may have no room for any.
template <typename Kernel>
int64_t resident_clusters(Kernel kernel, int blocks, int threads, int bytes) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  cudaLaunchAttribute size;
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim.x = static_cast<unsigned>(blocks);
  size.val.clusterDim.y = size.val.clusterDim.z = 1;
  config.attrs = &size;
  config.numAttrs = 1;
  int clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "clusters at once");
  return clusters;
}

}  // namespace cuda
}  // namespace te_dist
