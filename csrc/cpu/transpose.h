// Byte transposes in registers. Column planes are [K, M]: each tile is transposed in a buffer and leaves in
// runs of whole cache lines, because rows of a power-of-two length all fall into one cache set and evict each
// other.
#pragma once

#include "kernel.h"

TED_BEGIN_VARIANT
namespace {

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

TED_FN Bytes16 interleave_low(Bytes16 a, Bytes16 b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

TED_FN Bytes16 interleave_high(Bytes16 a, Bytes16 b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Four perfect shuffles of 16 rows of 16 bytes are the transpose.
TED_FN void transpose16(const uint8_t* __restrict in, int64_t in_pitch, uint8_t* __restrict out,
                        int64_t out_pitch) {
  Bytes16 v[16];
  Bytes16 w[16];
  TED_UNROLL
  for (int i = 0; i < 16; ++i) __builtin_memcpy(&v[i], in + i * in_pitch, 16);
  TED_UNROLL
  for (int stage = 0; stage < 2; ++stage) {
    TED_UNROLL
    for (int i = 0; i < 8; ++i) {
      w[2 * i] = interleave_low(v[i], v[i + 8]);
      w[2 * i + 1] = interleave_high(v[i], v[i + 8]);
    }
    TED_UNROLL
    for (int i = 0; i < 8; ++i) {
      v[2 * i] = interleave_low(w[i], w[i + 8]);
      v[2 * i + 1] = interleave_high(w[i], w[i + 8]);
    }
  }
  TED_UNROLL
  for (int i = 0; i < 16; ++i) __builtin_memcpy(out + i * out_pitch, &v[i], 16);
}

// out[c][r] = tile[r][c] for r < rows, c < cols. The tile is readable up to whole multiples of 64 rows and 16
// columns; what lies beyond rows and cols is not written.
inline void transpose_tile(const uint8_t* tile, int64_t pitch, int64_t rows, int64_t cols, uint8_t* out,
                           int64_t out_pitch) {
  alignas(64) uint8_t lines[16][kLine];
  for (int64_t r = 0; r < rows; r += kLine) {
    const int64_t run = smaller(kLine, rows - r);
    for (int64_t c = 0; c < cols; c += 16) {
      for (int64_t part = 0; part < kLine; part += 16) {
        transpose16(tile + (r + part) * pitch + c, pitch, &lines[0][part], kLine);
      }
      const int64_t count = smaller(16, cols - c);
      uint8_t* target = out + c * out_pitch + r;
      if (run == kLine) {
        for (int64_t i = 0; i < count; ++i) __builtin_memcpy(target + i * out_pitch, lines[i], kLine);
      } else {
        for (int64_t i = 0; i < count; ++i) __builtin_memcpy(target + i * out_pitch, lines[i], run);
      }
    }
  }
}

}  // namespace
TED_END_VARIANT
