// te_dist._kernels: the entry points of api.h as functions of numbers. Python passes addresses (0 is null), sizes and
// codes by position; it owns every buffer and keeps it alive during the call.
//
// Python's own C interface, without a binding library: a call of 15 numbers costs a fraction of a microsecond, the
// build needs nothing but Python's headers, and this file compiles in a second.
#include "arguments.h"

#include <new>
#include <stdexcept>

#include "cpu/variants.h"

namespace te_dist {
namespace {

// A backend is a table of functions; each Python function holds the address of its backend's as `self`.
using Backend = cpu::KernelTable;

// What Python calls, and what it is told.
struct Call : Reader {
  using Reader::Reader;
  bool done = true;
};

// Kernels never touch Python objects, and those of the CPU run for a while.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

template <typename Body>
void without_gil(const Body& body) {
  const WithoutGil released;
  body();
}

using Function = void (*)(Call&, const Backend&);

struct Entry {
  const char* name;
  Function function;
};

const Entry kEntries[] = {
    {"amax",
     [](Call& r, const Backend& call) {
       const Source x = r.source();
       float* amax = r.pointer<float>();
       const bool accumulate = r.flag();
       const float* noop = r.pointer<const float>();
       const Lane lane = r.last_lane();
       without_gil([&] { call.amax(x, amax, accumulate, noop, lane); });
     }},
    {"cast_scaled",
     [](Call& r, const Backend& call) {
       const Source x = r.source();
       const float* scale = r.pointer<const float>();
       const Fp8 format = r.fp8();
       uint8_t* row = r.pointer<uint8_t>();
       uint8_t* col = r.pointer<uint8_t>();
       float* scale_inv = r.pointer<float>();
       float* amax = r.pointer<float>();
       const float* noop = r.pointer<const float>();
       const Lane lane = r.last_lane();
       without_gil([&] { call.cast_scaled(x, scale, format, row, col, scale_inv, amax, noop, lane); });
     }},
    {"cast_current",
     [](Call& r, const Backend& call) {
       const Source x = r.source();
       const float* amax = r.pointer<const float>();
       const float eps = r.number();
       const bool power_of_2 = r.flag();
       const Fp8 format = r.fp8();
       uint8_t* row = r.pointer<uint8_t>();
       uint8_t* col = r.pointer<uint8_t>();
       float* scale_inv = r.pointer<float>();
       const float* noop = r.pointer<const float>();
       const Lane lane = r.last_lane();
       without_gil([&] { call.cast_current(x, amax, eps, power_of_2, format, row, col, scale_inv, noop, lane); });
     }},
    {"quantize_current",
     [](Call& r, const Backend& call) {
       const Source x = r.source();
       float* amax = r.pointer<float>();
       const float eps = r.number();
       const bool power_of_2 = r.flag();
       const Fp8 format = r.fp8();
       uint8_t* row = r.pointer<uint8_t>();
       uint8_t* col = r.pointer<uint8_t>();
       float* scale_inv = r.pointer<float>();
       const float* noop = r.pointer<const float>();
       const Lane lane = r.last_lane();
       without_gil([&] { call.quantize_current(x, amax, eps, power_of_2, format, row, col, scale_inv, noop, lane); });
     }},
    {"quantize_block",
     [](Call& r, const Backend& call) {
       const Source x = r.source();
       const int block_dim = static_cast<int>(r.integer());
       const float eps = r.number();
       const bool power_of_2 = r.flag();
       const Fp8 format = r.fp8();
       const Planes out = r.planes();
       const float* noop = r.pointer<const float>();
       const Lane lane = r.last_lane();
       without_gil([&] { call.quantize_block(x, block_dim, eps, power_of_2, format, out, noop, lane); });
     }},
    {"quantize_mxfp8",
     [](Call& r, const Backend& call) {
       const Source x = r.source();
       const bool two_d = r.flag();
       const Fp8 format = r.fp8();
       const Planes out = r.planes();
       const float* noop = r.pointer<const float>();
       const Lane lane = r.last_lane();
       without_gil([&] { call.quantize_mxfp8(x, two_d, format, out, noop, lane); });
     }},
    {"amax_nvfp4",
     [](Call& r, const Backend& call) {
       const Source x = r.source();
       Nvfp4Options options{};
       options.hadamard = r.flag();
       options.signs = static_cast<uint32_t>(r.integer());
       float* amax_row = r.pointer<float>();
       float* amax_col = r.pointer<float>();
       const float* noop = r.pointer<const float>();
       const Lane lane = r.last_lane();
       without_gil([&] { call.amax_nvfp4(x, options, amax_row, amax_col, noop, lane); });
     }},
    {"quantize_nvfp4",
     [](Call& r, const Backend& call) {
       const Source x = r.source();
       const Nvfp4Options options = r.nvfp4_options();
       const float* amax_row = r.pointer<const float>();
       const float* amax_col = r.pointer<const float>();
       const Planes out = r.planes();
       const float* noop = r.pointer<const float>();
       const Lane lane = r.last_lane();
       without_gil([&] { call.quantize_nvfp4(x, options, amax_row, amax_col, out, noop, lane); });
     }},
    {"quantize_nvfp4_current",
     [](Call& r, const Backend& call) {
       const Source x = r.source();
       const Nvfp4Options options = r.nvfp4_options();
       float* amax_row = r.pointer<float>();
       float* amax_col = r.pointer<float>();
       float* room = r.pointer<float>();
       const Planes out = r.planes();
       const float* noop = r.pointer<const float>();
       const Lane lane = r.last_lane();
       without_gil([&] {
         r.done = call.quantize_nvfp4_current(x, options, amax_row, amax_col, room, out, noop, lane);
       });
     }},
    {"dequantize_tensor",
     [](Call& r, const Backend& call) {
       const uint8_t* data = r.pointer<const uint8_t>();
       const bool columnwise = r.flag();
       const Fp8 format = r.fp8();
       const float* scale_inv = r.pointer<const float>();
       const Output out = r.output();
       const Lane lane = r.last_lane();
       without_gil([&] { call.dequantize_tensor(data, columnwise, format, scale_inv, out, lane); });
     }},
    {"dequantize_block",
     [](Call& r, const Backend& call) {
       const uint8_t* data = r.pointer<const uint8_t>();
       const float* scale = r.pointer<const float>();
       const bool columnwise = r.flag();
       const int block_dim = static_cast<int>(r.integer());
       const Fp8 format = r.fp8();
       const Output out = r.output();
       const Lane lane = r.last_lane();
       without_gil([&] { call.dequantize_block(data, scale, columnwise, block_dim, format, out, lane); });
     }},
    {"dequantize_mxfp8",
     [](Call& r, const Backend& call) {
       const uint8_t* data = r.pointer<const uint8_t>();
       const uint8_t* scale = r.pointer<const uint8_t>();
       const bool columnwise = r.flag();
       const Fp8 format = r.fp8();
       const Output out = r.output();
       const Lane lane = r.last_lane();
       without_gil([&] { call.dequantize_mxfp8(data, scale, columnwise, format, out, lane); });
     }},
    {"dequantize_nvfp4",
     [](Call& r, const Backend& call) {
       const uint8_t* data = r.pointer<const uint8_t>();
       const uint8_t* scale = r.pointer<const uint8_t>();
       const float* amax = r.pointer<const float>();
       const bool columnwise = r.flag();
       Nvfp4Options options{};
       options.hadamard = r.flag();
       options.signs = static_cast<uint32_t>(r.integer());
       const Output out = r.output();
       const Lane lane = r.last_lane();
       without_gil([&] { call.dequantize_nvfp4(data, scale, amax, columnwise, options, out, lane); });
     }},
#define TED_LAYOUT_ENTRY(name)                                        \
  {#name, [](Call& r, const Backend& call) {                        \
     const uint8_t* in = r.pointer<const uint8_t>();                  \
     const int64_t rows = r.integer();                                \
     const int64_t cols = r.integer();                                \
     uint8_t* out = r.pointer<uint8_t>();                             \
     const Lane lane = r.last_lane();                                 \
     without_gil([&] { call.name(in, rows, cols, out, lane); });      \
   }}
    TED_LAYOUT_ENTRY(transpose_bytes),
    TED_LAYOUT_ENTRY(transpose_nibbles),
    TED_LAYOUT_ENTRY(swizzle_scales),
    {"produce",
     [](Call& r, const Backend& call) {
       const Source x = r.source();
       const Output out = r.output();
       const Lane lane = r.last_lane();
       without_gil([&] { call.produce(x, out, lane); });
     }},
    {"norm_backward",
     [](Call& r, const Backend& call) {
       NormGrad from{};
       from.x = r.input();
       from.grad = r.pointer<const void>();
       from.grad_stride = r.integer();
       from.weight = r.vector();
       from.zero_centered = r.flag();
       from.mean = r.pointer<const float>();
       from.rstd = r.pointer<const float>();
       const Output dx = r.output();
       float* weight_partials = r.pointer<float>();
       float* bias_partials = r.pointer<float>();
       float* workspace = r.pointer<float>();
       const Lane lane = r.last_lane();
       without_gil([&] { call.norm_backward(from, dx, weight_partials, bias_partials, workspace, lane); });
     }},
    {"advance_scales",
     [](Call& r, const Backend& call) {
       float* history = r.pointer<float>();
       float* scales = r.pointer<float>();
       const float* largest = r.pointer<const float>();
       const int64_t length = r.integer();
       const int64_t count = r.integer();
       const int margin = static_cast<int>(r.integer());
       const bool most_recent = r.flag();
       const Lane lane = r.last_lane();
       without_gil([&] { call.advance_scales(history, scales, largest, length, count, margin, most_recent, lane); });
     }},
    {"reduce_partials",
     [](Call& r, const Backend& call) {
       const float* partials = r.pointer<const float>();
       const int64_t tiles = r.integer();
       const Output out = r.output();
       const Lane lane = r.last_lane();
       without_gil([&] { call.reduce_partials(partials, tiles, out, lane); });
     }},
};
constexpr size_t kEntryCount = sizeof(kEntries) / sizeof(kEntries[0]);

struct Bound {
  const Backend* backend;
  const Entry* entry;
  PyMethodDef definition;
};

// What a function returns, or null and the Python error for what it throws.
template <typename Function>
PyObject* guarded(const Function& function) {
  try {
    return function();
  } catch (const BadArgument&) {
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* invoke(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const auto* bound = static_cast<const Bound*>(PyCapsule_GetPointer(self, nullptr));
  return guarded([&]() -> PyObject* {
    Call call(bound->entry->name, args, count);
    bound->entry->function(call, *bound->backend);
    return PyBool_FromLong(call.done ? 1 : 0);
  });
}

// Adds `value` (a new reference, or null after an error) to a module.
bool add(PyObject* module, const char* name, PyObject* value) {
  if (value == nullptr) return false;
  const int failed = PyModule_AddObjectRef(module, name, value);
  Py_DECREF(value);
  return failed == 0;
}

// The functions live as long as the process, and so does what they point to.
bool bind_backend(PyObject* module, const Backend& backend) {
  static Bound bound[2 * kEntryCount];
  static size_t used = 0;
  for (const Entry& entry : kEntries) {
    Bound& one = bound[used++];
    one.backend = &backend;
    one.entry = &entry;
    one.definition = PyMethodDef{entry.name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(invoke)),
                                 METH_FASTCALL, nullptr};
    PyObject* self = PyCapsule_New(&one, nullptr, nullptr);
    if (self == nullptr) return false;
    PyObject* function = PyCFunction_NewEx(&one.definition, self, nullptr);
    Py_DECREF(self);
    if (!add(module, entry.name, function)) return false;
  }
  return true;
}

#define TED_BACKEND(name)                                                                                  \
  Backend {                                                                                                \
    #name, name::amax, name::cast_scaled, name::cast_current, name::quantize_current, name::quantize_block, \
        name::quantize_mxfp8, name::amax_nvfp4, name::quantize_nvfp4, name::quantize_nvfp4_current,        \
        name::dequantize_tensor,                                                                           \
        name::dequantize_block, name::dequantize_mxfp8, name::dequantize_nvfp4, name::transpose_bytes,     \
        name::transpose_nibbles, name::swizzle_scales, name::produce, name::norm_backward,                 \
        name::reduce_partials, name::advance_scales                                                        \
  }

PyObject* variant(PyObject*, PyObject*) {
  return guarded([] { return PyUnicode_FromString(cpu::kernels().name); });
}

PyMethodDef variant_definition{"variant", variant, METH_NOARGS,
                               "The instruction set that was chosen for this machine."};

PyModuleDef cpu_definition{PyModuleDef_HEAD_INIT, "cpu", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
#if defined(TED_WITH_CUDA)
PyObject* limit_multiprocessors(PyObject*, PyObject* most) {
  const long long number = PyLong_AsLongLong(most);
  if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&] { return PyLong_FromLong(cuda::limit_multiprocessors(number)); });
}

PyMethodDef limit_definition{"limit_multiprocessors", limit_multiprocessors, METH_O,
                             "For tests: lays work out for so few, or for all with 0, and returns how many."};

PyModuleDef cuda_definition{PyModuleDef_HEAD_INIT, "cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
#endif
PyModuleDef definition{PyModuleDef_HEAD_INIT,
                       "_kernels",
                       "Quantization kernels of te_dist; te_dist/kernels is their caller.",
                       -1,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

// own: a function of this backend alone.
bool add_backend(PyObject* module, PyModuleDef* backend_module, const Backend& backend, PyMethodDef* own) {
  PyObject* inner = PyModule_Create(backend_module);
  return inner != nullptr && bind_backend(inner, backend) &&
         add(inner, own->ml_name, PyCFunction_New(own, nullptr)) && add(module, backend_module->m_name, inner);
}

bool fill(PyObject* module) {
  static const Backend on_cpu = TED_BACKEND(cpu);
  if (!add_backend(module, &cpu_definition, on_cpu, &variant_definition)) return false;
#if defined(TED_WITH_CUDA)
  static const Backend on_cuda = TED_BACKEND(cuda);
  if (!add_backend(module, &cuda_definition, on_cuda, &limit_definition)) return false;
  const char* archs = TED_CUDA_ARCHS;
  const bool has_cuda = true;
#else
  const char* archs = "";
  const bool has_cuda = false;
#endif
  return add(module, "has_cuda", PyBool_FromLong(has_cuda)) &&
         add(module, "amax_room", PyLong_FromLong(kAmaxRoom)) &&
         add(module, "cuda_archs", PyUnicode_FromString(archs));
}

}  // namespace
}  // namespace te_dist

PyMODINIT_FUNC PyInit__kernels() {
  PyObject* module = PyModule_Create(&te_dist::definition);
  if (module != nullptr && te_dist::fill(module)) return module;
  Py_XDECREF(module);
  return nullptr;
}
