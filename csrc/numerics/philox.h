// Philox4x32-10: random bits as a pure function of (seed, offset, position), so that recomputation,
// compilation and CUDA graphs draw the same ones.
#pragma once

#include "portability.h"

namespace te_dist {

struct Philox4 {
  uint32_t word[4];
};

constexpr int kPhiloxRounds = 10;

TED_FN uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;  // of the same in C, the compiler makes another instruction, which adds a zero
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

TED_FN Philox4 philox4x32(Philox4 counter, uint64_t key) {
  auto key0 = static_cast<uint32_t>(key);
  auto key1 = static_cast<uint32_t>(key >> 32);
  TED_UNROLL
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = wide_product(0xD2511F53u, counter.word[0]);
    const uint64_t product1 = wide_product(0xCD9E8D57u, counter.word[2]);
    counter = Philox4{{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                       static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                       static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The random bytes of one NVFP4 plane. In each tile of 128 lines and 8 blocks, every line has two bytes, and every
// block's place 16. Byte j of a block is byte j of its place XORed with byte j / 2 % 2 of its line.
//
// A tile of a plane takes 24 draws instead of 1024. All bytes of a line are independent of each other, as if drawn one
// by one, and products of matrices add up along lines: what rounding does to any number in one has the same
// distribution. So are the bytes at one place of all lines, those of different tiles, and any two in a tile; the four
// at the corners of a rectangle in a tile are not.
struct RandomPlane {
  static constexpr int kLines = 128;  // of a tile
  static constexpr int kBlocks = 8;
  static constexpr int kLinesOfDraw = 8;
  static constexpr uint32_t kColumnwise = 1u << 31;
  static constexpr uint32_t kOfLines = 1u << 30;

  uint64_t seed;
  uint64_t offset;
  bool columnwise;
};

TED_FN Philox4 random_counter(const RandomPlane& plane, int64_t which, int64_t tile, uint32_t kind) {
  return Philox4{{static_cast<uint32_t>(which),
                  static_cast<uint32_t>(tile) | kind | (plane.columnwise ? RandomPlane::kColumnwise : 0u),
                  static_cast<uint32_t>(plane.offset), static_cast<uint32_t>(plane.offset >> 32)}};
}

// For eight lines, of which `line` is the first, in the tile of the block. Line and block: numbers in the plane.
TED_FN Philox4 counter_of_lines(const RandomPlane& plane, int64_t line, int64_t block) {
  return random_counter(plane, line / RandomPlane::kLinesOfDraw, block / RandomPlane::kBlocks, RandomPlane::kOfLines);
}

// For the block's place, in the tile of the line.
TED_FN Philox4 counter_of_place(const RandomPlane& plane, int64_t line, int64_t block) {
  return random_counter(plane, block, line / RandomPlane::kLines, 0u);
}

// What words of a place are XORed with, of line i of a draw's eight: its first byte twice, and its second one twice.
TED_FN uint32_t word_of_line(const Philox4& drawn, int i) {
  const uint32_t two = drawn.word[i / 2] >> (16 * (i % 2));
  return (two & 0xFFu) * 0x0101u | ((two >> 8) & 0xFFu) * 0x01010000u;
}

TED_FN Philox4 random_of_lines(const RandomPlane& plane, int64_t line, int64_t block) {
  return philox4x32(counter_of_lines(plane, line, block), plane.seed);
}

// Byte j is bits 8 (j % 4) on of word j / 4.
TED_FN Philox4 random_of_place(const RandomPlane& plane, int64_t line, int64_t block) {
  return philox4x32(counter_of_place(plane, line, block), plane.seed);
}

}  // namespace te_dist
