// Rearranging bytes: transposes of fp8 and packed fp4 data, and cuBLAS's order of block scales.
#include "../numerics/layout.h"
#include "transpose.h"

TED_BEGIN_VARIANT
namespace {

constexpr int64_t kTile = 128;

}  // namespace

void transpose_bytes(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane) {
  for_each_tile(rows, cols, kTile, kTile, lane, [&](int64_t r, int64_t c, int64_t height, int64_t width) {
    alignas(64) uint8_t tile[kTile][kTile];
    for (int64_t i = 0; i < height; ++i) __builtin_memcpy(tile[i], in + (r + i) * cols + c, width);
    transpose_tile(tile[0], kTile, height, width, out + c * rows + r, rows);
  });
}

void transpose_nibbles(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane) {
  const int64_t in_pitch = cols / 2;
  const int64_t out_pitch = rows / 2;
  for_each_tile(rows, in_pitch, kTile, kTile, lane, [&](int64_t r, int64_t c, int64_t height, int64_t width) {
    // Pair the nibbles of two rows; the even and the odd columns are two byte matrices from there on.
    alignas(64) uint8_t even[kTile / 2][kTile];
    alignas(64) uint8_t odd[kTile / 2][kTile];
    for (int64_t i = 0; i < height; i += 2) {
      const uint8_t* __restrict upper = in + (r + i) * in_pitch + c;
      const uint8_t* __restrict lower = upper + in_pitch;
      for (int64_t j = 0; j < width; ++j) {
        even[i / 2][j] = static_cast<uint8_t>((upper[j] & 0x0Fu) | (lower[j] << 4));
        odd[i / 2][j] = static_cast<uint8_t>((upper[j] >> 4) | (lower[j] & 0xF0u));
      }
    }
    uint8_t* target = out + 2 * c * out_pitch + r / 2;
    transpose_tile(even[0], kTile, height / 2, width, target, 2 * out_pitch);
    transpose_tile(odd[0], kTile, height / 2, width, target + out_pitch, 2 * out_pitch);
  });
}

void swizzle_scales(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane) {
  for_each_tile(rows, cols, 128, cols < 4 ? 4 : cols, lane, [&](int64_t r, int64_t, int64_t, int64_t) {
    for (int64_t c = 0; c < cols; c += 4) {
      // Four neighbouring scales of a row stay together.
      for (int64_t i = r; i < r + 128; ++i) {
        __builtin_memcpy(out + swizzled_index(i, c, cols), in + i * cols + c, 4);
      }
    }
  });
}

TED_END_VARIANT
