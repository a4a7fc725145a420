// The entry points, once for every backend. bindings.cpp exposes each of them as te_dist._kernels.<backend>.<name>
// and te_dist/kernels is their only caller; te_dist/reference.py defines what each one must compute.
//
// Letters: M rows, K columns of the logical 2-D tensor. Row plane: along K. Column plane: along M.
// All pointers belong to the caller, who has checked sizes and contiguity; entry points check again what would
// make them read or write out of bounds, and throw std::invalid_argument.
// A null plane is not asked for. Scale buffers are written whole: their padding becomes zero.
// noop: null, or one float on the same device; a non-zero value leaves every output untouched.
#pragma once

#include <cstdint>

#include "numerics/activation.h"
#include "numerics/half.h"

namespace te_dist {

struct Input {
  const void* data;
  Float dtype;
  int64_t rows;    // M
  int64_t cols;    // K
  int64_t stride;  // elements from one row to the next, >= K
};

// What makes the matrix that a kernel consumes (te_dist/producers.py holds the same numbers).
enum class Produce : int { kPlain = 0, kNorm = 1, kActivation = 2, kActivationGrad = 3 };

// A vector along K of any float type; data null: none.
struct Vector {
  const void* data;
  Float dtype;
};

// A matrix [M, K], as it lies in memory or as a norm or an activation makes it of `data`. rows and cols are those of
// the made matrix, dtype is that of all its matrices, and stride is that of `data`. A gated activation reads its
// second factor K columns further; a gated activation's gradient is [M, 2H] made of `grad` [M, H].
// The GPU backend alone fuses, and check::fused says what (te_dist/kernels knows the same rules): the other
// kernels take plain sources, and `produce` makes the rest.
struct Source : Input {
  Produce kind = Produce::kPlain;
  Activation activation = Activation::kGelu;
  bool gated = false;
  bool zero_centered = false;      // a norm's gain is 1 + weight
  bool make_stats = false;         // mean and rstd are to be computed, else they are there
  float eps = 0.0f;
  const void* grad = nullptr;      // [M, K], or [M, K / 2] where gated
  int64_t grad_stride = 0;
  Vector weight{nullptr, Float::kF32};
  Vector bias{nullptr, Float::kF32};
  float* mean = nullptr;           // [M], null: RMSNorm
  float* rstd = nullptr;           // [M]
  float* partials = nullptr;       // null, or [ceil(M / 128), K]: column sums of the made matrix, per 128 rows
  void* written = nullptr;         // null, or [M, K]: where NVFP4's amax writes the matrix, for the cast
};

struct NormGrad {
  Input x;
  const void* grad;  // [M, K] of x's dtype
  int64_t grad_stride;
  Vector weight;
  bool zero_centered;
  const float* mean;  // null: RMSNorm
  const float* rstd;
};

struct Output {
  void* data;  // [M, K] contiguous
  Float dtype;
  int64_t rows;
  int64_t cols;
};

enum class Fp8 : int { kE4M3 = 0, kE5M2 = 1 };

// Row and column destination of a block format; data null: not asked for.
struct Planes {
  uint8_t* row_data;
  void* row_scale;
  uint8_t* col_data;
  void* col_scale;
};

struct Nvfp4Options {
  bool two_d;            // 16x16 scales instead of 1x16
  bool hadamard;         // transform the column plane
  uint32_t signs;        // kHadamardSigns or 0
  const int64_t* rng;    // null, or {seed, offset}: stochastic rounding
};

// lane: number of threads on the CPU, the stream handle on a GPU.
using Lane = int64_t;

// Floats that an amax is found in: on a GPU, many blocks each have one to write.
constexpr int kAmaxRoom = 1024;

#define TED_DECLARE_BACKEND(backend)                                                                             \
  namespace backend {                                                                                            \
  /* amax <- max|x|, or max(amax, max|x|) if accumulate; a NaN wins and is stored canonically. */                \
  void amax(const Source& x, float* amax, bool accumulate, const float* noop, Lane lane);                        \
  /* Cast with a given scale (delayed scaling). row [M,K], col [K,M]; scale_inv <- 1 / scale. */                 \
  /* amax: null, or raised to max|x| on the way. */                                                              \
  void cast_scaled(const Source& x, const float* scale, Fp8 format, uint8_t* row, uint8_t* col, float* scale_inv, \
                   float* amax, const float* noop, Lane lane);                                                   \
  /* Cast with the scale that an amax on the device asks for (current scaling). */                               \
  void cast_current(const Source& x, const float* amax, float eps, bool power_of_2, Fp8 format, uint8_t* row,    \
                    uint8_t* col, float* scale_inv, const float* noop, Lane lane);                               \
  /* amax and cast_current: most tensors need nothing in between. amax: [kAmaxRoom], the first is the result. */ \
  void quantize_current(const Source& x, float* amax, float eps, bool power_of_2, Fp8 format, uint8_t* row,      \
                        uint8_t* col, float* scale_inv, const float* noop, Lane lane);                           \
  /* row [M,K], col [K,M]; fp32 scales: 1-D [ceil(K/128), rup(M,4)], 2-D [ceil(M/128), rup(ceil(K/128),4)], */   \
  /* the column plane's with M and K swapped. */                                                                 \
  void quantize_block(const Source& x, int block_dim, float eps, bool power_of_2, Fp8 format, const Planes& out, \
                      const float* noop, Lane lane);                                                             \
  /* row and col [M,K] (not transposed); E8M0 scales [rup(M,128), rup(ceil(K/32),4)] and */                      \
  /* [rup(ceil(M/32),4), rup(K,128)]. */                                                                         \
  void quantize_mxfp8(const Source& x, bool two_d, Fp8 format, const Planes& out, const float* noop, Lane lane); \
  /* amax of the row path |x| and of the column path, |RHT(x^T)| with the transform, |x| without. */             \
  void amax_nvfp4(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,                \
                  const float* noop, Lane lane);                                                                 \
  /* row [M,K/2], col [K,M/2]; E4M3 scales [rup(M,128), rup(ceil(K/16),4)] and M, K swapped. */                  \
  void quantize_nvfp4(const Source& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col, \
                      const Planes& out, const float* noop, Lane lane);                                          \
  /* amax_nvfp4 and quantize_nvfp4. room: [3, kAmaxRoom], as it is. False: nothing was done; what is to be made */ \
  /* has to be written on the way. */                                                                             \
  bool quantize_nvfp4_current(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,    \
                              float* room, const Planes& out, const float* noop, Lane lane);                     \
  /* The dequantizers write [M,K]; columnwise says which plane `data` is. */                                     \
  void dequantize_tensor(const uint8_t* data, bool columnwise, Fp8 format, const float* scale_inv,               \
                         const Output& out, Lane lane);                                                          \
  void dequantize_block(const uint8_t* data, const float* scale, bool columnwise, int block_dim, Fp8 format,     \
                        const Output& out, Lane lane);                                                           \
  void dequantize_mxfp8(const uint8_t* data, const uint8_t* scale, bool columnwise, Fp8 format,                  \
                        const Output& out, Lane lane);                                                           \
  void dequantize_nvfp4(const uint8_t* data, const uint8_t* scale, const float* amax, bool columnwise,           \
                        const Nvfp4Options& options, const Output& out, Lane lane);                              \
  /* [rows, cols] bytes -> [cols, rows]; nibbles: [rows, cols/2] -> [cols, rows/2], rows and cols even. */       \
  void transpose_bytes(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane);                  \
  void transpose_nibbles(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane);                \
  /* [rows, cols] scale bytes into cuBLAS order; rows % 128 == 0, cols % 4 == 0. */                              \
  void swizzle_scales(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane);                   \
  /* out <- the source; out.data null: only its statistics and column sums. */                                   \
  void produce(const Source& x, const Output& out, Lane lane);                                                   \
  /* dx, and the partial column sums of grad * normalized x and of grad; either may be null. */                  \
  /* workspace: [2, M] floats, as they are. */                                                                   \
  void norm_backward(const NormGrad& from, const Output& dx, float* weight_partials, float* bias_partials,       \
                     float* workspace, Lane lane);                                                               \
  /* Delayed scaling's step: scales from history [length, count], which then rolls by -1 and starts a row of zeros. */ \
  void advance_scales(float* history, float* scales, const float* largest, int64_t length, int64_t count,        \
                      int margin, bool most_recent, Lane lane);                                                  \
  /* partials [tiles, K] -> out [1, K]. */                                                                       \
  void reduce_partials(const float* partials, int64_t tiles, const Output& out, Lane lane);                      \
  }

TED_DECLARE_BACKEND(cpu)
TED_DECLARE_BACKEND(cuda)
#undef TED_DECLARE_BACKEND

namespace cuda {

// Lays work out for a GPU of at most so many multiprocessors; 0: for all there are. For tests: blocks that stay on a
// multiprocessor then take many tiles of a small matrix. Returns how many that are.
int limit_multiprocessors(int64_t most);

}  // namespace cuda

}  // namespace te_dist
