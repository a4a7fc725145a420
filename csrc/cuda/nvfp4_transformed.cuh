// The codes of transformed columns of bf16 values, by matrix units: 16 columns of 16 rows are a matrix, which is
// multiplied by that of the transform and its signs. Two neighbouring lanes have the 16 numbers of two columns.
//
// [Note: exact sums] The transform is defined as a butterfly of fp32 additions (numerics/hadamard.h). Matrix units add
// several products at once, and cut off what lies too far below the largest. Both find the same where every sum on the
// way is a fp32 number: where all values are multiples of some u, and no sum reaches 2^24 u. A bf16 number from 2^e on is
// a multiple of 2^(e - 7). How large may sums on the way be, if n is the largest number that the transform makes? Those
// of the butterfly are not above n: of a + b and a - b, one is at least as large as a. The same goes for eight
// neighbouring products, and all that Hopper's units add at once are eight or more. What units do in any other order is
// at most 4 n: the root of the sum of squares is at most n, and the sum of 16 magnitudes at most four times that root. So
// a column is exact if n is below 2^(e + 17), or 2^(e + 15), where 2^e is the power of two at or below its smallest value
// that is not zero. Of normal numbers, one column in a thousand is not. Such are made once more, by the butterfly.
#pragma once

#include "boxes.cuh"
#include "nvfp4_columns.cuh"
#include "nvfp4_four_rows.cuh"

namespace te_dist {
namespace cuda {
namespace {

// ---------------------------------------------------------------------------------------------- places
// A tile's values in shared memory, as two boxes bring them: the left half of its columns, then the right half, 16 rows
// after 16 rows, 64 columns a row. Of row i, eights of columns lie where BoxPlaces::kSpreadWide puts them: XORed with
// i % 8, so that eight rows of a few columns meet every bank.
struct SpreadTile {
  static constexpr unsigned kHalfCols = TileConfig::kTile / 2;
  static constexpr unsigned kRow = kHalfCols * sizeof(bf16_t);
  static constexpr unsigned kGroup = kBlock * kRow;
  static constexpr unsigned kHalf = NvConfig::kGroups * kGroup;
  static constexpr unsigned kVector = 16;  // bytes, of eight columns
  static constexpr unsigned kVectors = kRow / kVector;
  static constexpr int kAlignment = 1024;

  unsigned first;  // address in shared memory

  __device__ __forceinline__ unsigned group(unsigned half, unsigned number) const {
    return first + half * kHalf + number * kGroup;
  }
  static __device__ __forceinline__ unsigned place_in_group(unsigned row, unsigned vector) {
    return row * kRow + (vector ^ row % kVectors) * kVector;
  }
};

template <typename T>
__device__ __forceinline__ T* in_shared_memory(unsigned address) {
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// A thread's 16 rows of eight columns there.
class SpreadRows {
 public:
  // lane: of the 16 across.
  __device__ __forceinline__ SpreadRows(const SpreadTile& tile, unsigned lane, unsigned group)
      : first_(tile.group(lane / 8u, group) + lane % 8u * SpreadTile::kVector) {}

  // From a multiple of four on.
  __device__ __forceinline__ SpreadRows from(int row) const {
    const auto rows = static_cast<unsigned>(row);
    return SpreadRows((first_ ^ rows % SpreadTile::kVectors * SpreadTile::kVector) + rows * SpreadTile::kRow);
  }
  // Of the four from there on.
  __device__ __forceinline__ uint4* at(int row) const {
    const auto rows = static_cast<unsigned>(row);
    return in_shared_memory<uint4>((first_ ^ rows * SpreadTile::kVector) + rows * SpreadTile::kRow);
  }

 private:
  __device__ __forceinline__ explicit SpreadRows(unsigned first) : first_(first) {}

  unsigned first_;
};

// A tile's codes of columns in shared memory: 64 bytes a column, eight of each 16 rows, where BoxPlaces::kSpread puts
// them. Two groups of 16 rows share a vector, and every warp has two.
struct SpreadCodes {
  static constexpr unsigned kColumn = NvConfig::kGroups * 8;

  unsigned first;  // address in shared memory

  // Of a warp's first 16 rows, and of a column.
  static __device__ __forceinline__ unsigned place(unsigned warp, unsigned column) {
    return column * kColumn + (warp ^ column / 2u % 4u) * 16u;
  }
};

// ---------------------------------------------------------------------------------------------- smallest values
// The smaller magnitudes of two pairs, with some sign. A number is smaller than a NaN.
__device__ __forceinline__ uint32_t smaller_pair(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// The smallest magnitudes but zeros of eight columns, of which only the exponents matter.
class LeastOfColumns {
 public:
  __device__ __forceinline__ void add(const FourRows& rows) {
#pragma unroll
    for (int i = 0; i < FourRows::kRows; ++i) {
#pragma unroll
      for (int w = 0; w < 4; ++w) least_[w] = smaller_pair(least_[w], rows.word[i][w]);
    }
  }
  // Leaves out zeros of the thread's rows, if there are any.
  __device__ __forceinline__ void leave_out_zeros(const SpreadRows& rows) {
    const uint2 found = exponents();
    const auto has_zero = [](uint32_t bytes) { return ((bytes - 0x01010101u) & ~bytes & 0x80808080u) != 0u; };
    if (!__any_sync(kFullWarp, has_zero(found.x) || has_zero(found.y))) return;
    // As 16-bit integers with a sign, less 32769: a zero becomes the largest.
    constexpr uint32_t kLess = 0x7FFF7FFFu;
    uint32_t least[4] = {kInfPair + kLess, kInfPair + kLess, kInfPair + kLess, kInfPair + kLess};
#pragma unroll 1
    for (int first = 0; first < kBlock; first += FourRows::kRows) {
      FourRows four;
      four.load(rows.from(first));
#pragma unroll
      for (int i = 0; i < FourRows::kRows; ++i) {
#pragma unroll
        for (int w = 0; w < 4; ++w) least[w] = __vmins2(least[w], magnitudes(four.word[i][w]) + kLess);
      }
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) least_[w] = __vsub2(least[w], kLess);
  }
  // A byte of each column.
  __device__ __forceinline__ uint2 exponents() const {
    const auto of = [&](int w) { return __byte_perm(least_[w] * 2u, least_[w + 1] * 2u, 0x7531); };
    return make_uint2(of(0), of(2));
  }

 private:
  static constexpr uint32_t kInfPair = 0x7F807F80u;
  uint32_t least_[4] = {kInfPair, kInfPair, kInfPair, kInfPair};
};

// ---------------------------------------------------------------------------------------------- matrices
// [Note: exact sums]: n times this has to be below 2^e.
struct ExactSums {
  static constexpr float kOnHopper = 0x1p-17f;
  static constexpr float kInAnyOrder = 0x1p-15f;

  static float here() {
    return device_attribute<cudaDevAttrComputeCapabilityMajor>() == 9 ? kOnHopper : kInAnyOrder;
  }
};

// 16 x 16 bf16 values: four matrices of 8 x 8, of which lanes name the rows (lanes 0 to 7 those of the first one),
// transposed. May be done earlier than it stands here, wherever `row` is known. A lane gets rows 2 (lane % 4) and the next one of column lane / 4.
__device__ __forceinline__ void load_transposed(uint32_t (&matrix)[4], unsigned row) {
  asm("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
      : "r"(row));
}

// sum + a b; a: 16 x 16, b: 16 x 8. A lane has of row lane / 4, and then of row lane / 4 + 8, columns 2 (lane % 4) and
// the next one.
__device__ __forceinline__ void add_product(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&sum)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// That of the transform, but for the product with 1/4 at its end: that commutes with the rounding to bf16 unless numbers
// are very large or very small, so that scales of others can take it over. Of two matrices of 16 columns,
// lanes whose numbers are 0 and 1 modulo 4 shall have the first one's numbers, eight each, the others the second one's:
// what is added for others is zero. (Were it all lanes', a lane would have four neighbouring numbers of a column, and
// not eight, which takes more instructions than the products of zeros.)
struct TransformMatrix {
  uint32_t part[2][4][2];  // of matrices, of numbers 2 j and 2 j + 1 of each lane's eight

  // Number n is the sum of values k with signs, -1 where n & k has an odd number of bits. So number n + 2 j differs from n
  // by the bits of 2 j & k, and a lane has values k of which these are lane % 4.
  __device__ __forceinline__ TransformMatrix() {
    constexpr uint32_t kBoth = 0x80008000u;  // signs of a pair
    const unsigned lane = threadIdx.x % 32u;
    const unsigned column = lane / 4u;  // of a part
    const auto flip = [](bool flips, uint32_t signs) { return flips ? signs : 0u; };
    const uint32_t by_j[2] = {flip((lane & 1u) != 0u, kBoth), flip((lane & 2u) != 0u, kBoth)};
#pragma unroll
    for (unsigned r = 0u; r < 2u; ++r) {
      const uint32_t two = kHadamardSigns >> (lane % 4u * 2u + r * 8u);  // of values k and k + 1
      const uint32_t signs = (two & 1u) << 15 | (two & 2u) << 30;
      const uint32_t first = 0x3F803F80u ^ signs ^ flip((column & 1u) != 0u, 0x80000000u) ^
                             flip(r != 0u && (column & 2u) != 0u, kBoth);
#pragma unroll
      for (unsigned j = 0u; j < 4u; ++j) {
        const uint32_t ones = first ^ (j % 2u != 0u ? by_j[0] : 0u) ^ (j / 2u != 0u ? by_j[1] : 0u);
        part[0][j][r] = column < 4u ? ones : 0u;
        part[1][j][r] = column < 4u ? 0u : ones;
      }
    }
  }
};

// In one instruction.
__device__ __forceinline__ float rounded_to_bf16(float x) { return float_of(pack_bf16(0.0f, x)); }

// What a lane has of 32 columns: of columns c and c + 8, c = lane % 4 / 2 * 16 + lane / 4, numbers 8 (lane % 2) to the
// next seven, rounded to bf16.
struct EightOfTwo {
  uint32_t pair[2][4];

  // row: of the first 16 columns, and of the second.
  __device__ __forceinline__ EightOfTwo(const TransformMatrix& by, unsigned first_row, unsigned second_row) {
    uint32_t first[4];
    uint32_t second[4];
    load_transposed(first, first_row);
    load_transposed(second, second_row);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float sum[4] = {};
      add_product(first, by.part[0][j], sum);
      add_product(second, by.part[1][j], sum);
#pragma unroll
      for (int e = 0; e < 2; ++e) pair[e][j] = pack_bf16(sum[2 * e], sum[2 * e + 1]);
    }
  }
  // The largest of both columns, as bf16 magnitudes, in the halves of a word.
  __device__ __forceinline__ uint32_t largest() const {
    const auto of = [&](int e) { return larger_pair(pair[e][0], pair[e][1], pair[e][2], pair[e][3]); };
    const uint32_t mine = fold_pairs(of(0), of(1));
    return magnitudes(larger_pair(mine, __shfl_xor_sync(kFullWarp, mine, 1)));
  }
  template <bool kRaised>
  __device__ __forceinline__ uint32_t pack(int column, float factor) const {
    return pack_each_by_halves<kRaised>(Value{pair[column]}, factor);
  }
  // bytes: of a column's eight numbers.
  __device__ __forceinline__ uint32_t pack_at_random(int column, float factor, const RandomBytes<2>& bytes) const {
    return pack_each_at_random(Value{pair[column]}, factor, [&](int i) { return bytes.two(i); });
  }

 private:
  // Unpacked by a product with 1, as there is more to do for what has ANDs and shifts.
  struct Value {
    const uint32_t (&of)[4];
    PowerScaler scaler;

    __device__ __forceinline__ explicit Value(const uint32_t (&pairs)[4]) : of(pairs) {}
    __device__ __forceinline__ float operator()(int i) const { return scaler.scaled(of[i / 2], i % 2, 0x3F800000u); }
  };
};

// ---------------------------------------------------------------------------------------------- all of a warp
// A group's 16 rows of a column, of which a lane makes the scale: number `which` of its four.
struct TransformedBlock {
  static constexpr unsigned kOfGroup = 4u;
  static constexpr unsigned kCols = TileConfig::kTile / kOfGroup;  // of all lanes

  unsigned group;
  unsigned column;

  __device__ __forceinline__ TransformedBlock(unsigned number, unsigned lane, unsigned which)
      : group(number), column(which * kCols + lane % 4u * 8u + lane / 4u) {}
};

// The blocks of a warp's columns that are to be made once more, one by each lane at a time.
class OnceMore {
 public:
  static constexpr unsigned kQueue = 32u;  // bytes of shared memory a warp
  static constexpr unsigned kFew = 4u;

  // The lane's blocks of the warp's two groups, a bit each.
  uint32_t blocks = 0u;

  // by_warp(block): by all lanes together. by_lane(block): by each lane one, of many, which meet in the warp's queue.
  template <typename ByWarp, typename ByLane>
  __device__ __forceinline__ void each(uint8_t* queue, const ByWarp& by_warp, const ByLane& by_lane) const {
    if (!__any_sync(kFullWarp, blocks != 0u)) return;
    const unsigned lane = threadIdx.x % 32u;
    const auto mine = static_cast<unsigned>(__popc(blocks));
    unsigned up_to = mine;  // how many there are in the lanes up to this one
#pragma unroll
    for (unsigned apart = 1u; apart < 32u; apart *= 2u) {
      const unsigned others = __shfl_up_sync(kFullWarp, up_to, apart);
      if (lane >= apart) up_to += others;
    }
    const unsigned count = __shfl_sync(kFullWarp, up_to, 31);
#pragma unroll 1
    for (unsigned done = 0u; done < count; done += kQueue) {
      __syncwarp();
      unsigned at = up_to - mine - done;
#pragma unroll 1
      for (uint32_t left = blocks; left != 0u; left &= left - 1u, ++at) {
        const unsigned which = static_cast<unsigned>(__ffs(static_cast<int>(left))) - 1u;
        if (at < kQueue) queue[at] = static_cast<uint8_t>(lane * 8u + which);
      }
      __syncwarp();
      const auto queued = [&](unsigned i) {
        constexpr unsigned kOfGroup = TransformedBlock::kOfGroup;
        const unsigned block = queue[i];
        return TransformedBlock(threadIdx.x / 32u * 2u + block / kOfGroup % 2u, block / (2u * kOfGroup), block % kOfGroup);
      };
      if (count > kFew) {
        if (lane < count - done) by_lane(queued(lane));
      } else {
#pragma unroll 1
        for (unsigned i = 0u; i < count; ++i) by_warp(queued(i));
      }
    }
  }
};

// The columns of a tile, those of 32 rows by each warp.
template <bool kRandom, typename Dice>
class TransformedTile {
 public:
  // codes: SpreadCodes, scales: eight of each column, queue: OnceMore::kQueue bytes of each warp, all in shared memory.
  // exact: ExactSums's.
  __device__ __forceinline__ TransformedTile(const SpreadTile& values, const SpreadCodes& codes,
                                             uint8_t (*scales)[NvConfig::kGroups], uint8_t* queue, const Dice& dice,
                                             float exact)
      : values_(values), codes_(codes), scales_(scales), queue_(queue), dice_(dice), exact_(exact) {}

  // kRaised: from.plane.raises. least: of the thread's eight columns and 16 rows.
  template <bool kRaised>
  __device__ __forceinline__ void write(const HeldScales& from, const LeastOfColumns& least) const {
    keep(least);
    __syncwarp();  // of what is made, too
    const TransformMatrix by;
    OnceMore again;
#pragma unroll 1
    for (unsigned second = 0u; second < 2u; ++second) {
      again.blocks |= write_group<kRaised>(by, from, warp() * 2u + second) << (second * TransformedBlock::kOfGroup);
    }
    again.each(
        queue_ + warp() * OnceMore::kQueue, [&](const TransformedBlock& block) { write_by_warp(block, from); },
        [&](const TransformedBlock& block) { write_by_lane(block, from); });
  }

 private:
  static __device__ __forceinline__ unsigned warp() { return threadIdx.x / 32u; }

  __device__ __forceinline__ uint32_t line_of(unsigned column) const {
    return dice_.of_line(true, static_cast<int>(column));
  }

  // 16 rows of all columns. Returns which of the lane's blocks are to be made once more, a bit each.
  template <bool kRaised>
  __device__ __forceinline__ uint32_t write_group(const TransformMatrix& by, const HeldScales& from,
                                                  unsigned group) const {
    constexpr unsigned kCols = TransformedBlock::kCols;
    const unsigned lane = threadIdx.x % 32u;
    const bool odd = lane % 2u != 0u;
    const TransformedBlock first(group, lane, 0u);
    const unsigned column = lane % 4u / 2u * 16u + lane / 4u;  // EightOfTwo's
    const unsigned place = SpreadTile::place_in_group(lane % 8u + lane / 16u * 8u, lane / 8u % 2u);
    unsigned rows = values_.group(0u, group) + place;
    asm volatile("" : "+r"(rows) : : "memory");  // what is loaded by it has been written before: load_transposed
    const unsigned exponents = exponents_of(first.column / 8u, group) + first.column % 8u;
    const unsigned codes = codes_of(column, group) + lane % 2u * 4u;
    const unsigned scales = shared_address(&scales_[first.column][group]);
    const RandomBytes<2>::Place random(
        [&](int w) { return dice_.of_place(true, static_cast<int>(group), static_cast<int>(lane % 2u * 2u) + w); });
    uint32_t exponent[TransformedBlock::kOfGroup];
#pragma unroll
    for (unsigned which = 0u; which < TransformedBlock::kOfGroup; ++which) {
      exponent[which] = *in_shared_memory<uint8_t>(exponents + which * (kCols * SpreadCodes::kColumn));
    }
    __syncwarp();  // where they have been read, codes will be written
    uint32_t again = 0u;
#pragma unroll
    for (unsigned which = 0u; which < TransformedBlock::kOfGroup; ++which) {
      const auto row = [&](unsigned second) {
        return (rows ^ (which % 2u * 2u + second) * 2u * SpreadTile::kVector) + which / 2u * SpreadTile::kHalf;
      };
      const EightOfTwo eight(by, row(0u), row(1u));
      const uint32_t largest = eight.largest();
      const float amax = float_of(odd ? high_float(largest) : low_float(largest));
      const EasyScale scale(amax, from);
      if (!(is_exact(amax, exponent[which]) && scale.is_easy())) again |= 1u << which;
      *in_shared_memory<uint8_t>(scales + which * sizeof(scales_[0]) * kCols) = static_cast<uint8_t>(scale.code);
      const float other = __shfl_xor_sync(kFullWarp, scale.factor, 1);
#pragma unroll
      for (unsigned e = 0u; e < 2u; ++e) {
        const float factor = odd == (e != 0u) ? scale.factor : other;
        const unsigned further = which * kCols + e * 8u;
        uint32_t made;
        if constexpr (kRandom) {
          made = eight.pack_at_random(e, factor, RandomBytes<2>(line_of(column + further), random));
        } else {
          made = eight.template pack<kRaised>(e, factor);
        }
        *in_shared_memory<uint32_t>(codes + further * SpreadCodes::kColumn) = made;
      }
    }
    return again;
  }

  // Of 16 rows of a column.
  __device__ __forceinline__ unsigned codes_of(unsigned column, unsigned group) const {
    return codes_.first + SpreadCodes::place(warp(), column) + group % 2u * 8u;
  }
  // Exponents lie where codes will be: those of eight columns in the place of one of them, other ones for each four
  // eights, so that these meet different banks.
  __device__ __forceinline__ unsigned exponents_of(unsigned eight, unsigned group) const {
    return codes_of(eight * 8u + eight % 4u * 2u, group);
  }
  __device__ __forceinline__ void keep(const LeastOfColumns& least) const {
    const unsigned lane = threadIdx.x % 32u;
    *in_shared_memory<uint2>(exponents_of(lane % 16u, lane / 16u)) = least.exponents();
  }
  // [Note: exact sums]. exponent: of the smallest value. That of none is an infinity's, and that of subnormal ones is no
  // number's.
  __device__ __forceinline__ bool is_exact(float amax, uint32_t exponent) const {
    return amax * exact_ < float_of(exponent << 23);
  }
  __device__ __forceinline__ void write_scale(const TransformedBlock& block, uint32_t code) const {
    scales_[block.column][block.group] = static_cast<uint8_t>(code);
  }

  __device__ __forceinline__ float value_of(const TransformedBlock& block, unsigned row) const {
    constexpr unsigned kCols = SpreadTile::kHalfCols;
    const unsigned first = values_.group(block.column / kCols, block.group) + block.column % 8u * sizeof(bf16_t);
    const unsigned at = first + SpreadTile::place_in_group(row, block.column % kCols / 8u);
    return to_float(*in_shared_memory<bf16_t>(at));
  }
  __device__ __forceinline__ uint32_t random_word(const TransformedBlock& block, unsigned w) const {
    const RandomBytes<1>::Place place(
        [&](int) { return dice_.of_place(true, static_cast<int>(block.group), static_cast<int>(w)); });
    return RandomBytes<1>(line_of(block.column), place).word(0);
  }

  // A block by the first half of the warp; the other one follows.
  __device__ __forceinline__ void write_by_warp(const TransformedBlock& block, const HeldScales& from) const {
    const unsigned i = threadIdx.x % 16u;
    const float v = flip_sign(value_of(block, i), kHadamardSigns, static_cast<int>(i));
    const float made = rounded_to_bf16(transformed(butterfly_across_lanes(v)));
    uint32_t amax = bits_of(made) & kAbsMask;
#pragma unroll
    for (unsigned apart = 1u; apart < 16u; apart *= 2u) amax = max(amax, __shfl_xor_sync(kFullWarp, amax, apart));
    const uint32_t scale = make_scale(float_of(amax), from.plane.global).code;
    const float factor = exact_factor(scale, from.plane.global);
    const float magnitude = fminf(fabsf(made) * factor, 6.0f);
    uint32_t code = bits_of(made) >> 31 << 3;
    if constexpr (kRandom) {
      code |= random_code_over_base(magnitude, random_word(block, i / 4u), static_cast<int>(i % 4u)) & 7u;
    } else {
      code |= code_over_base(magnitude) & 7u;
    }
    uint32_t codes = (is_nan(factor) ? 7u : code) << i % 8u * 4u;
#pragma unroll
    for (unsigned apart = 1u; apart < 8u; apart *= 2u) codes |= __shfl_xor_sync(kFullWarp, codes, apart);
    if (threadIdx.x % 32u != i) return;
    if (i % 8u == 0u) *in_shared_memory<uint32_t>(codes_of(block.column, block.group) + i / 2u) = codes;
    if (i == 0u) write_scale(block, scale);
  }

  __device__ __forceinline__ void write_by_lane(const TransformedBlock& block, const HeldScales& from) const {
    float v[kBlock];
#pragma unroll
    for (unsigned i = 0u; i < kBlock; ++i) v[i] = value_of(block, i);
    uint32_t pair[kBlock / 2];
    transform_column(v, pair);
    ColumnCodes made;
    if constexpr (kRandom) {
      const uint32_t random[4] = {random_word(block, 0u), random_word(block, 1u), random_word(block, 2u),
                                  random_word(block, 3u)};
      made = pack_hard_column_at_random(pair, from, random);
    } else {
      made = pack_hard_column(pair, make_scale(float_of(max_of_column(pair)), from.plane.global).code, from.plane.global);
    }
    *in_shared_memory<uint2>(codes_of(block.column, block.group)) = made.codes;
    write_scale(block, made.scale);
  }

  SpreadTile values_;
  SpreadCodes codes_;
  uint8_t (*scales_)[NvConfig::kGroups];
  uint8_t* queue_;
  const Dice& dice_;
  float exact_;
};

}  // namespace
}  // namespace cuda
}  // namespace te_dist
