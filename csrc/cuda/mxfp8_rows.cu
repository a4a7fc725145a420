// MXFP8, 1x32, of a norm's result, row plane alone: 3 bytes an element.
#include "mxfp8_whole.cuh"
#include "norm_rows.cuh"

namespace te_dist {
namespace cuda {
namespace {

// PowerScaler is not for infinities. In blocks that have some, or NaNs, the powers are 2^-127 and 2^-128; here values
// become 2^-9 times as large and powers 2^9 times, but infinities the largest finite value, which saturates E4M3 then.
template <int kHeld>
__device__ __forceinline__ void prepare_special(TeamRow<8, kHeld>& made, CodePair& codes) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool special = codes.power_of_row(i) < 0x00800000u;
    uint4& v = made.vector[i];
    for (uint32_t* word : {&v.x, &v.y, &v.z, &v.w}) {
      const uint32_t bounded = bounded_pair(*word);
      const uint32_t changed = bounded ^ *word;
      uint32_t smaller;
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(smaller) : "r"(*word), "r"(0x3B003B00u), "r"(0x80008000u));
      const uint32_t mask = ((changed & 0xFFFFu) != 0u ? 0xFFFFu : 0u) | (changed >> 16 != 0u ? 0xFFFF0000u : 0u);
      if (special) *word = (bounded & mask) | (smaller & ~mask);
    }
  }
  const uint32_t low = codes.powers & 0xFFFFu;
  const uint32_t high = codes.powers >> 16;
  const auto larger = [](uint32_t power) { return power == 0x0040u ? 0x0480u : power == 0x0020u ? 0x0400u : power; };
  codes.powers = larger(low) | (larger(high) << 16);
}

template <typename F, bool kCentered, int kHeld>
__global__ void __launch_bounds__(NormRowsConfig::kThreads, NormRowsConfig::kBlocksPerSm<8>)
    mxfp8_rows_kernel(const __grid_constant__ Made x, bool make_stats, MxOutput out) {
  static_assert(F::code == E4M3::code, "prepare_special");
  extern __shared__ float4 memory[];
  if (is_noop(out.noop)) return;
  using Held = TeamRow<8, kHeld>;
  const int rank = RowTeam::rank();
  const int cols = static_cast<int>(x.cols);
  const int pitch = static_cast<int>(out.row_pitch);
  for_each_norm_row<kCentered, 8, kHeld, false>(
      x, make_stats, false, memory,
      [&](int64_t row, int, Held& made) {
        uint32_t maxima[4];
        const auto vector = [&](int i) { return made.vector[i]; };
        maxima_of_rows(vector, maxima);
        const bool special = __any_sync(kFullWarp, !all_finite(maxima));
        if (special) {  // a mean that is not finite makes NaNs of the zeros behind the row's end
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (Held::offset_of(i) + 8 * rank >= cols) made.vector[i] = make_uint4(0u, 0u, 0u, 0u);
          }
          maxima_of_rows(vector, maxima);
        }
        CodePair mine = CodePair::of<F>(magnitudes(quad_maximum<1>(maxima)));
        const auto there = [&](int i) { return kHeld == 1 || row + Held::row_of(i) < x.rows; };
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int i = 2 * (rank % 4) + k;
          const int at = i % Held::kEach * 32 + rank / 4;
          if (at >= pitch || !there(i)) continue;
          out.row_scale[(row + Held::row_of(i)) * pitch + at] =
              at * MxConfig::kBlock < cols ? static_cast<uint8_t>(mine.code[k]) : 0;
        }
        if (special) prepare_special(made, mine);
        const PowerScaler scaler;
        uint8_t* to = out.row_data.data + row * out.row_data.cols + 8 * rank;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint4& v = made.vector[i];
          const uint32_t words[4] = {v.x, v.y, v.z, v.w};
          const uint2 bytes = scaler.encode_eight<F>(words, mine.power_of_row(i));
          if (i > 0 && Held::offset_of(i) == 0) to += out.row_data.cols;
          if (there(i) && Held::offset_of(i) + 8 * rank < cols) {
            store_bulk(reinterpret_cast<uint2*>(to + Held::offset_of(i)), bytes);
          }
        }
      },
      [](int64_t) {});
  // The scales of rows that fill up the last 128.
  const int64_t padding = round_up(x.rows, TileConfig::kTile) - x.rows;
  for (int64_t row = blockIdx.x; row < padding; row += gridDim.x) {
    for (int at = static_cast<int>(threadIdx.x); at < pitch; at += NormRowsConfig::kThreads) {
      out.row_scale[(x.rows + row) * pitch + at] = 0;
    }
  }
}

}  // namespace

void launch_mxfp8_rows(const Made& x, bool make_stats, const MxOutput& out, Lane lane) {
  with_held_rows(x.cols, [&](auto held) {
    const auto kernel = x.centered ? mxfp8_rows_kernel<E4M3, true, held> : mxfp8_rows_kernel<E4M3, false, held>;
    launch_norm_rows<8, held>("mxfp8_rows_kernel", kernel, x, lane, make_stats, out);
  });
}

}  // namespace cuda
}  // namespace te_dist
