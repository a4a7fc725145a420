// The order of work of a norm whose tiles need the statistics of their 128 rows, in one launch, so that the tiles
// find in L2 what the statistics have read.
//
// Blocks take tickets. Tickets number the pieces of work in an order that keeps the statistics a few bands of 128 rows
// ahead of the tiles. A tile waits for statistics with smaller tickets alone, statistics wait for nobody, and a block
// works off its tickets in their order (but for statistics, which it may do early): whoever holds the smallest ticket
// that is not done can go on, so no order in which blocks are started locks up.
#pragma once

#include <cstdlib>

#include "common.cuh"

namespace te_dist {
namespace cuda {

struct BandConfig {
  static constexpr int kRows = 128;
  static constexpr int kRowsPerPiece = 8;  // of statistics, one a warp
  static constexpr int kPieces = kRows / kRowsPerPiece;
  static constexpr int kAhead = 9;
};

struct Bands {
  unsigned* counters;  // [0]: the next ticket; [1 + b]: pieces of band b whose statistics are there. null: no order
  unsigned bands;
  unsigned across;  // tiles of a band
  unsigned ahead;   // bands that the statistics lead by
};

struct BandPiece {
  bool stats;
  unsigned band;
  unsigned index;  // of the piece in its band
};

inline Bands bands_of(int64_t rows, int64_t cols, unsigned* counters) {
  const char* wanted = std::getenv("TED_AHEAD");
  const int64_t bands = ceil_div(rows, BandConfig::kRows);
  return Bands{counters, static_cast<unsigned>(bands), static_cast<unsigned>(ceil_div(cols, 128)),
               static_cast<unsigned>(smaller(bands, wanted ? std::atoi(wanted) : BandConfig::kAhead))};
}

inline int64_t band_pieces(const Bands& order) {
  return static_cast<int64_t>(order.bands) * (BandConfig::kPieces + order.across);
}

// Zeroes the counters on the stream.
void launch_bands_reset(const Bands& order, Lane lane);

// A block's tickets, each asked for while the one before is worked on.
class Tickets {
 public:
  __device__ __forceinline__ explicit Tickets(const Bands& order) : counter_(order.counters) { ask(); }

  // The next one, in all threads. slot: a word of shared memory.
  __device__ __forceinline__ unsigned take(unsigned* slot) {
    __syncthreads();
    if (threadIdx.x == 0) *slot = asked_;
    __syncthreads();
    const unsigned ticket = *slot;
    ask();
    return ticket;
  }

 private:
  __device__ __forceinline__ void ask() {
    if (threadIdx.x == 0 && counter_ != nullptr) asked_ = atomicAdd(counter_, 1u);
  }
  unsigned* counter_;
  unsigned asked_ = 0;
};

__device__ __forceinline__ BandPiece band_piece(const Bands& order, unsigned ticket) {
  constexpr unsigned kPieces = BandConfig::kPieces;
  const unsigned first = order.ahead * kPieces;  // statistics before the first tile
  if (ticket < first) return BandPiece{true, ticket / kPieces, ticket % kPieces};
  ticket -= first;
  const unsigned step = kPieces + order.across;
  const unsigned steps = order.bands - order.ahead;
  if (ticket < steps * step) {
    const unsigned band = ticket / step;
    const unsigned index = ticket % step;
    return index < kPieces ? BandPiece{true, band + order.ahead, index}
                           : BandPiece{false, band, index - kPieces};
  }
  ticket -= steps * step;
  return BandPiece{false, steps + ticket / order.across, ticket % order.across};
}

// All threads of the block have written their statistics.
__device__ __forceinline__ void band_done(const Bands& order, unsigned band) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicAdd(order.counters + 1 + band, 1u);
}

__device__ __forceinline__ void wait_for_band(const Bands& order, unsigned band) {
  if (threadIdx.x == 0) {
    unsigned done = 0;
    for (;;) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(order.counters + 1 + band) : "memory");
      if (done >= BandConfig::kPieces) break;
      __nanosleep(200);
    }
  }
  __syncthreads();
}

}  // namespace cuda
}  // namespace te_dist
