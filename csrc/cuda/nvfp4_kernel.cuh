// NVFP4's cast: packed E2M1 with E4M3 scales of 1x16 (or 16x16) blocks under one global amax. bf16 moves
// about 3.1 bytes an element for both planes. nvfp4_cast.cu and nvfp4_random.cu instantiate it, side by side.
//
// A row's block meets its neighbours' in one shuffle, and lane pairs share the work of the row scales. Row
// codes leave as they are; column codes cross shared memory as packed nibbles.
#pragma once

#include "../numerics/philox.h"
#include "nvfp4.cuh"
#include "nvfp4_codes.cuh"

namespace te_dist {
namespace cuda {

struct NvConfig {
  static constexpr int kLanes = 16;       // threads across a tile: 16 or 32
  static constexpr int kGroups = 8;       // threads down a tile, 16 rows each
  static constexpr int kThreads = kLanes * kGroups;
  static constexpr int kWarpsPerSm = 16;  // 128 registers a thread
  static constexpr int kRows = kGroups * kBlock;
};

// Round to nearest from bf16 is what most casts are; there, the usual case has code of its own.
template <typename T, bool kRandom>
constexpr bool kTuned = sizeof(T) == 2 && !kRandom;

template <typename T>
struct NvTile {
  static constexpr int kCols = NvConfig::kLanes * NvPatch<T>::kCols;
  static constexpr int kRowScales = kCols / kBlock;  // of a line
  static constexpr int kColScales = NvConfig::kGroups;
  struct Shared {
    alignas(16) Stage<NvConfig::kGroups, 3, kCols, NvConfig::kThreads> codes;  // of the column plane
    alignas(8) uint8_t row_scales[NvConfig::kRows][kRowScales];
    alignas(8) uint8_t col_scales[kCols][kColScales];
  };
  // Scale rows are padded to 128, so tiles cover the columns up to there.
  static int64_t across(int64_t cols) { return ceil_div(round_up(cols, 128), kCols); }
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

// ---------------------------------------------------------------------------------------------- random bytes
struct NvRandom {
  uint64_t seed;
  uint64_t offset;
  uint4 (*bytes)[NvConfig::kThreads];  // shared memory: 16 for each of a thread's blocks
};

// Draws the bytes of this thread's kCount blocks, one of each line from `line` on, a multiple of kCount. The loop stays
// one: ten rounds of Philox are long, and were half of the build when every block had its own.
template <int kCount>
__device__ __forceinline__ void draw_bytes(const NvRandom& random, int64_t line, int64_t block, bool columnwise) {
  constexpr int kOfDraw = RandomPlane::kLinesOfDraw;
  constexpr int kRest = kOfDraw - kCount;
  static_assert(kRest == 0 || kRest == kCount, "they are a draw's, or half of it");
  const RandomPlane plane{random.seed, random.offset, columnwise};
  Philox4 drawn{};
  Philox4 of_place{};
#pragma unroll 1
  for (int k = 0; k < 2; ++k) {
    of_place = drawn;
    const Philox4 counter = k == 0 ? counter_of_place(plane, line, block) : counter_of_lines(plane, line, block);
    drawn = philox4x32(counter, plane.seed);
  }
  const bool later = line % kOfDraw != 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const uint32_t of_line = later ? word_of_line(drawn, kRest + k) : word_of_line(drawn, k);
    const auto word = [&](int w) { return of_place.word[w] ^ of_line; };
    random.bytes[k][threadIdx.x] = make_uint4(word(0), word(1), word(2), word(3));
  }
}

// The bytes of block k of a thread.
__device__ __forceinline__ const uint32_t* bytes_of(const NvRandom& random, int k, int thread) {
  return reinterpret_cast<const uint32_t*>(&random.bytes[k][thread]);
}

// ---------------------------------------------------------------------------------------------- row plane
// Who makes the scales of a row plane's 16 rows: of the kSharers threads that hold a row's block, thread s
// those of rows s * kRows ... , kRows = 16 / kSharers.
template <typename T>
struct RowShare {
  static constexpr int kSharers = NvPatch<T>::kSharers;
  static constexpr int kRows = kBlock / kSharers;
};

template <typename T>
__device__ __forceinline__ uint32_t max_of_sharers(uint32_t raw) {
#pragma unroll
  for (int d = 1; d < NvPatch<T>::kSharers; d *= 2) raw = max(raw, __shfl_xor_sync(kFullWarp, raw, d));
  return raw;
}

// The raw amaxes of this thread's rows.
template <typename T>
__device__ __forceinline__ void row_amaxes(const NvPatch<T>& patch, int sharer, bool two_d,
                                           uint32_t (&raw)[RowShare<T>::kRows]) {
  constexpr int kRows = RowShare<T>::kRows;
  uint32_t all[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) all[i] = max_of_words<T>(patch.word[i], 0u);
  if (two_d) {
    uint32_t word = all[0];
#pragma unroll
    for (int i = 1; i < kBlock; ++i) word = Words<T>::max(word, all[i]);
    const uint32_t one = max_of_sharers<T>(Words<T>::fold(word));
#pragma unroll
    for (int k = 0; k < kRows; ++k) raw[k] = one;
    return;
  }
  if constexpr (sizeof(T) == 2) {
    // Rows i and i + 4 share a word from here on; each of the two threads keeps one half of the rows.
    uint32_t pair[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = k / 4 * 8 + k % 4;
      pair[k] = Words<T>::max(__byte_perm(all[i], all[i + 4], 0x5410),
                              __byte_perm(all[i], all[i + 4], 0x7632));
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t other = __shfl_xor_sync(kFullWarp, sharer != 0 ? pair[k] : pair[4 + k], 1);
      const uint32_t mine = Words<T>::max(sharer != 0 ? pair[4 + k] : pair[k], other);
      raw[k] = mine & 0xFFFFu;
      raw[k + 4] = mine >> 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t one = max_of_sharers<T>(all[i]);
      if (i / kRows == sharer) raw[i % kRows] = one;
    }
  }
}

// Where a thread's row codes go.
struct RowCodes {
  uint8_t* to;
  int64_t pitch;
  int rows;     // of the patch that are in the tensor
  int bytes;    // of a patch's row that are in the tensor
  bool vector;  // all of them, in one store
};

__device__ __forceinline__ RowCodes row_codes_at(const ByteMatrix& data, int64_t row, int64_t col, int cols) {
  RowCodes out;
  out.to = data.data + row * data.cols + col / 2;
  out.pitch = data.cols;
  out.rows = static_cast<int>(min(static_cast<int64_t>(kBlock), data.rows - row));
  out.bytes = static_cast<int>(min(static_cast<int64_t>(cols / 2), data.cols - col / 2));
  out.vector = data.vector && out.bytes == cols / 2;
  return out;
}

template <typename T, bool kWhole>
__device__ __forceinline__ void store_row_codes(const RowCodes& out, int i, uint32_t codes) {
  constexpr int kBytes = NvPatch<T>::kCols / 2;
  uint8_t* to = out.to + i * out.pitch;
  if constexpr (kWhole && kBytes == 4) {
    store_bulk(reinterpret_cast<uint32_t*>(to), codes);
  } else if constexpr (kWhole) {
    store_bulk(reinterpret_cast<uint16_t*>(to), static_cast<uint16_t>(codes));
  } else {
#pragma unroll
    for (int j = 0; j < kBytes; ++j) {
      if (i < out.rows && j < out.bytes) to[j] = static_cast<uint8_t>(codes >> (8 * j));
    }
  }
}

// The codes of row s * kRows + k, with the factor of sharer s. kPlain: the row's block is plain.
template <typename T, bool kRandom, bool kPlain>
__device__ __forceinline__ uint32_t row_codes(const NvPatch<T>& patch,
                                              const float (&factor)[RowShare<T>::kRows],
                                              const NvRandom& random, int k, int s) {
  constexpr int kSharers = RowShare<T>::kSharers;
  constexpr int kCols = NvPatch<T>::kCols;
  float heard = __shfl_sync(kFullWarp, factor[k], threadIdx.x % 32 / kSharers * kSharers + s);
  const uint32_t(&from)[4] = patch.word[s * RowShare<T>::kRows + k];
  if constexpr (kRandom) {
    const uint32_t* bytes = bytes_of(random, k, threadIdx.x / kSharers * kSharers + s);
    return pack_random<T, kCols>(from, heard, bytes + threadIdx.x % kSharers * (kCols / 4));
  } else if constexpr (sizeof(T) == 4) {
    return pack_nearest<T, kCols>(from, heard);
  } else {
    uint32_t word[4] = {from[0], from[1], from[2], from[3]};
    if (!kPlain) make_plain(word, heard);
    return pack_plain(word, heard);
  }
}

// kUsual: every block of the warp is plain, and all of it is in the tensor, on boundaries of the stores.
template <typename T, bool kUsual>
__device__ __forceinline__ void write_row_codes_tuned(const NvPatch<T>& patch,
                                                      const float (&factor)[RowShare<T>::kRows],
                                                      const NvRandom& random, const RowCodes& out) {
#pragma unroll
  for (int k = 0; k < RowShare<T>::kRows; ++k) {
#pragma unroll
    for (int s = 0; s < RowShare<T>::kSharers; ++s) {
      const uint32_t codes = row_codes<T, false, kUsual>(patch, factor, random, k, s);
      store_row_codes<T, kUsual>(out, s * RowShare<T>::kRows + k, codes);
    }
  }
}

// One copy of the arithmetic for all cases.
template <typename T, bool kRandom>
__device__ __forceinline__ void write_row_codes(const NvPatch<T>& patch,
                                                const float (&factor)[RowShare<T>::kRows],
                                                const NvRandom& random, const RowCodes& out) {
  uint32_t codes[kBlock];
#pragma unroll
  for (int k = 0; k < RowShare<T>::kRows; ++k) {
#pragma unroll
    for (int s = 0; s < RowShare<T>::kSharers; ++s) {
      codes[s * RowShare<T>::kRows + k] = row_codes<T, kRandom, false>(patch, factor, random, k, s);
    }
  }
  if (out.vector && out.rows == kBlock) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) store_row_codes<T, true>(out, i, codes[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) store_row_codes<T, false>(out, i, codes[i]);
  }
}

template <typename T, bool kRandom>
__device__ __forceinline__ void write_row_plane(const NvPatch<T>& patch, const NvPlane& plane,
                                                const NvRule& rule, const NvRandom& random, int64_t row0,
                                                int64_t col0, typename NvTile<T>::Shared& shared) {
  constexpr int kSharers = RowShare<T>::kSharers;
  constexpr int kRows = RowShare<T>::kRows;
  constexpr int kCols = NvPatch<T>::kCols;
  const int lane = threadIdx.x % NvConfig::kLanes;
  const int group = threadIdx.x / NvConfig::kLanes;
  const int sharer = lane % kSharers;
  const int64_t row = row0 + group * kBlock;
  const int64_t col = col0 + lane * kCols;
  const int64_t blocks = ceil_div(2 * plane.data.cols, kBlock);
  const Nvfp4Global global = nvfp4_global(*plane.amax);
  const RowCodes out = row_codes_at(plane.data, row, col, kCols);
  uint32_t raw[kRows];
  float factor[kRows];
  uint32_t code[kRows];
  row_amaxes<T>(patch, sharer, rule.two_d, raw);
  bool plain = true;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const NvScale own = make_scale(Words<T>::to_float_of_raw(raw[k]), global);
    factor[k] = own.factor;
    code[k] = own.code;
    plain = plain && own.plain;
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const bool padding = sharer * kRows + k >= out.rows || col / kBlock >= blocks;
    shared.row_scales[group * kBlock + sharer * kRows + k][lane / kSharers] =
        padding ? 0 : static_cast<uint8_t>(code[k]);
  }
  if constexpr (kRandom) {
    draw_bytes<kRows>(random, row + sharer * kRows, col / kBlock, false);
    __syncwarp();
  }
  const bool usual = __all_sync(kFullWarp, plain && out.vector && out.rows == kBlock);
  if constexpr (kTuned<T, kRandom>) {
    if (usual) return write_row_codes_tuned<T, true>(patch, factor, random, out);
  }
  if (!usual) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) factor[k] = exact_factor(code[k], global);
  }
  if constexpr (kTuned<T, kRandom>) {
    write_row_codes_tuned<T, false>(patch, factor, random, out);
  } else {
    write_row_codes<T, kRandom>(patch, factor, random, out);
    __syncwarp();  // the place of the random bytes is free again
  }
}

// ---------------------------------------------------------------------------------------------- column plane
// Column j, transformed with the standard signs and rounded to bf16, or as it is.
template <typename T>
__device__ __forceinline__ void column_words(const NvPatch<T>& patch, int j, bool hadamard,
                                             uint32_t (&word)[kBlock / Words<T>::per_word]) {
  constexpr int kPer = Words<T>::per_word;
  if (!hadamard) {
#pragma unroll
    for (int k = 0; k < kBlock / kPer; ++k) {
      const uint32_t first = patch.word[k * kPer][j / kPer];
      const uint32_t last = patch.word[k * kPer + kPer - 1][j / kPer];
      word[k] = kPer == 1 ? first : __byte_perm(first, last, j % kPer == 0 ? 0x5410 : 0x7632);
    }
    return;
  }
  float v[kBlock];
  column_values<T>(patch, j, v);
  flip_standard(v);
  butterfly16(v);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint32_t pair = pack_bf16(v[2 * k] * 0.25f, v[2 * k + 1] * 0.25f);
    if constexpr (kPer == 2) {
      word[k] = pair;
    } else {
      word[2 * k] = pair << 16;
      word[2 * k + 1] = pair & 0xFFFF0000u;
    }
  }
}

// The raw amax of the 16x16 block that the patch belongs to.
template <typename T>
__device__ __forceinline__ uint32_t square_amax(const NvPatch<T>& patch, bool hadamard) {
  uint32_t square = 0u;
#pragma unroll
  for (int j = 0; j < NvPatch<T>::kCols; ++j) {
    uint32_t word[kBlock / Words<T>::per_word];
    column_words<T>(patch, j, hadamard, word);
    square = max_of_words<T>(word, square);
  }
  return max_of_sharers<T>(Words<T>::fold(square));
}

// The codes of column j.
template <typename T, bool kRandom>
__device__ __forceinline__ uint2 column_codes(uint32_t (&word)[kBlock / Words<T>::per_word], float factor,
                                              const NvRandom& random, int j) {
  constexpr int kHalf = kBlock / Words<T>::per_word / 2;
  if constexpr (kRandom) {
    const uint32_t* bytes = bytes_of(random, j, threadIdx.x);
    return make_uint2(pack_random<T, 8>(word, factor, bytes),
                      pack_random<T, 8>(word + kHalf, factor, bytes + 2));
  } else if constexpr (sizeof(T) == 4) {
    return make_uint2(pack_nearest<T, 8>(word, factor), pack_nearest<T, 8>(word + kHalf, factor));
  } else {
    return make_uint2(pack_plain(word, factor), pack_plain(word + kHalf, factor));
  }
}

template <typename T, bool kRandom>
__device__ __forceinline__ void stage_column_plane(const NvPatch<T>& patch, const NvPlane& plane, bool two_d,
                                                   bool hadamard, const NvRandom& random, int64_t row0,
                                                   int64_t col0, typename NvTile<T>::Shared& shared) {
  constexpr int kCols = NvPatch<T>::kCols;
  const int lane = threadIdx.x % NvConfig::kLanes;
  const int group = threadIdx.x / NvConfig::kLanes;
  const int64_t blocks = ceil_div(2 * plane.data.cols, kBlock);
  const int64_t block = row0 / kBlock + group;
  const Nvfp4Global global = nvfp4_global(*plane.amax);
  const uint32_t square = two_d ? square_amax<T>(patch, hadamard) : 0u;
  if constexpr (kRandom) draw_bytes<kCols>(random, col0 + lane * kCols, block, true);
#pragma unroll
  for (int j = 0; j < kCols; ++j) {
    const int line = lane * kCols + j;
    uint32_t word[kBlock / Words<T>::per_word];
    column_words<T>(patch, j, hadamard, word);
    const uint32_t raw = two_d ? square : Words<T>::fold(max_of_words<T>(word, 0u));
    const NvScale scale = make_scale(Words<T>::to_float_of_raw(raw), global);
    float factor = scale.factor;
    if (!__all_sync(kFullWarp, scale.plain)) {
      factor = exact_factor(scale.code, global);
      if constexpr (kTuned<T, kRandom>) make_plain(word, factor);
    }
    shared.codes.put(line, group, column_codes<T, kRandom>(word, factor, random, j));
    const bool padding = col0 + line >= plane.data.rows || block >= blocks;
    shared.col_scales[line][group] = padding ? 0 : static_cast<uint8_t>(scale.code);
  }
}

// ---------------------------------------------------------------------------------------------- kernel
template <int kLines, int kPerLine>
__device__ __forceinline__ void flush_scales(const uint8_t (&scales)[kLines][kPerLine], const NvPlane& plane,
                                             int64_t line0, int64_t block0) {
  constexpr int kWords = kPerLine / 4;
  const int64_t pitch = round_up(ceil_div(2 * plane.data.cols, kBlock), 4);
  const int64_t lines = round_up(plane.data.rows, 128);
#pragma unroll
  for (int at = threadIdx.x; at < kLines * kWords; at += NvConfig::kThreads) {
    const int line = at / kWords;
    const int word = at % kWords;
    if (line0 + line < lines && block0 + 4 * word < pitch) {
      store_scale_word(plane.scale + (line0 + line) * pitch + block0 + 4 * word,
                       *reinterpret_cast<const uint32_t*>(&scales[line][4 * word]));
    }
  }
}

template <typename T, bool kRandom>
__global__ void __launch_bounds__(NvConfig::kThreads, NvConfig::kWarpsPerSm * 32 / NvConfig::kThreads)
    nvfp4_kernel(NvInput<T> x, unsigned across, NvPlane row, NvPlane col, NvRule rule, const float* noop) {
  using Tile = NvTile<T>;
  __shared__ typename Tile::Shared shared;
  if (is_noop(noop)) return;
  const unsigned down = blockIdx.x / across;
  const int64_t row0 = static_cast<int64_t>(down) * NvConfig::kRows;
  const int64_t col0 = static_cast<int64_t>(blockIdx.x - down * across) * Tile::kCols;
  NvPatch<T> patch;
  load_nv_patch(x, row0 + threadIdx.x / NvConfig::kLanes * kBlock,
                col0 + threadIdx.x % NvConfig::kLanes * NvPatch<T>::kCols, patch);
  NvRandom random{0u, 0u, nullptr};
  if constexpr (kRandom) {
    __shared__ uint4 bytes[NvPatch<T>::kCols][NvConfig::kThreads];
    random = NvRandom{static_cast<uint64_t>(rule.rng[0]), static_cast<uint64_t>(rule.rng[1]), bytes};
  }
  const bool columns = col.data.data != nullptr;
  if (row.data.data != nullptr) write_row_plane<T, kRandom>(patch, row, rule, random, row0, col0, shared);
  const auto stage_columns = [&](bool hadamard) {
    if (hadamard && rule.signs != kHadamardSigns) flip_rows(patch, rule.signs ^ kHadamardSigns);
    stage_column_plane<T, kRandom>(patch, col, rule.two_d, hadamard, random, row0, col0, shared);
  };
  if (columns && !kTuned<T, kRandom>) {
    stage_columns(rule.hadamard);
  } else if (columns && rule.hadamard) {
    stage_columns(true);
  } else if (columns) {
    stage_columns(false);
  }
  __syncthreads();
  if (row.data.data != nullptr) flush_scales(shared.row_scales, row, row0, col0 / kBlock);
  if (!columns) return;
  const bool inside = col0 + Tile::kCols <= col.data.rows && row0 + NvConfig::kRows <= 2 * col.data.cols;
  shared.codes.template flush<false>(col.data, col0, row0 / 2, inside);
  flush_scales(shared.col_scales, col, col0, row0 / kBlock);
}

template <typename T>
NvPlane nv_row_plane(const Input& x, const Planes& out, const float* amax) {
  return NvPlane{byte_matrix(out.row_data, x.rows, x.cols / 2, NvPatch<T>::kCols / 2),
                 static_cast<uint8_t*>(out.row_scale), amax};
}

inline NvPlane nv_col_plane(const Input& x, const Planes& out, const float* amax) {
  return NvPlane{byte_matrix(out.col_data, x.cols, x.rows / 2, 16), static_cast<uint8_t*>(out.col_scale), amax};
}

template <bool kRandom>
void launch_nvfp4(const Input& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                  const Planes& out, const float* noop, Lane lane) {
  const NvRule rule{options.two_d, options.hadamard, options.signs, options.rng};
  const NvPlane col = nv_col_plane(x, out, amax_col);
  dispatch_nv_patch(x.dtype, [&](auto values) {
    using T = TypeOf<decltype(values)>;
    const NvPlane row = nv_row_plane<T>(x, out, amax_row);
    const int64_t across = NvTile<T>::across(x.cols);
    const int blocks = grid_size(ceil_div(x.rows, NvConfig::kRows) * across);
    launch("nvfp4_kernel", nvfp4_kernel<T, kRandom>, blocks, NvConfig::kThreads, lane, nv_input(values, x),
           static_cast<unsigned>(across), row, col, rule, noop);
  });
}

// nvfp4_random.cu's launch_nvfp4<true>.
void launch_nvfp4_random(const Input& x, const Nvfp4Options& options, const float* amax_row,
                         const float* amax_col, const Planes& out, const float* noop, Lane lane);

}  // namespace cuda
}  // namespace te_dist
