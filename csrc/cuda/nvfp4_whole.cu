// NVFP4 rounded to nearest of what most matrices are: bf16, whole tiles of 128 x 128, planes whose rows are aligned, no
// square blocks, the standard signs, and a column plane, perhaps with a row plane. The same bytes as nvfp4_kernel.cuh
// makes of any tile, in fewer instructions, and in loops: all of a tile's work in one piece does not fit the cache of
// instructions.
//
// A thread has 16 rows of 8 columns. It makes the codes of four rows at a time, while the next four are on their way,
// and puts the rows into shared memory, out of which it takes two columns at a time. Nobody else reads them there.
#include "nvfp4_kernel.cuh"
#include "powers.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct NvWhole {
  static constexpr int kRowsAtOnce = 4;
  static constexpr int kBlocksPerSm = 5;
};

// ---------------------------------------------------------------------------------------------- codes
// The bits of a fp16 number, up to the first one behind the point, are E2M1's code, if fp16's smallest normal number,
// 2^-14, stands for 1; below it, both formats count evenly. So a code is (bits + 256) / 512 of bits that were rounded
// towards zero: E2M1 rounds at numbers that fp16 has, and what is cut off lies above them. But all ties go up, and
// those at 0.25, 1.25, 2.5 and 5 should not.
//
// Where a block can meet those, its values are made a little smaller, by kBelow, so that a tie becomes the fp16 number
// below it. One more is then added to the bits where the code below is odd: those ties go up. That is wrong for a value
// that should go down and is cut off to the same number, and for one that lies so little above 1.25, 2.5 or 5 that it
// fell below. A block has one value near each tie, so that it is known which it has (factor_for_halves). With values of
// the latter kind, one more is added wherever the code below is not 0. What neither does right takes the long way.
struct CodeHalves {
  static constexpr float kFirst = 1.0f / 16384.0f;  // times a is cut off
  static constexpr float kLimit = 6.9f * kFirst;
  static constexpr float kBelow = 1.0f - 1.0f / 2097152.0f;
};

// Two floats to fp16, towards zero.
__device__ __forceinline__ uint32_t cut_to_halves(float low, float high) {
  uint32_t pair;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t select(uint32_t where, uint32_t set, uint32_t clear) {
  return (set & where) | (clear & ~where);
}

// Where one more is added: kNone: nowhere, no tie that goes down is met. kOdd, kAll: where the code below is odd, or is
// not 0. A factor says it by its sign and its last bit.
enum class Ties { kNone, kOdd, kAll };

__device__ __forceinline__ Ties ties_of(float factor) {
  if (bits_of(factor) >> 31 == 0) return Ties::kNone;
  return bits_of(factor) % 2 == 0 ? Ties::kOdd : Ties::kAll;
}

// Eight bf16 values. factor: times CodeHalves::kFirst, with ties up to kMost. Nothing scales past 6.9.
template <Ties kMost>
__device__ __forceinline__ uint32_t pack_by_halves(const uint32_t* word, float factor) {
  const uint32_t odd_ones = ties_of(factor) != Ties::kNone ? 0x00010001u : 0u;
  const uint32_t all = ties_of(factor) == Ties::kAll ? 0x00010001u : 0u;
  if (kMost != Ties::kNone) factor = fabsf(factor);
  const auto at = [&](int i) { return Words<bf16_t>::element(word[i / 2], i % 2) * factor; };
  const auto two = [&](int i) {
    const uint32_t bits = cut_to_halves(at(i), at(i + 2));
    if (kMost == Ties::kNone) return bits;
    const uint32_t up = bits >> 9 & odd_ones;
    return bits + (kMost == Ties::kAll ? up | ((bits >> 10 | bits >> 11) & all) : up);
  };
  // Bytes of a sign, three zeros, three bits of the code, and the one by which they are rounded.
  const uint32_t even = __byte_perm(two(0), two(4), 0x7531);
  const uint32_t odd = __byte_perm(two(1), two(5), 0x7531);
  const uint32_t lower = select(0x07070707u, (even + 0x01010101u) >> 1, even >> 4);
  const uint32_t upper = select(0x70707070u, odd * 8u + 0x08080808u, odd);
  return select(0x0F0F0F0Fu, lower, upper);
}

// ---------------------------------------------------------------------------------------------- scales
// The factor for pack_by_halves, without CodeHalves::kFirst; NaN: there is none. decode: about 1 / exact. Powers of two
// do not matter, so that there are four ties, two of each kind, and next to each of them, divided by the factor, one
// value.
__device__ __forceinline__ float factor_for_halves(float decode, float exact) {
  const auto nearest = [&](float tie) { return float_of((bits_of(tie * decode) + 0x8000u) & 0xFFFF0000u); };
  const float low[2] = {nearest(1.0f), nearest(1.25f)};
  if (low[0] * exact != 1.0f && low[1] * exact != 1.25f) return exact;
  const float high[2] = {nearest(1.5f), nearest(1.75f)};
  // fp16's numbers are 2^-10 apart, at 0.75 and at 1.25 and 1.75 alike.
  constexpr float kStep = 1.0f / 1024.0f;
  const auto right = [&](float below, bool all) {
    return (low[0] * below >= 1.0f) == (low[0] * exact > 1.0f) &&
           (low[1] * below >= 1.25f - (all ? kStep : 0.0f)) == (low[1] * exact > 1.25f) &&
           (high[0] * below >= 1.5f - 2.0f * kStep) == (high[0] * exact >= 1.5f) &&
           (high[1] * below >= 1.75f - kStep) == (high[1] * exact >= 1.75f);
  };
  const uint32_t below = bits_of(exact * CodeHalves::kBelow);
  const float odd = float_of(below & ~1u);
  if (right(odd, false)) return -odd;
  const float all = float_of(below | 1u);
  return right(all, true) ? -all : float_of(kNanBits);
}

// What a tile's blocks need of their plane. The factor of a block follows from the 128 codes that its scale can have,
// times CodeHalves::kFirst. It is NaN where pack_by_halves cannot be used: where factor_for_halves says so, and where
// powers of two do not commute with roundings.
struct PlaneScales {
  Nvfp4Global global;
  float encode;  // turns a magnitude into a scale
  float factor[128];

  // By all threads, when `global` is there. quarter: magnitudes and values are four times what they should be.
  __device__ __forceinline__ void fill(bool quarter) {
    const float part = quarter ? 0.25f : 1.0f;
    const bool far = !(global.encode_sixth > 0x1p-90f && global.encode_sixth < 0x1p+90f);
    if (threadIdx.x == 0) encode = global.encode_sixth * part;
    const float decode = decode_scale(threadIdx.x) * global.decode;
    const float of_code = factor_for_halves(decode, reciprocal(decode)) * (part * CodeHalves::kFirst);
    // The factor of zeros keeps all others of that code from being easy, however small.
    static_assert(kFloatMax * 0x1p-133f > CodeHalves::kLimit, "the smallest bf16 number is not easy");
    factor[threadIdx.x] = far ? float_of(kNanBits) : threadIdx.x == 0 ? kFloatMax : of_code;
  }
};
static_assert(NvConfig::kThreads == 128, "a code a thread");

struct EasyScale {
  uint32_t code;
  float factor;
  uint32_t largest;  // the bits of what the factor makes of amax

  __device__ __forceinline__ EasyScale(float amax, const PlaneScales& scales)
      : code(encode_fp8<E4M3>(amax * scales.encode)),
        factor(scales.factor[code & 0x7Fu]),  // a tensor's amax below zero makes codes above; all factors are NaN then
        largest(bits_of(amax * factor)) {}

  // Whether pack_by_halves can be used, for ties up to `most`. As integers, NaN and all that is below zero are past the
  // limit.
  __device__ __forceinline__ bool is_easy(Ties most) const {
    if (most == Ties::kNone) return largest < bits_of(CodeHalves::kLimit);
    return (largest & kAbsMask) < bits_of(CodeHalves::kLimit) && (most == Ties::kAll || ties_of(factor) != Ties::kAll);
  }
};

// ---------------------------------------------------------------------------------------------- row plane
struct FourRows {
  uint32_t word[NvWhole::kRowsAtOnce][4];

  __device__ __forceinline__ void load(const bf16_t* from, int64_t stride) {
#pragma unroll
    for (int i = 0; i < NvWhole::kRowsAtOnce; ++i) {
      const uint4 v = load_bulk(reinterpret_cast<const uint4*>(from + i * stride));
      word[i][0] = v.x, word[i][1] = v.y, word[i][2] = v.z, word[i][3] = v.w;
    }
  }
  // The largest magnitudes of two rows' blocks, in the halves of a word. The other thread that holds those blocks has
  // the other two rows'.
  __device__ __forceinline__ uint32_t maxima(bool odd) const {
    uint32_t pair[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const auto& a = word[2 * k];
      const auto& b = word[2 * k + 1];
      pair[k] = fold_pairs(larger_pair(a[0], a[1], a[2], a[3]), larger_pair(b[0], b[1], b[2], b[3]));
    }
    const uint32_t other = __shfl_xor_sync(kFullWarp, odd ? pair[0] : pair[1], 1);
    return magnitudes(larger_pair(odd ? pair[1] : pair[0], other));
  }
};

// Codes of four rows, to `to` and pitch bytes on. scales: of the thread's first row, kRowScales a row.
__device__ __forceinline__ void write_four_rows(const FourRows& rows, const PlaneScales& from, uint8_t* to,
                                                int64_t pitch, uint8_t* scales) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool odd = lane % 2 != 0;
  const uint32_t maxima = rows.maxima(odd);
  const EasyScale mine[2] = {EasyScale(float_of(low_float(maxima)), from),
                             EasyScale(float_of(high_float(maxima)), from)};
  constexpr int kPitch = NvTile<bf16_t>::kRowScales;
  scales += (odd ? 2 : 0) * kPitch;
  scales[0] = static_cast<uint8_t>(mine[0].code);
  scales[kPitch] = static_cast<uint8_t>(mine[1].code);
  const auto write = [&](const float(&factor)[2], const auto& pack) {
#pragma unroll
    for (int i = 0; i < NvWhole::kRowsAtOnce; ++i) {
      const float heard = __shfl_sync(kFullWarp, factor[i % 2], lane / 2 * 2 + i / 2);
      store_bulk(reinterpret_cast<uint32_t*>(to), pack(rows.word[i], heard));
      to += pitch;
    }
  };
  const float factors[2] = {mine[0].factor, mine[1].factor};
  const auto all_easy = [&](Ties most) {
    return __all_sync(kFullWarp, mine[0].is_easy(most) && mine[1].is_easy(most));
  };
  if (all_easy(Ties::kNone)) return write(factors, pack_by_halves<Ties::kNone>);
  if (all_easy(Ties::kOdd)) return write(factors, pack_by_halves<Ties::kOdd>);
  if (all_easy(Ties::kAll)) return write(factors, pack_by_halves<Ties::kAll>);
  write({exact_factor(mine[0].code, from.global), exact_factor(mine[1].code, from.global)},
        [](const uint32_t(&from)[4], float factor) {
          uint32_t word[4] = {from[0], from[1], from[2], from[3]};
          make_plain(word, factor);
          return pack_plain(word, factor);
        });
}

// ---------------------------------------------------------------------------------------------- column plane
struct ColumnCodes {
  uint2 codes;
  uint32_t scale;
};

__device__ __forceinline__ uint32_t max_of_column(const uint32_t (&pair)[8]) {
  const uint32_t half[2] = {larger_pair(pair[0], pair[1], pair[2], pair[3]),
                            larger_pair(pair[4], pair[5], pair[6], pair[7])};
  const uint32_t two = magnitudes(larger_pair(half[0], half[1]));
  return max(low_float(two), high_float(two));
}

// Values as they are, with what make_plain does to them where that is needed.
__device__ __forceinline__ ColumnCodes pack_hard_column(uint32_t (&pair)[8], const Nvfp4Global& global) {
  const NvScale scale = make_scale(float_of(max_of_column(pair)), global);
  float factor = exact_factor(scale.code, global);
  make_plain(pair, factor);
  return ColumnCodes{make_uint2(pack_plain(pair, factor), pack_plain(pair + 4, factor)), scale.code};
}

// Whether it could be done.
__device__ __forceinline__ bool pack_easy_column(const uint32_t (&pair)[8], const PlaneScales& from, ColumnCodes& to) {
  const EasyScale scale(float_of(max_of_column(pair)), from);
  const auto pack = [&](const auto& eight) {
    to = ColumnCodes{make_uint2(eight(pair, scale.factor), eight(pair + 4, scale.factor)), scale.code};
    return true;
  };
  const auto all_easy = [&](Ties most) { return __all_sync(kFullWarp, scale.is_easy(most)); };
  if (all_easy(Ties::kNone)) return pack(pack_by_halves<Ties::kNone>);
  if (all_easy(Ties::kOdd)) return pack(pack_by_halves<Ties::kOdd>);
  return all_easy(Ties::kAll) && pack(pack_by_halves<Ties::kAll>);
}

// Column e of two that lie in words.
__device__ __forceinline__ ColumnCodes column_as_it_is(const uint32_t (&word)[kBlock], int e, const PlaneScales& from) {
  uint32_t pair[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) pair[k] = __byte_perm(word[2 * k], word[2 * k + 1], e == 0 ? 0x5410 : 0x7632);
  ColumnCodes made;
  return pack_easy_column(pair, from, made) ? made : pack_hard_column(pair, from.global);
}

// The same, transformed. The transform ends with a product with 1/4, which commutes with the rounding to bf16 unless
// numbers are very large or very small, so that scales take it over.
__device__ __forceinline__ ColumnCodes transformed_column(const uint32_t (&word)[kBlock], int e,
                                                          const PlaneScales& from) {
  float v[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = Words<bf16_t>::element(word[i], e);
  flip_standard(v);
  butterfly16(v);
  uint32_t pair[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) pair[k] = bf16_pair(v[2 * k], v[2 * k + 1]);
  ColumnCodes made;
  if (pack_easy_column(pair, from, made)) return made;
#pragma unroll
  for (int k = 0; k < 8; ++k) pair[k] = bf16_pair(v[2 * k] * 0.25f, v[2 * k + 1] * 0.25f);
  return pack_hard_column(pair, from.global);
}

// ---------------------------------------------------------------------------------------------- kernel
// The eight scales of a line.
__device__ __forceinline__ void store_scales(const uint8_t (&scales)[8], const NvPlane& plane, int64_t line,
                                             int64_t block) {
  uint8_t* to = plane.scale + line * (plane.data.cols / (kBlock / 2)) + block;
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(scales);
}

struct NvShared {
  uint4 patch[kBlock][NvConfig::kThreads];
  NvTile<bf16_t>::Shared planes;
  PlaneScales row;
  PlaneScales col;
};

template <bool kHadamard>
__global__ void __launch_bounds__(NvConfig::kThreads, NvWhole::kBlocksPerSm)
    nvfp4_whole_kernel(TileInput<bf16_t> x, NvPlane row, NvPlane col, const float* noop) {
  using Tile = NvTile<bf16_t>;
  constexpr int kTile = TileConfig::kTile;
  constexpr int kCols = NvPatch<bf16_t>::kCols;
  static_assert(Tile::kCols == kTile && NvConfig::kRows == kTile, "square tiles");
  __shared__ NvShared shared;
  if (is_noop(noop)) return;
  __builtin_assume(threadIdx.x < NvConfig::kThreads);
  // Backwards: L2 still holds the end of what the amax has been taken of.
  const TilePlace tile{static_cast<int64_t>(gridDim.y - 1 - blockIdx.y) * kTile,
                       static_cast<int64_t>(gridDim.x - 1 - blockIdx.x) * kTile};
  const int lane = static_cast<int>(threadIdx.x) % NvConfig::kLanes;
  const int group = static_cast<int>(threadIdx.x) / NvConfig::kLanes;
  const int64_t first = tile.row + group * kBlock;
  const bf16_t* from = x.data + first * x.stride + tile.col + lane * kCols;
  FourRows rows;
  rows.load(from, x.stride);
  const bool with_rows = row.data.data != nullptr;
  if (threadIdx.x == 0 && with_rows) shared.row.global = nvfp4_global(*row.amax);
  if (threadIdx.x == 32) shared.col.global = nvfp4_global(*col.amax);
  __syncthreads();
  if (with_rows) shared.row.fill(false);
  shared.col.fill(kHadamard);
  __syncthreads();
  uint8_t* to = row.data.data + first * row.data.cols + (tile.col + lane * kCols) / 2;
  uint8_t* scales = &shared.planes.row_scales[group * kBlock][lane / 2];
  uint4* mine = &shared.patch[0][threadIdx.x];
  const auto handle = [&](const FourRows& rows) {
#pragma unroll
    for (int i = 0; i < NvWhole::kRowsAtOnce; ++i) {
      mine[i * NvConfig::kThreads] = make_uint4(rows.word[i][0], rows.word[i][1], rows.word[i][2], rows.word[i][3]);
    }
    mine += NvWhole::kRowsAtOnce * NvConfig::kThreads;
    if (!with_rows) return;
    write_four_rows(rows, shared.row, to, row.data.cols, scales);
    to += NvWhole::kRowsAtOnce * row.data.cols;
    scales += NvWhole::kRowsAtOnce * Tile::kRowScales;
  };
#pragma unroll 1
  for (int step = 0; step < kBlock / NvWhole::kRowsAtOnce; step += 2) {
    FourRows later;
    from += NvWhole::kRowsAtOnce * x.stride;
    later.load(from, x.stride);
    handle(rows);
    from += NvWhole::kRowsAtOnce * x.stride;
    if (step == 0) rows.load(from, x.stride);
    handle(later);
  }
#pragma unroll 1
  for (unsigned turn = 0; turn < 4u; ++turn) {
    // Each eight lanes have columns of their own, so that they meet every bank once.
    const unsigned w = (turn + threadIdx.x / 8u) % 4u;
    const auto* words = reinterpret_cast<const uint32_t*>(&shared.patch[0][threadIdx.x]) + w;
    uint32_t word[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) word[i] = words[i * NvConfig::kThreads * 4];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const ColumnCodes made =
          kHadamard ? transformed_column(word, e, shared.col) : column_as_it_is(word, e, shared.col);
      const int line = lane * kCols + static_cast<int>(2u * w) + e;
      shared.planes.codes.put(line, group, made.codes);
      shared.planes.col_scales[line][group] = static_cast<uint8_t>(made.scale);
    }
  }
  __syncthreads();
  const int line = static_cast<int>(threadIdx.x);
  if (with_rows) store_scales(shared.planes.row_scales[line], row, tile.row + line, tile.col / kBlock);
  store_scales(shared.planes.col_scales[line], col, tile.col + line, tile.row / kBlock);
  shared.planes.codes.template flush<true>(col.data, tile.col, tile.row / 2, true);
}

}  // namespace

bool launch_nvfp4_whole(const Input& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                        const Planes& out, const float* noop, Lane lane) {
  constexpr int kTile = TileConfig::kTile;
  const NvPlane row = nv_row_plane<bf16_t>(x, out, amax_row);
  const NvPlane col = nv_col_plane(x, out, amax_col);
  const bool hadamard = options.hadamard;
  if (out.col_data == nullptr || x.dtype != Float::kBF16 || x.rows % kTile != 0 || x.cols % kTile != 0 ||
      !tile_input<bf16_t>(x).vector || !row.data.is_whole() || !col.data.is_whole() || !aligned(out.row_scale, 8) ||
      !aligned(out.col_scale, 8) || options.two_d || (hadamard && options.signs != kHadamardSigns) ||
      x.rows / kTile > 65535) {  // what a grid has downwards
    return false;
  }
  const dim3 tiles(static_cast<unsigned>(x.cols / kTile), static_cast<unsigned>(x.rows / kTile));
  const auto kernel = hadamard ? nvfp4_whole_kernel<true> : nvfp4_whole_kernel<false>;
  kernel<<<tiles, NvConfig::kThreads, 0, stream_of(lane)>>>(tile_input<bf16_t>(x), row, col, noop);
  check_launch("nvfp4_whole_kernel");
  return true;
}

}  // namespace cuda
}  // namespace te_dist
