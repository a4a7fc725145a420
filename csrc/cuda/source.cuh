// Tiles of a bf16 matrix that a norm, an activation or an activation's gradient makes on the fly.
//
// Blocks stay and take tile after tile. Each thread has 8 x 8 patches of the operands, whose rows come through a ring
// in shared memory, asynchronously, those of the next tile while this one is worked on: what is made costs as many
// instructions as memory leaves time for, so neither may wait for the other. A thread turns row after row into its
// patch of the made matrix, in shared memory too: loops instead of unrolled code keep the five activations small. No
// thread touches another's patches, so none waits. The made patch then goes to registers, rounded to bf16 as if it
// had been in memory, and the quantize kernels take over.
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
  bool biased;
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
  unsigned pieces;  // of work: tiles, or what `order` numbers

  __host__ __device__ bool activated() const {
    return kind == Produce::kActivation || kind == Produce::kActivationGrad;
  }
  __host__ __device__ bool paired() const { return kind == Produce::kActivationGrad && gated; }
};

struct MadeConfig {
  static constexpr int kThreads = TileConfig::kThreads;
  static constexpr int kBlocksPerSm = 3;
  static constexpr int kDepth = 8;                     // vectors of 16 bytes in a thread's ring
  static constexpr int kSlot = TileConfig::kPatch * kThreads;  // vectors of the ring, or of a made tile
  static constexpr int kSlotBytes = kSlot * 16;
  static constexpr int kSumsOffset = kSlotBytes / 2;  // in a made tile: behind the stage of a transposed plane
};
static_assert(MadeConfig::kDepth == TileConfig::kPatch, "one operand's ring holds a patch");

// Checks what fusion needs. with_stats: the kernel makes a norm's statistics where they are missing.
Made made_of(const Source& x, bool with_stats);

// Starts the kernel for x's kind as kernel(made, arguments...): as many blocks as fit, each with its ring and its made
// tiles.
template <typename Kernel, typename... Arguments>
void launch_made(const char* name, Kernel other, Kernel activated, const Made& x, Lane lane,
                 const Arguments&... arguments) {
  const Kernel kernel = x.activated() ? activated : other;
  const int bytes = (x.paired() ? 3 : 2) * MadeConfig::kSlotBytes;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 3 * MadeConfig::kSlotBytes),
             "shared memory for operands");
  const int64_t most = static_cast<int64_t>(multiprocessors()) * (x.paired() ? 2 : MadeConfig::kBlocksPerSm);
  if (x.order.counters != nullptr) launch_bands_reset(x.order, lane);
  kernel<<<grid_size(smaller(x.pieces, most)), MadeConfig::kThreads, bytes, stream_of(lane)>>>(x, arguments...);
  check_launch(name);
}

// ---------------------------------------------------------------------------------------------- operands
// 16 bytes to shared memory, past L1; zeros where there is no source. (With a cache hint for L2, ptxas 13.0 makes
// instructions of it that the GPU refuses.)
__device__ __forceinline__ void copy_async(uint4* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

constexpr unsigned kNoBand = ~0u;

// What a thread has of one tile. Rows and columns fit 32 bits (check::is_fused): 64-bit sums cost twice.
struct PatchPlace {
  int row;
  int col;
  int live_rows;  // of the patch that lie in the matrix
  unsigned band;  // kNoBand: there is no tile
};

// Where a thread's copies have got to.
struct Cursor {
  const bf16_t* data;
  const bf16_t* grad;
  int live_rows;

  __device__ __forceinline__ Cursor(const Made& x, const PatchPlace& place)
      : data(x.data + place.row * x.stride + place.col), grad(x.grad), live_rows(place.live_rows) {
    if (x.kind == Produce::kActivationGrad) grad += place.row * x.grad_stride + place.col;
  }
};

// A thread's ring of operand rows: a row of a patch is the operand, the other factor where gated, and the gradient.
// Row i lies where row i + kRows will.
template <bool kGated, bool kGrad>
struct OperandRing {
  static constexpr int kOperands = 1 + kGated + kGrad;
  static constexpr int kRows = kOperands == 1 ? 8 : kOperands == 2 ? 4 : 2;
  uint4* mine;

  __device__ __forceinline__ uint4* row(int i) const {
    return mine + (i & (kRows - 1)) * kOperands * MadeConfig::kThreads;
  }
  // The next row, as row i.
  __device__ __forceinline__ void fetch(const Made& x, Cursor& cursor, int i) const {
    const bool there = cursor.live_rows > 0;
    uint4* to = row(i);
    copy_async(to, cursor.data, there);
    if (kGated) copy_async(to + MadeConfig::kThreads, cursor.data + x.cols, there);
    if (kGrad) {
      copy_async(to + (kOperands - 1) * MadeConfig::kThreads, cursor.grad, there);
      cursor.grad += x.grad_stride;
    }
    cursor.data += x.stride;
    --cursor.live_rows;
    commit_copies();
  }
  __device__ __forceinline__ void fill(const Made& x, Cursor& cursor) const {
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) fetch(x, cursor, i);
  }
  // Until the oldest row is there.
  __device__ __forceinline__ void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kRows - 1) : "memory");
  }
};

// ---------------------------------------------------------------------------------------------- making
// The patch at `place` is made while rows of the one at `next` are fetched.
struct MakeTask {
  uint4* ring;
  uint4* made;
  PatchPlace place;
  PatchPlace next;
  Cursor cursor;
};

// body(i, operands of row i, where to put the made row) for the rows of a patch.
template <bool kGated, bool kGrad, typename Body>
__device__ __forceinline__ void for_each_row(const Made& x, MakeTask& task, const Body& body) {
  const OperandRing<kGated, kGrad> ring{task.ring};
  uint4* made = task.made;
  Cursor cursor = task.cursor;
#pragma unroll 1
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    ring.wait();
    body(i, ring.row(i), made);
    made += MadeConfig::kThreads;
    if (i == TileConfig::kPatch - ring.kRows) cursor = Cursor(x, task.next);
    ring.fetch(x, cursor, i);
  }
  task.cursor = cursor;
}

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

// A patch of which nothing, or a few instructions an element, is to be made: from the ring to registers, whereupon
// the ring is filled again.
__device__ __forceinline__ void take_operand(const Made& x, MakeTask& task, Patch<bf16_t>& patch) {
  const OperandRing<false, false> ring{task.ring};
  asm volatile("cp.async.wait_all;" ::: "memory");
  take_patch(task.ring, patch);
  Cursor cursor(x, task.next);
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) ring.fetch(x, cursor, i);
}

// What a norm makes of a patch of its operand.
__device__ __forceinline__ void make_norm(const Made& x, const PatchPlace& place, Patch<bf16_t>& patch) {
  float gain[8];
  float bias[8];
  // Eight neighbouring lanes share their rows: each fetches the statistics of one. Past L1, they are new.
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool there = place.row + lane % 8 < x.rows;
  const float mean = there && x.centered ? __ldcg(x.mean + place.row + lane % 8) : 0.0f;
  const float rstd = there ? __ldcg(x.rstd + place.row + lane % 8) : 0.0f;
  load_gain<true>(x.weight, x.zero_centered, place.col, gain);
  if (!x.centered && x.bias.data == nullptr) {
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) {
      const float row_rstd = __shfl_sync(kFullWarp, rstd, (lane & 24) | i);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {  // zeros stay zeros
        patch.word[i][j / 2] =
            pack_bf16(patch.value(i, j) * row_rstd * gain[j], patch.value(i, j + 1) * row_rstd * gain[j + 1]);
      }
    }
    return;
  }
  load_vector<true>(x.bias, place.col, kNoBias, bias);
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    const int source = (lane & 24) | i;
    const RowStats stats{__shfl_sync(kFullWarp, mean, source), __shfl_sync(kFullWarp, rstd, source)};
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = patch.value(i, j);
    apply_norm(v, stats, gain, bias);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {  // a row outside of the matrix is zero, whatever the bias
      patch.word[i][j / 2] = i < place.live_rows ? pack_bf16(v[j], v[j + 1]) : 0u;
    }
  }
}

struct BiasedRow {
  float first[8];
  float second[8];
};

// Rare, and so kept out of the loops: adds the bias to a row that is there.
static __device__ __noinline__ BiasedRow add_bias(const Made& x, int col, BiasedRow row) {
  float bias[8];
  load_vector<true>(x.bias, col, kNoBias, bias);
  add_eight(row.first, bias);
  load_vector<true>(x.second_bias, col, kNoBias, bias);
  add_eight(row.second, bias);
  return row;
}

template <bool kGated>
__device__ __forceinline__ void unpack_biased(const Made& x, const PatchPlace& place, int i, const uint4* from,
                                              float (&v)[8], float (&second)[8]) {
  unpack_eight<bf16_t>(*from, v);
  if (kGated) unpack_eight<bf16_t>(from[MadeConfig::kThreads], second);
  if (!x.biased || i >= place.live_rows) return;  // zeros stay zeros
  BiasedRow row;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    row.first[j] = v[j];
    row.second[j] = kGated ? second[j] : 0.0f;
  }
  row = add_bias(x, place.col, row);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    v[j] = row.first[j];
    if (kGated) second[j] = row.second[j];
  }
}

template <bool kGated>
__device__ __forceinline__ void make_activation(const Made& x, MakeTask& task) {
  with_activation(x.activation, [&](auto tag) {
    for_each_row<kGated, false>(x, task, [&](int i, const uint4* from, uint4* to) {
      float v[8];
      float second[8];
      unpack_biased<kGated>(x, task.place, i, from, v, second);
      activate_eight<decltype(tag)::kind>(v, second, kGated);
      *to = pack_eight_bf16(v);
    });
  });
}

template <bool kGated>
__device__ __forceinline__ void make_gradient(const Made& x, MakeTask& task) {
  with_activation(x.activation, [&](auto tag) {
    for_each_row<kGated, true>(x, task, [&](int i, const uint4* from, uint4* to) {
      float v[8];
      float second[8];
      float grad[8];
      unpack_biased<kGated>(x, task.place, i, from, v, second);
      unpack_eight<bf16_t>(from[(kGated ? 2 : 1) * MadeConfig::kThreads], grad);
      differentiate_eight<decltype(tag)::kind>(v, second, grad, kGated);
      *to = pack_eight_bf16(v);
      if (kGated) to[MadeConfig::kSlot] = pack_eight_bf16(second);
    });
  });
}

// Into the made tiles in shared memory.
__device__ __forceinline__ void make_activated(const Made& x, MakeTask& task) {
  if (x.kind == Produce::kActivation) {
    return x.gated ? make_activation<true>(x, task) : make_activation<false>(x, task);
  }
  return x.gated ? make_gradient<true>(x, task) : make_gradient<false>(x, task);
}

static __device__ __noinline__ void make_band_stats(const Made& x, unsigned band, unsigned index) {
  const int64_t row = static_cast<int64_t>(band) * BandConfig::kRows +
                      static_cast<int64_t>(index) * BandConfig::kRowsPerPiece + threadIdx.x / 32;
  if (row < x.rows) {
    const WarpRow warp{reinterpret_cast<const uint4*>(x.data + row * x.stride), static_cast<int>(x.cols / 8)};
    const RowStats stats = warp.stats(x.centered, x.eps);
    if (threadIdx.x % 32 == 0) {
      if (x.centered) x.mean[row] = stats.mean;
      x.rstd[row] = stats.rstd;
    }
  }
  band_done(x.order, band);
}

// The tiles that a block takes, in an order where norms make their statistics (see bands.cuh), else every so manyth.
template <bool kOrdered>
class TileQueue {
 public:
  __device__ __forceinline__ TileQueue(const Made& x, bool backwards, int patch_row, int patch_col)
      : tickets_(x.order), at_(blockIdx.x), backwards_(backwards), patch_row_(patch_row), patch_col_(patch_col) {}

  __device__ __forceinline__ PatchPlace next(const Made& x) {
    constexpr int kTile = TileConfig::kTile;
    PatchPlace place{0, 0, 0, kNoBand};
    unsigned down;
    unsigned across;
    if (kOrdered && x.order.counters != nullptr) {
      __shared__ unsigned slot;
      BandPiece piece;
      for (;;) {
        const unsigned ticket = tickets_.take(&slot);
        if (ticket >= x.pieces) return place;
        piece = band_piece(x.order, ticket);
        if (!piece.stats) break;
        make_band_stats(x, piece.band, piece.index);
      }
      down = piece.band;
      across = piece.index;
    } else {
      if (at_ >= x.pieces) return place;
      const unsigned tile = backwards_ ? x.pieces - 1 - at_ : at_;
      at_ += gridDim.x;
      down = tile / x.order.across;
      across = tile - down * x.order.across;
    }
    place.band = down;
    place.row = static_cast<int>(down) * kTile + patch_row_;
    place.col = static_cast<int>(across) * kTile + patch_col_;
    const int rows = static_cast<int>(x.rows) - place.row;
    place.live_rows = place.col >= static_cast<int>(x.cols) ? 0 : max(0, min(TileConfig::kPatch, rows));
    return place;
  }

 private:
  Tickets tickets_;
  unsigned at_;
  bool backwards_;
  int patch_row_;
  int patch_col_;
};

// ---------------------------------------------------------------------------------------------- tiles
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

// Makes the block's tiles (two at a time for a gated gradient) and hands each to consume(patch, place, inside). The
// threads' patches lie at (patch_row, patch_col). memory: the block's dynamic shared memory. consume may use stage(),
// half a tile, after a barrier of its own. shares: it does, or shares other memory between threads. backwards: starts
// with the last tile, which L2 may still hold.
__device__ __forceinline__ void* made_stage(uint4* memory) { return memory + MadeConfig::kSlot; }

// kActivated: x.activated(), compiled apart because the other kinds live in registers.
template <bool kActivated, typename Consume>
__device__ __forceinline__ void for_each_made_tile(const Made& x, bool backwards, int patch_row, int patch_col,
                                                   bool shares, uint4* memory, const Consume& consume) {
  uint4* made = memory + MadeConfig::kSlot + threadIdx.x;
  auto* sums = reinterpret_cast<GroupSums*>(static_cast<char*>(made_stage(memory)) + MadeConfig::kSumsOffset);
  TileQueue<!kActivated> queue(x, backwards, patch_row, patch_col);
  const PatchPlace first = queue.next(x);
  MakeTask task{memory + threadIdx.x, made, first, first, Cursor(x, first)};
  if (!kActivated || (x.kind == Produce::kActivation && !x.gated)) {
    OperandRing<false, false>{task.ring}.fill(x, task.cursor);
  } else if (x.kind == Produce::kActivation) {
    OperandRing<true, false>{task.ring}.fill(x, task.cursor);
  } else if (!x.gated) {
    OperandRing<false, true>{task.ring}.fill(x, task.cursor);
  } else {
    OperandRing<true, true>{task.ring}.fill(x, task.cursor);
  }
#pragma unroll 1
  for (; task.place.band != kNoBand; task.place = task.next) {
    task.next = queue.next(x);
    if (kActivated) make_activated(x, task);
    TilePlace tile{task.place.row - patch_row, task.place.col - patch_col};
    const bool inside = tile_inside(tile, x.rows, x.cols);
#pragma unroll 1
    for (int half = 0; half < (kActivated && x.paired() ? 2 : 1); ++half) {
      Patch<bf16_t> patch;
      if (kActivated) {
        take_patch(made + half * MadeConfig::kSlot, patch);
      } else {
        take_operand(x, task, patch);
        if (x.order.counters != nullptr) wait_for_band(x.order, task.place.band);
        if (x.kind == Produce::kNorm) make_norm(x, task.place, patch);
      }
      if (x.partials != nullptr) store_column_sums(x, patch, tile, patch_row, patch_col, *sums);
      consume(patch, tile, inside);
      if (shares || x.partials != nullptr) __syncthreads();  // until all have read what they shared
      tile.col += x.cols;
    }
  }
}

}  // namespace cuda
}  // namespace te_dist
