#pragma once
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#include <algorithm>
template <typename A, typename B> constexpr auto max(A a, B b) { return a > b ? a : b; }
template <typename A, typename B> constexpr auto min(A a, B b) { return a < b ? a : b; }
template <typename V> V __ldg(const V* p) { return *p; }
template <typename V> V __ldcg(const V* p) { return *p; }
template <typename... A> void __stcs(A...) {}
void __syncthreads();
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

extern char emu_smem[1 << 17];
extern thread_local unsigned emu_tid;
inline unsigned emu_thread() { return emu_tid; }
extern std::barrier<> emu_bars[9]; extern std::barrier<> emu_team;
#ifndef EMU_CLUSTER
#define emu_bar emu_bars[emu_tid / 32]
#define emu_x emu_xs[emu_tid / 32]
#else
extern thread_local int emu_block; extern std::barrier<>* emu_warp_bars[8][9]; extern uint32_t emu_warp_xs[8][9][32][8];
#define emu_bar (*emu_warp_bars[emu_block][emu_tid / 32])
#define emu_x emu_warp_xs[emu_block][emu_tid / 32]
#endif
extern uint32_t emu_xs[9][32][8];
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }
#ifndef EMU_CLUSTER
static dim3 blockIdx;
#endif
static dim3 gridDim;
inline void emu_box_wait() {}
inline void emu_sync() { emu_bar.arrive_and_wait(); }
template <typename T> T emu_get(T v, int lane) { static_assert(sizeof(T) == 4); unsigned l = emu_tid % 32; memcpy(&emu_x[l][0], &v, 4); emu_sync(); T r; memcpy(&r, &emu_x[lane & 31][0], 4); emu_sync(); return r; }
template <typename T> T __shfl_sync(unsigned, T v, int lane) { return emu_get(v, lane); }
template <typename T> T __shfl_xor_sync(unsigned, T v, int m) { return emu_get(v, (emu_tid % 32) ^ m); }
template <typename T> T __shfl_up_sync(unsigned, T v, unsigned d) { unsigned l = emu_tid % 32; return emu_get(v, l >= d ? l - d : l); }
inline unsigned __ballot_sync(unsigned, bool p) { unsigned l = emu_tid % 32; emu_x[l][0] = p; emu_sync(); unsigned r = 0; for (int i = 0; i < 32; ++i) r |= (emu_x[i][0] ? 1u : 0u) << i; emu_sync(); return r; }
inline bool __any_sync(unsigned m, bool p) { return __ballot_sync(m, p) != 0; }
inline bool __all_sync(unsigned m, bool p) { return __ballot_sync(m, p) == 0xFFFFFFFFu; }
inline void __syncwarp() { emu_sync(); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) { uint64_t v = a | (uint64_t)b << 32; uint32_t r = 0; for (int i = 0; i < 4; ++i) { unsigned n = (s >> (4 * i)) & 15; uint32_t by = (v >> (8 * (n & 7))) & 255; if (n & 8) by = by & 128 ? 255 : 0; r |= by << (8 * i); } return r; }
inline uint32_t __vimax3_u32(uint32_t a, uint32_t b, uint32_t c) { return std::max(a, std::max(b, c)); }
inline uint32_t __vimin3_u32(uint32_t a, uint32_t b, uint32_t c) { return std::min(a, std::min(b, c)); }
#define EMU2(name, expr) inline uint32_t name(uint32_t a, uint32_t b) { auto f = [](uint16_t x, uint16_t y) -> uint16_t { return expr; }; return f(a, b) | (uint32_t)f(a >> 16, b >> 16) << 16; }
EMU2(__vminu2, std::min(x, y))
EMU2(__vmaxu2, std::max(x, y))
EMU2(__vmins2, (uint16_t)std::min((int16_t)x, (int16_t)y))
EMU2(__vsub2, (uint16_t)(x - y))
inline uint32_t __vimax3_u16x2(uint32_t a, uint32_t b, uint32_t c) { return __vmaxu2(a, __vmaxu2(b, c)); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
#include <cfenv>
inline float __fmaf_rd(float a, float b, float c) { fesetround(FE_DOWNWARD); volatile float x = a, y = b, z = c; volatile float r = fmaf(x, y, z); fesetround(FE_TONEAREST); return r; }
inline float __fadd_rd(float a, float b) { fesetround(FE_DOWNWARD); volatile float x = a, y = b; volatile float r = x + y; fesetround(FE_TONEAREST); return r; }
inline float f_of(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
inline uint32_t b_of(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }
inline uint32_t emu_bf16(float f) { uint32_t b = b_of(f); if ((b & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF; return (b + 0x7FFF + ((b >> 16) & 1)) >> 16; }
inline bool nan16(uint32_t h) { return (h & 0x7FFF) > 0x7F80; }
inline uint16_t mm16(uint16_t a, uint16_t b, bool mx, bool nan) { uint16_t sign = (a ^ b) & 0x8000; if (nan16(a) || nan16(b)) { if (nan || (nan16(a) && nan16(b))) return 0x7FFF; return (nan16(a) ? b & 0x7FFF : a & 0x7FFF) | sign; } uint16_t x = a & 0x7FFF, y = b & 0x7FFF; return (mx ? std::max(x, y) : std::min(x, y)) | sign; }
inline uint32_t emu_maxmag2(uint32_t a, uint32_t b) { return mm16(a, b, true, true) | (uint32_t)mm16(a >> 16, b >> 16, true, true) << 16; }
inline uint32_t emu_minmag2(uint32_t a, uint32_t b) { return mm16(a, b, false, false) | (uint32_t)mm16(a >> 16, b >> 16, false, false) << 16; }
inline float emu_maxmag(float a, float b) { if (a != a || b != b) return f_of(0x7FFFFFFF); float m = std::max(fabsf(a), fabsf(b)); return std::signbit(a) != std::signbit(b) ? -m : m; }
inline uint32_t emu_rz16(float f) { // float -> fp16 bits toward zero
  uint32_t b = b_of(f), s = (b >> 16) & 0x8000, m = b & 0x7FFFFFFF; if (m > 0x7F800000) return 0x7FFF; if (m == 0x7F800000) return s | 0x7C00; if (m >= 0x47800000) return s | 0x7BFF; if (m < 0x38800000) { double v = fabs((double)f) * 16777216.0; return s | (uint32_t)v; } return s | ((m - (112u << 23)) >> 13); }
inline double h2d(uint16_t h) { int e = (h >> 10) & 31; int m = h & 1023; double v = e == 0 ? m * pow(2, -24) : (1024 + m) * pow(2, e - 25); return h & 0x8000 ? -v : v; }
inline uint16_t d2h(double v) { double a = fabs(v); uint16_t s = std::signbit(v) ? 0x8000 : 0; int e; if (a == 0) return s; frexp(a, &e); e -= 1; double ulp = pow(2, std::max(e, -14) - 10); double q = nearbyint(a / ulp) * ulp; for (int h = 0; h < 0x7C00; ++h) if (h2d(h) == q) return s | h; return s | 0x7C00; }
inline uint32_t emu_raise(uint32_t n, uint32_t share) { auto f = [](uint16_t x, uint16_t y) { if ((x & 0x7C00) == 0x7C00) return x; return d2h(h2d(x) * h2d(y) + h2d(x)); }; return f(n, share) | (uint32_t)f(n >> 16, share >> 16) << 16; }
inline void emu_ldmatrix_trans(uint32_t (&m)[4], unsigned row) { unsigned l = emu_tid % 32; emu_x[l][0] = row; emu_sync(); for (int k = 0; k < 4; ++k) { uint32_t w = 0; for (int e = 0; e < 2; ++e) { uint16_t v; memcpy(&v, (char*)(uintptr_t)0 + emu_x[8 * k + 2 * (l % 4) + e][0] + 2 * (l / 4), 2); w |= (uint32_t)v << (16 * e); } m[k] = w; } emu_sync(); }
inline double bf(uint32_t w, int e) { return f_of(e ? w & 0xFFFF0000u : w << 16); }
// exact sum, cut to 24 bits towards zero; values below 2^(emax-24) are cut one by one, as the hardware is believed to.
inline void emu_mma(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&c)[4]) {
  unsigned l = emu_tid % 32; for (int i = 0; i < 4; ++i) emu_x[l][i] = a[i]; emu_x[l][4] = b[0]; emu_x[l][5] = b[1]; emu_sync();
  auto A = [&](int m, int k) { return bf(emu_x[(m % 8) * 4 + (k % 8) / 2][m / 8 + 2 * (k / 8)], k % 2); };
  auto B = [&](int k, int n) { return bf(emu_x[n * 4 + (k % 8) / 2][4 + k / 8], k % 2); };
  for (int i = 0; i < 4; ++i) { int m = l / 4 + 8 * (i / 2), n = 2 * (l % 4) + i % 2; double t[17]; int emax = -2000; bool special = false; for (int k = 0; k < 16; ++k) t[k] = A(m, k) * B(k, n); t[16] = c[i]; double sum = 0; for (double v : t) { if (!std::isfinite(v)) special = true; else if (v != 0) { int e; frexp(v, &e); emax = std::max(emax, e - 1); } }
    if (special) { for (double v : t) sum += v; c[i] = (float)sum; continue; }
    double grid = ldexp(1.0, emax - 24); for (double v : t) sum += trunc(v / grid) * grid; if (sum == 0) { c[i] = 0.0f; continue; } int e; frexp(sum, &e); double ulp = ldexp(1.0, std::max(e - 24, -149)); double r = trunc(sum / ulp) * ulp; c[i] = fabs(r) > 3.4028234663852886e38 ? (r > 0 ? INFINITY : -INFINITY) : (float)r; }
  emu_sync();
}
