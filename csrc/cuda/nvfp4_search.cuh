// NVFP4's two global amaxes, found by the blocks that write the codes then (nvfp4_whole.cuh): those that have room at
// once. Each has a tile of its own on the way, which it is going to begin with, and looks at that and at its share of
// all other tiles; the last of these go to who is ready for them. Then it waits until all have been looked at.
//
// So what a tenth of the matrix takes is read once, and made while others wait for memory.
//
// Blocks wait for what others have begun, and never for one that has not started: where another kernel holds a part of
// the GPU, who is ready takes the shares of those that did not come. Each block claims its share first.
#pragma once

#include "amax.cuh"
#include "nvfp4_tile_order.cuh"

namespace te_dist {
namespace cuda {
namespace {

// In room that the kernel before has zeroed.
struct SearchState {
  // Read together.
  alignas(16) float row;
  float col;
  unsigned done;  // shares and tickets
  unsigned unused;
  // Apart from that, where nobody waits.
  alignas(128) unsigned tickets;
  unsigned claims;
  alignas(128) unsigned claimed[1];  // one for each block that searches

  static constexpr unsigned kMostBlocks = (2 * kAmaxRoom * sizeof(float) - 256) / sizeof(unsigned);
};

// What is to be searched: items of 16 rows x 128 columns, side by side in strips.
struct Search {
  static constexpr unsigned kWarps = 4;
  static constexpr unsigned kStrips = TileConfig::kTile / 16;  // of a tile
  static constexpr unsigned kOwnRounds = kStrips / kWarps;
  static constexpr unsigned kFew = 8;          // items of a warp, of which none are for who is ready
  static constexpr unsigned kLeastRounds = 3;  // until a block has told that its share is claimed

  SearchState* state;
  unsigned blocks;   // that search; 0: the amaxes are known
  unsigned owners;   // those of them whose first tile nobody else looks at
  unsigned items;    // of all other tiles
  unsigned dealt;    // of them, to each warp
  unsigned tickets;  // of an item a warp, for the rest
  // Lines of tiles that have none of these: each second one from `mixed` on, where there are tall blocks below.
  unsigned whole;  // lines above
  unsigned mixed;

  static Search of(const TileOrder& order, int64_t cols, float* room) {
    const auto across = static_cast<unsigned>(cols / TileConfig::kTile);
    const unsigned lines_of_blocks = order.blocks(cols).y;
    Search search{};
    search.state = reinterpret_cast<SearchState*>(room);
    const int64_t at_once = static_cast<int64_t>(multiprocessors()) * NvWhole::kBlocksPerSm;
    search.blocks = static_cast<unsigned>(
        smaller(smaller(at_once, SearchState::kMostBlocks), static_cast<int64_t>(lines_of_blocks) * across));
    const unsigned lines = search.blocks / across;
    search.owners = lines * across;
    const unsigned tall = lines < order.tall ? lines : order.tall;
    search.whole = order.down - lines - tall;
    search.mixed = order.down - NvWhole::kTall * tall + 1u;
    search.items = (order.down - lines) * kStrips * across;
    const unsigned warps = search.blocks * kWarps;
    const unsigned each = search.items / warps;
    search.dealt = each < kFew ? each : each * 7u / 8u;
    search.tickets = (search.items - search.dealt * warps + kWarps - 1u) / kWarps;
    return search;
  }

  __device__ __forceinline__ unsigned rounds() const { return max(dealt, kLeastRounds); }
  __device__ __forceinline__ unsigned units() const { return blocks + tickets; }

  // Until all have been looked at. By a warp, behind wait_for_kernel_before.
  __device__ __forceinline__ float2 amaxes() const {
    for (;;) {
      const uint4 there = read_state();
      if (there.z == units()) return make_float2(float_of(there.x), float_of(there.y));
#if __CUDA_ARCH__ >= 900
      __nanosleep(100u);
#endif
    }
  }

 private:
  // In one piece: who sees that all is done sees the amaxes.
  __device__ __forceinline__ uint4 read_state() const {
    uint64_t low = 0u;
    uint64_t high = 0u;
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n\t.reg .b128 all;\n\tld.acquire.gpu.global.b128 all, [%2];\n\tmov.b128 {%0, %1}, all;\n\t}"
        : "=l"(low), "=l"(high)
        : "l"(state)
        : "memory");
#endif
    return make_uint4(static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
                      static_cast<uint32_t>(high >> 32));
  }
};

struct SearchShared {
  unsigned said[2];
  uint32_t known;
};

// Where a warp looks next.
struct SearchPlace {
  unsigned row;
  unsigned col;
  bool any;
};

// Those of a block's warps, which all ask for as many.
class SearchTurns {
 public:
  __device__ __forceinline__ SearchTurns(const Search& search, const TileOrder& order, SearchShared& shared, unsigned me)
      : search_(search), order_(order), shared_(shared), me_(me), share_(me) {}

  // False: there are none, and all have come here.
  __device__ __forceinline__ bool next(SearchPlace& place) {
    const Search& all = search_;
    const unsigned warp = threadIdx.x / 32u;
    for (;;) {
      if (share_ < all.blocks) {
        const unsigned k = round_++;
        if (k < all.rounds()) {
          if (share_ == me_) claim(k);
          place_of((k * all.blocks + share_) * Search::kWarps + warp, k < all.dealt, place);
          return true;
        }
        if (share_ != me_ && share_ < all.owners && k - all.rounds() < Search::kOwnRounds) {
          place_in_tile((k - all.rounds()) * Search::kWarps + warp, place);
          return true;
        }
        share_ = all.blocks;
      }
      if (!no_tickets_) {
        const unsigned ticket = say(ticket_);
        if (ticket < all.tickets) {
          ask();
          ++units_;
          const unsigned item = (all.dealt * all.blocks + ticket) * Search::kWarps + warp;
          place_of(item, item < all.items, place);
          return true;
        }
        no_tickets_ = true;
      }
      share_ = unclaimed();
      if (share_ == all.blocks) return false;
      round_ = 0u;
    }
  }

  // The next one, where it is known already.
  __device__ __forceinline__ SearchPlace ahead() const {
    SearchPlace place;
    place.any = share_ < search_.blocks && round_ < search_.dealt;
    const unsigned warp = threadIdx.x / 32u;
    if (place.any) place_of((round_ * search_.blocks + share_) * Search::kWarps + warp, true, place);
    return place;
  }

  // By who has said all that its block has found, behind a barrier.
  __device__ __forceinline__ void tell_done() const {
    __threadfence();
    atomicAdd(&search_.state->done, units_);
  }

 private:
  // Of one thread, for all.
  __device__ __forceinline__ unsigned say(unsigned what) {
    if (threadIdx.x == 0u) shared_.said[turn_] = what;
    __syncthreads();
    what = shared_.said[turn_];
    turn_ ^= 1u;
    return what;
  }

  // The block's own share, and a first ticket at its end. What comes back is needed later. If others have taken it,
  // it is looked at twice.
  __device__ __forceinline__ void claim(unsigned round) {
    if (threadIdx.x != 0u) return;
    if (round == 1u) wait_for_kernel_before(), claimed_ = atomicExch(&state().claimed[me_], 1u);
    if (round == 2u && claimed_ == 0u) atomicAdd(&state().claims, 1u), units_ = 1u;
    if (round + 1u == search_.rounds()) ask();
  }
  // And how many have claimed theirs. By hand: the compiler would gather what lanes add, and wait for it at once.
  __device__ __forceinline__ void ask() {
    if (threadIdx.x != 0u) return;
    claims_ = *static_cast<volatile unsigned*>(&state().claims);
#if __CUDA_ARCH__ >= 900
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(ticket_)
                 : "l"(&state().tickets), "r"(threadIdx.x + 1u)
                 : "memory");
#endif
  }
  // A share that nobody has claimed, claimed now; or as many as there are blocks.
  __device__ __forceinline__ unsigned unclaimed() {
    unsigned found = search_.blocks;
    if (threadIdx.x == 0u && claims_ != search_.blocks) claims_ = *static_cast<volatile unsigned*>(&state().claims);
    if (threadIdx.x == 0u && claims_ != search_.blocks) {
      for (; asked_ < search_.blocks && found == search_.blocks; ++asked_) {
        if (atomicExch(&state().claimed[asked_], 1u) == 0u) found = asked_;
      }
      if (found != search_.blocks) atomicAdd(&state().claims, 1u), ++units_;
    }
    return say(found);
  }

  __device__ __forceinline__ void place_of(unsigned item, bool any, SearchPlace& place) const {
    const unsigned strip = item / gridDim.x;
    const unsigned line = strip / Search::kStrips;
    const unsigned lower = search_.mixed + NvWhole::kTall * (line - search_.whole);
    const unsigned tile = line < search_.whole ? line : lower;
    place.row = tile * TileConfig::kTile + strip % Search::kStrips * 16u;
    place.col = (item - strip * gridDim.x) * TileConfig::kTile;
    place.any = any;
  }
  // The first tile of the share's block.
  __device__ __forceinline__ void place_in_tile(unsigned strip, SearchPlace& place) const {
    const unsigned y = share_ / gridDim.x;
    place.row = order_.row_of(y) * TileConfig::kTile + strip * 16u;
    place.col = (gridDim.x - 1u - (share_ - y * gridDim.x)) * TileConfig::kTile;
    place.any = true;
  }

  __device__ __forceinline__ SearchState& state() const { return *search_.state; }

  const Search& search_;
  const TileOrder& order_;
  SearchShared& shared_;
  unsigned me_;
  unsigned share_;
  unsigned round_ = 0u;
  unsigned turn_ = 0u;
  bool no_tickets_ = false;
  // Of one thread.
  unsigned claimed_ = 0u;
  unsigned claims_ = 0u;
  unsigned ticket_ = 0u;
  unsigned asked_ = 0u;
  unsigned units_ = 0u;
};

}  // namespace

// Zeroes what blocks that search begin with.
void launch_search_reset(float* room, unsigned blocks, const float* noop, Lane lane);

}  // namespace cuda
}  // namespace te_dist
