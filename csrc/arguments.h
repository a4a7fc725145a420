// The arguments of a function of te_dist._kernels, as Python passes them: numbers by position, 0 for a null address.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "api.h"

namespace te_dist {

struct BadArgument {};  // the Python error is set

// Takes arguments in order.
class Reader {
 public:
  Reader(const char* name, PyObject* const* args, Py_ssize_t count) : name_(name), args_(args), count_(count) {}

  int64_t integer() { return to_integer(next()); }
  bool flag() { return integer() != 0; }
  Float dtype() { return static_cast<Float>(integer()); }
  Fp8 fp8() { return static_cast<Fp8>(integer()); }
  float number() {
    const double value = PyFloat_AsDouble(next());
    if (value == -1.0 && PyErr_Occurred() != nullptr) throw BadArgument{};
    return static_cast<float>(value);
  }
  template <typename T>
  T* pointer() {
    return reinterpret_cast<T*>(static_cast<std::intptr_t>(integer()));
  }
  Input input() {
    const void* data = pointer<const void>();
    const Float type = dtype();
    const int64_t rows = integer();
    const int64_t cols = integer();
    return Input{data, type, rows, cols, integer()};
  }
  Output output() {
    void* data = pointer<void>();
    const Float type = dtype();
    const int64_t rows = integer();
    return Output{data, type, rows, integer()};
  }
  Planes planes() {
    uint8_t* row = pointer<uint8_t>();
    void* row_scale = pointer<void>();
    uint8_t* col = pointer<uint8_t>();
    return Planes{row, row_scale, col, pointer<void>()};
  }
  Nvfp4Options nvfp4_options() {
    Nvfp4Options options{};
    options.two_d = flag();
    options.hadamard = flag();
    options.signs = static_cast<uint32_t>(integer());
    options.rng = pointer<const int64_t>();
    return options;
  }
  Vector vector() {
    const void* data = pointer<const void>();
    return Vector{data, dtype()};
  }
  // Either five numbers in a row (a matrix), or one tuple with everything a producer has.
  Source source() {
    Source result;
    if (at_ < count_ && PyTuple_Check(args_[at_])) {
      PyObject* tuple = args_[at_++];
      Reader fields(name_, reinterpret_cast<PyTupleObject*>(tuple)->ob_item, PyTuple_GET_SIZE(tuple));
      fields.producer(result);
      fields.end();
    } else {
      static_cast<Input&>(result) = input();
    }
    return result;
  }
  Lane last_lane() {
    const Lane lane = integer();
    end();
    return lane;
  }

 private:
  void producer(Source& to) {
    static_cast<Input&>(to) = input();
    to.kind = static_cast<Produce>(integer());
    to.activation = static_cast<Activation>(integer());
    to.gated = flag();
    to.zero_centered = flag();
    to.make_stats = flag();
    to.eps = number();
    to.grad = pointer<const void>();
    to.grad_stride = integer();
    to.weight = vector();
    to.bias = vector();
    to.mean = pointer<float>();
    to.rstd = pointer<float>();
    to.partials = pointer<float>();
    if (at_ < count_) to.written = pointer<void>();
  }
  PyObject* next() {
    if (at_ < count_) return args_[at_++];
    PyErr_Format(PyExc_TypeError, "_kernels.%s expects more than %zd arguments", name_, count_);
    throw BadArgument{};
  }
  int64_t to_integer(PyObject* object) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Format(PyExc_TypeError, "_kernels.%s: argument %zd expects an integer but got %R", name_, at_ - 1, object);
      throw BadArgument{};
    }
    return value;
  }
  void end() {
    if (at_ == count_) return;
    PyErr_Format(PyExc_TypeError, "_kernels.%s expects %zd arguments but got %zd", name_, at_, count_);
    throw BadArgument{};
  }

  const char* name_;
  PyObject* const* args_;
  Py_ssize_t count_;
  Py_ssize_t at_ = 0;
};

}  // namespace te_dist
