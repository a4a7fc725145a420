// Tiles of a bf16 matrix that is made on the fly in registers, in the place of its operand: norms, matrices
// whose columns are added up, and activations, whose sigmoids come from a table.
//
// As with a matrix in memory, a thread loads an 8 x 8 patch, and blocks that work hide the latency of those that
// load. Norms and sums: a block takes one tile. Activations: blocks stay, for the sake of their tables; with one
// operand there is room for the next tile's in shared memory, as in tile_stream.cuh. All but one way are for matrices
// that consist of whole tiles: few instructions, and no registers for edges.
#pragma once

#include "row_team.cuh"
#include "ways.cuh"

namespace te_dist {
namespace cuda {

// ---------------------------------------------------------------------------------------------- patches
// The patch at (row, col) of an operand; what lies outside of the matrix is zero. last: statistics have read it.
__device__ __forceinline__ void load_operand(const Made& x, const bf16_t* data, int64_t stride, int64_t row,
                                             int64_t col, bool inside, bool last, Patch<bf16_t>& patch) {
  const bf16_t* from = data + row * stride + col;
  if (inside && last) {
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) load_words<bf16_t, true>(from + i * stride, patch.word[i]);
    return;
  }
  if (inside) {
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) load_words(from + i * stride, patch.word[i]);
    return;
  }
  const int live = col < x.cols ? static_cast<int>(min(x.rows - row, int64_t{TileConfig::kPatch})) : 0;
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) patch.word[i][w] = 0u;
    if (i < live) load_words(from + i * stride, patch.word[i]);
  }
}

// Statistics of the kRows rows from `row` on, as they are now: as many neighbouring lanes, which share them, have one
// each.
template <int kRows = TileConfig::kPatch>
__device__ __forceinline__ RowStats peek_stats(const Made& x, int64_t row, bool inside) {
  row += threadIdx.x % kRows;
  const bool there = inside || row < x.rows;
  return RowStats{there && x.centered ? peek(x.mean + row) : 0.0f, there ? peek(x.rstd + row) : 0.0f};
}

// Until all lanes of the warp have theirs.
template <int kRows = TileConfig::kPatch>
__device__ __forceinline__ void await_stats(const Made& x, int64_t row, bool inside, RowStats& mine) {
  while (x.order.ordered && __any_sync(kFullWarp, is_pending(mine.mean) || is_pending(mine.rstd))) {
    __nanosleep(200);
    mine = peek_stats<kRows>(x, row, inside);
  }
}

// Gains and biases of eight columns, or of four where they are fp32: on their way before anybody waits for statistics.
struct NormVectors {
  uint4 gain;
  uint4 bias;

  template <bool kWhole>
  static __device__ __forceinline__ NormVectors load(const Made& x, int64_t col) {
    return NormVectors{load_first<kWhole>(x.weight, col, 0u), load_first<kWhole>(x.bias, col, kNoBiases)};
  }
};

// What a norm makes of a patch of its operand, kColumns columns at a time, kShiftedColumns where there are shifts or
// biases: fewer where there are not registers for eight gains and eight biases, but then every lane is asked for its
// statistics more than once. mine: of peek_stats. kWhole: all is inside.
template <bool kWhole, int kColumns, int kShiftedColumns = kColumns>
__device__ __forceinline__ void make_norm(const Made& x, int64_t row, int64_t col, bool inside, const RowStats& mine,
                                          const NormVectors& vectors, Patch<bf16_t>& patch) {
  const float shift_of_mine = mine.shift(x.centered);
  const auto make = [&](auto shifted, auto columns) {
    constexpr bool kShifted = decltype(shifted)::value;
    constexpr int kAtOnce = decltype(columns)::value;
#pragma unroll
    for (int first = 0; first < 8; first += kAtOnce) {
      float gain[kAtOnce];
      float bias[kAtOnce] = {};
      values_of_some<kWhole>(x.weight, col, vectors.gain, first, gain);
      if (x.zero_centered) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) gain[j] += 1.0f;
      }
      if (kShifted) values_of_some<kWhole>(x.bias, col, vectors.bias, first, bias);
#pragma unroll
      for (int i = 0; i < TileConfig::kPatch; ++i) {
        const float rstd = __shfl_sync(kFullWarp, mine.rstd, i, 8);
        const float shift = kShifted ? __shfl_sync(kFullWarp, shift_of_mine, i, 8) : 0.0f;
#pragma unroll
        for (int j = 0; j < kAtOnce; j += 2) {
          uint32_t& word = patch.word[i][(first + j) / 2];
          word = norm_of_word<kShifted>(word, rstd, shift, make_float2(gain[j], gain[j + 1]),
                                        make_float2(bias[j], bias[j + 1]));
        }
      }
    }
  };
  if (x.centered || x.bias.data != nullptr) {
    make(std::true_type{}, std::integral_constant<int, kShiftedColumns>{});
  } else {
    make(std::false_type{}, std::integral_constant<int, kColumns>{});
  }
  if (!kWhole && !inside) {
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) {  // a row outside of the matrix is zero, whatever gains and biases
#pragma unroll
      for (int w = 0; w < 4; ++w) patch.word[i][w] = row + i < x.rows && col < x.cols ? patch.word[i][w] : 0u;
    }
  }
}

// x + bias in the place of x, an activation's operand.
__device__ __forceinline__ void add_biases(const uint4& biases, Patch<bf16_t>& patch) {
  add_to_rows(patch.word, {biases.x, biases.y, biases.z, biases.w});
}

// Biases that come to shared memory with a streamed tile, a thread's own.
struct StreamedBiases {
  const Made& x;
  int patch_col;
  uint4* memory;

  __device__ __forceinline__ void fetch(const NearPlace& tile) const {
    copy_async(memory + threadIdx.x, static_cast<const bf16_t*>(x.bias.data) + (tile.col + patch_col));
  }
  __device__ __forceinline__ void take(Patch<bf16_t>& patch) const { add_biases(memory[threadIdx.x], patch); }
};

__device__ __forceinline__ float2 values_of(uint32_t word) {
  return make_float2(Words<bf16_t>::element(word, 0), Words<bf16_t>::element(word, 1));
}

template <bool kExact>
__device__ __forceinline__ uint32_t activated(const SigmoidTable<kExact>& table, uint32_t word) {
  const float2 x = values_of(word);
  const float2 sigma = table.look_up(word);
  return pack_bf16(x.x * sigma.x, x.y * sigma.y);
}
__device__ __forceinline__ uint32_t activated(const Rectifier& rectifier, uint32_t word) {
  const float2 x = values_of(word);
  return pack_bf16(rectifier.of(x.x), rectifier.of(x.y));
}

template <typename Table>
__device__ __forceinline__ void make_activation(const Table& table, Patch<bf16_t>& patch) {
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) patch.word[i][w] = activated(table, patch.word[i][w]);
  }
}

// A second operand waits in shared memory, where a thread finds row i of its patch 256 vectors behind row i - 1.
// patch <- combine(value, sigmoid of it, value of the second operand).
template <typename Table, typename Combine>
__device__ __forceinline__ void make_of_two(const Table& table, const uint4* mine, Patch<bf16_t>& patch,
                                            const Combine& combine) {
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    const uint4 row = mine[i * PatchConfig::kThreads];
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 x = values_of(patch.word[i][w]);
      const float2 second = values_of(words[w]);
      const float2 sigma = table.look_up(patch.word[i][w]);
      patch.word[i][w] = pack_bf16(combine(x.x, sigma.x, second.x), combine(x.y, sigma.y, second.y));
    }
  }
}

__device__ __forceinline__ float gelu_gradient(float x, float sigma, float grad) {
  return grad * (sigma * fused_multiply_add(sigmoid_slope(Activation::kGelu, x), 1.0f - sigma, 1.0f));
}

// The second factors in word w of a row.
struct Gate {
  __device__ __forceinline__ float2 operator()(uint32_t word, int) const { return values_of(word); }
};
struct BiasedGate {
  uint4 biases;

  __device__ __forceinline__ float2 operator()(uint32_t word, int w) const {
    return values_of(add_bf16(word, w == 0 ? biases.x : w == 1 ? biases.y : w == 2 ? biases.z : biases.w));
  }
};

// A gated activation's gradients: of its first factor in the patch, of its second one in that one's place in shared
// memory.
template <Activation kKind, typename Table, typename GateOf>
__device__ __forceinline__ void make_pair(const Table& table, const uint4* grads, uint4* seconds, const GateOf& gate_of,
                                          Patch<bf16_t>& patch) {
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    const uint4 grad = grads[i * PatchConfig::kThreads];
    const uint4 second = seconds[i * PatchConfig::kThreads];
    const uint32_t grad_words[4] = {grad.x, grad.y, grad.z, grad.w};
    uint32_t words[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 x = values_of(patch.word[i][w]);
      const float2 sigma = table.look_up(patch.word[i][w]);
      const float2 dy = values_of(grad_words[w]);
      const float2 gate = gate_of(words[w], w);
      const auto slope = [](float x, float sigma) {
        return sigma * fused_multiply_add(sigmoid_slope(kKind, x), 1.0f - sigma, 1.0f);
      };
      patch.word[i][w] = pack_bf16(dy.x * gate.x * slope(x.x, sigma.x), dy.y * gate.y * slope(x.y, sigma.y));
      words[w] = pack_bf16(dy.x * (x.x * sigma.x), dy.y * (x.y * sigma.y));
    }
    seconds[i * PatchConfig::kThreads] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Keeps the compiler from holding on to what it has unpacked of the patch: two registers an element.
__device__ __forceinline__ void forget_unpacked(Patch<bf16_t>& patch) {
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) asm volatile("" : "+r"(patch.word[i][w]));
  }
}

// ---------------------------------------------------------------------------------------------- bands
// The statistics of a row that need not fit the team's registers. kFull: it has all of TeamRow<8>, which saves
// comparisons.
template <bool kCentered, bool kFull>
__device__ __forceinline__ void make_stats_of_row(const Made& x, int64_t row, float* scratch, int number) {
  if (row >= x.rows) return;
  RowTeam team(scratch, number);
  const int vectors = kFull ? TeamRow<8>::kColumns / 8 : static_cast<int>(x.cols / 8);
  const auto* from = reinterpret_cast<const uint4*>(x.data + row * x.stride);
  TeamRow<8> held;
  held.load<true>(from, 0, vectors);
  const RowStats stats = stats_of_row<kCentered, kFull>(team, held, from, vectors, x.eps);
  if (RowTeam::rank() != 0) return;
  wait_for_kernel_before();  // which marks statistics as not there
  if (kCentered) publish(x.mean + row, stats.mean);
  publish(x.rstd + row, stats.rstd);
}

// Those of several short ones, from `row` on.
template <bool kCentered, int kHeld>
__device__ __forceinline__ void make_stats_of_rows(const Made& x, int64_t row, float* scratch, int number) {
  TeamOfRows<kHeld> team(scratch, number);
  const int vectors = static_cast<int>(x.cols / 8);
  const int rows = static_cast<int>(min(x.rows - row, int64_t{kHeld}));
  if (rows <= 0) return;
  TeamRow<8, kHeld> held;
#pragma unroll
  for (int r = 0; r < kHeld; ++r) {
    const auto* from = reinterpret_cast<const uint4*>(x.data + (row + r) * x.stride);
    held.template load<true>(from, 0, r < rows ? vectors : 0, r);
  }
  RowStats stats[kHeld];
  stats_of_held<kCentered>(team, held, vectors, x.eps, stats);
  if (RowTeam::rank() != 0) return;
  wait_for_kernel_before();
#pragma unroll
  for (int r = 0; r < kHeld; ++r) {
    if (r >= rows) break;
    if (kCentered) publish(x.mean + row + r, stats[r].mean);
    publish(x.rstd + row + r, stats[r].rstd);
  }
}

template <bool kCentered>
__device__ __forceinline__ void make_stats_of_team(const Made& x, int64_t row, float* scratch, int number) {
  if (x.order.held == 4) {
    make_stats_of_rows<kCentered, 4>(x, row, scratch, number);
  } else if (x.order.held == 2) {
    make_stats_of_rows<kCentered, 2>(x, row, scratch, number);
  } else if (x.cols == TeamRow<8>::kColumns) {
    make_stats_of_row<kCentered, true>(x, row, scratch, number);
  } else {
    make_stats_of_row<kCentered, false>(x, row, scratch, number);
  }
}

static __device__ __noinline__ void make_band_stats(const Made& x, unsigned band, unsigned index) {
  static_assert(BandConfig::kTeams * RowTeam::kThreads == PatchConfig::kThreads, "as many teams as a block has");
  __shared__ float scratch[BandConfig::kTeams * TeamOfRows<4>::kScratch];
  const unsigned number = threadIdx.x / RowTeam::kThreads;
  const int64_t row =
      static_cast<int64_t>(band) * BandConfig::kRows + (index * BandConfig::kTeams + number) * x.order.held;
  x.centered ? make_stats_of_team<true>(x, row, scratch, static_cast<int>(number))
             : make_stats_of_team<false>(x, row, scratch, static_cast<int>(number));
}

// ---------------------------------------------------------------------------------------------- tiles
// A band of 128 rows has as many tiles of any shape; lower ones lie in columns.
template <typename Shape>
__device__ __forceinline__ NearPlace place_in_band(const BandPiece& piece) {
  constexpr unsigned kDown = TileConfig::kTile / Shape::kRows;
  return NearPlace{static_cast<int>(piece.band * TileConfig::kTile + piece.index % kDown * Shape::kRows),
                   static_cast<int>(piece.index / kDown * Shape::kCols)};
}

// Makes the block's tiles and hands each to consume(patch, place, inside). The threads' patches lie at
// (patch_row, patch_col). Shape: of tiles; only squares have column sums. memory: the block's dynamic shared
// memory. backwards: starts with the last tile, which L2 may still hold. shares, of pairs: consume uses the work area,
// and launch_way was told of a stage. kNormColumns, kShiftedColumns: see make_norm.
template <Way kWay, typename Shape, int kNormColumns = 4, int kShiftedColumns = kNormColumns, typename Consume>
__device__ __forceinline__ void for_each_patch(const Made& x, bool backwards, int patch_row, int patch_col,
                                               float* memory, const Consume& consume, bool shares = true) {
  // Of pairs, the next operands are on their way as soon as there is room for them: two blocks do not hide what they
  // wait for. Others use the first one's place, if any.
  const bool early = WayConfig<kWay>::kPairs && !shares;
  const auto finish = [&](Patch<bf16_t>& patch, const TilePlace& tile, bool inside) {
    if constexpr (Shape::kRows == TileConfig::kTile && WayConfig<kWay>::kPairs) {
      if (x.partials != nullptr) {
        void* place = early ? sums_area<kWay>(memory) : work_area<kWay>(memory);
        if (early) __syncthreads();  // until all have read the last tile's
        store_column_sums(x, patch, tile, patch_row, patch_col, *static_cast<GroupSums*>(place));
        if (!early) __syncthreads();
      }
    } else if constexpr (Shape::kRows == TileConfig::kTile && WayConfig<kWay>::kSums) {
      __shared__ GroupSums sums;
      if (x.partials != nullptr) store_column_sums(x, patch, tile, patch_row, patch_col, sums);
    }
    if (!WayConfig<kWay>::kTabled) forget_unpacked(patch);
    consume(patch, tile, inside);
  };
  constexpr bool kWhole = WayConfig<kWay>::kWhole;
  if constexpr (!WayConfig<kWay>::kTabled) {
    const BandPiece piece = x.order.ordered
                                ? band_piece(x.order, blockIdx.x)
                                : band_tile(x.order, backwards ? x.pieces - 1 - blockIdx.x : blockIdx.x);
    if (piece.stats) return make_band_stats(x, piece.band, piece.index);
    const NearPlace tile = place_in_band<Shape>(piece);
    const bool inside = kWhole || tile_inside(tile, x.rows, x.cols);
    const int row = tile.row + patch_row;
    const int col = tile.col + patch_col;
    Patch<bf16_t> patch;
    load_operand(x, x.data, x.stride, row, col, inside, x.order.ordered, patch);
    if (x.kind == Produce::kNorm) {
      // Fewer instructions, but with four columns at a time there are not registers enough for what they become.
      constexpr bool kUnchecked = kWhole && kNormColumns == 8;
      const auto vectors = NormVectors::load<kUnchecked>(x, col);
      wait_for_kernel_before();
      RowStats stats = peek_stats(x, row, inside);
      await_stats(x, row, inside, stats);
      make_norm<kUnchecked, kNormColumns, kShiftedColumns>(x, row, col, inside, stats, vectors, patch);
    }
    finish(patch, tile, inside);
  } else {
    // As many tiles of any shape: what is whole has whole bands of 128 rows.
    const TileRegion region{0, 0, x.order.bands * (TileConfig::kTile / Shape::kRows),
                            x.order.across / (Shape::kCols / TileConfig::kTile)};
    const TileWalk walk{region, gridDim.x / region.across, gridDim.x % region.across, backwards};
    // What comes while the table is filled. (GELU's gradient is up to 6 % slower with this.)
    if constexpr (WayConfig<kWay>::kTableBytes > 0 && !WayConfig<kWay>::kSloped) {
      const TileCursor first(walk);
      if (first.there(walk)) {
        const auto tile = first.template place<Shape>(walk);
        prefetch_tile<Shape>(x.data, x.stride, tile);
        if (WayConfig<kWay>::kSlots > 0) prefetch_tile<Shape>(x.data + x.cols, x.stride, tile);
        if (WayConfig<kWay>::kPairs) prefetch_tile<Shape>(x.grad, x.grad_stride, tile);
      }
    }
    const auto table = WayConfig<kWay>::Table::fill(memory, x.activation);
    __syncthreads();
    if constexpr (WayConfig<kWay>::kStreamed) {
      const TileInput<bf16_t> input{x.data, x.rows, x.cols, x.stride, true};
      auto* ring = reinterpret_cast<uint4*>(reinterpret_cast<char*>(memory) + WayConfig<kWay>::kTableBytes);
      const auto make = [&](Patch<bf16_t>& patch, const NearPlace& tile) {
        make_activation(table, patch);
        __syncthreads();  // see below
        finish(patch, tile, true);
      };
      if constexpr (kWay == Way::kBiasedStreamed) {
        auto* biases = reinterpret_cast<uint4*>(reinterpret_cast<char*>(memory) + WayConfig<kWay>::kBiasOffset);
        for_each_streamed_tile<Shape>(input, walk, patch_row, patch_col, ring, make,
                                      StreamedBiases{x, patch_col, biases});
      } else {
        for_each_streamed_tile<Shape>(input, walk, patch_row, patch_col, ring, make);
      }
      return;
    }
    TileCursor cursor(walk);
    uint4* mine = static_cast<uint4*>(work_area<kWay>(memory)) + threadIdx.x;
    const auto fetch_grad = [&](const TilePlace& tile) {
      fetch_patch(x.grad + (tile.row + patch_row) * x.grad_stride + tile.col + patch_col, x.grad_stride, mine);
    };
    const auto fetch_second = [&](const TilePlace& tile, uint4* to) {
      fetch_patch(x.data + (tile.row + patch_row) * x.stride + tile.col + patch_col + x.cols, x.stride, to);
    };
    if (WayConfig<kWay>::kPairs && cursor.there(walk)) {
      const auto tile = cursor.template place<Shape>(walk);
      if (early) fetch_grad(tile);
      fetch_second(tile, mine + PatchConfig::kSlot);
    }
#pragma unroll 1
    for (; cursor.there(walk); cursor.next(walk)) {
      const auto tile = cursor.template place<Shape, typename WayConfig<kWay>::Place>(walk);
      const int64_t row = tile.row + patch_row;
      const int64_t col = tile.col + patch_col;
      Patch<bf16_t> patch;
      if constexpr (kWay == Way::kGated) fetch_patch(x.data + row * x.stride + col + x.cols, x.stride, mine);
      if ((WayConfig<kWay>::kSloped || WayConfig<kWay>::kPairs) && !early) fetch_grad(tile);
      load_operand(x, x.data, x.stride, row, col, true, false, patch);
      uint4 biases;
      uint4 second_biases;
      if constexpr (WayConfig<kWay>::kBiased) biases = load_first<true>(x.bias, col, kNoBiases);
      if constexpr (kWay == Way::kBiasedPaired) second_biases = load_first<true>(x.second_bias, col, kNoBiases);
      if constexpr (WayConfig<kWay>::kSlots > 0) wait_for_copies();
      if constexpr (WayConfig<kWay>::kBiased) add_biases(biases, patch);
      if constexpr (kWay == Way::kActivation || kWay == Way::kBiased) make_activation(table, patch);
      if constexpr (kWay == Way::kGated) {
        make_of_two(table, mine, patch, [](float x, float sigma, float second) { return x * sigma * second; });
      }
      if constexpr (WayConfig<kWay>::kSloped) make_of_two(table, mine, patch, gelu_gradient);
      if constexpr (WayConfig<kWay>::kPairs) {
        uint4* second = mine + PatchConfig::kSlot;
        // In one kernel: one of SwiGLU alone takes fewer registers, and with 1x128 blocks is 4 % slower.
        const auto make = [&](const auto& gate_of) {
          x.activation == Activation::kGelu ? make_pair<Activation::kGelu>(table, mine, second, gate_of, patch)
                                            : make_pair<Activation::kSilu>(table, mine, second, gate_of, patch);
        };
        if constexpr (kWay == Way::kBiasedPaired) {
          make(BiasedGate{second_biases});
        } else {
          make(Gate{});
        }
      }
      TileCursor later = cursor;
      if constexpr (WayConfig<kWay>::kPairs) {
        later.next(walk);
        if (later.there(walk)) prefetch_tile<Shape>(x.data, x.stride, later.template place<Shape>(walk));
        if (early && later.there(walk)) fetch_grad(later.template place<Shape>(walk));
      }
      // Until all have read what they shared. Here, because it also keeps the compiler from mixing both halves of
      // the work, for which there are not registers enough.
      if (!WayConfig<kWay>::kPairs || shares) __syncthreads();
      finish(patch, tile, true);
      if constexpr (WayConfig<kWay>::kPairs) {
        if (shares) __syncthreads();
        take_patch(mine + PatchConfig::kSlot, patch);
        if (later.there(walk)) fetch_second(later.template place<Shape>(walk), mine + PatchConfig::kSlot);
        finish(patch, TilePlace{tile.row, tile.col + x.cols}, true);
      }
      if (WayConfig<kWay>::kSlots > 0 && !early) __syncthreads();  // the next operands come where the stage is
    }
  }
}

}  // namespace cuda
}  // namespace te_dist
