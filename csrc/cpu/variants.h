// The CPU kernels exist once per instruction set. Every source that includes this header from a kernel is
// compiled several times with another TED_VARIANT, and all it defines lives in that namespace; dispatch.cpp
// picks one table.
#pragma once

#include "../api.h"

namespace te_dist {
namespace cpu {

// Also what bindings.cpp exposes of a backend.
struct KernelTable {
  const char* name;
  decltype(&cpu::amax) amax;
  decltype(&cpu::cast_scaled) cast_scaled;
  decltype(&cpu::cast_current) cast_current;
  decltype(&cpu::quantize_current) quantize_current;
  decltype(&cpu::quantize_block) quantize_block;
  decltype(&cpu::quantize_mxfp8) quantize_mxfp8;
  decltype(&cpu::amax_nvfp4) amax_nvfp4;
  decltype(&cpu::quantize_nvfp4) quantize_nvfp4;
  decltype(&cpu::quantize_nvfp4_current) quantize_nvfp4_current;
  decltype(&cpu::dequantize_tensor) dequantize_tensor;
  decltype(&cpu::dequantize_block) dequantize_block;
  decltype(&cpu::dequantize_mxfp8) dequantize_mxfp8;
  decltype(&cpu::dequantize_nvfp4) dequantize_nvfp4;
  decltype(&cpu::transpose_bytes) transpose_bytes;
  decltype(&cpu::transpose_nibbles) transpose_nibbles;
  decltype(&cpu::swizzle_scales) swizzle_scales;
  decltype(&cpu::produce) produce;
  decltype(&cpu::norm_backward) norm_backward;
  decltype(&cpu::reduce_partials) reduce_partials;
  decltype(&cpu::advance_scales) advance_scales;
};

// The variant chosen for this machine, at load.
const KernelTable& kernels();

namespace baseline {
extern const KernelTable table;
}
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}

}  // namespace cpu
}  // namespace te_dist
