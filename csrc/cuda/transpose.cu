// Layout only: transposes of bytes and of packed nibbles, and cuBLAS's order of block scales. Each reads and
// writes every byte once.
#include "../numerics/fp4.h"
#include "../numerics/layout.h"
#include "tile.cuh"

namespace te_dist {
namespace cuda {
namespace {

constexpr int kTile = TileConfig::kTile;
constexpr int kPatch = TileConfig::kPatch;

// A byte matrix to read; `vector`: its rows start on 8-byte boundaries.
struct ByteInput {
  const uint8_t* data;
  int64_t rows;
  int64_t cols;
  bool vector;
};

ByteInput byte_input(const uint8_t* data, int64_t rows, int64_t cols) {
  return ByteInput{data, rows, cols, aligned(data, 8) && cols % 8 == 0};
}

// 8 bytes of a row, zero beyond its end.
__device__ __forceinline__ uint2 load_eight(const ByteInput& in, int64_t row, int64_t col) {
  uint32_t words[2] = {0u, 0u};
  if (row >= in.rows || col >= in.cols) return make_uint2(0u, 0u);
  const uint8_t* from = in.data + row * in.cols + col;
  if (in.vector) return __ldcs(reinterpret_cast<const uint2*>(from));
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (col + j < in.cols) words[j / 4] |= static_cast<uint32_t>(from[j]) << (8 * (j % 4));
  }
  return make_uint2(words[0], words[1]);
}

__global__ void __launch_bounds__(TileConfig::kThreads)
    transpose_bytes_kernel(ByteInput in, ByteMatrix out) {
  __shared__ alignas(16) ByteStage stage;
  const TilePlace tile = tile_place(blockIdx.x, in.cols);
  const bool inside = tile_inside(tile, in.rows, in.cols);
  const int tx = threadIdx.x % 16;
  const int ty = threadIdx.x / 16;
  uint2 rows[kPatch];
  if (inside && in.vector) {
    const uint8_t* from = in.data + (tile.row + 8 * ty) * in.cols + tile.col + 8 * tx;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) rows[i] = __ldcs(reinterpret_cast<const uint2*>(from + i * in.cols));
  } else {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) rows[i] = load_eight(in, tile.row + 8 * ty + i, tile.col + 8 * tx);
  }
  stage_transposed(stage, rows, ty, tx);
  __syncthreads();
  stage.template flush<false>(out, tile.col, tile.row, inside);
}

// Tiles of 128 x 128 nibbles. A thread gathers 16 nibbles of one column: 8 bytes of the result.
__global__ void __launch_bounds__(TileConfig::kThreads)
    transpose_nibbles_kernel(ByteInput in, ByteMatrix out) {
  constexpr int kRowBytes = kTile / 2;
  constexpr int kPitch = kRowBytes + 8;
  constexpr int kBlocks = kTile / 16;
  __shared__ alignas(16) uint8_t bytes[kTile * kPitch];
  __shared__ alignas(16) Stage<kBlocks, 1> stage;
  const TilePlace tile = tile_place(blockIdx.x, 2 * in.cols);
#pragma unroll
  for (int k = 0; k < kTile * kRowBytes / 8 / TileConfig::kThreads; ++k) {
    const int at = threadIdx.x + k * TileConfig::kThreads;
    const int row = at / (kRowBytes / 8);
    const int byte = at % (kRowBytes / 8) * 8;
    *reinterpret_cast<uint2*>(&bytes[row * kPitch + byte]) =
        load_eight(in, tile.row + row, tile.col / 2 + byte);
  }
  __syncthreads();
  const int col = threadIdx.x % kTile;
  for (int b = threadIdx.x / kTile; b < kBlocks; b += TileConfig::kThreads / kTile) {
    uint32_t half[2] = {0u, 0u};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t both = bytes[(16 * b + i) * kPitch + col / 2];
      half[i / 8] |= ((both >> (4 * (col % 2))) & 15u) << (4 * (i % 8));
    }
    stage.put(col, b, make_uint2(half[0], half[1]));
  }
  __syncthreads();
  stage.template flush<false>(out, tile.col, tile.row / 2, tile_inside(tile, in.rows, 2 * in.cols));
}

// Column j of 8 x 8 nibbles, of which row i is rows[i], in the place of row j: halves change places between rows 4
// apart, then bytes between rows 2 apart, then nibbles between neighbours.
__device__ __forceinline__ void transpose_eight_nibbles(uint32_t (&rows)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t upper = rows[i];
    rows[i] = __byte_perm(upper, rows[i + 4], 0x5410);
    rows[i + 4] = __byte_perm(upper, rows[i + 4], 0x7632);
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int i = k / 2 * 4 + k % 2;
    const uint32_t upper = rows[i];
    rows[i] = __byte_perm(upper, rows[i + 2], 0x6240);
    rows[i + 2] = __byte_perm(upper, rows[i + 2], 0x7351);
  }
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    constexpr uint32_t kUpper = 0xF0F0F0F0u;
    const uint32_t first = rows[i];
    rows[i] = ((rows[i + 1] << 4) & kUpper) | (first & ~kUpper);
    rows[i + 1] = (rows[i + 1] & kUpper) | ((first >> 4) & ~kUpper);
  }
}

// The same of whole tiles in aligned rows: a thread has 8 x 8 nibbles.
__global__ void __launch_bounds__(TileConfig::kThreads)
    transpose_whole_nibbles_kernel(ByteInput in, ByteMatrix out) {
  constexpr int kWords = kTile / 8;  // of a line
  // A line's words change places, so that threads side by side meet different banks.
  __shared__ alignas(16) uint32_t words[kTile][kWords];
  const TilePlace tile = tile_place(blockIdx.x, 2 * in.cols);
  const int tx = threadIdx.x % kWords;
  const int ty = threadIdx.x / kWords;
  const uint8_t* from = in.data + (tile.row + kPatch * ty) * in.cols + tile.col / 2 + 4 * tx;
  uint32_t rows[kPatch];
#pragma unroll
  for (int i = 0; i < kPatch; ++i) rows[i] = load_last(reinterpret_cast<const uint32_t*>(from + i * in.cols));
  transpose_eight_nibbles(rows);
#pragma unroll
  for (int j = 0; j < kPatch; ++j) words[kPatch * tx + j][ty ^ tx] = rows[j];
  __syncthreads();
#pragma unroll
  for (int at = threadIdx.x; at < kTile * kWords / 4; at += TileConfig::kThreads) {
    const int line = at / (kWords / 4);
    const int four = at % (kWords / 4);
    const int moved = line / kPatch;
    uint4 v = *reinterpret_cast<const uint4*>(&words[line][(four ^ (moved / 4)) * 4]);
    if (moved % 2 != 0) v = make_uint4(v.y, v.x, v.w, v.z);
    if (moved / 2 % 2 != 0) v = make_uint4(v.z, v.w, v.x, v.y);
    store_bulk(reinterpret_cast<uint4*>(out.data + (tile.col + line) * out.cols + tile.row / 2 + 16 * four), v);
  }
}

// One thread per group of four scales, in the order of the result.
template <typename Group>
__global__ void swizzle_kernel(const uint8_t* in, int64_t groups, int64_t cols, uint8_t* out) {
  const int64_t tiles_across = cols / 4;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < groups;
       at += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    // Group `at` of the result sits at i = (at / 4) % 32 + 32 * (at % 4) in its tile of 128 groups.
    const int64_t tile = at / 128;
    const int64_t row = tile / tiles_across * 128 + at / 4 % 32 + at % 4 * 32;
    const int64_t col = tile % tiles_across * 4;
    const Group group = *reinterpret_cast<const Group*>(in + row * cols + col);
    *reinterpret_cast<Group*>(out + swizzled_index(row, col, cols)) = group;
  }
}

struct FourBytes {
  uint8_t byte[4];
};

template <typename Group>
void launch_swizzle(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane) {
  constexpr int kThreads = 256;
  const int64_t groups = rows * (cols / 4);
  const int blocks = grid_size(smaller(ceil_div(groups, kThreads), 1 << 20));
  launch("swizzle_kernel", swizzle_kernel<Group>, blocks, kThreads, lane, in, groups, cols, out);
}

bool nothing_to_do(const uint8_t* in, int64_t rows, int64_t cols, const uint8_t* out) {
  check::shape(rows, cols);
  if (rows == 0 || cols == 0) return true;
  check::required("the input", in);
  check::required("the output", out);
  return false;
}

}  // namespace

void transpose_bytes(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane) {
  if (nothing_to_do(in, rows, cols, out)) return;
  const int blocks = grid_size(tile_count(rows, cols));
  launch("transpose_bytes_kernel", transpose_bytes_kernel, blocks, TileConfig::kThreads, lane,
         byte_input(in, rows, cols), byte_matrix(out, cols, rows, 16));
}

void transpose_nibbles(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane) {
  if (nothing_to_do(in, rows, cols, out)) return;
  check::nibbles("rows", rows);
  check::nibbles("columns", cols);
  const int blocks = grid_size(tile_count(rows, cols));
  const bool whole = rows % kTile == 0 && cols % kTile == 0 && aligned(in, 16) && aligned(out, 16);
  launch("transpose_nibbles_kernel", whole ? transpose_whole_nibbles_kernel : transpose_nibbles_kernel, blocks,
         TileConfig::kThreads, lane, byte_input(in, rows, cols / 2), byte_matrix(out, cols, rows / 2, 16));
}

void swizzle_scales(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out, Lane lane) {
  check::swizzle(rows, cols);
  if (nothing_to_do(in, rows, cols, out)) return;
  if (aligned(in, 4) && aligned(out, 4)) {
    launch_swizzle<uint32_t>(in, rows, cols, out, lane);
  } else {
    launch_swizzle<FourBytes>(in, rows, cols, out, lane);
  }
}

}  // namespace cuda
}  // namespace te_dist
