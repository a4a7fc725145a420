// The sum over the partial column sums of all tiles: 32 slots take every 32nd tile in turn, then fold. Blocks
// take 32 columns of one set of sums, so that a warp reads neighbours and writes nothing twice.
#include "columns.cuh"
#include "common.cuh"

namespace te_dist {
namespace cuda {
namespace {

constexpr int kSlots = 32;

// Slot s of column c is thread s * 32 + c.
__global__ void __launch_bounds__(kSlots * 32)
    reduce_partials_kernel(const float* partials, int64_t tiles, int64_t cols, Float dtype, void* out) {
  __shared__ float slots[kSlots][33];
  const int slot = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  partials += blockIdx.y * tiles * cols;
  float total = 0.0f;
  for (int64_t tile = slot; tile < tiles && col < cols; tile += kSlots) total += partials[tile * cols + col];
  slots[slot][lane] = total;
  __syncthreads();
  // Warps turn to columns, lanes to slots: folding by halves is what shuffles do.
  float v = slots[lane][slot];
#pragma unroll
  for (int half = kSlots / 2; half > 0; half /= 2) v += __shfl_xor_sync(kFullWarp, v, half);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + slot;
  if (lane != 0 || column >= cols) return;
  const int64_t mine = blockIdx.y * cols + column;
  switch (dtype) {
    case Float::kF32: static_cast<float*>(out)[mine] = v; break;
    case Float::kF16: static_cast<fp16_t*>(out)[mine] = to_fp16(v); break;
    case Float::kBF16: static_cast<bf16_t*>(out)[mine] = to_bf16(v); break;
  }
}

}  // namespace

void reduce_partials(const float* partials, int64_t tiles, const Output& out, Lane lane) {
  check::reduction(partials, tiles, out);
  if (out.cols == 0 || out.rows == 0) return;
  const dim3 blocks(static_cast<unsigned>(grid_size(ceil_div(out.cols, 32))), static_cast<unsigned>(out.rows));
  reduce_partials_kernel<<<blocks, kSlots * 32, 0, stream_of(lane)>>>(
      partials, tiles, out.cols, out.dtype, out.data);
  check_launch("reduce_partials_kernel");
}

}  // namespace cuda
}  // namespace te_dist
