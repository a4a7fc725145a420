#include <vector_types.h>
#include <vector_functions.h>
#include <crt/host_defines.h>
#undef __shared__
#include "emulation.h"
#undef __shared__
#define __shared__ static
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline uint32_t __reduce_max_sync(unsigned, uint32_t v) { unsigned l = emu_tid % 32; emu_x[l][0] = v; emu_sync(); uint32_t r = 0; for (int i = 0; i < 32; ++i) r = std::max(r, emu_x[i][0]); emu_sync(); return r; }
inline uint32_t __reduce_or_sync(unsigned, uint32_t v) { unsigned l = emu_tid % 32; emu_x[l][0] = v; emu_sync(); uint32_t r = 0; for (int i = 0; i < 32; ++i) r |= emu_x[i][0]; emu_sync(); return r; }
template <typename... A> uint32_t atomicMax(A...) { abort(); }
#define __builtin_assume(x)
#include "csrc/cuda/nvfp4_whole.cuh"
#include "csrc/cuda/nvfp4_whole_norm.cu"
#include "csrc/cuda/nvfp4_whole_activation.cu"
unsigned emu_early = 0;
#include <random>
#include <cstdio>
alignas(4096) char emu_smem[1 << 17];
thread_local unsigned emu_tid;
#define B std::barrier<>(32)
std::barrier<> emu_bars[9] = {B,B,B,B,B,B,B,B,B};
std::barrier<> emu_team(128);
uint32_t emu_xs[9][32][8];
void __syncthreads() { emu_team.arrive_and_wait(); }
namespace te_dist { namespace cuda { CUtensorMap map_of(const BoxedMatrix& m) { CUtensorMap r; memcpy(&r, &m, sizeof m); return r; } } }
using namespace te_dist; using namespace te_dist::cuda;
int failures = 0;
template <bool kHad, typename From, Codes kC> void run(const char* name, const std::vector<uint16_t>& x, const std::vector<uint16_t>& y, int rows, int cols, const From& from, unsigned tall, bool with_rows, bool with_cols) {
  constexpr bool rnd = kC == Codes::kRandom;
  std::vector<uint8_t> rd(rows * cols / 2 + 64, 0xEE), cd(rows * cols / 2 + 64, 0xEE), rs(rows * cols / 16, 0xEE), cs(rows * cols / 16, 0xEE);
  std::vector<float> t((size_t)rows * cols); float ar = 0, ac = 0;
  for (int r = 0; r < rows; r += 16) for (int c = 0; c < cols; ++c) { float v[16]; for (int i = 0; i < 16; ++i) { v[i] = f_of((uint32_t)y[(r + i) * cols + c] << 16); if (v[i] == v[i]) ar = std::max(ar, fabsf(v[i])); } if (kHad) hadamard16(v, kHadamardSigns); for (int i = 0; i < 16; ++i) { t[(size_t)(r + i) * cols + c] = v[i]; if (std::isfinite(v[i])) ac = std::max(ac, fabsf(v[i])); } }
  if (!std::isfinite(ar)) ar = 9;
  Input in{}; in.data = (void*)x.data(); in.dtype = Float::kBF16; in.rows = rows; in.cols = cols; in.stride = cols;
  Planes out{}; out.row_data = with_rows ? rd.data() : nullptr; out.row_scale = rs.data(); out.col_data = with_cols ? cd.data() : nullptr; out.col_scale = cs.data();
  const NvBoxes boxes = boxes_of(BOXES);
  NvPlane row{ByteMatrix{with_rows ? rd.data() : nullptr, rows, cols / 2, true}, rs.data(), &ar}, col{ByteMatrix{with_cols ? cd.data() : nullptr, cols, rows / 2, true}, cs.data(), &ac};
  TileOrder order{(unsigned)rows / 128, tall}; gridDim = order.blocks(cols); int64_t rng[2] = {99, 7};
  NvParts parts{};
  for (unsigned by = 0; by < gridDim.y; ++by) for (unsigned bx = 0; bx < gridDim.x; ++bx) { blockIdx.x = bx; blockIdx.y = by;
    std::vector<std::thread> ts; for (int l = 0; l < 128; ++l) ts.emplace_back([&, l] { emu_tid = l; nvfp4_whole_kernel<kHad, From, kC>(boxes, from, row, col, parts, order, false, emu_early, rng, EXACT nullptr); }); for (auto& th : ts) th.join(); }
  int bad[4] = {};
  for (int p = 0; p < 2; ++p) { if (!(p ? with_cols : with_rows)) continue; auto g = nvfp4_global(p ? ac : ar); int L = p ? cols : rows, N = p ? rows : cols;
    for (int l = 0; l < L; ++l) for (int b = 0; b < N / 16; ++b) { float v[16], m = 0; bool n = false; for (int i = 0; i < 16; ++i) { v[i] = p ? t[(size_t)(16 * b + i) * cols + l] : f_of((uint32_t)y[l * cols + 16 * b + i] << 16); if (v[i] != v[i]) n = true; m = std::max(m, fabsf(v[i])); } if (n) m = f_of(kNanBits);
      uint8_t s = nvfp4_block_scale(m, g); float f = nvfp4_encode_factor(s, g); RandomPlane rp{99, 7, p == 1}; auto place = random_of_place(rp, l, b); uint32_t wl = word_of_line(random_of_lines(rp, l, b), l % 8); uint8_t want[8];
      for (int i = 0; i < 8; ++i) { uint8_t e[2]; for (int k = 0; k < 2; ++k) { int j = 2 * i + k; float w = v[j] * f; uint32_t by = ((place.word[j / 4] ^ wl) >> (8 * (j % 4))) & 255; if (n) e[k] = 7; else { w = std::min(std::max(w, -6.0f), 6.0f); e[k] = rnd ? encode_e2m1_stochastic(w, by) : encode_e2m1(w); } } want[i] = e[0] | e[1] << 4; }
      bad[2 * p] += memcmp(&(p ? cd : rd)[(size_t)l * N / 2 + 8 * b], want, 8) != 0; bad[2 * p + 1] += (p ? cs : rs)[(size_t)l * N / 16 + b] != s; } }
  printf("%s %dx%d tall %u rows %d cols %d: wrong row blocks %d scales %d, column blocks %d scales %d\n", name, rows, cols, tall, with_rows, with_cols, bad[0], bad[1], bad[2], bad[3]); failures += bad[0] + bad[1] + bad[2] + bad[3];
}
int main() {
  std::mt19937 gen(3); std::normal_distribution<float> normal;
  for (int kind = 0; kind < 4; ++kind) { int rows = kind == 1 ? 384 : 256, cols = kind == 1 ? 256 : 128;
    std::vector<uint16_t> x(rows * cols); for (auto& v : x) { float f = normal(gen); if (kind == 2 && gen() % 4 == 0) f = gen() % 2 ? 0.0f : -0.0f; if (kind == 3) f *= ldexpf(1, -(int)(gen() % 24)); v = emu_bf16(f); }
    for (unsigned tall = 0; tall < (kind == 1 ? 2 : 2); ++tall) for (int m = 1; m < 4; ++m) { if (rows / 128 < 2 * (int)tall) continue;
      run<true, AsItIs, Codes::kNearest>("rht", x, x, rows, cols, AsItIs{}, tall, m & 1, m & 2);
      run<true, AsItIs, Codes::kRandom>("rht random", x, x, rows, cols, AsItIs{}, tall, m & 1, m & 2);
      run<false, AsItIs, Codes::kNearest>("plain", x, x, rows, cols, AsItIs{}, tall, m & 1, m & 2);
      std::vector<float> mean(rows), rstd(rows), w(cols), b(cols); std::vector<uint16_t> y(x.size()); for (int r = 0; r < rows; ++r) mean[r] = normal(gen), rstd[r] = fabsf(normal(gen)) + 0.1f; for (int c = 0; c < cols; ++c) w[c] = normal(gen), b[c] = normal(gen);
      Made made{}; made.centered = true; made.mean = mean.data(); made.rstd = rstd.data(); made.cols = cols; made.rows = rows; made.weight = RowView{w.data(), Float::kF32, cols}; made.bias = RowView{b.data(), Float::kF32, cols};
      for (int r = 0; r < rows; ++r) for (int c = 0; c < cols; ++c) y[r * cols + c] = emu_bf16(fmaf(fmaf(f_of((uint32_t)x[r * cols + c] << 16), rstd[r], -(mean[r] * rstd[r])), w[c], b[c]));
      run<true, FromNorm<true>, Codes::kNearest>("norm", x, y, rows, cols, FromNorm<true>{made}, tall, m & 1, m & 2);
      std::vector<uint16_t> bias(cols); for (auto& v : bias) v = emu_bf16(normal(gen));
      for (int e = 0; e < 3; ++e) { emu_early = e;
        for (int with = 0; with < 2; ++with) {
          for (size_t i = 0; i < x.size(); ++i) { float v = f_of((uint32_t)x[i] << 16); if (with) v = f_of((uint32_t)emu_bf16(v + f_of((uint32_t)bias[i % cols] << 16)) << 16); y[i] = emu_bf16(fast_activation<Activation::kGelu>(v)); }
          run<true, FromActivation<Activation::kGelu>, Codes::kNearest>("gelu", x, y, rows, cols, FromActivation<Activation::kGelu>{with ? (const bf16_t*)bias.data() : nullptr}, tall, m & 1, m & 2); } } emu_early = 0; } }
  printf("failures %d\n", failures); return failures != 0;
}
namespace te_dist { namespace check { void fail(char const*, std::initializer_list<Part>) { abort(); } } }
