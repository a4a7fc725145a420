// amax: max|x| of a strided 2-D tensor. Reads every element once, writes 4 bytes.
//
// A warp takes chunks of 2 KB of one row (a contiguous tensor is one long row), four 16-byte loads in flight
// per lane. The few elements in front of a row's first 16-byte boundary and behind its last belong to chunk
// 0, so any pointer and any stride take the same path. Walks upwards: the cast that follows walks downwards
// and finds the end of the tensor in L2.
#include "amax.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct AmaxConfig {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSm = 5;
  static constexpr int kUnroll = 4;              // vectors of 16 bytes per lane and chunk
  static constexpr int kChunk = 32 * kUnroll;    // vectors per chunk
  static constexpr int kSingleBlockChunks = 64;  // up to here one block does all, and spares a launch that zeroes
};

struct AmaxResult {
  AmaxOut first;
  float* second;    // may be null
  bool direct;      // one block only: it stores, nobody had to zero
  bool accumulate;  // of interest to a direct store only
  ToBlank blank;
};

// The elements of a row outside its whole vectors.
template <typename T>
__device__ __forceinline__ uint32_t max_of_ends(uint32_t word, const T* row, int64_t cols, int64_t head,
                                                int64_t body_end, int lane) {
  using W = Words<T>;
  const auto* raw = reinterpret_cast<const typename W::Raw*>(row);
  if (lane < head) word = W::max(word, W::magnitude(raw[lane]));
  if (body_end + lane < cols) word = W::max(word, W::magnitude(raw[body_end + lane]));
  return word;
}

template <typename T>
__device__ __forceinline__ uint32_t max_of_chunk(uint32_t word, const T* row, int64_t cols, int64_t chunk,
                                                 int lane) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kUnroll = AmaxConfig::kUnroll;
  const unsigned misaligned = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(row) & 15u);
  int64_t head = ((16u - misaligned) & 15u) / sizeof(T);
  head = head < cols ? head : cols;
  const int64_t vectors = (cols - head) / kVector;
  const auto* body = reinterpret_cast<const uint4*>(row + head);

  const int64_t first = chunk * AmaxConfig::kChunk;
  uint4 v[kUnroll];
  if (first + AmaxConfig::kChunk <= vectors) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = __ldg(body + first + u * 32 + lane);
  } else {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = first + u * 32 + lane;
      v[u] = at < vectors ? __ldg(body + at) : make_uint4(0u, 0u, 0u, 0u);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) word = max_of_vector<T>(word, v[u]);
  if (chunk == 0) word = max_of_ends(word, row, cols, head, head + vectors * kVector, lane);
  return word;
}

__device__ __forceinline__ void store_amax(const AmaxOut& out, float value, const AmaxResult& result) {
  if (!result.direct) return give_amax(out, value);
  const uint32_t before = result.accumulate ? bits_of(*out.amax) & kAbsMask : 0u;
  *out.amax = amax_of_bits(max(before, bits_of(value)));
}

template <typename T>
__global__ void __launch_bounds__(AmaxConfig::kThreads, AmaxConfig::kBlocksPerSm)
    amax_kernel(const T* data, int64_t rows, int64_t cols, int64_t stride, int64_t chunks, AmaxResult result,
                const float* noop) {
  constexpr int kWarps = AmaxConfig::kThreads / 32;
  __shared__ uint32_t scratch[kWarps];
  let_next_kernel_start();
  if (is_noop(noop)) return;
  if (blockIdx.x == 0u) result.blank.fill();
  const int lane = threadIdx.x % 32;
  const int64_t items = rows * chunks;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  uint32_t word = 0u;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; item < items;
       item += step) {
    const int64_t row = rows == 1 ? 0 : item / chunks;
    word = max_of_chunk(word, data + row * stride, cols, item - row * chunks, lane);
  }
  const uint32_t raw = block_max<AmaxConfig::kThreads>(Words<T>::fold(word), scratch);
  if (threadIdx.x != 0) return;
  const float value = Words<T>::to_float_of_raw(raw);
  store_amax(result.first, value, result);
  if (result.second != nullptr) store_amax(AmaxOut{result.second, nullptr}, value, result);
}

__global__ void amax_reset_kernel(float* first, float* second, ToBlank blank, const float* noop) {
  let_next_kernel_start();
  if (is_noop(noop)) return;
  blank.fill();
  if (threadIdx.x != 0u) return;
  if (first != nullptr) *first = 0.0f;
  if (second != nullptr) *second = 0.0f;
}

}  // namespace

void launch_amax_reset(float* first, float* second, const float* noop, Lane lane, const ToBlank& blank) {
  launch("amax_reset_kernel", amax_reset_kernel, 1, 32, lane, first, second, blank, noop);
}

int launch_amax(const Input& x, const AmaxOut& out, float* second, bool accumulate, const float* noop, Lane lane,
                const ToBlank& blank) {
  static_assert(AmaxConfig::kBlocksPerSm <= kMostAmaxBlocksPerSm, "room for their parts");
  const bool empty = x.rows == 0 || x.cols == 0;
  const bool one_row = x.rows <= 1 || x.stride == x.cols;
  const int64_t rows = empty ? 0 : (one_row ? 1 : x.rows);
  const int64_t cols = one_row ? x.rows * x.cols : x.cols;
  int parts = 0;
  dispatch_float(x.dtype, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    const int64_t vectors = cols * static_cast<int64_t>(sizeof(T)) / 16;
    const int64_t chunks = larger(1, ceil_div(vectors, AmaxConfig::kChunk));
    const int64_t wanted = ceil_div(rows * chunks, AmaxConfig::kThreads / 32);
    const bool direct = rows * chunks <= AmaxConfig::kSingleBlockChunks;
    const int64_t most = static_cast<int64_t>(multiprocessors()) * AmaxConfig::kBlocksPerSm;
    const int blocks = direct ? 1 : grid_size(smaller(wanted, most));
    if (!direct && out.parts != nullptr) parts = blocks;
    if (!direct && parts == 0 && !accumulate) launch_amax_reset(out.amax, second, noop, lane);
    launch("amax_kernel", amax_kernel<T>, blocks, AmaxConfig::kThreads, lane, static_cast<const T*>(x.data),
           rows, cols, x.stride, chunks,
           AmaxResult{out, parts != 0 ? nullptr : second, direct, accumulate, blank}, noop);
  });
  return parts;
}

void amax(const Source& x, float* amax, bool accumulate, const float* noop, Lane lane) {
  check::required("amax", amax, sizeof(float));
  const AmaxOut out{amax, nullptr};
  if (is_made(x)) {
    launch_amax_made(x, out, accumulate, noop, lane);
    return;
  }
  check::plain(x);
  launch_amax(x, out, nullptr, accumulate, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
