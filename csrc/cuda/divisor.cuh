// Division of numbers below 2^31 by one that the host knows: a product and a shift instead of twenty instructions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace te_dist {
namespace cuda {

// With 2^(bits - 1) < value <= 2^bits, factor = 2^(31 + bits) / value, rounded up, is too large by less than
// 2^bits / value, which numbers below 2^31 do not notice.
struct Divisor {
  uint32_t factor;
  uint32_t bits;

  static Divisor by(uint32_t value) {  // not 0
    uint32_t bits = 0u;
    while ((uint64_t{1} << bits) < value) ++bits;
    return Divisor{static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + value - 1) / value), bits};
  }
  __device__ __forceinline__ uint32_t quotient(uint32_t number) const {
    return __umulhi(2u * number, factor) >> bits;
  }
};

}  // namespace cuda
}  // namespace te_dist
