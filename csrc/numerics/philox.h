// Philox4x32-10: random bits as a pure function of (seed, offset, position), so that recomputation,
// compilation and CUDA graphs draw the same ones.
#pragma once

#include "portability.h"

namespace te_dist {

struct Philox4 {
  uint32_t word[4];
};

constexpr int kPhiloxRounds = 10;

struct PhiloxKey {
  uint32_t word[2];
};

TED_FN PhiloxKey philox_key(uint64_t seed, int round) {
  const auto number = static_cast<uint32_t>(round);
  return PhiloxKey{{static_cast<uint32_t>(seed) + number * 0x9E3779B9u,
                    static_cast<uint32_t>(seed >> 32) + number * 0xBB67AE85u}};
}

TED_FN uint64_t philox_product0(uint32_t word) { return static_cast<uint64_t>(0xD2511F53u) * word; }
TED_FN uint64_t philox_product1(uint32_t word) { return static_cast<uint64_t>(0xCD9E8D57u) * word; }

// key(round): philox_key of a seed. From round kFirst on.
template <int kFirst = 0, typename Key>
TED_FN Philox4 philox4x32(Philox4 counter, const Key& key) {
  TED_UNROLL
  for (int round = kFirst; round < kPhiloxRounds; ++round) {
    const PhiloxKey of_round = key(round);
    const uint64_t product0 = philox_product0(counter.word[0]);
    const uint64_t product1 = philox_product1(counter.word[2]);
    counter = Philox4{{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ of_round.word[0],
                       static_cast<uint32_t>(product1),
                       static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ of_round.word[1],
                       static_cast<uint32_t>(product0)}};
  }
  return counter;
}

// What is encrypted for the bytes of one NVFP4 block. `block` is the block's linear index in its plane; the two planes
// draw different bits.
TED_FN Philox4 philox_counter(uint64_t offset, uint64_t block, bool columnwise) {
  const uint64_t position = block | (columnwise ? 1ull << 63 : 0ull);
  return Philox4{{static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                  static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)}};
}

// The 16 random bytes of the block: byte j of it is word[j / 4] >> 8 * (j % 4).
TED_FN Philox4 random_bytes(uint64_t seed, uint64_t offset, uint64_t block, bool columnwise) {
  return philox4x32(philox_counter(offset, block, columnwise), [&](int round) { return philox_key(seed, round); });
}

TED_FN uint32_t random_byte(const Philox4& bytes, int j) { return (bytes.word[j >> 2] >> (8 * (j & 3))) & 0xFFu; }

}  // namespace te_dist
