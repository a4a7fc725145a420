#include <vector_types.h>
#include <vector_functions.h>
#include "emulation_of_parts.h"
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline uint32_t __reduce_max_sync(unsigned, uint32_t v) { unsigned l = emu_tid % 32; emu_x[l][0] = v; emu_sync(); uint32_t r = 0; for (int i = 0; i < 32; ++i) r = std::max(r, emu_x[i][0]); emu_sync(); return r; }
#include "csrc/cuda/nvfp4_amax_layer_rows.cu"
#include <cstdio>
#include <fstream>
alignas(4096) char emu_smem[1 << 17];
thread_local unsigned emu_tid;
namespace te_dist { namespace cuda { thread_local int emu_member; } }
#define B std::barrier<>(32)
std::barrier<> emu_bars[9] = {B,B,B,B,B,B,B,B,B};
std::barrier<> emu_team(128);
uint32_t emu_xs[9][32][8];
using namespace te_dist; using namespace te_dist::cuda;
int main(int argc, char** argv) { int cols = atoi(argv[1]); std::vector<uint16_t> x(16 * cols); std::ifstream(argv[2], std::ios::binary).read((char*)x.data(), x.size() * 2);
  static LayerParts parts; static LayerStats stats; static uint4 stage[NvNormRows::kStage]; Made made{}; made.cols = cols; made.eps = 1e-5f; float mean[16], rstd[16]; made.mean = mean; made.rstd = rstd;
  for (int m = 0; m < 8; ++m) {
    memset(stage, 0, sizeof stage);
    for (int r = 0; r < 16; ++r) for (int p = 0; p < cols / 512; ++p) memcpy((char*)stage + (r * 1024 + p * 64) * 2, &x[r * cols + p * 512 + m * 64], 128);
    std::vector<std::thread> ts; for (int t = 0; t < 256; ++t) ts.emplace_back([&, t] { emu_tid = t; emu_member = m; LayerShare s(made); Arrival a; s.send(s.of(stage), parts, a); }); for (auto& t : ts) t.join(); }
  std::vector<std::thread> ts; for (int t = 256; t < 288; ++t) ts.emplace_back([&, t] { emu_tid = t; LayerMaker k(made); k.make(parts, stats, 0); }); for (auto& t : ts) t.join();
  fwrite(mean, 4, 16, stdout); fwrite(rstd, 4, 16, stdout); fwrite(stats.both, 4, 16, stdout); fwrite(&stats.most_shift, 4, 1, stdout); }
