// Argument checks of the entry points, shared by the backends. A light header on purpose: every CUDA file
// includes it, so the standard library's string machinery stays in check.cpp.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "api.h"

namespace te_dist {
namespace check {

// One piece of an error message: text, a number or an address.
struct Part {
  const char* text = nullptr;
  long long number = 0;
  const void* address = nullptr;
  enum { kText, kNumber, kAddress } kind;

  Part(const char* value) : text(value), kind(kText) {}
  Part(int value) : number(value), kind(kNumber) {}
  Part(long value) : number(value), kind(kNumber) {}
  Part(long long value) : number(value), kind(kNumber) {}
  Part(unsigned long value) : number(static_cast<long long>(value)), kind(kNumber) {}
  Part(const void* value) : address(value), kind(kAddress) {}
};

// Throws std::invalid_argument, which arrives in Python as ValueError.
[[noreturn]] void fail(const char* expression, std::initializer_list<Part> parts);
// Throws std::runtime_error: "<what>: <reason>".
[[noreturn]] void fail_at_run_time(const char* what, const char* reason);

// What went wrong, in words and values: TED_CHECK(rows >= 0, "rows must not be negative, got ", rows).
#define TED_CHECK(expression, ...)                                         \
  do {                                                                     \
    if (!(expression)) ::te_dist::check::fail(#expression, {__VA_ARGS__}); \
  } while (0)

void aligned(const char* name, const void* pointer, std::uintptr_t bytes);
void required(const char* name, const void* pointer, std::uintptr_t bytes = 1);
void dtype(Float value);
void fp8(Fp8 format);
void shape(int64_t rows, int64_t cols);
void input(const Input& x);
void output(const Output& out);
// A source that lies in memory: all that the CPU kernels quantize.
void plain(const Source& x);
void source(const Source& x);
// A source that the GPU's quantize kernels make on the fly.
void fused(const Source& x);
bool is_fused(const Source& x);
void norm_grad(const NormGrad& from);
void advance(const float* history, const float* scales, const float* largest, int64_t length, int64_t count);
void made(const Source& x, const Output& out);
void norm_made(const NormGrad& from, const Output& dx, const float* weight_partials, const float* bias_partials);
void reduction(const float* partials, int64_t tiles, const Output& out);
void block_dim(int value);
// A plane is data plus scales: one without the other is a caller's mistake. The planes of an empty tensor
// hold nothing, so their pointers say nothing.
void planes(const Planes& out, std::uintptr_t scale_bytes, bool empty);
void hadamard(const Nvfp4Options& options, int64_t rows);
// Two codes share a byte, so the inner size of a packed plane is even.
void nibbles(const char* what, int64_t size);
void swizzle(int64_t rows, int64_t cols);

}  // namespace check
}  // namespace te_dist
