// NVFP4 of what most matrices are: bf16, whole tiles of 128 x 128, planes whose rows are aligned, and the standard
// signs. The same bytes as nvfp4_kernel.cuh makes of any tile, in fewer instructions, and in loops: all of a tile's
// work in one piece does not fit the cache of instructions.
//
// A thread has 16 rows of 8 columns, in shared memory. It makes the codes of four rows at a time, then those of one
// column after another. Tiles come, and codes of columns leave, as boxes: their copies cost no instructions.
//
// What these kernels wait for is instructions, those of logic and shifts above all, and the number of their requests to
// L2, not the bytes. Hence the multiplications where shifts would do, and blocks that take two tiles, one below the
// other, whose column scales are written together. (More tiles a block are slower: all blocks come to write at the same
// time, and lines of scales leave L2 before their neighbours have added theirs. So are clusters that put their scales
// together, and more, smaller boxes.) What few tiles need comes after the loops that all take, so that these are short.
//
// Codes and scales follow from the amaxes by tables of 544 bytes, which take longer to make than a tile takes to come.
// The first block makes them for all that start when others have ended.
#pragma once

#include <type_traits>

#include "amax.cuh"
#include "boxes.cuh"
#include "nvfp4_columns.cuh"
#include "nvfp4_four_rows.cuh"
#include "nvfp4_parts.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct NvWhole {
  static constexpr int kRowsAtOnce = FourRows::kRows;
  static constexpr int kBlocksPerSm = 5;
  static constexpr unsigned kTall = 2;  // tiles of most blocks
};

// ---------------------------------------------------------------------------------------------- squares
// The largest magnitude of the 16 x 16 values that two neighbouring lanes have, as a float's bits.
__device__ __forceinline__ uint32_t max_of_square(const uint4* mine) {
  uint32_t pair = 0u;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const uint4 v = mine[i * NvConfig::kThreads];
    pair = larger_pair(pair, larger_pair(v.x, v.y, v.z, v.w));
  }
  pair = magnitudes(pair);
  const uint32_t largest = max(low_float(pair), high_float(pair));
  return max(largest, __shfl_xor_sync(kFullWarp, largest, 1));
}

// ---------------------------------------------------------------------------------------------- tiles
// Blocks lie as tiles do, across and down, from the lowest tiles up: L2 still holds the end of what the amax has been
// taken of. The first `tall` lines of blocks have kTall tiles each, the others one; where there is little to do for a
// tile, all have one.
struct TileOrder {
  unsigned down;  // tiles
  unsigned tall;

  static constexpr int64_t kMostDown = 65535;  // that a grid can have

  static TileOrder of(int64_t rows, int64_t cols, bool any_tall) {
    constexpr int kTile = TileConfig::kTile;
    const int64_t across = cols / kTile;
    TileOrder order{static_cast<unsigned>(rows / kTile), 0u};
    // As many as there is room for at once, some times. The rest, and what there would be room for once more, evens out
    // when they end.
    const int64_t room = static_cast<int64_t>(multiprocessors()) * NvWhole::kBlocksPerSm;
    const int64_t times = rows / kTile * across / NvWhole::kTall / room - 1;
    if (!any_tall || times <= 0 || order.down % NvWhole::kTall != 0u) return order;
    order.tall = static_cast<unsigned>(times * room / across);
    return order;
  }
  dim3 blocks(int64_t cols) const {
    const auto across = static_cast<unsigned>(grid_size(cols / TileConfig::kTile));
    return dim3(across, down - (NvWhole::kTall - 1u) * tall);
  }
  __device__ __forceinline__ bool is_tall() const { return blockIdx.y < tall; }
  // Of the uppermost tile.
  __device__ __forceinline__ unsigned row() const {
    const unsigned lines = blockIdx.y + 1u;  // of blocks, with this one
    return down - lines - (NvWhole::kTall - 1u) * min(lines, tall);
  }
  __device__ __forceinline__ unsigned col() const { return gridDim.x - 1u - blockIdx.x; }
};

// A tile's columns are numbered 8 * lane + j, and the rows of its patches 16 * group + i.
struct NvBoxes {
  CUtensorMap in;         // of a tile: [16][kGroups][128 columns], row i of all patches first
  CUtensorMap col_codes;  // of a tile: [8][kLanes][64 bytes], line j of all lanes first
};

struct BothScales {
  PlaneScales row;
  PlaneScales col;
};
static_assert(sizeof(BothScales) == sizeof(NvTables::of_planes), "both planes");

// Dice: of random bytes, or nothing. It is in here as five blocks a multiprocessor have no more room than this takes.
template <typename Dice>
struct NvShared {
  alignas(512) uint2 col_codes[NvPatch<bf16_t>::kCols][NvConfig::kLanes][NvConfig::kGroups];
  alignas(128) uint4 patch[kBlock][NvConfig::kThreads];
  alignas(8) uint8_t row_scales[NvConfig::kRows][NvTile<bf16_t>::kRowScales];
  alignas(8) uint8_t col_scales[NvTile<bf16_t>::kCols][NvTile<bf16_t>::kColScales];
  BothScales scales;
  Arrival arrival;
  Arrival arrival_of_scales;
  Dice dice;

  // Where the codes of 16 rows go, of column 0 of a lane. BoxPlaces::kSpread.
  __device__ __forceinline__ uint2* codes_of(int lane, int group) {
    return &col_codes[0][lane][((group / 2) ^ (lane / 2 % 4)) * 2 + group % 2];
  }
};

// All of a tile, by one thread.
template <typename Dice>
__device__ __forceinline__ void fetch_tile(NvShared<Dice>& shared, const NvBoxes& boxes, int64_t row, int64_t col) {
  shared.arrival.expect(sizeof(shared.patch));
  load_box(shared.patch, boxes.in, static_cast<int>(col), static_cast<int>(row / kBlock), 0, shared.arrival);
}

// What codes and scales follow from, as far as the first block has written it. By one thread.
template <typename Dice>
__device__ __forceinline__ void fetch_scales(NvShared<Dice>& shared, const NvTables& tables) {
  shared.arrival_of_scales.init();
  wait_for_kernel_before();  // which has left it blank
  shared.arrival_of_scales.expect(sizeof(BothScales));
  load_bytes(&shared.scales, tables.of_planes, sizeof(BothScales), shared.arrival_of_scales);
}

// Whether they were there. By all threads, of which each has the same answer.
template <typename Dice>
__device__ __forceinline__ bool have_come(const NvShared<Dice>& shared, bool with_rows, bool with_columns) {
  shared.arrival_of_scales.wait(0u);
  return (!with_rows || shared.scales.row.is_there()) && (!with_columns || shared.scales.col.is_there());
}

// By a warp of the first block. Nobody is told: who finds blanks makes his own.
__device__ __forceinline__ void publish_scales(const BothScales& scales, NvTables& tables) {
  for (unsigned i = threadIdx.x % 32u; i < NvTables::kVectors; i += 32u) {
    tables.of_planes[i] = reinterpret_cast<const uint4*>(&scales)[i];
  }
}

// The same place in shared memory, which the compiler does not know how to compute. If it did, it would do so again
// wherever it is used.
template <typename T>
__device__ __forceinline__ T* computed_once(T* place) {
  const unsigned address = __shfl_sync(kFullWarp, shared_address(place), static_cast<int>(threadIdx.x % 32u));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

__device__ __forceinline__ bool computed_once(bool of_all) { return __shfl_sync(kFullWarp, of_all ? 1 : 0, 0) != 0; }

// ---------------------------------------------------------------------------------------------- kernel
// Of a thread, for the rows of a tile from `row` on: what lies there, as boxes have brought it or somebody has made it.
struct TakesRows {
  template <typename From, typename Shared>
  __device__ __forceinline__ TakesRows(const From&, const Shared&, int64_t /*row*/, int /*lane*/) {}
  // Four of them after four, of which `mine` is the thread's part. What is made goes there if kept.
  __device__ __forceinline__ void take(const uint4* mine, bool /*kept*/, FourRows& rows) const { rows.load(mine); }
};

// What boxes bring is the matrix. Others make it of that: see nvfp4_whole_norm.cu.
struct AsItIs {
  static constexpr bool kMade = false;       // when rows are written
  static constexpr bool kMadeAhead = false;  // before that, and before the amaxes are known
  struct Shared {};
  using Taker = TakesRows;

  // By one warp.
  __device__ __forceinline__ void prepare(Shared&, int64_t /*tile_col*/) const {}
  // The thread's part of a tile, where it is: kMadeAhead.
  __device__ __forceinline__ void make_ahead(const Shared&, int /*lane*/, uint4* /*mine*/) const {}
};

// rng: seed and offset, where kRandom. early: blocks that have room at once, and start before the amaxes are there.
template <bool kHadamard, typename From, Codes kCodes>
__global__ void __launch_bounds__(NvConfig::kThreads, NvWhole::kBlocksPerSm)
    nvfp4_whole_kernel(const __grid_constant__ NvBoxes boxes, const __grid_constant__ From from, NvPlane row,
                       NvPlane col, NvParts parts, TileOrder order, bool written, unsigned early,
                       const int64_t* rng, const float* noop) {
  using Tile = NvTile<bf16_t>;
  constexpr bool kRandom = kCodes == Codes::kRandom;
  constexpr bool kSquares = kCodes == Codes::kSquares;
  constexpr int kTile = TileConfig::kTile;
  constexpr int kCols = NvPatch<bf16_t>::kCols;
  static_assert(!kSquares || (!kHadamard && !From::kMade), "squares are cut out of a matrix in memory");
  static_assert(Tile::kCols == kTile && NvConfig::kRows == kTile && NvConfig::kThreads == kTile, "square tiles");
  static_assert(NvWhole::kTall == 2u, "the scales of the tile before are held");
  __shared__ NvShared<std::conditional_t<kRandom, Dice, NoDice>> shared;
  __shared__ typename From::Shared for_making;
  if (is_noop(noop)) return;
  __builtin_assume(threadIdx.x < NvConfig::kThreads);
  const int line = static_cast<int>(threadIdx.x);
  const int lane = line % NvConfig::kLanes;
  const int group = line / NvConfig::kLanes;
  const unsigned count = order.is_tall() ? NvWhole::kTall : 1u;
  const int64_t tile_col = static_cast<int64_t>(order.col()) * kTile;
  int64_t tile_row = static_cast<int64_t>(order.row()) * kTile;
  int64_t first = tile_row + group * kBlock;
  // What a warp does before the first tile. Duties move on from block to block: a warp's number says which of four
  // schedulers it has.
  const unsigned duty = (threadIdx.x / 32u + blockIdx.x + blockIdx.y) % 4u;
  const bool asks = duty == 2u && threadIdx.x % 32u == 0u;
  const unsigned me = blockIdx.y * gridDim.x + blockIdx.x;
  const bool is_late = parts.tables != nullptr && me >= early;
  if (asks) {
    shared.arrival.init();
    if (written) wait_for_kernel_before();
    fetch_tile(shared, boxes, tile_row, tile_col);
    if (is_late) fetch_scales(shared, *parts.tables);
  }
  // By warps that fill no table, as far as they go.
  const unsigned draw = (duty + 2u) % 4u * 32u + threadIdx.x % 32u;
  shared.dice.draw(draw, rng, static_cast<unsigned>(tile_row), static_cast<unsigned>(tile_col));
  const bool with_rows = computed_once(row.data.data != nullptr);
  const bool with_columns = (!From::kMade && !From::kMadeAhead && !kRandom) || computed_once(col.data.data != nullptr);
  // What a warp finds of the parts is the whole, which the first block keeps.
  const auto amax_of = [&](const float* in_place, const float* of_blocks, float* whole) {
    wait_for_kernel_before();
    if (parts.count == 0) return *in_place;
    const float amax = amax_of_parts(of_blocks, parts.count);
    if (blockIdx.x == 0u && blockIdx.y == 0u && threadIdx.x % 32u == 0u && whole != nullptr) *whole = amax;
    return amax;
  };
  const auto fill_tables = [&] {
    BothScales& scales = shared.scales;
    if (duty == 0u) {
      if (with_rows) scales.row.template fill<kRandom>(amax_of(row.amax, parts.row, parts.row_amax), false);
    } else if (duty == 1u) {
      if (with_columns) scales.col.template fill<kRandom>(amax_of(col.amax, parts.col, parts.col_amax), kHadamard);
    }
  };
  const auto publish = [&] {
    if (me == 0u && duty == 3u && parts.tables != nullptr) publish_scales(shared.scales, *parts.tables);
  };
  // Early blocks would wait for the amaxes a tenth of their time. They make their first tile before, if they can.
  const bool waits = From::kMadeAhead && me < early;
#pragma unroll 1
  for (bool takes = is_late;; takes = false) {
    if (!takes && !waits) fill_tables();
    if (duty == 3u) from.prepare(for_making, tile_col);
    __syncthreads();
    if (!takes || have_come(shared, with_rows, with_columns)) break;
    __syncthreads();  // all have seen that they have not
  }
  if (!waits) publish();
  const TwoColumns columns{reinterpret_cast<const uint32_t*>(&shared.patch[0][line]),
                           computed_once(shared.codes_of(lane, group)),
                           computed_once(&shared.col_scales[lane * kCols][group])};
  const auto& dice = *computed_once(&shared.dice);
  const auto& row_plane_scales = *computed_once(&shared.scales.row);
  const auto& col_plane_scales = *computed_once(&shared.scales.col);
  uint2 now = make_uint2(0u, 0u);
  uint2 before = now;
#pragma unroll 1
  for (unsigned left = count;;) {
    uint8_t* to = row.data.data + first * row.data.cols + (tile_col + lane * kCols) / 2;
    uint8_t* row_scales = &shared.row_scales[group * kBlock + (kSquares ? 0 : lane % 2 * 2)][lane / 2];
    uint4* mine = &shared.patch[0][line];
    uint32_t square = 0u;
    typename From::Taker taker(from, for_making, first, lane);
    shared.arrival.wait(count - left);
    if constexpr (From::kMadeAhead) {
      from.make_ahead(for_making, lane, mine);
      if (waits && left == count) {
        fill_tables();
        __syncthreads();
        publish();
      }
    }
    const HeldScales of_row(row_plane_scales);
    const HeldScales of_col(col_plane_scales);
    if (kSquares) square = max_of_square(mine);
    const EasyScale of_rows(float_of(square), of_row);
    const EasyScale of_columns(float_of(square), of_col);
    if (kSquares && with_rows) {
#pragma unroll
      for (int i = 0; i < kBlock; i += 2) {
        row_scales[(i + lane % 2) * Tile::kRowScales] = static_cast<uint8_t>(of_rows.code);
      }
    }
    const BytesOfFour::OfRow::Place place_in_rows(
        [&](int w) { return dice.of_place(false, lane / 2, lane % 2 * 2 + w); });
    const auto draw_of_rows = [&](int step) {
      return [&, step] {
        return BytesOfFour{dice.four_lines(false, group * kBlock + step * NvWhole::kRowsAtOnce), place_in_rows};
      };
    };
    HardestScale hardest_rows;
    const auto write_rows = [&](auto raised) {
#pragma unroll 1
      for (int step = 0; step < kBlock / NvWhole::kRowsAtOnce; ++step) {
        FourRows rows;
        taker.take(mine, with_columns, rows);
        if constexpr (kSquares) {
          write_four_rows<raised.value>(rows, of_rows, of_row.plane.global, to, row.data.cols);
        } else if (with_rows) {
          const ScalesOfFour scales(rows, of_row);
          scales.write(row_scales);
          write_four_rows<kRandom, raised.value>(rows, scales, to, row.data.cols, draw_of_rows(step));
          scales.add_to(hardest_rows);
          if (From::kMade && !with_columns && !__all_sync(kFullWarp, scales.are_easy())) rows.store(mine);
        }
        mine += NvWhole::kRowsAtOnce * NvConfig::kThreads;
        to += NvWhole::kRowsAtOnce * row.data.cols;
        row_scales += NvWhole::kRowsAtOnce * Tile::kRowScales;
      }
    };
    if (From::kMade || with_rows) with_raises<kRandom>(of_row.plane, write_rows);
    // Codes of rows whose scales are not easy are wrong, and written again.
    const bool all_easy = kSquares || !with_rows || hardest_rows.are_all_easy();
#pragma unroll 1
    for (int step = 0; !all_easy && step < kBlock / NvWhole::kRowsAtOnce; ++step) {
      FourRows rows;
      rows.load(&shared.patch[step * NvWhole::kRowsAtOnce][line]);
      const ScalesOfFour scales(rows, of_row);
      if (__all_sync(kFullWarp, scales.are_easy())) continue;
      to = row.data.data + (first + step * NvWhole::kRowsAtOnce) * row.data.cols + (tile_col + lane * kCols) / 2;
      write_four_hard_rows<kRandom>(rows, scales, of_row.plane.global, to, row.data.cols, draw_of_rows(step));
    }
    const RandomBytes<4>::Place place_in_columns([&](int w) { return dice.of_place(true, group, w); });
    const auto draw_of_column = [&](unsigned column) {
      return RandomBytes<4>(dice.of_line(true, lane * kCols + static_cast<int>(column)), place_in_columns);
    };
    if (with_columns) {
      with_raises<kRandom>(of_col.plane, [&](auto raised) {
        write_columns<kHadamard, kCodes, raised.value>(columns, of_col, of_columns, draw_of_column);
      });
    }
    --left;
    show_to_copies();
    __syncthreads();
    if (asks) {
      if (left > 0u) fetch_tile(shared, boxes, tile_row + kTile, tile_col);
      if (with_columns) {
        store_box(boxes.col_codes, static_cast<int>(tile_row / 2), static_cast<int>(tile_col / kCols), 0,
                  shared.col_codes);
      }
    }
    const auto eight = [](const uint8_t(&of)[8]) { return *reinterpret_cast<const uint2*>(of); };
    if (with_rows) {
      store_scales(scales_of(row, tile_row + line, tile_col / kBlock), eight(shared.row_scales[line]));
    }
    before = now;
    if (with_columns) now = eight(shared.col_scales[line]);
    if (count == 1u && with_columns) store_scales(scales_of(col, tile_col + line, tile_row / kBlock), now);
    if (asks) wait_for_stores();
    tile_row += kTile;
    first += kTile;
    if (left == 0u) break;
    shared.dice.draw(draw, rng, static_cast<unsigned>(tile_row), static_cast<unsigned>(tile_col));
    __syncthreads();
  }
  if (count > 1u && with_columns) {
    const int64_t first_row = tile_row - NvWhole::kTall * kTile;
    store_scales(scales_of(col, tile_col + line, first_row / kBlock), before, now);
  }
}

// ---------------------------------------------------------------------------------------------- host
NvBoxes boxes_of(const Input& x, const Planes& out) {
  constexpr auto kLanes = static_cast<cuuint32_t>(NvConfig::kLanes);
  constexpr auto kGroups = static_cast<cuuint32_t>(NvConfig::kGroups);
  constexpr auto kCols = static_cast<cuuint32_t>(NvPatch<bf16_t>::kCols);
  const auto rows = static_cast<cuuint64_t>(x.rows);
  const auto cols = static_cast<cuuint64_t>(x.cols);
  const auto step = static_cast<cuuint64_t>(x.stride) * sizeof(bf16_t);
  const BoxedMatrix in{const_cast<void*>(x.data),
                       CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                       {cols, rows / kBlock, kBlock},
                       {kBlock * step, step},
                       {kLanes * kCols, kGroups, kBlock},
                       BoxPlaces::kPlain};
  const BoxedMatrix codes{out.col_data,
                          CU_TENSOR_MAP_DATA_TYPE_UINT8,
                          {rows / 2, cols / kCols, kCols},
                          {kCols * rows / 2, rows / 2},
                          {kGroups * sizeof(uint2), kLanes, kCols},
                          BoxPlaces::kSpread};
  return NvBoxes{map_of(in), out.col_data != nullptr ? map_of(codes) : CUtensorMap{}};
}

// Whether tiles are as nvfp4_whole_kernel<.., From, kCodes> takes them; of both planes, either may not be asked for.
template <typename From, Codes kCodes = Codes::kNearest>
bool is_whole(const Input& x, const Nvfp4Options& options, const Planes& out) {
  constexpr bool kSquares = kCodes == Codes::kSquares;
  constexpr int64_t kMost = int64_t{1} << 30;
  constexpr int kTile = TileConfig::kTile;
  return runs_hopper_code() && x.dtype == Float::kBF16 && x.rows <= TileOrder::kMostDown * kTile &&
         x.rows % kTile == 0 && x.cols < kMost && x.cols % kTile == 0 && x.stride > 0 && x.stride < kMost &&
         tile_input<bf16_t>(x).vector &&
         nv_row_plane<bf16_t>(x, out, nullptr).data.is_whole() && nv_col_plane(x, out, nullptr).data.is_whole() &&
         aligned(out.row_scale, 8) && aligned(out.col_scale, 16) && options.two_d == kSquares &&
         !(options.hadamard && (kSquares || options.signs != kHadamardSigns));
}

template <Codes kCodes = Codes::kNearest, typename From>
void launch_whole(const Input& x, const From& from, const Nvfp4Options& options, const float* amax_row,
                  const float* amax_col, const NvParts& parts, Before before, const Planes& out, const float* noop,
                  Lane lane) {
  const NvPlane row = nv_row_plane<bf16_t>(x, out, amax_row);
  const NvPlane col = nv_col_plane(x, out, amax_col);
  // A block that makes its scales itself does much before its first tile.
  constexpr bool kIsLittle = !From::kMade && !From::kMadeAhead && kCodes != Codes::kRandom;
  const TileOrder order = TileOrder::of(x.rows, x.cols, !kIsLittle || parts.tables == nullptr);
  const dim3 blocks = order.blocks(x.cols);
  const NvBoxes boxes = boxes_of(x, out);
  auto kernel = nvfp4_whole_kernel<false, From, kCodes>;
  if constexpr (kCodes != Codes::kSquares) {
    if (options.hadamard) kernel = nvfp4_whole_kernel<true, From, kCodes>;
  }
  const bool written = before == Before::kWritesToo;
  const auto early = static_cast<unsigned>(multiprocessors() * NvWhole::kBlocksPerSm);
  if (before != Before::kUnknown) {
    return launch_close("nvfp4_whole_kernel", kernel, blocks, NvConfig::kThreads, 0, lane, boxes, from, row, col, parts,
                        order, written, early, options.rng, noop);
  }
  launch("nvfp4_whole_kernel", kernel, blocks, NvConfig::kThreads, lane, boxes, from, row, col, parts, order, written,
         early, options.rng, noop);
}

}  // namespace
}  // namespace cuda
}  // namespace te_dist
