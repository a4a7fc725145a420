// NVFP4: packed E2M1 with E4M3 scales of 1x16 (or 16x16) blocks under one global amax, and the two global
// amaxes. bf16 moves about 3.1 bytes an element for both planes; the amax pass 2.
//
// A block puts its 128 x 128 tile into shared memory. Then a plane is 128 lines (rows, or columns) of 8
// blocks of 16 values: a thread takes one block of one line, neighbouring lanes take neighbouring lines, so
// that 16 lanes hold a 16x16 block. Codes go back through shared memory to leave as 16-byte stores.
#include "../numerics/hadamard.h"
#include "../numerics/nvfp4.h"
#include "../numerics/philox.h"
#include "amax.cuh"
#include "tile.cuh"

namespace te_dist {
namespace cuda {
namespace {

constexpr int kTile = TileConfig::kTile;
constexpr int kLineBlocks = kTile / kNvfp4Block;

// Lines of 64 bytes: 8 units, and two neighbouring lines share the 32 banks.
using NibbleStage = Stage<kLineBlocks, 1>;

template <typename T>
struct NvShared {
  // 16 bytes of padding: reads of one block from many rows then fall on different banks.
  static constexpr int kPitch = kTile + 16 / static_cast<int>(sizeof(T));
  alignas(16) T tile[kTile * kPitch];
  alignas(16) NibbleStage codes;
  alignas(4) uint8_t scales[kTile][kLineBlocks];
  uint32_t scratch[TileConfig::kThreads / 32];
};

struct NvPlane {
  ByteMatrix data;  // [lines, values / 2], null data: not asked for
  uint8_t* scale;
  const float* amax;
};

struct NvRule {
  bool two_d;
  bool hadamard;
  uint32_t signs;
  const int64_t* rng;
};

template <typename T>
__device__ __forceinline__ void fill_tile(const TileInput<T>& x, const TilePlace& tile, Patch<T>& patch,
                                          NvShared<T>& shared) {
  const int row = threadIdx.x / 16 * 8;
  const int col = threadIdx.x % 16 * 8;
  load_patch(x, tile.row + row, tile.col + col, tile_inside(tile, x.rows, x.cols), patch);
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    auto* to = reinterpret_cast<uint4*>(&shared.tile[(row + i) * NvShared<T>::kPitch + col]);
#pragma unroll
    for (int v = 0; v < Patch<T>::kWords / 4; ++v) {
      to[v] = make_uint4(patch.word[i][4 * v], patch.word[i][4 * v + 1], patch.word[i][4 * v + 2],
                         patch.word[i][4 * v + 3]);
    }
  }
}

// The 16 values of a line's block, as the plane quantizes them.
template <typename T, bool kColumn>
__device__ __forceinline__ void block_values(const NvShared<T>& shared, int line, int block, bool hadamard,
                                             uint32_t signs, float (&v)[kNvfp4Block]) {
  constexpr int kPitch = NvShared<T>::kPitch;
  if (kColumn) {
#pragma unroll
    for (int i = 0; i < kNvfp4Block; ++i)
      v[i] = to_float(shared.tile[(block * kNvfp4Block + i) * kPitch + line]);
    if (!hadamard) return;
#pragma unroll
    for (int i = 0; i < kNvfp4Block; ++i) v[i] = to_float(to_bf16(v[i]));
    hadamard16(v, signs);
  } else {
    constexpr int kPer = Words<T>::per_word;
    const auto* from = reinterpret_cast<const uint4*>(&shared.tile[line * kPitch + block * kNvfp4Block]);
#pragma unroll
    for (int k = 0; k < kNvfp4Block / kPer / 4; ++k) {
      const uint4 four = from[k];
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4 * kPer; ++i) v[4 * kPer * k + i] = Words<T>::element(words[i / kPer], i % kPer);
    }
  }
}

__device__ __forceinline__ uint32_t largest_of(const float (&v)[kNvfp4Block]) {
  uint32_t result = 0u;
#pragma unroll
  for (int i = 0; i < kNvfp4Block; ++i) result = max(result, bits_of(v[i]) & kAbsMask);
  return result;
}

__device__ __forceinline__ uint2 pack_codes(const float (&v)[kNvfp4Block], float factor) {
  uint32_t half[2] = {0u, 0u};
#pragma unroll
  for (int i = 0; i < kNvfp4Block; ++i) {
    half[i / 8] |= static_cast<uint32_t>(encode_e2m1(v[i] * factor)) << (4 * (i % 8));
  }
  return make_uint2(half[0], half[1]);
}

__device__ __forceinline__ uint2 pack_codes_stochastic(const float (&v)[kNvfp4Block], float factor,
                                                       const Philox4& random) {
  uint32_t half[2] = {0u, 0u};
#pragma unroll
  for (int i = 0; i < kNvfp4Block; ++i) {
    const uint32_t code = encode_e2m1_stochastic(v[i] * factor, random_byte(random, i));
    half[i / 8] |= code << (4 * (i % 8));
  }
  return make_uint2(half[0], half[1]);
}

// Writes the tile's part of one plane. line0 and value0: the tile's corner in the plane.
template <typename T, bool kColumn>
__device__ __forceinline__ void write_plane(NvShared<T>& shared, const NvPlane& plane, const NvRule& rule,
                                            int64_t line0, int64_t value0) {
  const int64_t blocks = ceil_div(2 * plane.data.cols, kNvfp4Block);
  const int64_t block0 = value0 / kNvfp4Block;
  const Nvfp4Global global = nvfp4_global(*plane.amax);
  const int line = threadIdx.x % kTile;
#pragma unroll 1
  for (int b = threadIdx.x / kTile; b < kLineBlocks; b += TileConfig::kThreads / kTile) {
    float v[kNvfp4Block];
    block_values<T, kColumn>(shared, line, b, rule.hadamard, rule.signs, v);
    uint32_t largest = largest_of(v);
    if (rule.two_d) {
#pragma unroll
      for (int d = 1; d < 16; d *= 2) largest = max(largest, __shfl_xor_sync(kFullWarp, largest, d));
    }
    const uint8_t scale = nvfp4_block_scale(float_of(largest), global);
    const float factor = nvfp4_encode_factor(scale, global);
    uint2 codes;
    if (rule.rng == nullptr) {
      codes = pack_codes(v, factor);
    } else {
      const uint64_t position = static_cast<uint64_t>((line0 + line) * blocks + block0 + b);
      codes = pack_codes_stochastic(v, factor,
                                    random_bytes(static_cast<uint64_t>(rule.rng[0]),
                                                 static_cast<uint64_t>(rule.rng[1]), position, kColumn));
    }
    shared.codes.put(line, b, codes);
    const bool padding = line0 + line >= plane.data.rows || block0 + b >= blocks;
    shared.scales[line][b] = padding ? 0 : scale;
  }
  __syncthreads();
  const bool inside = line0 + kTile <= plane.data.rows && value0 + kTile <= 2 * plane.data.cols;
  shared.codes.flush(plane.data, line0, value0 / 2, inside);
  // Two words of scales a line; rows of the buffer are padded to 4 scales, not to 8.
  const int64_t pitch = round_up(blocks, 4);
  const int64_t word_line = threadIdx.x / 2;
  const int64_t word_block = block0 + threadIdx.x % 2 * 4;
  if (word_block < pitch) {
    store_scale_word(plane.scale + (line0 + word_line) * pitch + word_block,
                     *reinterpret_cast<const uint32_t*>(&shared.scales[word_line][threadIdx.x % 2 * 4]));
  }
}

template <typename T>
__global__ void __launch_bounds__(TileConfig::kThreads)
    nvfp4_kernel(TileInput<T> x, NvPlane row, NvPlane col, NvRule rule, const float* noop) {
  extern __shared__ __align__(16) unsigned char storage[];
  auto& shared = *reinterpret_cast<NvShared<T>*>(storage);
  if (is_noop(noop)) return;
  const TilePlace tile = tile_place(blockIdx.x, x.cols);
  Patch<T> patch;
  fill_tile(x, tile, patch, shared);
  __syncthreads();
  if (row.data.data != nullptr) {
    write_plane<T, false>(shared, row, rule, tile.row, tile.col);
    __syncthreads();
  }
  if (col.data.data != nullptr) write_plane<T, true>(shared, col, rule, tile.col, tile.row);
}

// Both global amaxes where the column path is transformed.
template <typename T>
__global__ void __launch_bounds__(TileConfig::kThreads)
    nvfp4_amax_kernel(TileInput<T> x, unsigned tiles, uint32_t signs, float* amax_row, float* amax_col,
                      const float* noop) {
  extern __shared__ __align__(16) unsigned char storage[];
  auto& shared = *reinterpret_cast<NvShared<T>*>(storage);
  if (is_noop(noop)) return;
  uint32_t row_word = 0u;
  uint32_t col_bits = 0u;
  for (unsigned at = blockIdx.x; at < tiles; at += gridDim.x) {
    Patch<T> patch;
    fill_tile(x, tile_place(at, x.cols), patch, shared);
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) row_word = Words<T>::max(row_word, patch.row_max(i));
    __syncthreads();
#pragma unroll 1
    for (int b = threadIdx.x / kTile; b < kLineBlocks; b += TileConfig::kThreads / kTile) {
      float v[kNvfp4Block];
      block_values<T, true>(shared, threadIdx.x % kTile, b, true, signs, v);
      col_bits = max(col_bits, largest_of(v));
    }
    __syncthreads();
  }
  const uint32_t row_raw = block_max<TileConfig::kThreads>(Words<T>::fold(row_word), shared.scratch);
  __syncthreads();
  const uint32_t col_raw = block_max<TileConfig::kThreads>(col_bits, shared.scratch);
  if (threadIdx.x != 0) return;
  if (amax_row != nullptr) atomic_amax(amax_row, Words<T>::to_float_of_raw(row_raw));
  if (amax_col != nullptr) atomic_amax(amax_col, float_of(col_raw));
}

// Tiles of fp32 are larger than what a kernel gets unasked.
template <typename Kernel>
void allow_shared(Kernel kernel, size_t bytes) {
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "shared memory of an nvfp4 kernel");
}

}  // namespace

void amax_nvfp4(const Input& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                const float* noop, Lane lane) {
  check::input(x);
  check::hadamard(options, x.rows);
  if (amax_row == nullptr && amax_col == nullptr) return;
  if (!options.hadamard) {
    float* first = amax_row != nullptr ? amax_row : amax_col;
    return launch_amax(x, first, first == amax_col ? nullptr : amax_col, false, noop, lane);
  }
  launch_amax_reset(amax_row, amax_col, noop, lane);
  const int64_t tiles = grid_size(tile_count(x.rows, x.cols));
  if (tiles == 0) return;
  const int blocks = grid_size(smaller(tiles, static_cast<int64_t>(multiprocessors()) * 4));
  dispatch_float(x.dtype, [&](auto input) {
    using T = typename decltype(input)::type;
    allow_shared(nvfp4_amax_kernel<T>, sizeof(NvShared<T>));
    nvfp4_amax_kernel<T><<<blocks, TileConfig::kThreads, sizeof(NvShared<T>), stream_of(lane)>>>(
        tile_input<T>(x), static_cast<unsigned>(tiles), options.signs, amax_row, amax_col, noop);
    check_launch("nvfp4_amax_kernel");
  });
}

void quantize_nvfp4(const Input& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                    const Planes& out, const float* noop, Lane lane) {
  check::input(x);
  const bool empty = x.rows == 0 || x.cols == 0;
  check::planes(out, 1, empty);
  if (empty || (out.row_data == nullptr && out.col_data == nullptr)) return;  // no scales either
  if (out.row_data != nullptr) {
    check::nibbles("columns", x.cols);
    check::required("amax_row", amax_row, sizeof(float));
  }
  if (out.col_data != nullptr) {
    check::nibbles("rows", x.rows);
    check::hadamard(options, x.rows);
    check::required("amax_col", amax_col, sizeof(float));
  }
  const NvPlane row{byte_matrix(out.row_data, x.rows, x.cols / 2, 16), static_cast<uint8_t*>(out.row_scale),
                    amax_row};
  const NvPlane col{byte_matrix(out.col_data, x.cols, x.rows / 2, 16), static_cast<uint8_t*>(out.col_scale),
                    amax_col};
  const NvRule rule{options.two_d, options.hadamard, options.signs, options.rng};
  const int blocks = grid_size(tile_count(x.rows, x.cols));
  dispatch_float(x.dtype, [&](auto input) {
    using T = typename decltype(input)::type;
    allow_shared(nvfp4_kernel<T>, sizeof(NvShared<T>));
    nvfp4_kernel<T><<<blocks, TileConfig::kThreads, sizeof(NvShared<T>), stream_of(lane)>>>(
        tile_input<T>(x), row, col, rule, noop);
    check_launch("nvfp4_kernel");
  });
}

}  // namespace cuda
}  // namespace te_dist
