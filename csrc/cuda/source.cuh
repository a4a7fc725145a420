// Tiles of a bf16 matrix that an activation or an activation's gradient makes on the fly, any of them, with
// or without a bias: what patch_source.cuh does not make faster.
//
// Blocks stay and take tile after tile. Each thread has 8 x 8 patches of the operands, whose rows come
// through a ring in shared memory, asynchronously, those of the next tile while this one is worked on: what
// is made costs as many instructions as memory leaves time for, so neither may wait for the other. A thread
// turns row after row into its patch of the made matrix, in shared memory too: loops instead of unrolled code
// keep the five activations small. No thread touches another's patches, so none waits. The made patch then
// goes to registers, rounded to bf16 as if it had been in memory, and the quantize kernels take over.
//
// A gated gradient [M, 2 H] is made in pairs of tiles at columns c and H + c, which share two thirds of what
// they read and the activation.
#pragma once

#include "activation_guarded.cuh"
#include "copy.cuh"
#include "made_sums.cuh"

namespace te_dist {
namespace cuda {

struct MadeConfig {
  static constexpr int kThreads = TileConfig::kThreads;
  static constexpr int kBlocksPerSm = 3;
  static constexpr int kDepth = 8;  // vectors of 16 bytes in a thread's ring
  static constexpr int kSlot = TileConfig::kPatch * kThreads;  // vectors of the ring, or of a made tile
  static constexpr int kSlotBytes = kSlot * 16;
  static constexpr int kSumsOffset = kSlotBytes / 2;  // in a made tile: behind the stage of a transposed plane
};
static_assert(MadeConfig::kDepth == TileConfig::kPatch, "one operand's ring holds a patch");

// Starts kernel(made, arguments...): as many blocks as fit, each with its ring and its made tiles.
template <typename Kernel, typename... Arguments>
int launch_made(const char* name, Kernel kernel, const Made& x, Lane lane, const Arguments&... arguments) {
  const int bytes = (x.paired() ? 3 : 2) * MadeConfig::kSlotBytes;
  constexpr int kMostBytes = 3 * MadeConfig::kSlotBytes;  // never less: a graph may hold a launch that needs it
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes),
             "shared memory for operands");
  const int64_t most = static_cast<int64_t>(multiprocessors()) * (x.paired() ? 2 : MadeConfig::kBlocksPerSm);
  const int blocks = grid_size(smaller(x.pieces, most));
  kernel<<<blocks, MadeConfig::kThreads, bytes, stream_of(lane)>>>(x, arguments...);
  check_launch(name);
  return blocks;
}

// ---------------------------------------------------------------------------------------------- operands
// What a thread has of one tile. Rows and columns fit 32 bits (check::is_fused): 64-bit sums cost twice.
struct PatchPlace {
  int row;
  int col;
  int live_rows;  // of the patch that lie in the matrix
  bool there;     // a tile
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
  __device__ __forceinline__ void skip(const Made& x, int rows) {
    data += rows * x.stride;
    grad += rows * x.grad_stride;
    live_rows -= rows;
  }
};

// A thread's ring of operand rows: a row of a patch is the operand, the other factor where gated, and the
// gradient. Row i lies where row i + kRows will.
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
  __device__ __forceinline__ void fill(const Made& x, const PatchPlace& place) const {
    Cursor cursor(x, place);
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) fetch(x, cursor, i);
  }
  // Until the oldest row is there.
  __device__ __forceinline__ void wait() const { wait_for_all_but<kRows - 1>(); }
};

// ---------------------------------------------------------------------------------------------- making
// The patch at `place` is made while rows of the one at `next` are fetched.
struct MakeTask {
  uint4* ring;
  uint4* made;
  PatchPlace place;
  PatchPlace next;
};

// body(i, operands of row i, where to put the made row) for the rows of a patch.
template <bool kGated, bool kGrad, typename Body>
__device__ __forceinline__ void for_each_row(const Made& x, const MakeTask& task, const Body& body) {
  const OperandRing<kGated, kGrad> ring{task.ring};
  uint4* made = task.made;
  Cursor cursor(x, task.place);
  cursor.skip(x, ring.kRows);
#pragma unroll 1
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    ring.wait();
    body(i, ring.row(i), made);
    made += MadeConfig::kThreads;
    if (i == TileConfig::kPatch - ring.kRows) cursor = Cursor(x, task.next);
    ring.fetch(x, cursor, i);
  }
}

// Biases of a patch's columns.
template <bool kGated>
struct PatchBias {
  uint4 first;
  uint4 second;

  __device__ __forceinline__ PatchBias(const Made& x, int col)
      : first(load_first<false>(x.bias, col, kNoBiases)),
        second(kGated ? load_first<false>(x.second_bias, col, kNoBiases) : first) {}
  // A row of the operand, and of the other factor where gated.
  __device__ __forceinline__ void unpack(const Made& x, const uint4* from, float (&v)[8], float (&other)[8]) const {
    uint4 row = *from;
    uint4 other_row = kGated ? from[MadeConfig::kThreads] : row;
    if (x.biased) {
      asm volatile("");  // or the compiler adds without a branch, nothing to most
      row = add_bf16(row, first);
      if (kGated) other_row = add_bf16(other_row, second);
    }
    unpack_eight<bf16_t>(row, v);
    if (kGated) unpack_eight<bf16_t>(other_row, other);
  }
};

// What a bias makes of rows that are not there is nothing. Few patches have such.
__device__ __forceinline__ void clear_rows_not_there(const Made& x, const MakeTask& task, uint4* made) {
  if (!x.biased) return;
#pragma unroll 1
  for (int i = task.place.live_rows; i < TileConfig::kPatch; ++i) {
    made[i * MadeConfig::kThreads] = make_uint4(0u, 0u, 0u, 0u);
  }
}

template <bool kGated>
__device__ __forceinline__ void make_activation(const Made& x, const MakeTask& task) {
  const PatchBias<kGated> bias(x, task.place.col);
  with_activation(x.activation, [&](auto tag) {
    for_each_row<kGated, false>(x, task, [&](int, const uint4* from, uint4* to) {
      float v[8];
      float second[8];
      bias.unpack(x, from, v, second);
      *to = activated_eight<decltype(tag)::kind, kGated>(x.guard, v, second);
    });
  });
  clear_rows_not_there(x, task, task.made);
}

template <bool kGated>
__device__ __forceinline__ void make_gradient(const Made& x, const MakeTask& task) {
  const PatchBias<kGated> bias(x, task.place.col);
  with_activation(x.activation, [&](auto tag) {
    for_each_row<kGated, true>(x, task, [&](int, const uint4* from, uint4* to) {
      float v[8];
      float second[8];
      float grad[8];
      bias.unpack(x, from, v, second);
      unpack_eight<bf16_t>(from[(kGated ? 2 : 1) * MadeConfig::kThreads], grad);
      differentiate_eight<decltype(tag)::kind>(v, second, grad, kGated);
      *to = pack_eight_bf16(v);
      if (kGated) to[MadeConfig::kSlot] = pack_eight_bf16(second);
    });
  });
  clear_rows_not_there(x, task, task.made);
  if (kGated) clear_rows_not_there(x, task, task.made + MadeConfig::kSlot);
}

// Into the made tiles in shared memory.
__device__ __forceinline__ void make_activated(const Made& x, const MakeTask& task) {
  if (x.kind == Produce::kActivation) {
    return x.gated ? make_activation<true>(x, task) : make_activation<false>(x, task);
  }
  return x.gated ? make_gradient<true>(x, task) : make_gradient<false>(x, task);
}

// The tiles that a block takes: every so manyth.
class TileQueue {
 public:
  __device__ __forceinline__ TileQueue(bool backwards, int patch_row, int patch_col)
      : at_(blockIdx.x), backwards_(backwards), patch_row_(patch_row), patch_col_(patch_col) {}

  __device__ __forceinline__ PatchPlace next(const Made& x) {
    constexpr int kTile = TileConfig::kTile;
    PatchPlace place{0, 0, 0, false};
    if (at_ >= x.pieces) return place;
    const unsigned tile = backwards_ ? x.pieces - 1 - at_ : at_;
    at_ += gridDim.x;
    const unsigned down = tile / x.order.across;
    const unsigned across = tile - down * x.order.across;
    place.there = true;
    place.row = static_cast<int>(down) * kTile + patch_row_;
    place.col = static_cast<int>(across) * kTile + patch_col_;
    const int rows = static_cast<int>(x.rows) - place.row;
    place.live_rows = place.col >= static_cast<int>(x.cols) ? 0 : max(0, min(TileConfig::kPatch, rows));
    return place;
  }

 private:
  unsigned at_;
  bool backwards_;
  int patch_row_;
  int patch_col_;
};

// ---------------------------------------------------------------------------------------------- tiles
// Half a made tile of shared memory, for what consume (below) stages.
__device__ __forceinline__ void* made_stage(uint4* memory) { return memory + MadeConfig::kSlot; }

// Makes the block's tiles (two at a time for a gated gradient) and hands each to consume(patch, place,
// inside). The threads' patches lie at (patch_row, patch_col). memory: the block's dynamic shared memory.
// consume may use made_stage after a barrier of its own. shares: it does, or shares other memory
// between threads. backwards: starts with the last tile, which L2 may still hold.
template <typename Consume>
__device__ __forceinline__ void for_each_made_tile(const Made& x, bool backwards, int patch_row, int patch_col,
                                                   bool shares, uint4* memory, const Consume& consume) {
  uint4* made = memory + MadeConfig::kSlot + threadIdx.x;
  auto* sums = reinterpret_cast<GroupSums*>(static_cast<char*>(made_stage(memory)) + MadeConfig::kSumsOffset);
  TileQueue queue(backwards, patch_row, patch_col);
  const PatchPlace first = queue.next(x);
  MakeTask task{memory + threadIdx.x, made, first, first};
  if (x.kind == Produce::kActivation && !x.gated) {
    OperandRing<false, false>{task.ring}.fill(x, first);
  } else if (x.kind == Produce::kActivation) {
    OperandRing<true, false>{task.ring}.fill(x, first);
  } else if (!x.gated) {
    OperandRing<false, true>{task.ring}.fill(x, first);
  } else {
    OperandRing<true, true>{task.ring}.fill(x, first);
  }
#pragma unroll 1
  for (; task.place.there; task.place = task.next) {
    task.next = queue.next(x);
    make_activated(x, task);
    TilePlace tile{task.place.row - patch_row, task.place.col - patch_col};
    const bool inside = tile_inside(tile, x.rows, x.cols);
#pragma unroll 1
    for (int half = 0; half < (x.paired() ? 2 : 1); ++half) {
      Patch<bf16_t> patch;
      take_patch(made + half * MadeConfig::kSlot, patch);
      if (x.partials != nullptr) {
        __syncthreads();  // the sums take the place of patches: all threads have theirs
        store_column_sums(x, patch, tile, patch_row, patch_col, *sums);
      }
      consume(patch, tile, inside);
      if (shares || x.partials != nullptr) __syncthreads();  // until all have read what they shared
      tile.col += x.cols;
    }
  }
}

}  // namespace cuda
}  // namespace te_dist
