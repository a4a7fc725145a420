// te_dist._kernels: the entry points of api.h as functions of integers. Python passes addresses (0 is null),
// sizes and codes; it owns every buffer and keeps it alive during the call.
#include <pybind11/pybind11.h>

#include "api.h"
#include "cpu/variants.h"

namespace te_dist {
namespace {

namespace py = pybind11;
using Address = std::uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

Input input(Address x, int dtype, int64_t rows, int64_t cols, int64_t stride) {
  return Input{pointer<const void>(x), static_cast<Float>(dtype), rows, cols, stride};
}

Output output(Address out, int dtype, int64_t rows, int64_t cols) {
  return Output{pointer<void>(out), static_cast<Float>(dtype), rows, cols};
}

Planes planes(Address row, Address row_scale, Address col, Address col_scale) {
  return Planes{pointer<uint8_t>(row), pointer<void>(row_scale), pointer<uint8_t>(col),
                pointer<void>(col_scale)};
}

Nvfp4Options nvfp4(bool two_d, bool hadamard, uint32_t signs, Address rng) {
  return Nvfp4Options{two_d, hadamard, signs, pointer<const int64_t>(rng)};
}

// A backend is a table of functions, so that the list of signatures below exists once.
using Backend = cpu::KernelTable;

#define TED_BACKEND(name)                                                                                 \
  Backend {                                                                                               \
    #name, name::amax, name::cast_scaled, name::cast_current, name::quantize_block, name::quantize_mxfp8, \
        name::amax_nvfp4, name::quantize_nvfp4, name::dequantize_tensor, name::dequantize_block,          \
        name::dequantize_mxfp8, name::dequantize_nvfp4, name::transpose_bytes, name::transpose_nibbles,   \
        name::swizzle_scales                                                                              \
  }

#define TED_X Address x, int x_dtype, int64_t rows, int64_t cols, int64_t stride
#define TED_X_ARGS py::arg("x"), py::arg("x_dtype"), py::arg("rows"), py::arg("cols"), py::arg("stride")
#define TED_OUT Address out, int out_dtype, int64_t rows, int64_t cols
#define TED_OUT_ARGS py::arg("out"), py::arg("out_dtype"), py::arg("rows"), py::arg("cols")
#define TED_PLANES Address row, Address row_scale, Address col, Address col_scale
#define TED_PLANES_ARGS py::arg("row"), py::arg("row_scale"), py::arg("col"), py::arg("col_scale")

// Kernels never touch Python objects, and those of the CPU run for a while.
using WithoutGil = py::call_guard<py::gil_scoped_release>;

void bind_per_tensor(py::module_& module, const Backend& call) {
  module.def(
      "amax",
      [=](TED_X, Address amax, bool accumulate, Address noop, Lane lane) {
        call.amax(input(x, x_dtype, rows, cols, stride), pointer<float>(amax), accumulate,
                  pointer<const float>(noop), lane);
      },
      WithoutGil(), TED_X_ARGS, py::arg("amax"), py::arg("accumulate"), py::arg("noop"), py::arg("lane"));
  module.def(
      "cast_scaled",
      [=](TED_X, Address scale, int fp8, Address row, Address col, Address scale_inv, Address noop,
          Lane lane) {
        call.cast_scaled(input(x, x_dtype, rows, cols, stride), pointer<const float>(scale),
                         static_cast<Fp8>(fp8), pointer<uint8_t>(row), pointer<uint8_t>(col),
                         pointer<float>(scale_inv), pointer<const float>(noop), lane);
      },
      WithoutGil(), TED_X_ARGS, py::arg("scale"), py::arg("fp8"), py::arg("row"), py::arg("col"),
      py::arg("scale_inv"), py::arg("noop"), py::arg("lane"));
  module.def(
      "cast_current",
      [=](TED_X, Address amax, float eps, bool power_of_2, int fp8, Address row, Address col,
          Address scale_inv, Address noop, Lane lane) {
        call.cast_current(input(x, x_dtype, rows, cols, stride), pointer<const float>(amax), eps, power_of_2,
                          static_cast<Fp8>(fp8), pointer<uint8_t>(row), pointer<uint8_t>(col),
                          pointer<float>(scale_inv), pointer<const float>(noop), lane);
      },
      WithoutGil(), TED_X_ARGS, py::arg("amax"), py::arg("eps"), py::arg("power_of_2"), py::arg("fp8"),
      py::arg("row"), py::arg("col"), py::arg("scale_inv"), py::arg("noop"), py::arg("lane"));
}

void bind_blocks(py::module_& module, const Backend& call) {
  module.def(
      "quantize_block",
      [=](TED_X, int block_dim, float eps, bool power_of_2, int fp8, TED_PLANES, Address noop, Lane lane) {
        call.quantize_block(input(x, x_dtype, rows, cols, stride), block_dim, eps, power_of_2,
                            static_cast<Fp8>(fp8), planes(row, row_scale, col, col_scale),
                            pointer<const float>(noop), lane);
      },
      WithoutGil(), TED_X_ARGS, py::arg("block_dim"), py::arg("eps"), py::arg("power_of_2"), py::arg("fp8"),
      TED_PLANES_ARGS, py::arg("noop"), py::arg("lane"));
  module.def(
      "quantize_mxfp8",
      [=](TED_X, bool two_d, int fp8, TED_PLANES, Address noop, Lane lane) {
        call.quantize_mxfp8(input(x, x_dtype, rows, cols, stride), two_d, static_cast<Fp8>(fp8),
                            planes(row, row_scale, col, col_scale), pointer<const float>(noop), lane);
      },
      WithoutGil(), TED_X_ARGS, py::arg("two_d"), py::arg("fp8"), TED_PLANES_ARGS, py::arg("noop"),
      py::arg("lane"));
  module.def(
      "amax_nvfp4",
      [=](TED_X, bool hadamard, uint32_t signs, Address amax_row, Address amax_col, Address noop, Lane lane) {
        call.amax_nvfp4(input(x, x_dtype, rows, cols, stride), nvfp4(false, hadamard, signs, 0),
                        pointer<float>(amax_row), pointer<float>(amax_col), pointer<const float>(noop), lane);
      },
      WithoutGil(), TED_X_ARGS, py::arg("hadamard"), py::arg("signs"), py::arg("amax_row"),
      py::arg("amax_col"), py::arg("noop"), py::arg("lane"));
  module.def(
      "quantize_nvfp4",
      [=](TED_X, bool two_d, bool hadamard, uint32_t signs, Address rng, Address amax_row, Address amax_col,
          TED_PLANES, Address noop, Lane lane) {
        call.quantize_nvfp4(input(x, x_dtype, rows, cols, stride), nvfp4(two_d, hadamard, signs, rng),
                            pointer<const float>(amax_row), pointer<const float>(amax_col),
                            planes(row, row_scale, col, col_scale), pointer<const float>(noop), lane);
      },
      WithoutGil(), TED_X_ARGS, py::arg("two_d"), py::arg("hadamard"), py::arg("signs"), py::arg("rng"),
      py::arg("amax_row"), py::arg("amax_col"), TED_PLANES_ARGS, py::arg("noop"), py::arg("lane"));
}

void bind_dequantizers(py::module_& module, const Backend& call) {
  module.def(
      "dequantize_tensor",
      [=](Address data, bool columnwise, int fp8, Address scale_inv, TED_OUT, Lane lane) {
        call.dequantize_tensor(pointer<const uint8_t>(data), columnwise, static_cast<Fp8>(fp8),
                               pointer<const float>(scale_inv), output(out, out_dtype, rows, cols), lane);
      },
      WithoutGil(), py::arg("data"), py::arg("columnwise"), py::arg("fp8"), py::arg("scale_inv"),
      TED_OUT_ARGS, py::arg("lane"));
  module.def(
      "dequantize_block",
      [=](Address data, Address scale, bool columnwise, int block_dim, int fp8, TED_OUT, Lane lane) {
        call.dequantize_block(pointer<const uint8_t>(data), pointer<const float>(scale), columnwise,
                              block_dim, static_cast<Fp8>(fp8), output(out, out_dtype, rows, cols), lane);
      },
      WithoutGil(), py::arg("data"), py::arg("scale"), py::arg("columnwise"), py::arg("block_dim"),
      py::arg("fp8"), TED_OUT_ARGS, py::arg("lane"));
  module.def(
      "dequantize_mxfp8",
      [=](Address data, Address scale, bool columnwise, int fp8, TED_OUT, Lane lane) {
        call.dequantize_mxfp8(pointer<const uint8_t>(data), pointer<const uint8_t>(scale), columnwise,
                              static_cast<Fp8>(fp8), output(out, out_dtype, rows, cols), lane);
      },
      WithoutGil(), py::arg("data"), py::arg("scale"), py::arg("columnwise"), py::arg("fp8"), TED_OUT_ARGS,
      py::arg("lane"));
  module.def(
      "dequantize_nvfp4",
      [=](Address data, Address scale, Address amax, bool columnwise, bool hadamard, uint32_t signs, TED_OUT,
          Lane lane) {
        call.dequantize_nvfp4(pointer<const uint8_t>(data), pointer<const uint8_t>(scale),
                              pointer<const float>(amax), columnwise, nvfp4(false, hadamard, signs, 0),
                              output(out, out_dtype, rows, cols), lane);
      },
      WithoutGil(), py::arg("data"), py::arg("scale"), py::arg("amax"), py::arg("columnwise"),
      py::arg("hadamard"), py::arg("signs"), TED_OUT_ARGS, py::arg("lane"));
}

void bind_layout(py::module_& module, const Backend& call) {
  const auto bind = [&](const char* name, decltype(&cpu::transpose_bytes) function) {
    module.def(
        name,
        [=](Address in, int64_t rows, int64_t cols, Address out, Lane lane) {
          function(pointer<const uint8_t>(in), rows, cols, pointer<uint8_t>(out), lane);
        },
        WithoutGil(), py::arg("in"), py::arg("rows"), py::arg("cols"), py::arg("out"), py::arg("lane"));
  };
  bind("transpose_bytes", call.transpose_bytes);
  bind("transpose_nibbles", call.transpose_nibbles);
  bind("swizzle_scales", call.swizzle_scales);
}

void bind_backend(py::module_& module, const Backend& call) {
  bind_per_tensor(module, call);
  bind_blocks(module, call);
  bind_dequantizers(module, call);
  bind_layout(module, call);
}

}  // namespace
}  // namespace te_dist

PYBIND11_MODULE(_kernels, module) {
  using namespace te_dist;
  module.doc() = "Quantization kernels of te_dist; te_dist/kernels.py is their caller.";
  py::module_ on_cpu = module.def_submodule("cpu");
  bind_backend(on_cpu, TED_BACKEND(cpu));
  on_cpu.def(
      "variant", [] { return cpu::kernels().name; }, "The instruction set that was chosen for this machine.");
#if defined(TED_WITH_CUDA)
  py::module_ on_cuda = module.def_submodule("cuda");
  bind_backend(on_cuda, TED_BACKEND(cuda));
  module.attr("has_cuda") = true;
  module.attr("cuda_archs") = TED_CUDA_ARCHS;
#else
  module.attr("has_cuda") = false;
  module.attr("cuda_archs") = "";
#endif
}
