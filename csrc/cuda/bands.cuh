// The order of work of a norm whose tiles need the statistics of their 128 rows, in one launch, so that the
// tiles find in L2 what the statistics have read.
//
// Blocks of threads are pieces of work, numbered in an order that keeps the statistics a few bands of 128 rows
// ahead of the tiles. A tile waits for statistics of smaller numbers alone, and statistics wait for nobody.
// Blocks are started in the order of their numbers, so whoever a tile waits for has been started.
#pragma once

#include "common.cuh"

namespace te_dist {
namespace cuda {

struct BandConfig {
  static constexpr int kRows = 128;
  static constexpr int kRowsPerPiece = 4;  // of statistics
  static constexpr int kPieces = kRows / kRowsPerPiece;
  // Bands that the statistics lead by: about as many as there are blocks at once.
  static constexpr int kAhead = 8;
};

struct Bands {
  unsigned* counters;  // per band, of pieces whose statistics are there; null: tiles have no order
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
  const int64_t bands = ceil_div(rows, BandConfig::kRows);
  return Bands{counters, static_cast<unsigned>(bands), static_cast<unsigned>(ceil_div(cols, 128)),
               static_cast<unsigned>(smaller(bands, BandConfig::kAhead))};
}

inline int64_t band_pieces(const Bands& order) {
  return static_cast<int64_t>(order.bands) * (BandConfig::kPieces + order.across);
}

// Zeroes the counters on the stream.
void launch_bands_reset(const Bands& order, Lane lane);

__device__ __forceinline__ BandPiece band_piece(const Bands& order, unsigned number) {
  constexpr unsigned kPieces = BandConfig::kPieces;
  const unsigned first = order.ahead * kPieces;  // statistics before the first tile
  if (number < first) return BandPiece{true, number / kPieces, number % kPieces};
  number -= first;
  const unsigned step = kPieces + order.across;
  const unsigned steps = order.bands - order.ahead;
  if (number < steps * step) {
    const unsigned band = number / step;
    const unsigned index = number % step;
    return index < kPieces ? BandPiece{true, band + order.ahead, index}
                           : BandPiece{false, band, index - kPieces};
  }
  number -= steps * step;
  return BandPiece{false, steps + number / order.across, number % order.across};
}

// All threads of the block have written their statistics.
__device__ __forceinline__ void band_done(const Bands& order, unsigned band) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicAdd(order.counters + band, 1u);
}

__device__ __forceinline__ void wait_for_band(const Bands& order, unsigned band) {
  if (threadIdx.x == 0) {
    unsigned done = 0;
    for (;;) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(done)
                   : "l"(order.counters + band)
                   : "memory");
      if (done >= BandConfig::kPieces) break;
      __nanosleep(200);
    }
  }
  __syncthreads();
}

}  // namespace cuda
}  // namespace te_dist
