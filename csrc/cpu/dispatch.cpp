// The CPU backend's entry points: check the arguments, then run the variant that suits this machine.
#include <cstdlib>
#include <cstring>

#include "../check.h"
#include "variants.h"

namespace te_dist {
namespace cpu {
namespace {

// Best first. The compiler's runtime also asks the operating system whether it saves the wide registers.
int supported_variants(const KernelTable** found) {
  int count = 0;
#if defined(TED_X86_VARIANTS)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    found[count++] = &avx512::table;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found[count++] = &avx2::table;
#endif
  found[count++] = &baseline::table;
  return count;
}

// TE_DIST_CPU_VARIANT names one, so that tests can run all that a machine supports.
const KernelTable& choose() {
  const KernelTable* found[3];
  const int count = supported_variants(found);
  const char* wanted = std::getenv("TE_DIST_CPU_VARIANT");
  if (wanted == nullptr || *wanted == '\0') return *found[0];
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(found[i]->name, wanted) == 0) return *found[i];
  }
  check::fail("TE_DIST_CPU_VARIANT", {"this machine or build has no CPU variant '", wanted,
              "'; the best one is '", found[0]->name, "'"});
}

bool is_empty(const Input& x) { return x.rows == 0 || x.cols == 0; }

void check_noop(const float* noop) { check::aligned("noop", noop, alignof(float)); }

// What a plane is read from; an empty one may be null.
void check_source(const Output& out, const void* data, const void* scale, std::uintptr_t scale_bytes) {
  check::output(out);
  if (out.rows == 0 || out.cols == 0) return;
  check::required("the data", data);
  check::required("the scale", scale, scale_bytes);
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& chosen = choose();
  return chosen;
}

void amax(const Source& x, float* amax, bool accumulate, const float* noop, Lane lane) {
  check::plain(x);
  check_noop(noop);
  check::required("amax", amax, alignof(float));
  kernels().amax(x, amax, accumulate, noop, lane);
}

void cast_scaled(const Source& x, const float* scale, Fp8 format, uint8_t* row, uint8_t* col, float* scale_inv,
                 float* amax, const float* noop, Lane lane) {
  check::plain(x);
  check::fp8(format);
  check_noop(noop);
  check::required("scale", scale, alignof(float));
  check::aligned("scale_inv", scale_inv, alignof(float));
  check::aligned("amax", amax, alignof(float));
  kernels().cast_scaled(x, scale, format, row, col, scale_inv, amax, noop, lane);
}

void cast_current(const Source& x, const float* amax, float eps, bool power_of_2, Fp8 format, uint8_t* row,
                  uint8_t* col, float* scale_inv, const float* noop, Lane lane) {
  check::plain(x);
  check::fp8(format);
  check_noop(noop);
  check::required("amax", amax, alignof(float));
  check::aligned("scale_inv", scale_inv, alignof(float));
  kernels().cast_current(x, amax, eps, power_of_2, format, row, col, scale_inv, noop, lane);
}

void quantize_current(const Source& x, float* amax, float eps, bool power_of_2, Fp8 format, uint8_t* row,
                      uint8_t* col, float* scale_inv, const float* noop, Lane lane) {
  check::plain(x);
  check::fp8(format);
  check_noop(noop);
  check::required("amax", amax, alignof(float));
  check::aligned("scale_inv", scale_inv, alignof(float));
  kernels().quantize_current(x, amax, eps, power_of_2, format, row, col, scale_inv, noop, lane);
}

void quantize_block(const Source& x, int block_dim, float eps, bool power_of_2, Fp8 format, const Planes& out,
                    const float* noop, Lane lane) {
  check::plain(x);
  check::fp8(format);
  check_noop(noop);
  check::block_dim(block_dim);
  check::planes(out, alignof(float), is_empty(x));
  if (!is_empty(x)) kernels().quantize_block(x, block_dim, eps, power_of_2, format, out, noop, lane);
}

void quantize_mxfp8(const Source& x, bool two_d, Fp8 format, const Planes& out, const float* noop, Lane lane) {
  check::plain(x);
  check::fp8(format);
  check_noop(noop);
  check::planes(out, 1, is_empty(x));
  if (!is_empty(x)) kernels().quantize_mxfp8(x, two_d, format, out, noop, lane);
}

void amax_nvfp4(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                const float* noop, Lane lane) {
  check::plain(x);
  check_noop(noop);
  check::aligned("amax_row", amax_row, alignof(float));
  check::aligned("amax_col", amax_col, alignof(float));
  if (amax_col != nullptr) check::hadamard(options, x.rows);
  kernels().amax_nvfp4(x, options, amax_row, amax_col, noop, lane);
}

namespace {

// Whether there is anything to do.
bool check_nvfp4(const Source& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                 const Planes& out, const float* noop) {
  check::plain(x);
  check_noop(noop);
  check::planes(out, 1, is_empty(x));
  check::aligned("rng", options.rng, alignof(int64_t));
  if (is_empty(x)) return false;
  if (out.row_data != nullptr) {
    check::required("amax_row", amax_row, alignof(float));
    check::nibbles("columns", x.cols);
  }
  if (out.col_data != nullptr) {
    check::required("amax_col", amax_col, alignof(float));
    check::nibbles("rows", x.rows);
    check::hadamard(options, x.rows);
  }
  return true;
}

}  // namespace

void quantize_nvfp4(const Source& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                    const Planes& out, const float* noop, Lane lane) {
  if (!check_nvfp4(x, options, amax_row, amax_col, out, noop)) return;
  kernels().quantize_nvfp4(x, options, amax_row, amax_col, out, noop, lane);
}

bool quantize_nvfp4_current(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                            float* room, const Planes& out, const float* noop, Lane lane) {
  if (!check_nvfp4(x, options, amax_row, amax_col, out, noop)) {
    amax_nvfp4(x, options, amax_row, amax_col, noop, lane);
    return true;
  }
  return kernels().quantize_nvfp4_current(x, options, amax_row, amax_col, room, out, noop, lane);
}

void dequantize_tensor(const uint8_t* data, bool columnwise, Fp8 format, const float* scale_inv,
                       const Output& out, Lane lane) {
  check_source(out, data, scale_inv, alignof(float));
  check::fp8(format);
  check::required("scale_inv", scale_inv, alignof(float));
  kernels().dequantize_tensor(data, columnwise, format, scale_inv, out, lane);
}

void dequantize_block(const uint8_t* data, const float* scale, bool columnwise, int block_dim, Fp8 format,
                      const Output& out, Lane lane) {
  check_source(out, data, scale, alignof(float));
  check::fp8(format);
  check::block_dim(block_dim);
  kernels().dequantize_block(data, scale, columnwise, block_dim, format, out, lane);
}

void dequantize_mxfp8(const uint8_t* data, const uint8_t* scale, bool columnwise, Fp8 format,
                      const Output& out, Lane lane) {
  check_source(out, data, scale, 1);
  check::fp8(format);
  kernels().dequantize_mxfp8(data, scale, columnwise, format, out, lane);
}

void dequantize_nvfp4(const uint8_t* data, const uint8_t* scale, const float* amax, bool columnwise,
                      const Nvfp4Options& options, const Output& out, Lane lane) {
  check_source(out, data, scale, 1);
  check::required("amax", amax, alignof(float));
  check::nibbles(columnwise ? "rows" : "columns", columnwise ? out.rows : out.cols);
  if (columnwise) check::hadamard(options, out.rows);
  kernels().dequantize_nvfp4(data, scale, amax, columnwise, options, out, lane);
}

void transpose_bytes(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane) {
  check::shape(rows, cols);
  if (rows == 0 || cols == 0) return;
  check::required("the input", in);
  check::required("the output", out);
  kernels().transpose_bytes(in, rows, cols, out, lane);
}

void transpose_nibbles(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane) {
  check::shape(rows, cols);
  check::nibbles("rows", rows);
  check::nibbles("columns", cols);
  if (rows == 0 || cols == 0) return;
  check::required("the input", in);
  check::required("the output", out);
  kernels().transpose_nibbles(in, rows, cols, out, lane);
}

void swizzle_scales(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane) {
  check::swizzle(rows, cols);
  if (rows == 0 || cols == 0) return;
  check::required("the input", in);
  check::required("the output", out);
  kernels().swizzle_scales(in, rows, cols, out, lane);
}

void produce(const Source& x, const Output& out, Lane lane) {
  check::made(x, out);
  if (!is_empty(x)) kernels().produce(x, out, lane);
}

void norm_backward(const NormGrad& from, const Output& dx, float* weight_partials, float* bias_partials,
                   float* workspace, Lane lane) {
  check::norm_made(from, dx, weight_partials, bias_partials);
  if (!is_empty(from.x)) kernels().norm_backward(from, dx, weight_partials, bias_partials, workspace, lane);
}

void reduce_partials(const float* partials, int64_t tiles, const Output& out, Lane lane) {
  check::reduction(partials, tiles, out);
  kernels().reduce_partials(partials, tiles, out, lane);
}

void advance_scales(float* history, float* scales, const float* largest, int64_t length, int64_t count,
                    int margin, bool most_recent, Lane lane) {
  check::advance(history, scales, largest, length, count);
  kernels().advance_scales(history, scales, largest, length, count, margin, most_recent, lane);
}

}  // namespace cpu
}  // namespace te_dist
