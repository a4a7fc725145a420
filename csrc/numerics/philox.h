// Philox4x32-10: random bits as a pure function of (seed, offset, position), so that recomputation,
// compilation and CUDA graphs draw the same ones.
#pragma once

#include "portability.h"

namespace te_dist {

struct Philox4 {
  uint32_t word[4];
};

TED_FN Philox4 philox4x32(Philox4 counter, uint32_t key0, uint32_t key1) {
  TED_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * counter.word[0];
    const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * counter.word[2];
    counter = Philox4{{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                       static_cast<uint32_t>(product1),
                       static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                       static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The 16 random bytes of one NVFP4 block: byte j of the block is word[j / 4] >> 8 * (j % 4).
// `block` is the block's linear index in its plane; the two planes draw different bits.
TED_FN Philox4 random_bytes(uint64_t seed, uint64_t offset, uint64_t block, bool columnwise) {
  const uint64_t position = block | (columnwise ? 1ull << 63 : 0ull);
  const Philox4 counter{{static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                         static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)}};
  return philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

TED_FN uint32_t random_byte(const Philox4& bytes, int j) { return (bytes.word[j >> 2] >> (8 * (j & 3))) & 0xFFu; }

}  // namespace te_dist
