#include <random>
#include <cstdio>
#include <memory>
char emu_smem[1 << 17];
thread_local unsigned emu_tid; thread_local int emu_block; thread_local EmuIdx emu_blockIdx;
char* emu_shared_of[kBlocks]; std::barrier<>* emu_all; EmuNamed emu_nameds[kBlocks][16];
std::barrier<>* emu_warp_bars[8][9]; uint32_t emu_warp_xs[8][9][32][8];
std::barrier<> emu_team(256);
void __syncthreads() { emu_team.arrive_and_wait(); }
namespace te_dist { namespace cuda { CUtensorMap map_of(const BoxedMatrix& m) { CUtensorMap r; memcpy(&r, &m, sizeof m); return r; } bool runs_hopper_code() { return true; } } }
namespace te_dist { namespace check { void fail(char const*, std::initializer_list<Part>) { abort(); } } }
using namespace te_dist; using namespace te_dist::cuda;
int main(int argc, char** argv) { int failures = 0, n = 0;
  for (unsigned seed = 0; seed < 12; ++seed) for (int special = 0; special < 7; ++special) for (float scale : {1e-39f, 1.0f, 1e37f}) for (uint32_t signs : {kHadamardSigns, 0x1234u}) {
    int rows = 128, cols = 256; std::mt19937 gen(seed); std::normal_distribution<float> normal; std::vector<uint16_t> x((size_t)rows * cols);
    for (int i = 0; i < 8; ++i) emu_warp_bars[0][i] = new std::barrier<>(32);
    for (size_t i = 0; i < x.size(); ++i) x[i] = emu_bf16(scale * (normal(gen) + (special == 6 ? 2.0f : 0.0f)));
    if (special == 1) for (int r = 32; r < 48; ++r) x[(size_t)r * cols + 77] = emu_bf16((signs >> (r % 16) & 1) ? -3.0f * scale : 3.0f * scale);
    if (special == 2) x[5000] = 0xFF80; if (special == 3) x[5000] = 0x7F80, x[5000 + 256] = 0x7F80; if (special == 4) x[6000] = 0x7FC1; if (special == 5) for (auto& v : x) v = 0;
    float ar = 0, ac = 0; gridDim.x = 1; unsigned items = rows / 16 * (cols / 128); Taper work{items, 1, items - items / 8, items / 8};
    CUtensorMap map = WarpBoxes::map((const bf16_t*)x.data(), rows, cols, cols);
    for (unsigned block = 0; block < 2; ++block) { std::vector<std::thread> ts; for (int t = 0; t < 256; ++t) ts.emplace_back([&, t] { emu_block = 0; emu_tid = t; emu_blockIdx.x = block; nvfp4_amax_boxed_kernel(map, 2u, work, signs, AmaxOut{&ar, nullptr}, AmaxOut{&ac, nullptr}, nullptr); }); for (auto& t : ts) t.join(); }
    float wr = 0, wc = 0; bool nr = false, nc = false;
    for (auto v : x) { float f = fabsf(f_of((uint32_t)v << 16)); if (f != f) nr = true; else wr = std::max(wr, f); }
    for (int g = 0; g < rows; g += 16) for (int c = 0; c < cols; ++c) { float v[16]; for (int i = 0; i < 16; ++i) { v[i] = f_of((uint32_t)x[(size_t)(g + i) * cols + c] << 16); if (signs >> i & 1) v[i] = -v[i]; }
      for (int s = 1; s < 16; s *= 2) for (int i = 0; i < 16; ++i) if (!(i & s)) { float a = v[i], b = v[i + s]; v[i] = a + b; v[i + s] = a - b; }
      for (int i = 0; i < 16; ++i) { float t = f_of((uint32_t)emu_bf16(0.25f * v[i]) << 16); if (t != t) nc = true; else wc = std::max(wc, fabsf(t)); } }
    bool ok = (nr ? ar != ar : ar == wr) && (nc ? ac != ac : ac == wc); failures += !ok; ++n; if (!ok) printf("special %d scale %g signs %x: %g %g, %g %g\n", special, scale, signs, ar, wr, ac, wc); }
  printf("%d runs, failures %d\n", n, failures); }
