// Per-tensor casts: q = fp8(x * scale), the scale given (delayed scaling) or computed by every block from an
// amax on the device (current scaling). bf16 moves 3 bytes an element for one plane, 4 for row and column
// plane together.
//
// Row plane of a contiguous tensor: one stream of 16-byte loads, persistent blocks. Everything else (a transposed
// plane, strides, odd pointers): tiles of 128 x 128. Both walk the tensor from its end, where the amax pass stopped and
// L2 still holds the input.
#include "cast.cuh"
#include "whole_tile.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct FlatConfig {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSm = 6;
  static constexpr int kUnroll = 4;  // 16-byte loads in flight per thread
  static constexpr int64_t kSpan = kThreads * kUnroll;
};

// ---------------------------------------------------------------------------------------------- flat
template <typename T>
struct FlatVector;  // what a 16-byte load becomes

template <>
struct FlatVector<float> {
  using Bytes = uint32_t;
};
template <>
struct FlatVector<bf16_t> {
  using Bytes = uint2;
};
template <>
struct FlatVector<fp16_t> {
  using Bytes = uint2;
};

template <typename F>
__device__ __forceinline__ void encode_vector(Tag<float>, const uint4& v, float scale, uint32_t& bytes) {
  bytes = encode_four<F>(float_of(v.x) * scale, float_of(v.y) * scale, float_of(v.z) * scale,
                         float_of(v.w) * scale);
}

template <typename F, typename T>
__device__ __forceinline__ void encode_vector(Tag<T>, const uint4& v, float scale, uint2& bytes) {
  using W = Words<T>;
  const auto two = [&](uint32_t a, uint32_t b) {
    return encode_four<F>(W::element(a, 0) * scale, W::element(a, 1) * scale, W::element(b, 0) * scale,
                          W::element(b, 1) * scale);
  };
  bytes = make_uint2(two(v.x, v.y), two(v.z, v.w));
}

template <typename T, typename F>
__global__ void __launch_bounds__(FlatConfig::kThreads, FlatConfig::kBlocksPerSm)
    cast_flat_kernel(const T* data, int64_t count, uint8_t* out, CastScale from) {
  using Bytes = typename FlatVector<T>::Bytes;
  constexpr int kUnroll = FlatConfig::kUnroll;
  constexpr int kVector = 16 / sizeof(T);
  __shared__ uint32_t maxima[FlatConfig::kThreads / 32];
  if (is_noop(from.noop)) return;
  const float scale = tensor_scale<F, FlatConfig::kThreads>(from, maxima);
  const bool records = from.seen != nullptr;
  uint32_t word = 0u;
  const int64_t vectors = count / kVector;
  const auto* in = reinterpret_cast<const uint4*>(data);
  auto* to = reinterpret_cast<Bytes*>(out);

  for (int64_t span = ceil_div(vectors, FlatConfig::kSpan) - 1 - blockIdx.x; span >= 0; span -= gridDim.x) {
    const int64_t first = span * FlatConfig::kSpan + threadIdx.x;
    uint4 v[kUnroll];
    Bytes bytes[kUnroll];
    if ((span + 1) * FlatConfig::kSpan <= vectors) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) v[u] = load_bulk(in + first + u * FlatConfig::kThreads);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) encode_vector<F>(Tag<T>{}, v[u], scale, bytes[u]);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) store_bulk(to + first + u * FlatConfig::kThreads, bytes[u]);
      if (records) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) word = max_of_vector<T>(word, v[u]);
      }
    } else {
      for (int64_t at = first; at < vectors; at += FlatConfig::kThreads) {
        encode_vector<F>(Tag<T>{}, in[at], scale, bytes[0]);
        to[at] = bytes[0];
        if (records) word = max_of_vector<T>(word, in[at]);
      }
    }
  }
  const int64_t tail = vectors * kVector + threadIdx.x;
  if (blockIdx.x == 0 && tail < count) {
    out[tail] = encode_fp8<F>(to_float(data[tail]) * scale);
    const auto raw = reinterpret_cast<const typename Words<T>::Raw*>(data)[tail];
    word = Words<T>::max(word, Words<T>::magnitude(raw));
  }
  record_amax<T, FlatConfig::kThreads>(from, word, maxima);
}

// ---------------------------------------------------------------------------------------------- tiles
template <typename T, typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<T>)
    cast_tile_kernel(TileInput<T> x, TileRegion region, ByteMatrix row_out, ByteMatrix col_out, CastScale from) {
  __shared__ alignas(16) ByteStage stage;
  __shared__ uint32_t maxima[TileConfig::kThreads / 32];
  if (is_noop(from.noop)) return;
  const TilePlace tile = tile_place(region, gridDim.x - 1 - blockIdx.x);
  const bool inside = tile_inside(tile, x.rows, x.cols);
  Patch<T> patch;
  load_patch(x, tile.row + threadIdx.x / 16 * 8, tile.col + threadIdx.x % 16 * 8, inside, patch);
  const float scale = tensor_scale<F, TileConfig::kThreads>(from, maxima);
  write_tile<T, F>(patch, scale, tile, inside, row_out, col_out, stage);
  if (from.seen != nullptr) record_amax<T, TileConfig::kThreads>(from, max_of_patch(patch, 0u), maxima);
}

template <typename F>
__global__ void __launch_bounds__(TileConfig::kThreads, TileConfig::kBlocksPerSm<bf16_t>)
    cast_whole_kernel(TileInput<bf16_t> x, TileRegion region, unsigned ahead, ByteMatrix row_out, ByteMatrix col_out,
                      CastScale from) {
  __shared__ alignas(16) ByteStage stage;
  __shared__ uint32_t maxima[TileConfig::kThreads / 32];
  if (is_noop(from.noop)) return;
  Patch<bf16_t> patch;
  const TilePlace tile = load_whole_tile<SquareTile>(x, region, gridDim.x - 1 - blockIdx.x, ahead, true,
                                                     threadIdx.x / 16 * 8, threadIdx.x % 16 * 8, patch);
  const float scale = tensor_scale<F, TileConfig::kThreads>(from, maxima);
  write_tile<bf16_t, F, true>(patch, scale, tile, true, row_out, col_out, stage);
  if (from.seen != nullptr) record_amax<bf16_t, TileConfig::kThreads>(from, max_of_patch(patch, 0u), maxima);
}

// ---------------------------------------------------------------------------------------------- launch
template <typename T, typename F>
void launch_flat(const Input& x, uint8_t* row, const CastScale& from, Lane lane) {
  const int64_t count = x.rows * x.cols;
  const int64_t spans = ceil_div(count / (16 / static_cast<int64_t>(sizeof(T))), FlatConfig::kSpan);
  const int64_t most = static_cast<int64_t>(multiprocessors()) * FlatConfig::kBlocksPerSm;
  const int blocks = grid_size(larger(1, smaller(spans, most)));
  launch("cast_flat_kernel", cast_flat_kernel<T, F>, blocks, FlatConfig::kThreads, lane,
         static_cast<const T*>(x.data), count, row, from);
}

void launch_cast_tiles(const Input& x, Fp8 format, uint8_t* row, uint8_t* col, const CastScale& from, Lane lane) {
  const ByteMatrix row_out = byte_matrix(row, x.rows, x.cols, 8);
  const ByteMatrix col_out = byte_matrix(col, x.cols, x.rows, 16);
  const auto kernel_for = [](auto input, auto fp8) {
    return cast_tile_kernel<TypeOf<decltype(input)>, TypeOf<decltype(fp8)>>;
  };
  const auto whole_for = [](auto fp8) { return cast_whole_kernel<TypeOf<decltype(fp8)>>; };
  // An empty tensor still has a scale_inv: one block, which finds nothing else to do.
  launch_tiles<SquareTile>("cast_tile_kernel", kernel_for, whole_for, x, format,
                           row_out.is_whole() && col_out.is_whole(), 1, lane, row_out, col_out, from);
}

void launch_cast(const Input& x, Fp8 format, uint8_t* row, uint8_t* col, const CastScale& from, Lane lane) {
  const bool contiguous = x.rows <= 1 || x.stride == x.cols;
  const bool flat = col == nullptr && row != nullptr && contiguous && aligned(x.data, 16) && aligned(row, 8);
  if (!flat) return launch_cast_tiles(x, format, row, col, from, lane);
  dispatch_cast(x.dtype, format, [&](auto input, auto fp8) {
    launch_flat<TypeOf<decltype(input)>, TypeOf<decltype(fp8)>>(x, row, from, lane);
  });
}

void cast(const Source& x, Fp8 format, uint8_t* row, uint8_t* col, const CastScale& from, Lane lane) {
  if (is_made(x)) return launch_cast_made(x, format, row, col, from, lane);
  check::plain(x);
  launch_cast(x, format, row, col, from, lane);
}

}  // namespace

void cast_scaled(const Source& x, const float* scale, Fp8 format, uint8_t* row, uint8_t* col, float* scale_inv,
                 float* amax, const float* noop, Lane lane) {
  check::required("scale", scale, sizeof(float));
  check::aligned("amax", amax, sizeof(float));
  const CastScale from{scale, nullptr, 0, nullptr, ScaleRule{0.0f, false}, scale_inv, amax, noop};
  cast(x, format, row, col, from, lane);
}

void cast_current(const Source& x, const float* amax, float eps, bool power_of_2, Fp8 format, uint8_t* row,
                  uint8_t* col, float* scale_inv, const float* noop, Lane lane) {
  check::required("amax", amax, sizeof(float));
  const CastScale from{nullptr, amax, 0, nullptr, ScaleRule{eps, power_of_2}, scale_inv, nullptr, noop};
  cast(x, format, row, col, from, lane);
}

void cast_of_parts(const Source& x, const float* parts, int count, float* amax, ScaleRule rule, Fp8 format,
                   uint8_t* row, uint8_t* col, float* scale_inv, const float* noop, Lane lane) {
  cast(x, format, row, col, CastScale{nullptr, parts, count, amax, rule, scale_inv, nullptr, noop}, lane);
}

}  // namespace cuda
}  // namespace te_dist
