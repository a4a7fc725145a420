// NVFP4's two global amaxes of a matrix whose 8 x 8 patches threads make on the fly.
#pragma once

#include "made.cuh"
#include "nvfp4_amax.cuh"

namespace te_dist {
namespace cuda {

struct NvMadeOut {
  bf16_t* written;
  AmaxOut amax_row;
  AmaxOut amax_col;
  bool hadamard;
  uint32_t signs;
  const float* noop;
};

// Of a gated activation's gradient, which is written on the way.
void launch_amax_nvfp4_pairs(const Made& x, const NvMadeOut& out, Lane lane);

namespace {

// Of the patches that a thread has met.
class NvMaxima {
 public:
  // stays: the block does, and takes more patches than these. Its first ones come when nobody knows anything.
  __device__ __forceinline__ NvMaxima(const NvMadeOut& out, bool stays)
      : hadamard_(out.hadamard), stays_(stays), columns_(out.amax_col.amax) {
    signs_ = out.signs >> (is_lower() ? 8 : 0);
    if (hadamard_ && !stays) columns_.ask_now();
  }

  __device__ __forceinline__ void add(const Patch<bf16_t>& patch) {
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) row_word_ = max_of_words<bf16_t>(patch.word[i], row_word_);
    if (hadamard_) add_transformed(patch);
  }

  // Of who makes patches row by row: each row,
  __device__ __forceinline__ void add_row(const uint4& v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    row_word_ = max_of_words<bf16_t>(words, row_word_);
  }
  // and then, of two patches, the sums of magnitudes in columns, added row after row. patch_of(k, patch): patch k,
  // which few are asked for.
  template <typename PatchOf>
  __device__ __forceinline__ void add_columns(const uint32_t (&sums)[2][4], const PatchOf& patch_of) {
    if (!hadamard_) return;
    hear_and_ask();
    uint32_t largest = 0u;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int w = 0; w < 4; ++w) largest = Words<bf16_t>::max(largest, with_partner(sums[k][w]));
    }
    if (!columns_.may_rise<TileConfig::kPatch>(largest)) return;
#pragma unroll 1
    for (int k = 0; k < 2; ++k) {
      Patch<bf16_t> patch;
      patch_of(k, patch);
      columns_.raise(transformed(patch));
    }
  }

  __device__ __forceinline__ void give(const NvMadeOut& out) const {
    __shared__ uint32_t scratch[TileConfig::kThreads / 32];
    if (hadamard_) return give_row_amax<bf16_t, TileConfig::kThreads>(row_word_, out.amax_row, scratch);
    const uint32_t raw = block_max<TileConfig::kThreads>(Words<bf16_t>::fold(row_word_), scratch);
    if (threadIdx.x != 0) return;
    const float amax = Words<bf16_t>::to_float_of_raw(raw);  // of both
    if (out.amax_row.amax != nullptr) give_amax(out.amax_row, amax);
    if (out.amax_col.amax != nullptr) give_amax(out.amax_col, amax);
  }

 private:
  static __device__ __forceinline__ bool is_lower() { return (threadIdx.x & 16u) != 0u; }

  __device__ __forceinline__ void hear_and_ask() {
    columns_.hear();
    if (stays_) columns_.ask();
  }

  // 16 rows are those of two lanes, 16 apart.
  static __device__ __forceinline__ uint32_t with_partner(uint32_t sums) {
    return add_bf16(sums, __shfl_xor_sync(kFullWarp, sums, 16));
  }

  __device__ __forceinline__ void add_transformed(const Patch<bf16_t>& patch) {
    hear_and_ask();
    uint32_t largest = 0u;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t mine = sum_of_magnitudes<TileConfig::kPatch>([&](int i) { return patch.word[i][w]; });
      largest = Words<bf16_t>::max(largest, with_partner(mine));
    }
    if (columns_.may_rise(largest)) columns_.raise(transformed(patch));
  }

  // Each takes four of their eight columns. Whose rows are whose makes no difference to transformed_amax, once their
  // signs are right.
  __device__ __forceinline__ uint32_t transformed(const Patch<bf16_t>& patch) const {
    NvPatch<bf16_t, 2> columns;
#pragma unroll
    for (int i = 0; i < TileConfig::kPatch; ++i) {
      const uint32_t flip = ((signs_ >> i) & 1u) != 0u ? 0x80008000u : 0u;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const uint32_t left = patch.word[i][w] ^ flip;
        const uint32_t right = patch.word[i][w + 2] ^ flip;
        columns.word[i][w] = is_lower() ? right : left;
        columns.word[i + 8][w] = __shfl_xor_sync(kFullWarp, is_lower() ? left : right, 16);
      }
    }
    uint32_t largest = 0u;
#pragma unroll
    for (int j = 0; j < NvPatch<bf16_t, 2>::kCols; ++j) {
      float v[kBlock];
      column_values(columns, j, v);
      largest = transformed_amax(v, largest);
    }
    return largest;
  }

  uint32_t row_word_ = 0u;
  uint32_t signs_;  // of this thread's rows
  bool hadamard_;
  bool stays_;
  ColumnAmax columns_;
};

}  // namespace
}  // namespace cuda
}  // namespace te_dist
