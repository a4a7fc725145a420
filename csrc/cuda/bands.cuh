// The order of work of a norm whose tiles need the statistics of their 128 rows, in one launch, so that the
// tiles find in L2 what the statistics have read.
//
// Blocks of threads are pieces of work, numbered in an order that keeps the statistics a few bands of 128 rows
// ahead of the tiles. A tile waits for statistics of smaller numbers alone, and statistics wait for nobody.
// Blocks are started in the order of their numbers, so whoever a tile waits for has been started.
//
// A statistic that is not there yet is a NaN of its own, written before the launch: who reads it sees in one go whether
// it is there and what it is, and waits for nothing else.
#pragma once

#include "common.cuh"
#include "divisor.cuh"

namespace te_dist {
namespace cuda {

struct BandConfig {
  static constexpr int kRows = 128;
  // That make the statistics of a piece. Few, so that they are there soon, and what they have read is still in L2.
  static constexpr int kTeams = 2;
  // Pieces that the statistics lead by, for each multiprocessor: half as many again as are worked on at once. With
  // fewer, tiles wait; with more, L2 forgets.
  static constexpr int kAhead = 6;
};

struct Bands {
  bool ordered;     // statistics are made, and tiles wait for them
  unsigned held;    // rows that a team makes the statistics of at once, a power of two
  unsigned pieces;  // of statistics of a band
  unsigned bands;
  unsigned across;  // tiles of a band
  unsigned ahead;   // bands that the statistics lead by
  Divisor by_across;
  Divisor by_step;  // pieces of a band, statistics and tiles
};

struct BandPiece {
  bool stats;
  unsigned band;
  unsigned index;  // of the piece in its band
};

inline Bands bands_of(int64_t rows, int64_t cols, bool ordered, int held) {
  const int64_t bands = ceil_div(rows, BandConfig::kRows);
  const auto across = static_cast<unsigned>(larger(ceil_div(cols, 128), 1));
  const auto pieces = static_cast<unsigned>(BandConfig::kRows / (BandConfig::kTeams * held));
  const int64_t step = pieces + across;
  const int64_t ahead = larger((BandConfig::kAhead * multiprocessors() + step / 2) / step, 1);
  return Bands{ordered,
               static_cast<unsigned>(held),
               pieces,
               static_cast<unsigned>(bands),
               across,
               static_cast<unsigned>(smaller(bands, ahead)),
               Divisor::by(across),
               Divisor::by(static_cast<unsigned>(step))};
}

inline int64_t band_pieces(const Bands& order) {
  return static_cast<int64_t>(order.bands) * (order.pieces + order.across);
}

// A tile where nothing is to be made before it.
__device__ __forceinline__ BandPiece band_tile(const Bands& order, unsigned number) {
  const unsigned band = order.by_across.quotient(number);
  return BandPiece{false, band, number - band * order.across};
}

__device__ __forceinline__ BandPiece band_piece(const Bands& order, unsigned number) {
  const unsigned first = order.ahead * order.pieces;  // statistics before the first tile
  if (number < first) {
    const unsigned band = number / order.pieces;
    return BandPiece{true, band, number - band * order.pieces};
  }
  number -= first;
  const unsigned step = order.pieces + order.across;
  const unsigned steps = order.bands - order.ahead;
  if (number < steps * step) {
    const unsigned band = order.by_step.quotient(number);
    const unsigned index = number - band * step;
    return index < order.pieces ? BandPiece{true, band + order.ahead, index}
                                : BandPiece{false, band, index - order.pieces};
  }
  number -= steps * step;
  const BandPiece tile = band_tile(order, number);
  return BandPiece{false, steps + tile.band, tile.index};
}

// ---------------------------------------------------------------------------------------------- statistics
constexpr uint32_t kPendingBits = 0xFFF0DDEDu;

// What the statistics of `rows` rows, and up to two amaxes, are before a kernel makes them, which may be launched close
// behind this one. mean null: RMSNorm. Unless noop: then they stay as they are.
struct Unmade {
  float* mean;
  float* rstd;
  int64_t rows;
  float* first_amax;  // each may be null
  float* second_amax;
  ToBlank blank;
};
void launch_mark_pending(const Unmade& what, const float* noop, Lane lane);

__device__ __forceinline__ bool is_pending(float statistic) { return bits_of(statistic) == kPendingBits; }

__device__ __forceinline__ void publish(float* to, float statistic) {
  const uint32_t bits = is_pending(statistic) ? 0x7FFFFFFFu : bits_of(statistic);  // a NaN, too; nobody waits for ever
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

// What is there now, past L1.
__device__ __forceinline__ float peek(const float* from) {
  uint32_t bits;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
  return float_of(bits);
}

}  // namespace cuda
}  // namespace te_dist
