// E2M1 codes of bf16 values by way of fp16, and the scales of blocks that can take that way: fewer instructions than
// nvfp4_codes.cuh needs for any block.
#pragma once

#include "nvfp4.cuh"
#include "nvfp4_codes.cuh"

namespace te_dist {
namespace cuda {

// Not known to the compiler, so that it multiplies.
static __constant__ uint32_t kTwo = 2u;
static __constant__ uint32_t kEight = 8u;

// ---------------------------------------------------------------------------------------------- codes
// The bits of a fp16 number, up to the first one behind the point, are E2M1's code, if fp16's smallest normal number,
// 2^-14, stands for 1; below it, both formats count evenly. So a code is (bits + 256) / 512 of bits that were rounded
// towards zero: E2M1 rounds at numbers that fp16 has, and what is cut off lies above them. But all ties go up, and
// those at 0.25, 1.25, 2.5 and 5 should not.
//
// Where a block can meet those, its values are made smaller by a share, so that all ties fall below, and the numbers
// that they are cut off to are raised by kRaise of themselves, rounded to the nearest. By 2^-10 and 2^-10, in steps of
// fp16: 0.75 becomes a number one step below, which is raised by 0.75; 1.75 and 3.5 become one two steps below, which
// is raised by 1.75: these are back at the tie. 0.25 is one step below and raised by 0.25, 1.25, 2.5 and 5 are two
// steps below and raised by 1.25: these stay below. Values next to a tie may go wrong. A block has one such for each
// tie, so that it is known whether any does (factor_for_halves); then it takes the long way.
struct CodeHalves {
  static constexpr float kFirst = 1.0f / 16384.0f;  // times a is cut off
  static constexpr float kLimit = 6.9f * kFirst;
  static constexpr uint32_t kRaise = 0x14001400u;  // 2^-10, twice
};

// Two floats to fp16, towards zero.
__device__ __forceinline__ uint32_t cut_to_halves(float low, float high) {
  uint32_t pair;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// One instruction. (Of two of these in a row, the compiler makes three.)
__device__ __forceinline__ uint32_t select(uint32_t where, uint32_t set, uint32_t clear) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(word) : "r"(where), "r"(set), "r"(clear));
  return word;
#else
  return (set & where) | (clear & ~where);
#endif
}

// Of fp16 numbers, two a word. factor: of their block; below zero where it can meet ties that go down. A branch, of
// which the compiler makes predicates: to those of single instructions it prefers two instructions.
__device__ __forceinline__ void raise(uint32_t (&numbers)[4], float factor) {
  asm("{\n\t.reg .pred below;\n\tsetp.lt.f32 below, %4, 0f00000000;\n\t@!below bra DONE;\n\t"
      "fma.rn.f16x2 %0, %0, %5, %0;\n\tfma.rn.f16x2 %1, %1, %5, %1;\n\t"
      "fma.rn.f16x2 %2, %2, %5, %2;\n\tfma.rn.f16x2 %3, %3, %5, %3;\n\tDONE:\n\t}"
      : "+r"(numbers[0]), "+r"(numbers[1]), "+r"(numbers[2]), "+r"(numbers[3])
      : "f"(factor), "r"(CodeHalves::kRaise));
}

// Eight bf16 values, value(i), none of which scales past 6.9. factor: times CodeHalves::kFirst. kRaised: it may be
// below zero.
template <bool kRaised, typename Value>
__device__ __forceinline__ uint32_t pack_each_by_halves(const Value& value, float factor) {
  const float magnitude = kRaised ? fabsf(factor) : factor;
  const auto at = [&](int i) { return value(i) * magnitude; };
  const auto two = [&](int i) { return cut_to_halves(at(i), at(i + 2)); };
  uint32_t numbers[4] = {two(0), two(1), two(4), two(5)};
  if (kRaised) raise(numbers, factor);
  // Bytes of a sign, three zeros, three bits of the code, and the one by which they are rounded.
  const uint32_t firsts = __byte_perm(numbers[0], numbers[2], 0x7531);
  const uint32_t seconds = __byte_perm(numbers[1], numbers[3], 0x7531);
  const auto to_upper = [](uint32_t bytes) { return select(0x70707070u, bytes * kEight + 0x08080808u, bytes); };
  return select(0x0F0F0F0Fu, to_upper(firsts) >> 4, to_upper(seconds));
}

template <bool kRaised>
__device__ __forceinline__ uint32_t pack_by_halves(const uint32_t* word, float factor) {
  return pack_each_by_halves<kRaised>([&](int i) { return Words<bf16_t>::element(word[i / 2], i % 2); }, factor);
}

// ---------------------------------------------------------------------------------------------- codes at random
// Eight bf16 values, value(i). bytes(i): those of values i and i + 2, in the halves of a word. A fp16 number has nine
// bits behind those of its code, and its random byte is a share of what these count to: encode_e2m1_stochastic adds the
// share, and cuts off. factor: times CodeHalves::kFirst.
template <typename Value, typename Bytes>
__device__ __forceinline__ uint32_t pack_each_at_random(const Value& value, float factor, const Bytes& bytes) {
  const auto at = [&](int i) { return value(i) * factor; };
  const auto two = [&](int i) { return bytes(i) * kTwo + cut_to_halves(at(i), at(i + 2)); };
  // Bytes of a sign, two zeros, four bits of the code, and one more.
  const uint32_t firsts = __byte_perm(two(0), two(4), 0x7531);
  const uint32_t seconds = __byte_perm(two(1), two(5), 0x7531);
  const uint32_t codes = select(0x0F0F0F0Fu, firsts >> 1, seconds * kEight);
  const uint32_t signs = select(0x0F0F0F0Fu, firsts >> 4, seconds);  // and the first bit of the code
  // A code of 8 is that of a number past 6, and becomes 7.
  static_assert(CodeHalves::kLimit < 8.0f * CodeHalves::kFirst, "no code is above 8");
  return select(0x77777777u, codes - (signs & 0x11111111u), signs);
}

template <typename Bytes>
__device__ __forceinline__ uint32_t pack_at_random(const uint32_t* word, float factor, const Bytes& bytes) {
  return pack_each_at_random([&](int i) { return Words<bf16_t>::element(word[i / 2], i % 2); }, factor, bytes);
}

// ---------------------------------------------------------------------------------------------- scales
// The factor for pack_by_halves, without CodeHalves::kFirst; NaN: there is none. decode: about 1 / exact. Powers of two
// do not matter, so that there are four ties, two of each kind, and next to each of them, divided by the factor, one
// value.
__device__ __forceinline__ float factor_for_halves(float decode, float exact) {
  const auto nearest = [&](float tie) { return float_of((bits_of(tie * decode) + 0x8000u) & 0xFFFF0000u); };
  const float down[2] = {nearest(1.0f), nearest(1.25f)};  // 0.25, and 1.25, 2.5 and 5
  if (down[0] * exact != 1.0f && down[1] * exact != 1.25f) return exact;
  const float up[2] = {nearest(1.5f), nearest(1.75f)};  // 0.75, and 1.75 and 3.5
  const auto is_right = [&](float smaller) {
    const auto number = [&](float v, float power) { return v * smaller * (CodeHalves::kFirst * power); };
    uint32_t numbers[4] = {cut_to_halves(number(down[0], 0.25f), number(up[0], 0.5f)),
                           cut_to_halves(number(down[1], 1.0f), number(up[1], 1.0f))};
    raise(numbers, -1.0f);
    const uint32_t small = numbers[0];
    const uint32_t large = numbers[1];
    return (small % 65536u >= 0x0100u) == (down[0] * exact > 1.0f) &&
           (small / 65536u >= 0x0300u) == (up[0] * exact >= 1.5f) &&
           (large % 65536u >= 0x0500u) == (down[1] * exact > 1.25f) &&
           (large / 65536u >= 0x0700u) == (up[1] * exact >= 1.75f);
  };
  // The second one is for blocks that meet 0.25 alone, and have a value next to 1.25.
  const float smaller[2] = {exact * (1.0f - 1.0f / 1024.0f), exact * (1.0f - 1.0f / 4096.0f)};
  return is_right(smaller[0]) ? -smaller[0] : is_right(smaller[1]) ? -smaller[1] : float_of(kNanBits);
}

// What a tile's blocks need of their plane. The factor of a block follows from the 128 codes that its scale can have,
// times CodeHalves::kFirst. It is NaN where pack_by_halves cannot be used: where factor_for_halves says so, and where
// powers of two do not commute with roundings.
//
// A copy of it may have been taken while it was written, 16 bytes at once, to where all bits were set (ToBlank). Then
// factors that are missing are NaNs as well, and the rest does no harm either, but for the 16 bytes of is_there.
struct alignas(16) PlaneScales {
  float factor[128];
  alignas(16) Nvfp4Global global;
  float encode;     // turns a magnitude into a scale
  uint32_t raises;  // not 0: some factor is below zero

  // By one warp. quarter: magnitudes and values are four times what they should be. kRandom: for pack_at_random.
  template <bool kRandom = false>
  __device__ __forceinline__ void fill(float amax, bool quarter) {
    const unsigned lane = threadIdx.x % 32u;
    const Nvfp4Global of = nvfp4_global(amax);
    const float part = quarter ? 0.25f : 1.0f;
    const bool far = !(of.encode_sixth > 0x1p-90f && of.encode_sixth < 0x1p+90f);
    if (lane == 0u) {
      global = of;
      encode = of.encode_sixth * part;
    }
    // Of the eight codes from 1.0 on; the other factors are these times powers of two.
    const float decode = decode_scale(0x38u + lane % 8u) * of.decode;
    const float exact = reciprocal(decode);
    const float of_code = (kRandom ? exact : factor_for_halves(decode, exact)) * (part * CodeHalves::kFirst);
    const float from_one = far ? float_of(kNanBits) : of_code;
    const bool any_raises = !kRandom && __any_sync(kFullWarp, from_one < 0.0f);
    const auto power = [](unsigned exponent) { return float_of((127u + exponent) << 23); };
#pragma unroll
    for (unsigned at = 0u; at < 128u; at += 32u) factor[at + lane] = from_one * power(7u - (at + lane) / 8u);
    // Codes below 8 are whole numbers of 2^-9.
    const unsigned top = 31u - __clz(lane % 8u | 1u);
    const float small = __shfl_sync(kFullWarp, from_one, (lane << (3u - top)) % 8u) * power(9u - top);
    // The factor of zeros keeps all others of that code from being easy, however small.
    static_assert(kFloatMax * 0x1p-133f > CodeHalves::kLimit, "the smallest bf16 number is not easy");
    if (lane < 8u) factor[lane] = far ? float_of(kNanBits) : lane == 0u ? kFloatMax : small;
    if (lane == 31u) factor[127] = float_of(kNanBits), raises = any_raises ? 1u : 0u;
  }

  __device__ __forceinline__ bool is_there() const { return bits_of(encode) != ~0u; }
};

// The same in use: what all blocks need is in a register.
struct HeldScales {
  const PlaneScales& plane;
  float encode;

  __device__ __forceinline__ explicit HeldScales(const PlaneScales& of) : plane(of), encode(of.encode) {}
};

// The hardest of some scales: an instruction each, where a mask of those that are not easy took four.
class HardestScale {
 public:
  // largest: EasyScale's.
  __device__ __forceinline__ void add(float largest) {
    asm("max.NaN.xorsign.abs.f32 %0, %0, %1;" : "+f"(largest_) : "f"(largest));
  }
  // Of the warp's lanes.
  __device__ __forceinline__ bool are_all_easy() const {
    return __all_sync(kFullWarp, fabsf(largest_) < CodeHalves::kLimit);  // no NaN is
  }

 private:
  float largest_ = 0.0f;
};

struct EasyScale {
  uint16_t code;
  float factor;
  float largest;  // what the factor makes of amax

  __device__ __forceinline__ EasyScale(float amax, const HeldScales& scales)
      : code(static_cast<uint16_t>(convert_fp8x2<E4M3>(amax * scales.encode, 0.0f))),
        factor(scales.plane.factor[place(code)]),
        largest(amax * factor) {}

  // Whether pack_by_halves can be used.
  __device__ __forceinline__ bool is_easy() const { return fabsf(largest) < CodeHalves::kLimit; }

 private:
  // A tensor's amax below zero makes codes from 128 on; all factors are NaN then. (Of an AND that it knew, the compiler
  // would make a shift, an AND and an addition.)
  static __device__ __forceinline__ uint32_t place(uint32_t code) {
    uint32_t at;
    asm("and.b32 %0, %1, 0x7F;" : "=r"(at) : "r"(code));
    return at;
  }
};

}  // namespace cuda
}  // namespace te_dist
