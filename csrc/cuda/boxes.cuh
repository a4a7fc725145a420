// Boxes of a matrix to shared memory and back, each asked for by one thread and copied by an engine of its own, which
// Hopper was the first to have.
//
// Who needs a box waits for its Arrival. What threads have written to shared memory is seen by the engine after
// show_to_copies(), by those who wrote it.
#pragma once

#include <cuda.h>

#include "common.cuh"

namespace te_dist {
namespace cuda {

// ---------------------------------------------------------------------------------------------- host
// What boxes are cut out of: a matrix of bytes or bf16 values, as three dimensions, the innermost first, whose steps
// are any multiples of 16 bytes. In shared memory, boxes lie in this order. kSpread: bits 4 and 5 of the address there
// are XORed with bits 7 and 8 (of memory that is aligned to 512 bytes, for boxes 64 bytes wide).
enum class BoxPlaces { kPlain, kSpread };

struct BoxedMatrix {
  void* data;
  CUtensorMapDataType type;
  cuuint64_t size[3];
  cuuint64_t step[2];  // bytes, of the second and the third dimension
  cuuint32_t box[3];
  BoxPlaces places;
};

// For a kernel's parameter, which has to be a __grid_constant__.
CUtensorMap map_of(const BoxedMatrix& matrix);

// ---------------------------------------------------------------------------------------------- device
__device__ __forceinline__ unsigned shared_address(const void* of) {
  return static_cast<unsigned>(__cvta_generic_to_shared(of));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TED_BOX_COPIES(...) asm volatile(__VA_ARGS__)
#else
#define TED_BOX_COPIES(...) __trap()  // runs_hopper_code says no
#endif

// Of one or more boxes, or of bytes that other blocks of a cluster send (clusters.cuh). Then it is ready for the next
// ones.
struct Arrival {
  uint64_t state;

  // By the thread that expects them. Others use it after a barrier.
  __device__ __forceinline__ void init() {
    TED_BOX_COPIES("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(this)) : "memory");
    TED_BOX_COPIES("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Before they are asked for.
  __device__ __forceinline__ void expect(unsigned bytes) {
    TED_BOX_COPIES("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                   : "memory");
  }
  // turn: how often it was used before.
  __device__ __forceinline__ void wait(unsigned turn) const {
    unsigned there = 0u;
    do {
      TED_BOX_COPIES(
          "{\n\t.reg .pred there;\n\tmbarrier.try_wait.parity.shared::cta.b64 there, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, there;\n\t}"
          : "=r"(there)
          : "r"(shared_address(this)), "r"(turn % 2u)
          : "memory");
    } while (there == 0u);
  }
};

__device__ __forceinline__ void load_box(void* to, const CUtensorMap& from, int x, int y, int z, Arrival& arrival) {
  TED_BOX_COPIES(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared_address(to)),
      "l"(&from), "r"(x), "r"(y), "r"(z), "r"(shared_address(&arrival))
      : "memory");
}

// bytes: a multiple of 16, as both addresses are.
__device__ __forceinline__ void load_bytes(void* to, const void* from, unsigned bytes, Arrival& arrival) {
  TED_BOX_COPIES(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&arrival))
      : "memory");
}

__device__ __forceinline__ void show_to_copies() { TED_BOX_COPIES("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void store_box(const CUtensorMap& to, int x, int y, int z, const void* from) {
  TED_BOX_COPIES("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&to), "r"(x),
                 "r"(y), "r"(z), "r"(shared_address(from))
                 : "memory");
  TED_BOX_COPIES("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the boxes that this thread has stored are no longer read in shared memory, which has to be waited for before
// that is written to, or the block ends.
__device__ __forceinline__ void wait_for_stores() {
  TED_BOX_COPIES("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

#undef TED_BOX_COPIES

}  // namespace cuda
}  // namespace te_dist
