// The 128 x 128 tile that the fp8 kernels work on. A block of 256 threads holds it in registers as 16 x 16
// patches of 8 x 8 elements: patch (ty, tx) belongs to thread ty * 16 + tx. One row of a patch is one 16-byte
// load (two for fp32) and one 8-byte store; one column of it is 8 bytes of the transposed tile, which goes
// through shared memory to leave as 16-byte stores of 128 contiguous bytes.
#pragma once

#include "common.cuh"

namespace te_dist {
namespace cuda {

struct TileConfig {
  static constexpr int kTile = 128;
  static constexpr int kPatch = 8;
  static constexpr int kThreads = 256;
  // Patches of 16-bit inputs take 32 registers, fp32 ones 64.
  template <typename T>
  static constexpr int kBlocksPerSm = sizeof(T) == 2 ? 4 : 2;
};

template <typename T>
struct TileInput {
  const T* data;
  int64_t rows;
  int64_t cols;
  int64_t stride;
  bool vector;  // every row starts on a 16-byte boundary
};

template <typename T>
TileInput<T> tile_input(const Input& x) {
  const bool rows_aligned = x.rows <= 1 || x.stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
  return TileInput<T>{static_cast<const T*>(x.data), x.rows, x.cols, x.stride,
                      rows_aligned && aligned(x.data, 16)};
}

// A contiguous byte matrix [rows, cols] to write; `vector`: its rows start on boundaries of the stores used.
struct ByteMatrix {
  uint8_t* data;
  int64_t rows;
  int64_t cols;
  bool vector;

  // Tiles inside of it are written by vectors, or it is not to be written.
  __host__ __device__ bool is_whole() const { return vector || data == nullptr; }
};

inline ByteMatrix byte_matrix(uint8_t* data, int64_t rows, int64_t cols, int store) {
  return ByteMatrix{data, rows, cols, aligned(data, store) && cols % store == 0};
}

inline int64_t tile_count(int64_t rows, int64_t cols) {
  return ceil_div(rows, TileConfig::kTile) * ceil_div(cols, TileConfig::kTile);
}

// Tiles of a matrix, from a corner on. They are numbered along K first, so that blocks that run together share rows.
struct TileRegion {
  int64_t row;
  int64_t col;
  unsigned down;
  unsigned across;

  __host__ __device__ unsigned tiles() const { return down * across; }
};

struct SquareTile {
  static constexpr int kRows = TileConfig::kTile;
  static constexpr int kCols = TileConfig::kTile;
};

template <typename Shape = SquareTile>
TileRegion tile_region(int64_t row, int64_t col, int64_t rows, int64_t cols) {
  const int64_t down = ceil_div(rows, Shape::kRows);
  const int64_t across = ceil_div(cols, Shape::kCols);
  grid_size(down * across);  // checks
  return TileRegion{row, col, static_cast<unsigned>(down), static_cast<unsigned>(across)};
}

// Where a block works.
struct TilePlace {
  int64_t row;
  int64_t col;
};

// The same of matrices whose rows and columns fit 32 bits (check::fused), where registers are short.
struct NearPlace {
  int row;
  int col;

  __device__ __forceinline__ operator TilePlace() const { return TilePlace{row, col}; }
};

template <typename Shape = SquareTile>
__device__ __forceinline__ TilePlace tile_place(const TileRegion& region, unsigned tile) {
  const unsigned down = region.across == 0u ? 0u : tile / region.across;
  return TilePlace{region.row + static_cast<int64_t>(down) * Shape::kRows,
                   region.col + static_cast<int64_t>(tile - down * region.across) * Shape::kCols};
}

__device__ __forceinline__ TilePlace tile_place(unsigned tile, int64_t cols) {
  return tile_place(TileRegion{0, 0, 0u, static_cast<unsigned>(ceil_div(cols, TileConfig::kTile))}, tile);
}

__device__ __forceinline__ bool tile_inside(const TilePlace& tile, int64_t rows, int64_t cols) {
  return tile.row + TileConfig::kTile <= rows && tile.col + TileConfig::kTile <= cols;
}

// ---------------------------------------------------------------------------------------------- patches
template <typename T>
struct Patch {
  static constexpr int kWords = TileConfig::kPatch / Words<T>::per_word;
  uint32_t word[TileConfig::kPatch][kWords];

  __device__ __forceinline__ float value(int row, int col) const {
    return Words<T>::element(word[row][col / Words<T>::per_word], col % Words<T>::per_word);
  }
  // A word of raw magnitudes: the maximum of a row, not yet folded, or of a word's column.
  __device__ __forceinline__ uint32_t row_max(int row) const {
    uint32_t result = 0u;
#pragma unroll
    for (int w = 0; w < kWords; w += 2) {
      result =
          Words<T>::max(result, Words<T>::magnitude(word[row][w]), Words<T>::magnitude(word[row][w + 1]));
    }
    return result;
  }
  __device__ __forceinline__ uint32_t col_max(int w) const {
    uint32_t result = 0u;
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; i += 2) {
      result = Words<T>::max(result, Words<T>::magnitude(word[i][w]), Words<T>::magnitude(word[i + 1][w]));
    }
    return result;
  }
};

template <typename T, bool kLast = false>
__device__ __forceinline__ void load_words(const T* from, uint32_t (&to)[Patch<T>::kWords]) {
  const auto* vectors = reinterpret_cast<const uint4*>(from);
#pragma unroll
  for (int v = 0; v < Patch<T>::kWords / 4; ++v) {
    const uint4 loaded = kLast ? load_last(vectors + v) : load_bulk(vectors + v);
    to[4 * v] = loaded.x;
    to[4 * v + 1] = loaded.y;
    to[4 * v + 2] = loaded.z;
    to[4 * v + 3] = loaded.w;
  }
}

template <typename T>
__device__ __forceinline__ void load_elements(const T* from, int count, uint32_t (&to)[Patch<T>::kWords]) {
  constexpr int kPer = Words<T>::per_word;
  const auto* raw = reinterpret_cast<const typename Words<T>::Raw*>(from);
#pragma unroll
  for (int j = 0; j < TileConfig::kPatch; ++j) {
    if (j < count) to[j / kPer] |= Words<T>::place(raw[j], j % kPer);
  }
}

// The patch at (row, col); what lies outside the tensor is zero. inside: the caller's whole tile is in the
// tensor.
template <typename T>
__device__ __forceinline__ void load_patch(const TileInput<T>& x, int64_t row, int64_t col, bool inside,
                                           Patch<T>& patch) {
  constexpr int kPatch = TileConfig::kPatch;
  const T* from = x.data + row * x.stride + col;
  if (inside && x.vector) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) load_words(from + i * x.stride, patch.word[i]);
    return;
  }
  const bool vector = x.vector && col + kPatch <= x.cols;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
#pragma unroll
    for (int w = 0; w < Patch<T>::kWords; ++w) patch.word[i][w] = 0u;
    if (vector && row + i < x.rows) load_words(from + i * x.stride, patch.word[i]);
  }
  if (vector || col >= x.cols) return;
  const int count = static_cast<int>(min(static_cast<int64_t>(kPatch), x.cols - col));
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    if (row + i < x.rows) load_elements(from + i * x.stride, count, patch.word[i]);
  }
}

// A thread's patch in shared memory: row i lies 256 vectors behind row i - 1.
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

// Brings a tile of bf16 into L2, 128 bytes a thread.
template <typename Shape>
__device__ __forceinline__ void prefetch_tile(const bf16_t* data, int64_t stride, const TilePlace& tile) {
  constexpr int kLines = Shape::kCols / 64;  // of a row
  static_assert(kLines * Shape::kRows == TileConfig::kThreads, "a line a thread");
  const int row = static_cast<int>(threadIdx.x) / kLines;
  const int col = static_cast<int>(threadIdx.x) % kLines * 64;
  prefetch_line(data + (tile.row + row) * stride + tile.col + col);
}

// One row of a quantized patch, 8 bytes; out.vector means 8-byte stores. kWhole: the tile is wholly inside, and rows
// are aligned.
template <bool kWhole>
__device__ __forceinline__ void store_patch_row(const ByteMatrix& out, int64_t row, int64_t col, bool inside,
                                                uint2 bytes) {
  uint8_t* to = out.data + row * out.cols + col;
  if (kWhole || (inside && out.vector)) return store_bulk(reinterpret_cast<uint2*>(to), bytes);
  if (row >= out.rows || col >= out.cols) return;
  if (out.vector) return store_bulk(reinterpret_cast<uint2*>(to), bytes);
#pragma unroll
  for (int j = 0; j < TileConfig::kPatch; ++j) {
    if (col + j < out.cols) to[j] = static_cast<uint8_t>((j < 4 ? bytes.x : bytes.y) >> (8 * (j & 3)));
  }
}

// ---------------------------------------------------------------------------------------------- the way to
// [K, M] The transposed tile in shared memory: kLines lines of kUnits units of 8 bytes. A unit's place in its
// line is XORed with the line's number so that both the writers, one unit of many lines at a time, and the
// readers, a line at a time, meet every bank once. kShift: lines that are written by the same thread share
// their XOR.
template <int kUnits, int kShift, int kLines = TileConfig::kTile, int kThreads = TileConfig::kThreads>
struct Stage {
  uint2 unit[kLines * kUnits];

  __device__ __forceinline__ void put(int line, int u, uint2 bytes) {
    unit[line * kUnits + (u ^ ((line >> kShift) & (kUnits - 1)))] = bytes;
  }
  // Units 2 * pair and 2 * pair + 1 of a line. They lie in one aligned 16-byte slot, perhaps the other way
  // round.
  __device__ __forceinline__ uint4 take(int line, int pair) const {
    const int key = (line >> kShift) & (kUnits - 1);
    const uint4 v = reinterpret_cast<const uint4*>(unit)[line * (kUnits / 2) + (pair ^ (key >> 1))];
    return (key & 1) != 0 ? make_uint4(v.z, v.w, v.x, v.y) : v;
  }
  // Writes the lines to `out` at (line0, byte0); out.vector means 16-byte stores. All threads, after a
  // barrier.
  template <bool kWhole>
  __device__ __forceinline__ void flush(const ByteMatrix& out, int64_t line0, int64_t byte0,
                                        bool inside) const {
    constexpr int kPairs = kUnits / 2;
    constexpr int kStep = kThreads / kPairs;  // lines at a time
    const int line = static_cast<int>(threadIdx.x) / kPairs;
    const int pair = static_cast<int>(threadIdx.x) % kPairs;
    uint8_t* to = out.data + (line0 + line) * out.cols + byte0 + pair * 16;
#pragma unroll
    for (int k = 0; k < kLines / kStep; ++k) {
      const uint4 v = take(line + k * kStep, pair);
      if (kWhole || (inside && out.vector)) {
        store_bulk(reinterpret_cast<uint4*>(to), v);
      } else if (line0 + line + k * kStep < out.rows && byte0 + pair * 16 < out.cols) {
        store_bytes(out, to, static_cast<int>(min(static_cast<int64_t>(16), out.cols - byte0 - pair * 16)), v);
      }
      to += kStep * out.cols;
    }
  }

  static __device__ __forceinline__ void store_bytes(const ByteMatrix& out, uint8_t* to, int count,
                                                     const uint4& v) {
    if (out.vector) return store_bulk(reinterpret_cast<uint4*>(to), v);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (j < count) to[j] = static_cast<uint8_t>(words[j / 4] >> (8 * (j & 3)));
    }
  }
};

// Bytes of a 128 x 128 tile: 16 units a line, and thread tx writes lines 8 * tx .. 8 * tx + 7.
using ByteStage = Stage<16, 3>;

__device__ __forceinline__ void transpose_4x4(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                              uint32_t (&out)[4]) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140);
  const uint32_t ab_high = __byte_perm(a, b, 0x7362);
  const uint32_t cd_low = __byte_perm(c, d, 0x5140);
  const uint32_t cd_high = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab_low, cd_low, 0x5410);
  out[1] = __byte_perm(ab_low, cd_low, 0x7632);
  out[2] = __byte_perm(ab_high, cd_high, 0x5410);
  out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// A patch of bytes, two words a row, transposed into the stage by thread (ty, tx).
__device__ __forceinline__ void stage_transposed(ByteStage& stage, const uint2 (&rows)[TileConfig::kPatch],
                                                 int ty, int tx) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t r[TileConfig::kPatch];
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) r[i] = h == 0 ? rows[i].x : rows[i].y;
    uint32_t upper[4];
    uint32_t lower[4];
    transpose_4x4(r[0], r[1], r[2], r[3], upper);
    transpose_4x4(r[4], r[5], r[6], r[7], lower);
#pragma unroll
    for (int j = 0; j < 4; ++j) stage.put(8 * tx + 4 * h + j, ty, make_uint2(upper[j], lower[j]));
  }
}

template <typename T, typename F>
__device__ __forceinline__ uint2 encode_patch_row(const Patch<T>& patch, int i, float scale) {
  const auto scaled = [&](int j) { return patch.value(i, j) * scale; };
  return make_uint2(encode_four<F>(scaled(0), scaled(1), scaled(2), scaled(3)),
                    encode_four<F>(scaled(4), scaled(5), scaled(6), scaled(7)));
}

// Writes the row plane and the transposed plane (data null: not) of the block's tile, of which threads have the bytes
// of their patches. kWhole: the tile is wholly inside, and rows are aligned.
template <bool kWhole>
__device__ __forceinline__ void write_bytes(const uint2 (&bytes)[TileConfig::kPatch], const TilePlace& tile,
                                            bool inside, const ByteMatrix& row_out, const ByteMatrix& col_out,
                                            ByteStage& stage) {
  const int tx = threadIdx.x % 16;
  const int ty = threadIdx.x / 16;
  if (row_out.data != nullptr) {
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) {
      store_patch_row<kWhole>(row_out, tile.row + 8 * ty + i, tile.col + 8 * tx, inside, bytes[i]);
    }
  }
  if (col_out.data == nullptr) return;
  stage_transposed(stage, bytes, ty, tx);
  __syncthreads();
  stage.template flush<kWhole>(col_out, tile.col, tile.row, inside);
}

// Quantizes the block's tile with one scale, and writes both planes.
template <typename T, typename F, bool kWhole>
__device__ __forceinline__ void write_tile(const Patch<T>& patch, float scale, const TilePlace& tile,
                                           bool inside, const ByteMatrix& row_out, const ByteMatrix& col_out,
                                           ByteStage& stage) {
  uint2 bytes[TileConfig::kPatch];
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) bytes[i] = encode_patch_row<T, F>(patch, i, scale);
  write_bytes<kWhole>(bytes, tile, inside, row_out, col_out, stage);
}

template <typename T, typename F>
__device__ __forceinline__ void write_tile(const Patch<T>& patch, float scale, const TilePlace& tile,
                                           bool inside, const ByteMatrix& row_out, const ByteMatrix& col_out,
                                           ByteStage& stage) {
  if (inside && row_out.is_whole() && col_out.is_whole()) {
    write_tile<T, F, true>(patch, scale, tile, inside, row_out, col_out, stage);
  } else {
    write_tile<T, F, false>(patch, scale, tile, inside, row_out, col_out, stage);
  }
}

}  // namespace cuda
}  // namespace te_dist
