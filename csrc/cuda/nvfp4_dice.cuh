// The random bytes of a tile's blocks, in both planes (numerics/philox.h).
#pragma once

#include "../numerics/philox.h"
#include "nvfp4_kernel.cuh"

namespace te_dist {
namespace cuda {
namespace {

// Of some values of a block, four a word of their place.
template <int kWords>
class RandomBytes {
 public:
  // What all lines of a tile share. Bytes 0 and 2, and 1 and 3, of each word, in the halves of a word.
  struct Place {
    uint32_t even[kWords];
    uint32_t odd[kWords];

    // word(w)
    template <typename Word>
    __device__ __forceinline__ explicit Place(const Word& word) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) even[w] = word(w) & 0x00FF00FFu, odd[w] = (word(w) >> 8) & 0x00FF00FFu;
    }
  };

  // line: its two bytes, in the halves of a word.
  __device__ __forceinline__ RandomBytes(uint32_t line, const Place& place) : line_(line), place_(place) {}

  // Those of values i and i + 2, in the halves of a word. i % 4: 0 or 1.
  __device__ __forceinline__ uint32_t two(int i) const {
    return line_ ^ (i % 2 == 0 ? place_.even[i / 4] : place_.odd[i / 4]);
  }
  // Of values 4 w to 4 w + 3.
  __device__ __forceinline__ uint32_t word(int w) const { return two(4 * w) | two(4 * w + 1) << 8; }

 private:
  uint32_t line_;
  const Place& place_;
};

// In shared memory.
class Dice {
 public:
  // Draw number `which`, if there are as many, for the tile whose first value has these places.
  __device__ __forceinline__ void draw(unsigned which, const int64_t* rng, unsigned row, unsigned col) {
    if (which >= 2u * (kLineDraws + RandomPlane::kBlocks)) return;
    const bool of_lines = which < 2u * kLineDraws;
    const unsigned number = of_lines ? which : which - 2u * kLineDraws;
    const unsigned each = of_lines ? kLineDraws : RandomPlane::kBlocks;
    const bool columnwise = number >= each;
    const unsigned at = columnwise ? number - each : number;
    const unsigned line = columnwise ? col : row;
    const unsigned block = (columnwise ? row : col) / kBlock;
    const RandomPlane plane{static_cast<uint64_t>(rng[0]), static_cast<uint64_t>(rng[1]), columnwise};
    const Philox4 drawn = philox4x32(of_lines ? counter_of_lines(plane, line + at * RandomPlane::kLinesOfDraw, block)
                                              : counter_of_place(plane, line, block + at),
                                     plane.seed);
    if (!of_lines) {
      places_[columnwise][at] = make_uint4(drawn.word[0], drawn.word[1], drawn.word[2], drawn.word[3]);
      return;
    }
    // word_of_line, in the halves of a word.
    const auto halves = [&](int i) { return __byte_perm(drawn.word[i / 2], 0u, i % 2 == 0 ? 0x4140 : 0x4342); };
    lines_[columnwise][2u * at] = make_uint4(halves(0), halves(1), halves(2), halves(3));
    lines_[columnwise][2u * at + 1u] = make_uint4(halves(4), halves(5), halves(6), halves(7));
  }

  // For RandomBytes, of four lines of the tile, of which `line` is the first.
  __device__ __forceinline__ uint4 four_lines(bool columnwise, int line) const { return lines_[columnwise][line / 4]; }
  __device__ __forceinline__ uint32_t of_line(bool columnwise, int line) const {
    return reinterpret_cast<const uint32_t*>(lines_[columnwise])[line];
  }
  // Word w of a place.
  __device__ __forceinline__ uint32_t of_place(bool columnwise, int block, int w) const {
    return reinterpret_cast<const uint32_t*>(&places_[columnwise][block])[w];
  }

 private:
  static constexpr unsigned kLineDraws = RandomPlane::kLines / RandomPlane::kLinesOfDraw;

  uint4 lines_[2][RandomPlane::kLines / 4];
  uint4 places_[2][RandomPlane::kBlocks];
};

// Of who rounds to the nearest.
struct NoDice {
  __device__ __forceinline__ void draw(unsigned, const int64_t*, unsigned, unsigned) {}
  __device__ __forceinline__ uint4 four_lines(bool, int) const { return make_uint4(0u, 0u, 0u, 0u); }
  __device__ __forceinline__ uint32_t of_line(bool, int) const { return 0u; }
  __device__ __forceinline__ uint32_t of_place(bool, int, int) const { return 0u; }
};

}  // namespace
}  // namespace cuda
}  // namespace te_dist
