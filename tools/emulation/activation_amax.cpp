#include <vector_types.h>
#include <vector_functions.h>
#include <crt/host_defines.h>
#undef __shared__
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include "emulation.h"
#undef __shared__
#define __shared__ static
#define __cluster_dims__(...)
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline uint32_t __reduce_max_sync(unsigned, uint32_t v) { unsigned l = emu_tid % 32; emu_x[l][0] = v; emu_sync(); uint32_t r = 0; for (int i = 0; i < 32; ++i) r = std::max(r, emu_x[i][0]); emu_sync(); return r; }
template <typename T> T atomicMax(T* p, T v) { std::atomic_ref<T> a(*p); T old = a.load(); while (old < v && !a.compare_exchange_weak(old, v)) {} return old; }
inline uint32_t emu_rn(double v) { if (v != v) return 0x7FFF; float f = (float)v; // odd rounding by way of what is left
  double left = v - (double)f; uint32_t b = b_of(f); if (std::isfinite(f) && left != 0) { bool away = (left > 0) == (v > 0); if (!(b & 1)) b = away ? b | 1 : (b ? b - 1 : b) | 1; } return (b + 0x7FFF + ((b >> 16) & 1)) >> 16; }
inline uint32_t emu_max2(uint32_t a, uint32_t b) { auto f = [](uint16_t x, uint16_t y) -> uint32_t { if (nan16(x) || nan16(y)) return 0x7FFF; return f_of((uint32_t)x << 16) >= f_of((uint32_t)y << 16) ? x : y; }; return f(a, b) | f(a >> 16, b >> 16) << 16; }
inline uint32_t emu_min2(uint32_t a, uint32_t b) { auto f = [](uint16_t x, uint16_t y) -> uint32_t { if (nan16(x) || nan16(y)) return 0x7FFF; return f_of((uint32_t)x << 16) <= f_of((uint32_t)y << 16) ? x : y; }; return f(a, b) | f(a >> 16, b >> 16) << 16; }
inline uint32_t emu_fma2(uint32_t a, uint32_t b, uint32_t c) { auto f = [](uint32_t x, uint32_t y, uint32_t z) { return emu_rn((double)f_of(x) * f_of(y) + f_of(z)); };
  return f(a << 16, b << 16, c << 16) | f(a & 0xFFFF0000u, b & 0xFFFF0000u, c & 0xFFFF0000u) << 16; }
static dim3 blockDim; inline size_t __cvta_generic_to_shared(const void* p) { return (size_t)p; }
#define __noinline__
template <typename V> V __ldcs(const V* p) { return *p; }
template <typename T> T __shfl_sync(unsigned, T v, int lane, int width) { unsigned l = emu_tid % 32; return emu_get(v, (int)(l / width * width + lane % width)); }
inline std::atomic<long> emu_raises, emu_raised;
inline uint32_t emu_parabola(uint32_t w, uint32_t p, uint32_t q, uint32_t t) { uint32_t v = emu_fma2(w, q * 0x10001u, p * 0x10001u); v = emu_fma2(w, v, 0x80008000u); return emu_max2(emu_min2(w, v), t * 0x10001u); }
EMU2(__vmaxs2, (uint16_t)std::max((int16_t)x, (int16_t)y))
EMU2(__vadd2, (uint16_t)(x + y))
inline uint32_t __viaddmax_u16x2(uint32_t a, uint32_t b, uint32_t c) { return __vmaxu2(__vadd2(a, b), c); }
inline uint32_t __viaddmin_u16x2(uint32_t a, uint32_t b, uint32_t c) { return __vminu2(__vadd2(a, b), c); }
constexpr int kBlocks = 1;
extern thread_local int emu_block;
extern char* emu_shared_of[kBlocks];
extern std::barrier<>* emu_all;
struct EmuArrival { std::mutex m; std::condition_variable c; int phase = 0, pending = 1; long tx = 0;
  void look() { if (pending == 0 && tx == 0) { ++phase; pending = 1; c.notify_all(); } if (pending < 0) { printf("arrived twice\n"); abort(); } }
  void expect(unsigned n) { std::lock_guard g(m); tx += n; --pending; look(); }
  void complete(unsigned n) { std::lock_guard g(m); tx -= n; look(); }
  void wait(unsigned turn) { std::unique_lock g(m); c.wait(g, [&] { return phase % 2 != (int)(turn % 2); }); } };
struct EmuNamed { std::mutex m; std::condition_variable c; int count = 0; long generation = 0;
  bool one(int n) { if (++count < n) return false; count = 0; ++generation; c.notify_all(); return true; }
  void arrive(int n) { std::lock_guard g(m); one(n); }
  void sync(int n) { std::unique_lock g(m); long mine = generation; if (!one(n)) c.wait(g, [&] { return generation != mine; }); } };
extern EmuNamed emu_nameds[kBlocks][16];
inline EmuNamed& emu_named(int b) { return emu_nameds[emu_block][b]; }
#define __builtin_assume(x)
extern thread_local struct EmuIdx { unsigned x, y, z; } emu_blockIdx;
#define blockIdx emu_blockIdx
// a barrier for each warp of each block


#include "csrc/cuda/nvfp4_amax_activation.cu"
#include <random>
#include <cstdio>
#include <memory>
char emu_smem[1 << 17];
thread_local unsigned emu_tid; thread_local int emu_block; thread_local EmuIdx emu_blockIdx;
char* emu_shared_of[kBlocks]; std::barrier<>* emu_all; EmuNamed emu_nameds[kBlocks][16];
std::barrier<>* emu_warp_bars[8][9]; uint32_t emu_warp_xs[8][9][32][8];
std::barrier<> emu_team(256);
void __syncthreads() { emu_team.arrive_and_wait(); }
namespace te_dist { namespace check { void fail(char const*, std::initializer_list<Part>) { abort(); } } }
using namespace te_dist; using namespace te_dist::cuda;
int failures = 0; long raised_by[2];
template <Activation kKind> void run(const char* name, int rows, int cols, float scale, bool with, float mean, float bias_of, int special, unsigned seed) {
  std::mt19937 gen(seed); std::normal_distribution<float> normal; std::vector<uint16_t> x((size_t)rows * cols), b(cols);
  for (auto& v : b) v = emu_bf16(mean + bias_of * normal(gen));
  for (auto& v : x) v = emu_bf16(scale * normal(gen));
  if (special == 1) for (int r = 32; r < 48; ++r) x[(size_t)r * cols + 77] = emu_bf16((kHadamardSigns >> (r % 16) & 1) ? -3.0f * scale : 3.0f * scale);
  if (special == 2) x[5000] = 0xFF80;
  if (special == 3) x[5000] = 0x7F80;
  if (special == 4) for (auto& v : x) v |= 0x8000;
  if (special == 5) x[6000] = 0x7FC1;
  for (int i = 0; i < 8; ++i) emu_warp_bars[0][i] = new std::barrier<>(32);
  float ar = 0, ac = 0, wr = 0, wc = 0; gridDim.x = 1; unsigned items = rows / 16 * (cols / 128); Taper work{items, 1, items - items / 8, items / 8}; 
  for (unsigned block = 0; block < 2; ++block) { std::vector<std::thread> ts; for (int t = 0; t < 256; ++t) ts.emplace_back([&, t] { emu_block = 0; emu_tid = t; emu_blockIdx.x = block; nvfp4_amax_activation_kernel<kKind>((const bf16_t*)x.data(), cols, with ? (const bf16_t*)b.data() : nullptr, cols / 128, work, &ar, &ac, nullptr); }); for (auto& th : ts) th.join(); }
  bool nan = false, nanc = false;
  for (int g = 0; g < rows; g += 16) for (int c = 0; c < cols; ++c) { float v[16]; bool n = false; for (int i = 0; i < 16; ++i) { float xv = f_of((uint32_t)x[(size_t)(g + i) * cols + c] << 16); if (with) xv = f_of((uint32_t)emu_bf16(xv + f_of((uint32_t)b[c] << 16)) << 16); float y = fast_activation<kKind>(xv); if (std::isinf(xv) && xv < 0 && !is_rectifier(kKind)) y = NAN; v[i] = f_of((uint32_t)emu_bf16(y) << 16); if (v[i] != v[i]) nan = n = true; wr = std::max(wr, fabsf(v[i])); } hadamard16(v, kHadamardSigns); for (float t : v) { if (t != t) nanc = true; else wc = std::max(wc, fabsf(t)); } }
  bool ok = (nan ? ar != ar : ar == wr) && (nanc ? ac != ac : ac == wc); failures += !ok;
  if (!ok) printf("%s %dx%d scale %g bias %d %g %g special %d: row %g %g column %g %g %s\n", name, rows, cols, scale, with, mean, bias_of, special, ar, wr, ac, wc, ok ? "" : "WRONG"); fflush(stdout);
}
template <Activation kKind> int all(const char* name, unsigned seed) { int n = 0;
  for (int special = 0; special < 6; ++special) for (float scale : {0.05f, 1.0f, 6.0f}) for (int with = 0; with < 2; ++with) for (float mean : {0.0f, 1.0f, 5.0f}) { if (!with && mean) continue; run<kKind>(name, 128, 256, scale, with, mean, special % 2 ? 1.0f : 0.0f, special, seed + n++); } return n; }
int main(int argc, char** argv) { unsigned seed = argc > 1 ? atoi(argv[1]) : 1; int n = all<Activation::kGelu>("gelu", seed) + all<Activation::kSilu>("silu", seed) + all<Activation::kQuickGelu>("qgelu", seed) + all<Activation::kRelu>("relu", seed) + all<Activation::kSquaredRelu>("srelu", seed); printf("%d runs, failures %d\n", n, failures); return failures != 0; }
