// Tiles of a bf16 matrix that a norm, an activation or an activation's gradient makes on the fly.
//
// Each thread copies the 8 x 8 patches of all operands into shared memory, asynchronously and all at once, and turns
// them into its patch of the made matrix there, a row at a time: loops instead of unrolled code keep the five
// activations small. No thread touches another's patches, so nothing waits. The made patch then goes to registers,
// rounded to bf16 as if it had been in memory, and the quantize kernels take over.
//
// A gated gradient [M, 2 H] is made in pairs of tiles at columns c and H + c, which share two thirds of what they
// read and the activation.
#pragma once

#include "activation.cuh"
#include "bands.cuh"
#include "columns.cuh"
#include "row.cuh"
#include "tile.cuh"

namespace te_dist {
namespace cuda {

// A Source as the device sees it; cols are those of one tile row, H for a gated gradient.
struct Made {
  Produce kind;
  Activation activation;
  bool gated;
  bool zero_centered;
  bool centered;
  float eps;
  int64_t rows;
  int64_t cols;
  int64_t pitch;  // columns of the made matrix
  const bf16_t* data;
  int64_t stride;
  const bf16_t* grad;
  int64_t grad_stride;
  RowView weight;
  RowView bias;  // of the first operand
  RowView second_bias;
  float* mean;
  float* rstd;
  float* partials;
  Bands order;

  __host__ __device__ bool paired() const { return kind == Produce::kActivationGrad && gated; }
  __host__ __device__ int operands() const {
    return 1 + ((kind == Produce::kActivation || kind == Produce::kActivationGrad) && gated) +
           (kind == Produce::kActivationGrad);
  }
};

struct MadeConfig {
  static constexpr int kSlot = TileConfig::kPatch * TileConfig::kThreads;  // vectors of 16 bytes an operand
  static constexpr int kSlotBytes = kSlot * 16;
  static constexpr int kSumsOffset = kSlotBytes / 2;  // behind the stage of a transposed plane
};

// Checks what fusion needs. with_stats: the kernel makes a norm's statistics where they are missing.
Made made_of(const Source& x, bool with_stats);
inline int made_bytes(const Made& x) { return x.operands() * MadeConfig::kSlotBytes; }
inline int64_t made_blocks(const Made& x) {
  return x.order.counters != nullptr ? band_pieces(x.order) : tile_count(x.rows, x.cols);
}

// More shared memory than a kernel gets without asking.
template <typename Kernel>
void allow_made_bytes(Kernel kernel) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 3 * MadeConfig::kSlotBytes),
             "shared memory for operands");
}

// ---------------------------------------------------------------------------------------------- operands
// 16 bytes to shared memory, zeros where there is no source; passes L1, and leaves L2 early.
__device__ __forceinline__ void copy_async(uint4* to, const void* from, bool there) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(address), "l"(from),
               "r"(there ? 16 : 0), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void fetch_operand(const bf16_t* data, int64_t stride, int64_t row, int64_t col,
                                              int live_rows, uint4* mine) {
  const bf16_t* from = data + row * stride + col;
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    const bool there = i < live_rows;
    copy_async(mine + i * TileConfig::kThreads, there ? from + i * stride : data, there);
  }
}

// mine: the thread's place in the first slot. Rows beyond live_rows are not there.
__device__ __forceinline__ void fetch_operands(const Made& x, int64_t row, int64_t col, int live_rows,
                                               uint4* mine) {
  fetch_operand(x.data, x.stride, row, col, live_rows, mine);
  if (x.gated) {
    mine += MadeConfig::kSlot;
    fetch_operand(x.data + x.cols, x.stride, row, col, live_rows, mine);
  }
  if (x.kind == Produce::kActivationGrad) {
    fetch_operand(x.grad, x.grad_stride, row, col, live_rows, mine + MadeConfig::kSlot);
  }
}

// ---------------------------------------------------------------------------------------------- making
static __device__ __noinline__ void make_norm(const Made& x, int64_t row, int64_t col, int live_rows, uint4* mine) {
  float gain[8];
  float bias[8];
  load_gain<true>(x.weight, x.zero_centered, col, gain);
  load_vector<true>(x.bias, col, kNoBias, bias);
  // Eight neighbouring lanes share their rows: each fetches the statistics of one. Past L1, they are new.
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool there = row + lane % 8 < x.rows;
  const float mean = there && x.centered ? __ldcg(x.mean + row + lane % 8) : 0.0f;
  const float rstd = there ? __ldcg(x.rstd + row + lane % 8) : 0.0f;
  wait_for_copies();
#pragma unroll 2
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    const int from = (lane & 24) | i;
    const RowStats stats{__shfl_sync(kFullWarp, mean, from), __shfl_sync(kFullWarp, rstd, from)};
    float v[8];
    unpack_eight<bf16_t>(mine[i * TileConfig::kThreads], v);
    apply_norm(v, stats, gain, bias);
    if (i < live_rows) mine[i * TileConfig::kThreads] = pack_eight_bf16(v);
  }
}

static __device__ __noinline__ void make_activation(const Made& x, int64_t col, int live_rows, uint4* mine) {
  const bool biased = x.bias.data != nullptr;
  float bias[8];
  float second_bias[8];
  load_vector<true>(x.bias, col, kNoBias, bias);
  load_vector<true>(x.second_bias, col, kNoBias, second_bias);
  wait_for_copies();
  with_activation(x.activation, [&](auto tag) {
    constexpr Activation kKind = decltype(tag)::kind;
#pragma unroll 1
    for (int i = 0; i < live_rows; ++i) {
      uint4* at = mine + i * TileConfig::kThreads;
      float v[8];
      float second[8];
      unpack_eight<bf16_t>(*at, v);
      if (biased) add_eight(v, bias);
      if (x.gated) {
        unpack_eight<bf16_t>(at[MadeConfig::kSlot], second);
        if (biased) add_eight(second, second_bias);
      }
      activate_eight<kKind>(v, second, x.gated);
      *at = pack_eight_bf16(v);
    }
  });
}

static __device__ __noinline__ void make_gradient(const Made& x, int64_t col, int live_rows, uint4* mine) {
  const bool biased = x.bias.data != nullptr;
  const int grad_slot = x.gated ? 2 * MadeConfig::kSlot : MadeConfig::kSlot;
  wait_for_copies();
  with_activation(x.activation, [&](auto tag) {
    constexpr Activation kKind = decltype(tag)::kind;
#pragma unroll 1
    for (int i = 0; i < live_rows; ++i) {
      uint4* at = mine + i * TileConfig::kThreads;
      float v[8];
      float second[8];
      float grad[8];
      unpack_eight<bf16_t>(*at, v);
      unpack_eight<bf16_t>(at[grad_slot], grad);
      if (x.gated) unpack_eight<bf16_t>(at[MadeConfig::kSlot], second);
      if (biased) {  // rare: from L1 each time, registers are dearer
        float bias[8];
        load_vector<true>(x.bias, col, kNoBias, bias);
        add_eight(v, bias);
        load_vector<true>(x.second_bias, col, kNoBias, bias);
        if (x.gated) add_eight(second, bias);
      }
      differentiate_eight<kKind>(v, second, grad, x.gated);
      *at = pack_eight_bf16(v);
      if (x.gated) at[MadeConfig::kSlot] = pack_eight_bf16(second);
    }
  });
}

static __device__ __noinline__ void make_band_stats(const Made& x, BandPiece piece, float* scratch) {
  const int number = static_cast<int>(threadIdx.x / RowTeam::kThreads);
  RowTeam team(scratch, number);
  const int64_t first = static_cast<int64_t>(piece.band) * BandConfig::kRows +
                        static_cast<int64_t>(piece.index) * BandConfig::kRowsPerPiece;
#pragma unroll 1
  for (int i = number; i < BandConfig::kRowsPerPiece; i += TileConfig::kThreads / RowTeam::kThreads) {
    const int64_t row = first + i;
    if (row >= x.rows) break;
    HeldRow held(x.data + row * x.stride, x.cols);
    const RowStats stats = held.stats(x.centered, x.eps, team);
    if (RowTeam::rank() != 0) continue;
    if (x.centered) x.mean[row] = stats.mean;
    x.rstd[row] = stats.rstd;
  }
  band_done(x.order, piece.band);
}

// ---------------------------------------------------------------------------------------------- tiles
__device__ __forceinline__ void take_patch(const uint4* mine, Patch<bf16_t>& patch) {
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    const uint4 v = mine[i * TileConfig::kThreads];
    patch.word[i][0] = v.x;
    patch.word[i][1] = v.y;
    patch.word[i][2] = v.z;
    patch.word[i][3] = v.w;
  }
}

// The patch's share of the column sums, then all of the tile's. Begins with a barrier.
__device__ __forceinline__ void store_column_sums(const Made& x, const Patch<bf16_t>& patch, const TilePlace& tile,
                                                  int patch_row, int patch_col, GroupSums& sums) {
  float total[8] = {};
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] += patch.value(i, j);
  }
  __syncthreads();
  sums.put(patch_row / 8, patch_col, total);
  __syncthreads();
  sums.store(x.partials, tile.row / TileConfig::kTile, tile.col, x.pitch, x.pitch);
}

// Makes the block's tile (two of them for a gated gradient) and hands each to consume(patch, place, inside). The
// threads' patches lie at (patch_row, patch_col). memory: the block's dynamic shared memory, whose first half slot
// consume may use after a barrier of its own. backwards: starts with the last tile, which L2 may still hold.
template <typename Consume>
__device__ __forceinline__ void for_each_made_tile(const Made& x, bool backwards, int patch_row, int patch_col,
                                                   uint4* memory, const Consume& consume) {
  TilePlace tile;
  unsigned band = 0;
  if (x.order.counters != nullptr) {
    __shared__ unsigned ticket;
    const BandPiece piece = band_piece(x.order, take_ticket(x.order, &ticket));
    if (piece.stats) return make_band_stats(x, piece, reinterpret_cast<float*>(memory));
    band = piece.band;
    tile = TilePlace{static_cast<int64_t>(band) * TileConfig::kTile,
                     static_cast<int64_t>(piece.index) * TileConfig::kTile};
  } else {
    tile = tile_place(backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x, x.cols);
  }
  const bool inside = tile_inside(tile, x.rows, x.cols);
  const int64_t row = tile.row + patch_row;
  const int64_t col = tile.col + patch_col;
  const int live_rows =
      col >= x.cols ? 0 : static_cast<int>(max(int64_t{0}, min(static_cast<int64_t>(TileConfig::kPatch), x.rows - row)));
  uint4* mine = memory + threadIdx.x;
  fetch_operands(x, row, col, live_rows, mine);
  if (x.order.counters != nullptr) wait_for_band(x.order, band);
  switch (x.kind) {
    case Produce::kNorm: make_norm(x, row, col, live_rows, mine); break;
    case Produce::kActivation: make_activation(x, col, live_rows, mine); break;
    case Produce::kActivationGrad: make_gradient(x, col, live_rows, mine); break;
    default: wait_for_copies();
  }
  const int halves = x.paired() ? 2 : 1;
#pragma unroll 1
  for (int half = 0; half < halves; ++half) {
    if (half != 0) __syncthreads();  // the last tile has left shared memory
    Patch<bf16_t> patch;
    take_patch(mine + half * MadeConfig::kSlot, patch);
    const TilePlace place{tile.row, tile.col + half * x.cols};
    if (x.partials != nullptr) {
      auto* sums = reinterpret_cast<GroupSums*>(reinterpret_cast<char*>(memory) + MadeConfig::kSumsOffset);
      store_column_sums(x, patch, place, patch_row, patch_col, *sums);
    }
    consume(patch, place, inside);
  }
}

}  // namespace cuda
}  // namespace te_dist
