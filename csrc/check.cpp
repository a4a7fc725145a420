#include "check.h"

#include <cstdio>
#include <stdexcept>
#include <string>

namespace te_dist {
namespace check {

// Without streams: a number's way through their locales crosses whatever copies of the C++ library a process holds.
void fail(const char* expression, std::initializer_list<Part> parts) {
  std::string text;
  for (const Part& part : parts) {
    char number[32];
    switch (part.kind) {
      case Part::kText: text += part.text; break;
      case Part::kNumber: std::snprintf(number, sizeof(number), "%lld", part.number), text += number; break;
      case Part::kAddress: std::snprintf(number, sizeof(number), "%p", part.address), text += number; break;
    }
  }
  throw std::invalid_argument(text + " (violated: " + expression + ")");
}

void fail_at_run_time(const char* what, const char* reason) {
  throw std::runtime_error(std::string(what) + ": " + reason);
}

void aligned(const char* name, const void* pointer, std::uintptr_t bytes) {
  TED_CHECK(reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0, name, " must be aligned to ", bytes,
            " bytes, got address ", pointer);
}

void required(const char* name, const void* pointer, std::uintptr_t bytes) {
  TED_CHECK(pointer != nullptr, name, " is required, got a null pointer");
  aligned(name, pointer, bytes);
}

void dtype(Float value) {
  TED_CHECK(value == Float::kF32 || value == Float::kF16 || value == Float::kBF16,
            "the dtype must be 0 (float32), 1 (float16) or 2 (bfloat16), got ", static_cast<int>(value));
}

static std::uintptr_t element_size(Float value) { return value == Float::kF32 ? 4 : 2; }

void fp8(Fp8 format) {
  TED_CHECK(format == Fp8::kE4M3 || format == Fp8::kE5M2, "the fp8 format must be 0 (E4M3) or 1 (E5M2), got ",
            static_cast<int>(format));
}

void shape(int64_t rows, int64_t cols) {
  TED_CHECK(rows >= 0 && cols >= 0, "sizes must not be negative, got ", rows, " x ", cols);
}

void input(const Input& x) {
  dtype(x.dtype);
  shape(x.rows, x.cols);
  TED_CHECK(x.rows <= 1 || x.stride >= x.cols,
            "the row stride must be at least the number of columns, got stride ", x.stride, " for ", x.cols,
            " columns");
  if (x.rows > 0 && x.cols > 0) required("the input", x.data, element_size(x.dtype));
}

void plain(const Source& x) {
  input(x);
  TED_CHECK(x.kind == Produce::kPlain && x.partials == nullptr,
            "this kernel reads a matrix from memory, got a producer of kind ", static_cast<int>(x.kind));
}

static void vector(const char* name, const Vector& v) {
  dtype(v.dtype);
  aligned(name, v.data, element_size(v.dtype));
}

void source(const Source& x) {
  const int kind = static_cast<int>(x.kind);
  const int activation = static_cast<int>(x.activation);
  TED_CHECK(kind >= 0 && kind <= 3, "unknown kind of producer ", kind);
  TED_CHECK(activation >= 0 && activation <= 4, "unknown activation ", activation);
  const bool doubled = x.kind == Produce::kActivation && x.gated;
  Input data = x;
  data.cols = doubled ? 2 * x.cols : x.cols;
  input(data);
  vector("the weight", x.weight);
  vector("the bias", x.bias);
  aligned("the partials", x.partials, alignof(float));
  if (x.rows == 0 || x.cols == 0) return;
  if (x.kind == Produce::kNorm) {
    required("the weight", x.weight.data);
    required("rstd", x.rstd, alignof(float));
    aligned("mean", x.mean, alignof(float));
  }
  if (x.kind == Produce::kActivationGrad) {
    required("the gradient", x.grad, element_size(x.dtype));
    TED_CHECK(!x.gated || x.cols % 2 == 0, "a gated gradient has an even number of columns, got ", x.cols);
    TED_CHECK(x.rows <= 1 || x.grad_stride >= x.cols / (x.gated ? 2 : 1),
              "the gradient's row stride is too small: ", x.grad_stride);
  }
}

bool is_fused(const Source& x) {
  const auto vectors = [&](const void* data, int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && (x.rows == 1 || stride % 8 == 0);
  };
  const bool gradient = x.kind == Produce::kActivationGrad;
  // Two values of it are added by one instruction.
  const bool added = x.bias.data != nullptr && (gradient || x.kind == Produce::kActivation);
  // A gated gradient is made in pairs of tiles, H columns apart.
  const int64_t most = int64_t{1} << 30;  // tiles count rows and columns in 32 bits
  return x.dtype == Float::kBF16 && x.rows > 0 && x.cols > 0 && x.rows < most && x.cols < most &&
         x.cols % (gradient && x.gated ? 256 : 8) == 0 &&
         vectors(x.data, x.stride) && (!gradient || vectors(x.grad, x.grad_stride)) && vectors(x.weight.data, 0) &&
         vectors(x.bias.data, 0) && (!added || x.bias.dtype == Float::kBF16);
}

void fused(const Source& x) {
  source(x);
  TED_CHECK(is_fused(x),
            "only bf16 matrices of whole, aligned vectors of 16 bytes are made on the fly (a gated gradient: with "
            "columns in multiples of 256; an activation: with a bias in bf16), got dtype ",
            static_cast<int>(x.dtype), ", the bias's ", static_cast<int>(x.bias.dtype), ", ", x.rows, " x ", x.cols,
            ", stride ", x.stride, " at ", x.data);
  TED_CHECK(!x.gated || x.kind == Produce::kActivation || x.kind == Produce::kActivationGrad,
            "only activations are gated");
}

void made(const Source& x, const Output& out) {
  source(x);
  TED_CHECK(out.data == nullptr || (out.rows == x.rows && out.cols == x.cols && out.dtype == x.dtype),
            "the output must have the source's shape and dtype");
  if (out.data != nullptr) output(out);
}

void norm_made(const NormGrad& from, const Output& dx, const float* weight_partials, const float* bias_partials) {
  norm_grad(from);
  output(dx);
  TED_CHECK(dx.rows == from.x.rows && dx.cols == from.x.cols && dx.dtype == from.x.dtype,
            "dx must have x's shape and dtype");
  aligned("the weight's partials", weight_partials, alignof(float));
  aligned("the bias's partials", bias_partials, alignof(float));
}

void reduction(const float* partials, int64_t tiles, const Output& out) {
  output(out);
  TED_CHECK(tiles >= 0 && out.rows >= 0 && out.rows <= 0xFFFF, "there cannot be ", tiles, " tiles of ", out.rows,
            " sets of sums");
  if (tiles > 0) required("the partials", partials, alignof(float));
}

void norm_grad(const NormGrad& from) {
  input(from.x);
  vector("the weight", from.weight);
  if (from.x.rows == 0 || from.x.cols == 0) return;
  required("the weight", from.weight.data);
  required("the gradient", from.grad, element_size(from.x.dtype));
  required("rstd", from.rstd, alignof(float));
  aligned("mean", from.mean, alignof(float));
  TED_CHECK(from.x.rows <= 1 || from.grad_stride >= from.x.cols,
            "the gradient's row stride is too small: ", from.grad_stride);
}

void advance(const float* history, const float* scales, const float* largest, int64_t length, int64_t count) {
  TED_CHECK(length >= 1 && count >= 0, "a history has at least one row, got ", length, " x ", count);
  if (count == 0) return;
  required("the history", history, alignof(float));
  required("the scales", scales, alignof(float));
  required("the largest values", largest, alignof(float));
}

void output(const Output& out) {
  dtype(out.dtype);
  shape(out.rows, out.cols);
  if (out.rows > 0 && out.cols > 0) required("the output", out.data, element_size(out.dtype));
}

void block_dim(int value) {
  TED_CHECK(value == 1 || value == 2, "block_dim must be 1 (1x128) or 2 (128x128), got ", value);
}

void planes(const Planes& out, std::uintptr_t scale_bytes, bool empty) {
  TED_CHECK(empty || (out.row_data == nullptr) == (out.row_scale == nullptr),
            "row data and row scale must be given together, got ", static_cast<const void*>(out.row_data),
            " and ", out.row_scale);
  TED_CHECK(empty || (out.col_data == nullptr) == (out.col_scale == nullptr),
            "column data and column scale must be given together, got ",
            static_cast<const void*>(out.col_data), " and ", out.col_scale);
  aligned("the row scale", out.row_scale, scale_bytes);
  aligned("the column scale", out.col_scale, scale_bytes);
}

void hadamard(const Nvfp4Options& options, int64_t rows) {
  TED_CHECK(!options.hadamard || rows % 16 == 0,
            "the Hadamard transform needs a number of rows that is a multiple of 16, got ", rows);
}

void nibbles(const char* what, int64_t size) {
  TED_CHECK(size % 2 == 0, "packing two 4-bit codes a byte needs an even number of ", what, ", got ", size);
}

void swizzle(int64_t rows, int64_t cols) {
  shape(rows, cols);
  TED_CHECK(rows % 128 == 0 && cols % 4 == 0, "swizzling needs rows % 128 == 0 and cols % 4 == 0, got ", rows,
            " x ", cols);
}

}  // namespace check
}  // namespace te_dist
