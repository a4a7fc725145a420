// NVFP4's two global amaxes of a gated activation's gradient, which is written on the way (nvfp4_made.cu).
//
// Operands come through rings, as in source.cuh. But every row leaves for memory as soon as it is made, so that blocks
// have room for nothing else in shared memory, and threads hold no patches. The few whose columns may raise the amax
// read them back. With three blocks a multiprocessor it is 3 % slower, with four 30 %.
#include "columns.cuh"
#include "nvfp4_maxima.cuh"
#include "source.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct NvPairs {
  static constexpr int kThreads = MadeConfig::kThreads;
  static constexpr int kBlocksPerSm = 2;
  using Ring = OperandRing<true, true>;
  static constexpr int kRing = Ring::kRows * Ring::kOperands * kThreads;  // vectors
};

// Rows [0, live) of a patch that this thread has written.
__device__ __forceinline__ void read_back(const bf16_t* from, int64_t pitch, int live, Patch<bf16_t>& patch) {
#pragma unroll
  for (int i = 0; i < TileConfig::kPatch; ++i) {
    uint4 v = make_uint4(0u, 0u, 0u, 0u);
    if (i < live) v = *reinterpret_cast<const uint4*>(from + i * pitch);
    patch.word[i][0] = v.x;
    patch.word[i][1] = v.y;
    patch.word[i][2] = v.z;
    patch.word[i][3] = v.w;
  }
}

template <bool kSums>
__global__ void __launch_bounds__(NvPairs::kThreads, NvPairs::kBlocksPerSm)
    nvfp4_amax_pairs_kernel(const __grid_constant__ Made x, const __grid_constant__ NvMadeOut out) {
  extern __shared__ uint4 memory[];
  let_next_kernel_start();
  if (is_noop(out.noop)) return;
  const int patch_row = static_cast<int>(threadIdx.x) / 16 * TileConfig::kPatch;
  const int patch_col = static_cast<int>(threadIdx.x) % 16 * TileConfig::kPatch;
  uint4* const ring = memory + threadIdx.x;
  auto& of_columns = *reinterpret_cast<GroupSums*>(memory + NvPairs::kRing);
  TileQueue queue(false, patch_row, patch_col);
  PatchPlace place = queue.next(x);
  NvPairs::Ring{ring}.fill(x, place);
  wait_for_kernel_before();  // which zeroes both amaxes
  NvMaxima maxima(out, true);
#pragma unroll 1
  while (place.there) {
    const PatchPlace next = queue.next(x);
    bf16_t* const written = out.written + place.row * x.pitch + place.col;
    bf16_t* to = written;
    uint32_t magnitudes[2][4] = {};
    float totals[2][8] = {};
    const auto take = [&](int half, const uint4& v) {
      // Not a streaming store: the cast begins with what is made last, and finds it in L2.
      *reinterpret_cast<uint4*>(to + half * x.cols) = v;
      maxima.add_row(v);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        magnitudes[half][w] = add_bf16(magnitudes[half][w], Words<bf16_t>::magnitude(words[w]));
        if (!kSums) continue;
        totals[half][2 * w] += Words<bf16_t>::element(words[w], 0);
        totals[half][2 * w + 1] += Words<bf16_t>::element(words[w], 1);
      }
    };
    const PatchBias<true> bias(x, place.col);
    with_activation(x.activation, [&](auto tag) {
      for_each_row<true, true>(x, MakeTask{ring, ring, place, next}, [&](int i, const uint4* from, uint4*) {
        float first[8];
        float second[8];
        float grad[8];
        bias.unpack(x, from, first, second);
        unpack_eight<bf16_t>(from[2 * NvPairs::kThreads], grad);
        differentiate_eight<decltype(tag)::kind>(first, second, grad, true);
        if (i < place.live_rows) {
          take(0, pack_eight_bf16(first));
          take(1, pack_eight_bf16(second));
        }
        to += x.pitch;
      });
    });
    if (kSums) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        __syncthreads();  // until all have read the last ones
        of_columns.put(patch_row / TileConfig::kPatch, patch_col, totals[half]);
        __syncthreads();
        of_columns.store(x.partials, place.row / TileConfig::kTile, place.col - patch_col + half * x.cols, x.pitch,
                         x.pitch);
      }
    }
    maxima.add_columns(magnitudes, [&](int half, Patch<bf16_t>& patch) {
      read_back(written + half * x.cols, x.pitch, place.live_rows, patch);
    });
    place = next;
  }
  maxima.give(out);
}

}  // namespace

void launch_amax_nvfp4_pairs(const Made& x, const NvMadeOut& out, Lane lane) {
  const bool sums = x.partials != nullptr;
  const auto kernel = sums ? nvfp4_amax_pairs_kernel<true> : nvfp4_amax_pairs_kernel<false>;
  const int bytes = NvPairs::kRing * 16 + (sums ? static_cast<int>(sizeof(GroupSums)) : 0);
  const int64_t most = static_cast<int64_t>(multiprocessors()) * NvPairs::kBlocksPerSm;
  launch_close("nvfp4_amax_pairs_kernel", kernel, grid_size(smaller(x.pieces, most)), NvPairs::kThreads, bytes, lane, x,
               out);
}

}  // namespace cuda
}  // namespace te_dist
