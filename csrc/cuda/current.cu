// Current scaling, from amax to codes. A tensor of a few tiles takes one launch, because launching is most of what it
// costs: its tiles are a cluster of blocks, which find their common amax without leaving the chip. Any other takes two
// passes, and two launches.
#include "cast.cuh"

namespace te_dist {
namespace cuda {
namespace {

constexpr int kMostTiles = 8;  // of a cluster that every GPU with clusters can run

__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The word that block `rank` of the cluster holds at `mine` in its shared memory.
__device__ __forceinline__ uint32_t word_of_block(const uint32_t* mine, unsigned rank) {
  uint32_t value = 0u;
#if __CUDA_ARCH__ >= 900
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(mine));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
#endif
  return value;
}

// One cluster of gridDim.x blocks, a tile each; blocks behind the last tile have nothing but zeros.
template <typename T, typename F>
__global__ void __launch_bounds__(TileConfig::kThreads)
    quantize_small_kernel(TileInput<T> x, ByteMatrix row_out, ByteMatrix col_out, ScaleRule rule, float* amax,
                          float* scale_inv) {
  __shared__ alignas(16) ByteStage stage;
  __shared__ uint32_t maxima[TileConfig::kThreads / 32];
  __shared__ uint32_t mine;
  const TilePlace tile = tile_place(blockIdx.x, x.cols);
  const bool inside = tile_inside(tile, x.rows, x.cols);
  Patch<T> patch;
  load_patch(x, tile.row + threadIdx.x / 16 * 8, tile.col + threadIdx.x % 16 * 8, inside, patch);
  const uint32_t raw = block_max<TileConfig::kThreads>(Words<T>::fold(max_of_patch(patch, 0u)), maxima);
  if (threadIdx.x == 0) mine = raw;
  cluster_barrier();
  const unsigned lane = threadIdx.x % 32;
  const uint32_t all = __reduce_max_sync(kFullWarp, lane < gridDim.x ? word_of_block(&mine, lane) : 0u);
  const float largest = amax_of_bits(bits_of(Words<T>::to_float_of_raw(all)));
  const float scale = scale_from_amax(largest, F::max, kFloatMax, rule);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *amax = largest;
    if (scale_inv != nullptr) *scale_inv = 1.0f / scale;
  }
  write_tile<T, F>(patch, scale, tile, inside, row_out, col_out, stage);
  cluster_barrier();  // until all have read what this block holds
}

void quantize_small(const Input& x, int tiles, ScaleRule rule, Fp8 format, uint8_t* row, uint8_t* col, float* amax,
                    float* scale_inv, Lane lane) {
  int blocks = 1;
  while (blocks < tiles) blocks *= 2;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(blocks);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(TileConfig::kThreads);
  config.stream = stream_of(lane);
  config.attrs = &cluster;
  config.numAttrs = 1;
  dispatch_cast(x.dtype, format, [&](auto input, auto fp8) {
    using T = TypeOf<decltype(input)>;
    check_cuda(cudaLaunchKernelEx(&config, quantize_small_kernel<T, TypeOf<decltype(fp8)>>, tile_input<T>(x),
                                  byte_matrix(row, x.rows, x.cols, 8), byte_matrix(col, x.cols, x.rows, 16), rule,
                                  amax, scale_inv),
               "quantize_small_kernel");
  });
}

}  // namespace

void quantize_current(const Source& x, float* amax, float eps, bool power_of_2, Fp8 format, uint8_t* row,
                      uint8_t* col, float* scale_inv, const float* noop, Lane lane) {
  check::required("amax", amax, sizeof(float));
  const ScaleRule rule{eps, power_of_2};
  if (!is_made(x)) {
    check::plain(x);
    const int64_t tiles = tile_count(x.rows, x.cols);
    if (tiles > 0 && tiles <= kMostTiles && runs_hopper_code() && noop == nullptr) {
      return quantize_small(x, static_cast<int>(tiles), rule, format, row, col, amax, scale_inv, lane);
    }
  }
  Source first = x;  // makes a norm's statistics; the column sums are the second one's
  first.partials = nullptr;
  Source second = x;
  second.make_stats = false;
  if (!is_made(first)) check::plain(first);
  // For the result, too, and for what fills up the last four parts.
  const bool room = multiprocessors() * kMostAmaxBlocksPerSm <= kAmaxRoom - 4;
  const AmaxOut out{amax, room ? amax + 1 : nullptr};
  const int parts = is_made(first) ? launch_amax_made(first, out, false, noop, lane)
                                   : launch_amax(first, out, nullptr, false, noop, lane);
  if (parts == 0) return cast_current(second, amax, eps, power_of_2, format, row, col, scale_inv, noop, lane);
  cast_of_parts(second, out.parts, parts, amax, rule, format, row, col, scale_inv, noop, lane);
}

}  // namespace cuda
}  // namespace te_dist
