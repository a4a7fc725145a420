// amax of an activation without a bias or a gate, at the price of reading its operand: |act| goes up and down
// in four stretches of bf16 values, so that the outermost values of each decide. tests/test_producers.py checks
// the stretches over all bf16 values.
//
//   x >= 0                |act| grows with x                              a: the largest as signed integer
//   -0 ... trough         |act| grows with |x|                            b: the largest up to the trough
//   trough ... clamp      |act| falls with |x|                            c: the smallest behind the trough
//   clamp ... -inf        |act| grows with |x|, the sigmoid is 2^-125     d: the largest as unsigned integer
//
// As integers, the bits of negative values are ordered by magnitude, and behind infinity come NaNs, which a and
// d keep. Where a stretch is empty its integer is one of another stretch, and does no harm.
#include "activation.cuh"
#include "amax.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct StretchConfig {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSm = 5;
  static constexpr int kUnroll = 4;            // vectors of 16 bytes per lane and chunk
  static constexpr int kChunk = 32 * kUnroll;  // vectors per chunk
};

// The bits of the negative value where |act| is largest.
__host__ __device__ constexpr uint32_t trough_of(Activation kind) {
  return kind == Activation::kSilu ? 0xBFA8u : kind == Activation::kGelu ? 0xBF4Eu : 0xBF43u;
}

// Two bf16 values a word, each half on its own. b and c: distances from the bits behind the trough, modulo 2^16.
struct Stretches {
  uint32_t a = 0x80008000u;
  uint32_t b = 0u;
  uint32_t c = 0xFFFFFFFFu;
  uint32_t d = 0u;

  __device__ __forceinline__ void take(uint32_t word, uint32_t minus_behind) {
    a = __vmaxs2(a, word);
    b = __viaddmax_u16x2(word, minus_behind, b);
    c = __viaddmin_u16x2(word, minus_behind, c);
    d = __vmaxu2(d, word);
  }
};

// The largest of a block's words, half by half, in thread 0.
__device__ __forceinline__ uint32_t largest_half(uint32_t word, uint32_t* scratch) {
  __syncthreads();
  return block_max<StretchConfig::kThreads>(Words<bf16_t>::fold(word), scratch);
}

__device__ __forceinline__ uint32_t activated_magnitude(Activation kind, uint32_t raw) {
  float value = to_float(bf16_t{static_cast<uint16_t>(raw)});
  with_activation(kind, [&](auto tag) { value = activate<decltype(tag)::kind>(value).value; });
  return magnitude_bits(to_bf16(value));
}

__global__ void __launch_bounds__(StretchConfig::kThreads, StretchConfig::kBlocksPerSm)
    amax_activation_kernel(const uint4* data, int64_t rows, int64_t vectors, int64_t stride, int64_t chunks,
                           Activation kind, AmaxOut out, const float* noop) {
  constexpr int kWarps = StretchConfig::kThreads / 32;
  constexpr int kUnroll = StretchConfig::kUnroll;
  __shared__ uint32_t scratch[kWarps];
  if (is_noop(noop)) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint32_t behind = trough_of(kind) + 1u;
  const uint32_t minus_behind = (0x10000u - behind) * 0x10001u;
  Stretches found;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; item < rows * chunks;
       item += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t row = rows == 1 ? 0 : item / chunks;
    const int64_t first = (item - row * chunks) * StretchConfig::kChunk + lane;
    const uint4* from = data + row * stride;
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {  // behind the end: the last vector once more
      v[u] = __ldg(from + min(first + u * 32, vectors - 1));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      found.take(v[u].x, minus_behind);
      found.take(v[u].y, minus_behind);
      found.take(v[u].z, minus_behind);
      found.take(v[u].w, minus_behind);
    }
  }
  // All four as maxima of unsigned integers.
  const uint32_t a = largest_half(found.a ^ 0x80008000u, scratch) ^ 0x8000u;
  const uint32_t b = largest_half(found.b, scratch) + behind;
  const uint32_t c = ~largest_half(~found.c, scratch) + behind;
  const uint32_t d = largest_half(found.d, scratch);
  if (threadIdx.x != 0) return;
  const uint32_t positive = max(activated_magnitude(kind, a), activated_magnitude(kind, d));
  const uint32_t negative = max(activated_magnitude(kind, b), activated_magnitude(kind, c));
  give_amax(out, float_of(max(positive, negative)));
}

}  // namespace

int launch_amax_activation(const Source& x, const AmaxOut& out, const float* noop, Lane lane) {
  static_assert(StretchConfig::kBlocksPerSm <= kMostAmaxBlocksPerSm, "room for their parts");
  const bool one_row = x.rows == 1 || x.stride == x.cols;
  const int64_t rows = one_row ? 1 : x.rows;
  const int64_t vectors = (one_row ? x.rows * x.cols : x.cols) / 8;
  const int64_t chunks = ceil_div(vectors, StretchConfig::kChunk);
  const int64_t wanted = ceil_div(rows * chunks, StretchConfig::kThreads / 32);
  const int64_t most = static_cast<int64_t>(multiprocessors()) * StretchConfig::kBlocksPerSm;
  const int blocks = grid_size(smaller(wanted, most));
  launch("amax_activation_kernel", amax_activation_kernel, blocks, StretchConfig::kThreads, lane,
         static_cast<const uint4*>(x.data), rows, vectors, x.stride / 8, chunks, x.activation, out, noop);
  return blocks;
}

}  // namespace cuda
}  // namespace te_dist
