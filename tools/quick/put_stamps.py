exec(open("edit.py").read().split("sub(\"csrc")[0])
import os
os.chdir("TREE")
sub("csrc/cuda/common.cuh", [('''// ---------------------------------------------------------------------------------------------- device
// Blocks of the next''', '''struct StampsOf { unsigned long long t[8]; };
static __device__ StampsOf stamps_here[20000];
static __device__ __forceinline__ void stamp(unsigned block, int i) {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory");
  if (threadIdx.x == 96u) stamps_here[block].t[i] = t;
}
static __device__ __forceinline__ void stamp_sm(unsigned block, int i) {
  unsigned t;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(t));
  if (threadIdx.x == 96u) stamps_here[block].t[i] = t;
}
static inline void dump_stamps(const char* name, int blocks) {
  const char* to = getenv("TED_DUMP");
  if (to == nullptr || !*to) return;
  cudaDeviceSynchronize();
  static StampsOf host[20000];
  cudaMemcpyFromSymbol(host, stamps_here, sizeof(StampsOf) * blocks);
  FILE* f = fopen((std::string(to) + "." + name).c_str(), "wb");
  fwrite(host, sizeof(StampsOf), blocks, f);
  fclose(f);
}

// ---------------------------------------------------------------------------------------------- device
// Blocks of the next'''),
('#pragma once\n', '#pragma once\n#include <cstdio>\n#include <cstdlib>\n#include <string>\n')])
sub("csrc/cuda/nvfp4_amax_activation.cu", [
('  let_next_kernel_start();\n', '  stamp(blockIdx.x, 0);\n  stamp_sm(blockIdx.x, 7);\n  let_next_kernel_start();\n'),
('  if (to.row.amax != nullptr) found', '  stamp(blockIdx.x, 1);\n  if (to.row.amax != nullptr) found'),
('  if (threadIdx.x == 0u) give_amax(to.col, float_of(known));\n', '  if (threadIdx.x == 0u) give_amax(to.col, float_of(known));\n  stamp(blockIdx.x, 2);\n'),
('  const int blocks = work.blocks(kWarps);\n', '  const int blocks = work.blocks(kWarps);\n  dump_stamps("amax", blocks);\n'),
])
sub("csrc/cuda/nvfp4_amax.cu", [
('  let_next_kernel_start();\n', '  stamp(blockIdx.x, 0);\n  stamp_sm(blockIdx.x, 7);\n  let_next_kernel_start();\n'),
('  give_amaxes<T, kThreads>(row_word, col_bits, amax_row, amax_col, scratch);\n', '  stamp(blockIdx.x, 1);\n  give_amaxes<T, kThreads>(row_word, col_bits, amax_row, amax_col, scratch);\n  stamp(blockIdx.x, 2);\n'),
('      const int blocks = work.blocks(kWarps);\n', '      const int blocks = work.blocks(kWarps);\n      dump_stamps("amax", blocks);\n'),
])
sub("csrc/cuda/nvfp4_whole.cuh", [
('  if (is_noop(noop)) return;\n  __builtin_assume', '  const unsigned me = blockIdx.y * gridDim.x + blockIdx.x;\n  stamp(me, 0);\n  stamp_sm(me, 7);\n  if (is_noop(noop)) return;\n  __builtin_assume'),
('    shared.arrival.wait(count - left);\n', '    shared.arrival.wait(count - left);\n    if (left == count) stamp(me, 1);\n'),
('''      if (is_early && left == count) {
        fill_tables();
        __syncthreads();
      }
''', '''      if (left == count) stamp(me, 2);
      if (is_early && left == count) {
        fill_tables();
        __syncthreads();
      }
'''),
('    const HeldScales of_row(row_plane_scales);\n', '    if (left == count) stamp(me, 3);\n    const HeldScales of_row(row_plane_scales);\n'),
('    const RandomBytes<4>::Place place_in_columns(', '    if (left == count) stamp(me, 4);\n    const RandomBytes<4>::Place place_in_columns('),
('    --left;\n    show_to_copies();\n    __syncthreads();\n', '    --left;\n    show_to_copies();\n    __syncthreads();\n    if (left + 1 == count) stamp(me, 5);\n'),
('''    if (left == 0u) break;
    shared.dice''', '''    if (left == 0u) { stamp(me, 6); break; }
    shared.dice'''),
('  const dim3 blocks = order.blocks(x.cols);\n', '  const dim3 blocks = order.blocks(x.cols);\n  dump_stamps("codes", static_cast<int>(blocks.x * blocks.y));\n'),
])
