// The codes of four rows of bf16 values at a time. Two neighbouring lanes have a block of 16 each row.
#pragma once

#include "nvfp4_dice.cuh"
#include "nvfp4_halves.cuh"
#include "nvfp4_kernel.cuh"
#include "powers.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct FourRows {
  static constexpr int kRows = 4;
  uint32_t word[kRows][4];

  __device__ __forceinline__ void load(const uint4* from) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint4 v = from[i * NvConfig::kThreads];
      word[i][0] = v.x, word[i][1] = v.y, word[i][2] = v.z, word[i][3] = v.w;
    }
  }
  __device__ __forceinline__ void store(uint4* to) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      to[i * NvConfig::kThreads] = make_uint4(word[i][0], word[i][1], word[i][2], word[i][3]);
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

// body(raised): std::bool_constant, from.raises, by a vote, so that the compiler knows that all lanes have the same.
// It is a plane's: all tiles run one of two loops, and not both.
template <bool kRandom, typename Body>
__device__ __forceinline__ void with_raises(const PlaneScales& from, const Body& body) {
  if constexpr (kRandom) {
    body(std::false_type{});
  } else if (__any_sync(kFullWarp, from.raises != 0u)) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

// A thread's eight bytes of each of four rows.
struct BytesOfFour {
  using OfRow = RandomBytes<2>;
  uint4 lines;
  const OfRow::Place& place;

  __device__ __forceinline__ OfRow of_row(int i) const {
    return OfRow(i < 2 ? (i == 0 ? lines.x : lines.y) : (i == 2 ? lines.z : lines.w), place);
  }
};

// ---------------------------------------------------------------------------------------------- rows
// With what make_plain does to values where that is needed. factor: exact_factor's.
__device__ __forceinline__ uint32_t pack_hard_eight(const uint32_t (&from)[4], float factor) {
  uint32_t word[4] = {from[0], from[1], from[2], from[3]};
  make_plain(word, factor);
  return pack_plain(word, factor);
}

// Of four rows, in the two threads that have their blocks. Each makes the scales of two of them.
class ScalesOfFour {
 public:
  __device__ __forceinline__ ScalesOfFour(const FourRows& rows, const HeldScales& from)
      : maxima_(rows.maxima(is_odd())), mine_{{low(), from}, {high(), from}} {}

  static __device__ __forceinline__ bool is_odd() { return threadIdx.x % 2 != 0; }

  // to: of the first row, or of the third one if the thread is odd, kRowScales a row.
  __device__ __forceinline__ void write(uint8_t* to) const {
    to[0] = static_cast<uint8_t>(mine_[0].code);
    to[NvTile<bf16_t>::kRowScales] = static_cast<uint8_t>(mine_[1].code);
  }
  __device__ __forceinline__ bool are_easy() const { return mine_[0].is_easy() && mine_[1].is_easy(); }
  __device__ __forceinline__ void add_to(HardestScale& hardest) const {
    hardest.add(mine_[0].largest);
    hardest.add(mine_[1].largest);
  }

  // pack(i, factor), of row i, to `to` and pitch bytes on.
  template <typename Pack>
  __device__ __forceinline__ void write_codes(uint8_t* to, int64_t pitch, const Pack& pack) const {
    write_each({mine_[0].factor, mine_[1].factor}, to, pitch, pack);
  }
  template <typename Pack>
  __device__ __forceinline__ void write_hard_codes(const Nvfp4Global& global, uint8_t* to, int64_t pitch,
                                                   const Pack& pack) const {
    write_each({exact_factor(mine_[0].code, global), exact_factor(mine_[1].code, global)}, to, pitch, pack);
  }

 private:
  __device__ __forceinline__ float low() const { return float_of(low_float(maxima_)); }
  __device__ __forceinline__ float high() const { return float_of(high_float(maxima_)); }

  template <typename Pack>
  static __device__ __forceinline__ void write_each(const float (&factor)[2], uint8_t* to, int64_t pitch,
                                                    const Pack& pack) {
#pragma unroll
    for (int i = 0; i < FourRows::kRows; ++i) {
      const float heard = __shfl_sync(kFullWarp, factor[i % 2], static_cast<int>(threadIdx.x % 32) / 2 * 2 + i / 2);
      store_bulk(reinterpret_cast<uint32_t*>(to), pack(i, heard));
      to += pitch;
    }
  }

  uint32_t maxima_;
  EasyScale mine_[2];
};

// Codes of four rows with these scales, to `to` and pitch bytes on. They are right where scales of all lanes are easy.
// kRaised: PlaneScales::raises. draw(): BytesOfFour, where kRandom.
template <bool kRandom, bool kRaised, typename Draw>
__device__ __forceinline__ void write_four_rows(const FourRows& rows, const ScalesOfFour& of, uint8_t* to,
                                                int64_t pitch, const Draw& draw) {
  if constexpr (kRandom) {
    const BytesOfFour bytes = draw();
    of.write_codes(to, pitch, [&](int i, float factor) {
      const auto of_row = bytes.of_row(i);
      return pack_at_random(rows.word[i], factor, [&](int at) { return of_row.two(at); });
    });
  } else {
    of.write_codes(to, pitch, [&](int i, float factor) { return pack_by_halves<kRaised>(rows.word[i], factor); });
  }
}

// Where they are not.
template <bool kRandom, typename Draw>
__device__ __forceinline__ void write_four_hard_rows(const FourRows& rows, const ScalesOfFour& of,
                                                     const Nvfp4Global& global, uint8_t* to, int64_t pitch,
                                                     const Draw& draw) {
  if constexpr (kRandom) {
    const BytesOfFour bytes = draw();
    return of.write_hard_codes(global, to, pitch, [&](int i, float factor) {
      const uint32_t words[2] = {bytes.of_row(i).word(0), bytes.of_row(i).word(1)};
      return pack_random<bf16_t, 8>(rows.word[i], factor, words);
    });
  }
  of.write_hard_codes(global, to, pitch, [&](int i, float factor) { return pack_hard_eight(rows.word[i], factor); });
}

// Codes of rows that all have one scale, which is written already.
template <bool kRaised>
__device__ __forceinline__ void write_four_rows(const FourRows& rows, const EasyScale& scale, const Nvfp4Global& global,
                                                uint8_t* to, int64_t pitch) {
  const auto write = [&](float factor, const auto& pack) {
#pragma unroll
    for (int i = 0; i < FourRows::kRows; ++i) {
      store_bulk(reinterpret_cast<uint32_t*>(to + i * pitch), pack(rows.word[i], factor));
    }
  };
  if (__all_sync(kFullWarp, scale.is_easy())) return write(scale.factor, pack_by_halves<kRaised>);
  write(exact_factor(scale.code, global), pack_hard_eight);
}

// ---------------------------------------------------------------------------------------------- scales of whole tiles
// Where a line's scales from `block` on go. They stay in L2 until the lines there are whole.
__device__ __forceinline__ uint8_t* scales_of(const NvPlane& plane, int64_t line, int64_t block) {
  return plane.scale + line * (plane.data.cols / (kBlock / 2)) + block;
}

__device__ __forceinline__ void store_scales(uint8_t* to, uint2 scales) {
  asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(to), "r"(scales.x), "r"(scales.y),
               "l"(keep_in_l2())
               : "memory");
}

__device__ __forceinline__ void store_scales(uint8_t* to, uint2 first, uint2 second) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(first.x), "r"(first.y),
               "r"(second.x), "r"(second.y), "l"(keep_in_l2())
               : "memory");
}

}  // namespace
}  // namespace cuda
}  // namespace te_dist
