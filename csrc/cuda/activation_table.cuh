// The sigmoids inside of SiLU, GELU and quick-GELU from a table in shared memory.
//
// Their argument is a bf16 value, and there are few of these: outside of a range of magnitudes the sigmoid is 1/2, 1 or
// 0, inside lie 16 binades. A look-up takes a third of the instructions of the arithmetic, and no branch tells the
// activations apart. Blocks fill their tables themselves, so that the numbers are those of the arithmetic, and keep
// them for many tiles.
#pragma once

#include "../numerics/activation.h"
#include "common.cuh"

namespace te_dist {
namespace cuda {

// kExact: what is looked up equals the sigmoid. Otherwise bf16(x * what is looked up) equals bf16(act(x)), from
// a shorter table. tests/test_producers.py runs through all bf16 values.
template <bool kExact>
struct SigmoidTable {
  static constexpr uint32_t kLow = kExact ? 0x3300u : 0x3B00u;  // magnitude bits up to which it is 1/2
  static constexpr uint32_t kHigh = 0x42B0u;                    // and from which on 1 or 0
  static constexpr int kSide = static_cast<int>(kHigh - kLow + 1u);
  static constexpr int kBytes = 2 * kSide * static_cast<int>(sizeof(float));

  // Negative arguments lie in front of `middle`, larger magnitudes further away, the others behind.
  const float* middle;
  uint32_t minus_low;  // twice; opaque, or the compiler makes it anew for each look-up

  // All threads; a barrier has to follow.
  static __device__ __forceinline__ SigmoidTable fill(float* memory, Activation kind) {
    for (int at = static_cast<int>(threadIdx.x); at < 2 * kSide; at += static_cast<int>(blockDim.x)) {
      const bool negative = at < kSide;
      const uint32_t distance = static_cast<uint32_t>(negative ? kSide - 1 - at : at - kSide);
      const float x = to_float(bf16_t{static_cast<uint16_t>((negative ? 0x8000u : 0u) | (kLow + distance))});
      const float sigma = distance == 0u ? 0.5f : sigmoid(sigmoid_exponent(kind, x));
      memory[at] = sigma;
    }
    SigmoidTable table{memory + kSide, 0u};
    asm volatile("mov.b32 %0, %1;" : "=r"(table.minus_low) : "n"((0x10000u - kLow) * 0x10001u));
    return table;
  }

  // Of the two values in a word of bf16.
  __device__ __forceinline__ float2 look_up(uint32_t word) const {
    constexpr uint32_t kMost = (kHigh - kLow) * 0x10001u;
    const uint32_t distance = __viaddmin_s16x2_relu(word & 0x7FFF7FFFu, minus_low, kMost);
    uint32_t signs;  // 0xFFFF in each half that is negative
    asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(signs) : "r"(word));
    // Both halves in bytes, and 4 times -1 - distance where negative.
    const int offset = static_cast<int>((distance << 2) ^ (signs & 0xFFFCFFFCu));
    return make_float2(at(static_cast<int16_t>(offset)), at(offset >> 16));
  }

 private:
  __device__ __forceinline__ float at(int bytes) const {
    return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(middle) + bytes);
  }
};

// In the place of a table: these need none.
struct Rectifier {
  static constexpr int kBytes = 0;
  bool squares;

  static __device__ __forceinline__ Rectifier fill(float*, Activation kind) {
    return Rectifier{kind == Activation::kSquaredRelu};
  }
  __device__ __forceinline__ float of(float x) const {
    return squares ? activate<Activation::kSquaredRelu>(x).value : activate<Activation::kRelu>(x).value;
  }
};

}  // namespace cuda
}  // namespace te_dist
