// A matrix that a norm, an activation or an activation's gradient makes on the fly, as the device sees it.
#pragma once

#include "bands.cuh"
#include "row.cuh"

namespace te_dist {
namespace cuda {

// Around the middle between two bf16 values: where activation_guarded.cuh's approximations may round otherwise than
// what they stand for.
struct RoundingGuard {
  uint32_t shift;  // what lies behind the bits of two bf16 values in floats, plus this: distances from its beginning
  uint32_t width;  // of the upper one

  __device__ __forceinline__ bool has(uint32_t distances) const { return distances << 16 < width || distances < width; }
};

// A Source as the device sees it; cols are those of one tile row, H for a gated gradient.
struct Made {
  Produce kind;
  Activation activation;
  bool gated;
  bool zero_centered;
  bool centered;
  bool biased;
  float eps;
  int64_t rows;
  int64_t cols;
  int64_t pitch;  // columns of the made matrix
  const bf16_t* data;
  int64_t stride;
  const bf16_t* grad;
  int64_t grad_stride;
  RowView weight;
  RowView bias;  // of the first operand
  RowView second_bias;
  RoundingGuard guard;
  float* mean;
  float* rstd;
  float* partials;
  Bands order;
  unsigned pieces;  // of work: tiles, or what `order` numbers

  __host__ __device__ bool activated() const {
    return kind == Produce::kActivation || kind == Produce::kActivationGrad;
  }
  // It consists of whole tiles.
  bool is_whole() const { return rows % 128 == 0 && cols % 128 == 0; }
  __host__ __device__ bool paired() const { return kind == Produce::kActivationGrad && gated; }
};

// Checks what fusion needs. with_stats: the kernel makes a norm's statistics where they are missing.
Made made_of(const Source& x, bool with_stats);

}  // namespace cuda
}  // namespace te_dist
