// What every kernel source shares: the variant's namespace, dispatch over element types, and threads.
//
// No standard library templates here: the linker keeps one copy of a template for all variants, and that copy
// may hold AVX-512 instructions. The unnamed namespace keeps even un-inlined helpers private to their source.
#pragma once

#include <cstddef>

#include "../numerics/fp8.h"
#include "variants.h"

#if !defined(TED_VARIANT)
#error "compile the CPU kernels with -DTED_VARIANT=baseline, avx2 or avx512"
#endif

#define TED_BEGIN_VARIANT \
  namespace te_dist {     \
  namespace cpu {         \
  namespace TED_VARIANT {
#define TED_END_VARIANT \
  }                     \
  }                     \
  }

TED_BEGIN_VARIANT

// So that kernels call each other within the variant, and definitions are checked against api.h.
decltype(cpu::amax) amax;
decltype(cpu::cast_scaled) cast_scaled;
decltype(cpu::cast_current) cast_current;
decltype(cpu::quantize_current) quantize_current;
decltype(cpu::quantize_block) quantize_block;
decltype(cpu::quantize_mxfp8) quantize_mxfp8;
decltype(cpu::amax_nvfp4) amax_nvfp4;
decltype(cpu::quantize_nvfp4) quantize_nvfp4;
decltype(cpu::quantize_nvfp4_current) quantize_nvfp4_current;
decltype(cpu::dequantize_tensor) dequantize_tensor;
decltype(cpu::dequantize_block) dequantize_block;
decltype(cpu::dequantize_mxfp8) dequantize_mxfp8;
decltype(cpu::dequantize_nvfp4) dequantize_nvfp4;
decltype(cpu::transpose_bytes) transpose_bytes;
decltype(cpu::transpose_nibbles) transpose_nibbles;
decltype(cpu::swizzle_scales) swizzle_scales;
decltype(cpu::produce) produce;
decltype(cpu::norm_backward) norm_backward;
decltype(cpu::reduce_partials) reduce_partials;
decltype(cpu::advance_scales) advance_scales;

namespace {

constexpr int64_t kLine = 64;  // bytes of a cache line

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Below this many elements a thread costs more than it saves.
constexpr int64_t kElementsPerThread = 32768;

inline int thread_count(int64_t elements, Lane lane) {
  const int64_t useful = elements / kElementsPerThread;
  const int64_t threads = smaller(lane, useful);
  return static_cast<int>(threads < 1 ? 1 : threads);
}

// Consecutive tasks stay on one thread, but a thread that is held up gets fewer of them.
inline int64_t chunk_size(int64_t tasks, int threads) { return tasks / (16 * threads) + 1; }

// body(task) for every task of [0, tasks), which together touch `elements` elements.
template <typename Body>
void for_each_task(int64_t tasks, int64_t elements, Lane lane, const Body& body) {
  const int threads = thread_count(elements, lane);
  if (threads == 1) {
    for (int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  const int64_t chunk = chunk_size(tasks, threads);
#pragma omp parallel for schedule(dynamic, chunk) num_threads(threads)
  for (int64_t task = 0; task < tasks; ++task) body(task);
}

struct Maxima {
  uint32_t row;
  uint32_t col;
};

TED_FN void raise(Maxima& maxima, Maxima found) {
  maxima.row = found.row > maxima.row ? found.row : maxima.row;
  maxima.col = found.col > maxima.col ? found.col : maxima.col;
}

// The maximum of body(task) over all tasks.
template <typename Body>
Maxima max_over_tasks(int64_t tasks, int64_t elements, Lane lane, const Body& body) {
  const int threads = thread_count(elements, lane);
  const int64_t chunk = chunk_size(tasks, threads);
  Maxima result{0, 0};
#pragma omp declare reduction(raise:Maxima : raise(omp_out, omp_in)) initializer(omp_priv = Maxima{0, 0})
#pragma omp parallel for schedule(dynamic, chunk) num_threads(threads) \
    reduction(raise : result) if (threads > 1)
  for (int64_t task = 0; task < tasks; ++task) raise(result, body(task));
  return result;
}

// A grid of tiles over rows x cols; body(row, col, height, width) per tile, tiles of one strip in order.
template <typename Body>
void for_each_tile(int64_t rows, int64_t cols, int64_t tile_rows, int64_t tile_cols, Lane lane,
                   const Body& body) {
  const int64_t across = ceil_div(cols, tile_cols);
  for_each_task(ceil_div(rows, tile_rows) * across, rows * cols, lane, [&](int64_t task) {
    const int64_t row = task / across * tile_rows;
    const int64_t col = task % across * tile_cols;
    body(row, col, smaller(tile_rows, rows - row), smaller(tile_cols, cols - col));
  });
}

// body(T{}) with the C++ type of a dtype code.
template <typename Body>
void with_float(Float dtype, const Body& body) {
  switch (dtype) {
    case Float::kF32:
      return body(float{});
    case Float::kF16:
      return body(fp16_t{});
    case Float::kBF16:
      return body(bf16_t{});
  }
}

template <typename Body>
void with_fp8(Fp8 format, const Body& body) {
  return format == Fp8::kE4M3 ? body(E4M3{}) : body(E5M2{});
}

template <typename Body>
void with_types(Float dtype, Fp8 format, const Body& body) {
  with_float(dtype, [&](auto element) { with_fp8(format, [&](auto fp8) { body(element, fp8); }); });
}

template <typename T>
const T* row_of(const Input& x, int64_t row) {
  return static_cast<const T*>(x.data) + row * x.stride;
}

// One long row where the rows lie end to end: elementwise kernels then need not know about rows.
inline Input flattened(const Input& x) {
  const bool contiguous = x.stride == x.cols || x.rows <= 1;
  return contiguous ? Input{x.data, x.dtype, 1, x.rows * x.cols, x.rows * x.cols} : x;
}

// A scale buffer of rows x cols of which used_rows x used_cols get written; the rest is padding, zero by
// definition.
inline void clear_padding(uint8_t* scale, int64_t rows, int64_t cols, int64_t used_rows, int64_t used_cols) {
  if (scale == nullptr || (rows == used_rows && cols == used_cols)) return;
  __builtin_memset(scale, 0, static_cast<size_t>(rows * cols));
}

inline bool skipped(const float* noop) { return noop != nullptr && *noop != 0.0f; }

}  // namespace
TED_END_VARIANT
