// NVFP4: E2M1 codes, an E4M3 scale for every 16 of them (or for 16x16), fp32 amaxes for the whole tensor.
//
// A tile is 128 x 128 and is walked in strips of 16 rows. Row blocks lie along a row of the strip; a column
// block is one column of it, so that the column path (Hadamard transform included) works on whole rows of
// columns.
#include "../numerics/hadamard.h"
#include "../numerics/nvfp4.h"
#include "../numerics/philox.h"
#include "tile.h"
#include "transpose.h"

TED_BEGIN_VARIANT
namespace {

constexpr int64_t kBlock = kNvfp4Block;
constexpr int64_t kTile = 128;
constexpr int64_t kBlocks = kTile / kBlock;         // of one row of a tile
constexpr int64_t kStripBlocks = kBlocks * kBlock;  // row blocks of a strip

struct Nvfp4Job {
  Input x;
  Nvfp4Options options;
  uint64_t seed;
  uint64_t offset;
  Nvfp4Global row_global;
  Nvfp4Global col_global;
  uint8_t* row;
  uint8_t* row_scale;
  uint8_t* col;
  uint8_t* col_scale;
  int64_t row_pitch;  // of the scales
  int64_t col_pitch;
};

using Columns = float[kBlock][kTile];

// A strip as floats, zero beyond the tensor.
template <typename T>
void load_strip(TileRows<T> x, int64_t height, bool round, Columns& v) {
  if (height < kBlock) __builtin_memset(v, 0, sizeof(v));
  for (int64_t r = 0; r < height; ++r) {
    const T* __restrict row = x[r];
    float* __restrict out = v[r];
    prefetch_next_tile<kTile>(row);
    if (round) {
      for (int64_t c = 0; c < kTile; ++c) out[c] = to_float(to_bf16(to_float(row[c])));
    } else {
      for (int64_t c = 0; c < kTile; ++c) out[c] = to_float(row[c]);
    }
  }
}

void transform_columns(Columns& v, uint32_t signs) {
  for (int64_t c = 0; c < kTile; ++c) {
    float column[kBlock];
    TED_UNROLL
    for (int64_t r = 0; r < kBlock; ++r) column[r] = v[r][c];
    hadamard16(column, signs);
    TED_UNROLL
    for (int64_t r = 0; r < kBlock; ++r) v[r][c] = column[r];
  }
}

template <typename T>
void load_columns(TileRows<T> x, const Nvfp4Options& options, int64_t height, Columns& v) {
  load_strip(x, height, options.hadamard, v);
  if (options.hadamard) transform_columns(v, options.signs);
}

TED_FN void scales_of(const float* __restrict amax, const Nvfp4Global& global, uint8_t* __restrict scale,
                      float* __restrict factor) {
  for (int64_t i = 0; i < kTile; ++i) {
    scale[i] = nvfp4_block_scale(amax[i], global);
    factor[i] = nvfp4_encode_factor(scale[i], global);
  }
}

static_assert(kTile == RandomPlane::kLines && kBlocks == RandomPlane::kBlocks, "a strip is in one random tile");

TED_FN RandomPlane random_plane(const Nvfp4Job& job, bool columnwise) {
  return RandomPlane{job.seed, job.offset, columnwise};
}

// Of `count` lines, a multiple of eight.
TED_FN void draw_lines(const RandomPlane& plane, int64_t line, int64_t block, int64_t count, uint32_t* words) {
  for (int64_t i = 0; i < count; i += RandomPlane::kLinesOfDraw) {
    const Philox4 drawn = random_of_lines(plane, line + i, block);
    for (int k = 0; k < RandomPlane::kLinesOfDraw; ++k) words[i + k] = word_of_line(drawn, k);
  }
}

template <bool kStochastic>
TED_FN uint8_t encode(float value, uint32_t random) {
  return kStochastic ? encode_e2m1_stochastic(value, random) : encode_e2m1(value);
}

template <bool kStochastic, typename T>
void encode_row(const T* __restrict x, const float* __restrict factor, const uint8_t* __restrict random,
                int64_t width, uint8_t* __restrict out) {
  // One long loop: with 16 iterations per block, fewer than the bytes of a register, it would stay scalar.
  alignas(64) float each[kTile];
  alignas(64) uint8_t code[kTile];
  for (int64_t b = 0; b < kBlocks; ++b) {
    for (int64_t i = 0; i < kBlock; ++i) each[b * kBlock + i] = factor[b];
  }
  for (int64_t i = 0; i < kTile; ++i) {
    code[i] = encode<kStochastic>(to_float(x[i]) * each[i], kStochastic ? random[i] : 0u);
  }
  for (int64_t i = 0; i < width / 2; ++i) out[i] = pack_e2m1(code[2 * i], code[2 * i + 1]);
}

template <bool kStochastic, typename T>
void rows_of_strip(const Nvfp4Job& job, TileRows<T> x, int64_t m, int64_t k, int64_t height, int64_t width) {
  MagnitudeOf<T> magnitude[kStripBlocks] = {};
  for (int64_t r = 0; r < height; ++r) {
    prefetch_next_tile<kTile>(x[r]);
    block_magnitudes<kBlock, kTile>(x[r], magnitude + r * kBlocks);
  }
  if (job.options.two_d) {
    for (int64_t b = 0; b < kBlocks; ++b) {
      for (int64_t r = 1; r < height; ++r) magnitude[b] = larger(magnitude[b], magnitude[r * kBlocks + b]);
      for (int64_t r = 1; r < height; ++r) magnitude[r * kBlocks + b] = magnitude[b];
    }
  }
  float amax[kStripBlocks];
  float factor[kStripBlocks];
  uint8_t scale[kStripBlocks];
  for (int64_t i = 0; i < kStripBlocks; ++i) amax[i] = Magnitude<T>::widen(magnitude[i]);
  scales_of(amax, job.row_global, scale, factor);

  alignas(64) uint32_t random[kBlock][kBlocks * 4];
  if (kStochastic) {
    const RandomPlane plane = random_plane(job, false);
    uint32_t of_line[kBlock];
    draw_lines(plane, m, k / kBlock, kBlock, of_line);
    for (int64_t b = 0; b < kBlocks; ++b) {
      const Philox4 of_place = random_of_place(plane, m, k / kBlock + b);
      for (int64_t r = 0; r < kBlock; ++r) {
        for (int w = 0; w < 4; ++w) random[r][4 * b + w] = of_place.word[w] ^ of_line[r];
      }
    }
  }
  const int64_t blocks = ceil_div(width, kBlock);
  for (int64_t r = 0; r < height; ++r) {
    __builtin_memcpy(job.row_scale + (m + r) * job.row_pitch + k / kBlock, scale + r * kBlocks, blocks);
    // Little-endian words: the bytes in memory are the bytes in order.
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(random[r]);
    encode_row<kStochastic>(x[r], factor + r * kBlocks, bytes, width,
                            job.row + ((m + r) * job.x.cols + k) / 2);
  }
}

TED_FN void column_amaxes(const Columns& v, bool two_d, float* __restrict amax) {
  uint32_t magnitude[kTile] = {};
  for (int64_t r = 0; r < kBlock; ++r) raise_magnitudes(v[r], kTile, magnitude);
  if (two_d) {
    for (int64_t c = 0; c < kTile; c += kBlock) {
      uint32_t largest = 0;
      for (int64_t i = 0; i < kBlock; ++i) largest = larger(largest, magnitude[c + i]);
      for (int64_t i = 0; i < kBlock; ++i) magnitude[c + i] = largest;
    }
  }
  for (int64_t c = 0; c < kTile; ++c) amax[c] = amax_of_bits(magnitude[c]);
}

// Codes of a strip into 8 rows of bytes, each the pair of codes of two neighbouring rows; they get transposed
// later.
template <bool kStochastic, typename T>
void columns_of_strip(const Nvfp4Job& job, TileRows<T> x, int64_t m, int64_t k, int64_t height, int64_t width,
                      uint8_t (*packed)[kTile]) {
  alignas(64) Columns v;
  alignas(64) float amax[kTile];
  alignas(64) float factor[kTile];
  alignas(64) uint8_t scale[kTile];
  load_columns(x, job.options, height, v);
  column_amaxes(v, job.options.two_d, amax);
  scales_of(amax, job.col_global, scale, factor);
  for (int64_t c = 0; c < width; ++c) job.col_scale[(k + c) * job.col_pitch + m / kBlock] = scale[c];

  alignas(64) uint32_t of_line[kTile];
  Philox4 of_place{};
  if (kStochastic) {
    const RandomPlane plane = random_plane(job, true);
    draw_lines(plane, k, m / kBlock, kTile, of_line);
    of_place = random_of_place(plane, k, m / kBlock);
  }
  for (int r = 0; r < kBlock; r += 2) {
    uint8_t* __restrict out = packed[r / 2];
    const int shift = 8 * (r & 3);
    for (int64_t c = 0; c < kTile; ++c) {
      const uint32_t random = kStochastic ? (of_place.word[r >> 2] ^ of_line[c]) >> shift : 0u;
      out[c] = pack_e2m1(encode<kStochastic>(v[r][c] * factor[c], random & 0xFFu),
                         encode<kStochastic>(v[r + 1][c] * factor[c], (random >> 8) & 0xFFu));
    }
  }
}

template <bool kStochastic, typename T>
void quantize_tile(const Nvfp4Job& job, int64_t m, int64_t k, int64_t height, int64_t width) {
  alignas(64) uint8_t packed[kTile / 2][kTile];
  alignas(64) T padded[kTile][kTile];
  const TileRows<T> x = load_tile(job.x, m, k, height, width, padded);
  for (int64_t r = 0; r < height; r += kBlock) {
    const TileRows<T> strip{x[r], x.pitch};
    const int64_t rows = smaller(kBlock, height - r);
    if (job.row != nullptr) rows_of_strip<kStochastic>(job, strip, m + r, k, rows, width);
    if (job.col != nullptr) columns_of_strip<kStochastic>(job, strip, m + r, k, rows, width, packed + r / 2);
  }
  if (job.col == nullptr) return;
  const int64_t pitch = job.x.rows / 2;
  transpose_tile(packed[0], kTile, height / 2, width, job.col + k * pitch + m / 2, pitch);
}

template <typename T>
Maxima amaxes_of_tile(const Input& input, const Nvfp4Options& options, int64_t m, int64_t k, int64_t height,
                      int64_t width) {
  alignas(64) T padded[kTile][kTile];
  const TileRows<T> x = load_tile(input, m, k, height, width, padded);
  Maxima result{0, 0};
  MagnitudeOf<T> of_rows = 0;
  for (int64_t r = 0; r < height; ++r) of_rows = larger(of_rows, largest_magnitude(x[r], kTile));
  result.row = bits_of(Magnitude<T>::widen(of_rows));
  for (int64_t r = 0; r < height; r += kBlock) {
    alignas(64) Columns v;
    load_columns(TileRows<T>{x[r], x.pitch}, options, smaller(kBlock, height - r), v);
    result.col = larger(result.col, largest_magnitude(v[0], kBlock * kTile));
  }
  return result;
}

}  // namespace

void amax_nvfp4(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col,
                const float* noop, Lane lane) {
  if (skipped(noop)) return;
  if (!options.hadamard || amax_col == nullptr) {
    float value;
    amax(x, &value, false, nullptr, lane);
    if (amax_row != nullptr) *amax_row = value;
    if (amax_col != nullptr) *amax_col = value;
    return;
  }
  Maxima result{0, 0};
  const int64_t across = ceil_div(x.cols, kTile);
  with_float(x.dtype, [&](auto element) {
    using T = decltype(element);
    result = max_over_tasks(ceil_div(x.rows, kTile) * across, x.rows * x.cols, lane, [&](int64_t task) {
      const int64_t m = task / across * kTile;
      const int64_t k = task % across * kTile;
      return amaxes_of_tile<T>(x, options, m, k, smaller(kTile, x.rows - m), smaller(kTile, x.cols - k));
    });
  });
  if (amax_row != nullptr) *amax_row = amax_of_bits(result.row);
  *amax_col = amax_of_bits(result.col);
}

void quantize_nvfp4(const Source& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                    const Planes& out, const float* noop, Lane lane) {
  if (skipped(noop)) return;
  const int64_t across = ceil_div(x.cols, kBlock);
  const int64_t down = ceil_div(x.rows, kBlock);
  const bool stochastic = options.rng != nullptr;
  const Nvfp4Job job{x,
                     options,
                     stochastic ? static_cast<uint64_t>(options.rng[0]) : 0u,
                     stochastic ? static_cast<uint64_t>(options.rng[1]) : 0u,
                     nvfp4_global(amax_row != nullptr ? *amax_row : 0.0f),
                     nvfp4_global(amax_col != nullptr ? *amax_col : 0.0f),
                     out.row_data,
                     static_cast<uint8_t*>(out.row_scale),
                     out.col_data,
                     static_cast<uint8_t*>(out.col_scale),
                     round_up(across, 4),
                     round_up(down, 4)};
  clear_padding(job.row_scale, round_up(x.rows, 128), job.row_pitch, x.rows, across);
  clear_padding(job.col_scale, round_up(x.cols, 128), job.col_pitch, x.cols, down);
  with_float(x.dtype, [&](auto element) {
    using T = decltype(element);
    for_each_tile(x.rows, x.cols, kTile, kTile, lane,
                  [&](int64_t m, int64_t k, int64_t height, int64_t width) {
                    if (stochastic) return quantize_tile<true, T>(job, m, k, height, width);
                    quantize_tile<false, T>(job, m, k, height, width);
                  });
  });
}

bool quantize_nvfp4_current(const Source& x, const Nvfp4Options& options, float* amax_row, float* amax_col, float*,
                            const Planes& out, const float* noop, Lane lane) {
  if (skipped(noop)) return true;
  amax_nvfp4(x, options, amax_row, amax_col, nullptr, lane);
  quantize_nvfp4(x, options, amax_row, amax_col, out, nullptr, lane);
  return true;
}

TED_END_VARIANT
