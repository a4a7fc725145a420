// Norms, activations, their gradients and column sums. Rows are widened to float, worked on, and narrowed again, so
// that the arithmetic is compiled once and not once per dtype. Order of all sums: te_dist/reference_producers.py.
#include <vector>

#include "../numerics/activation.h"
#include "kernel.h"

TED_BEGIN_VARIANT
namespace {

constexpr int64_t kGroup = 8;              // rows that one task adds up in order
constexpr int64_t kTileGroups = 16;        // groups of a partial sum
constexpr int64_t kAccumulators = 1024;    // of a row's sum
constexpr int64_t kSlots = 32;             // of the sum over partials

template <typename T>
void widen_run(const void* from, int64_t n, float* __restrict out) {
  const T* __restrict values = static_cast<const T*>(from);
  for (int64_t i = 0; i < n; ++i) out[i] = to_float(values[i]);
}

template <typename T>
void narrow_run(const float* __restrict values, int64_t n, void* to) {
  T* __restrict out = static_cast<T*>(to);
  for (int64_t i = 0; i < n; ++i) out[i] = from_float<T>(values[i]);
}

int64_t size_of(Float dtype) { return dtype == Float::kF32 ? 4 : 2; }

const void* element(const void* data, Float dtype, int64_t at) {
  return static_cast<const char*>(data) + at * size_of(dtype);
}

void widen(const void* from, Float dtype, int64_t n, float* out) {
  with_float(dtype, [&](auto type) { widen_run<decltype(type)>(from, n, out); });
}

// Rounds the values to dtype in place, and stores them if there is a place for them.
void round_and_store(float* values, int64_t n, Float dtype, void* to, std::vector<char>& scratch) {
  scratch.resize(static_cast<size_t>(n * size_of(dtype)));
  void* narrow = to != nullptr ? to : scratch.data();
  with_float(dtype, [&](auto type) { narrow_run<decltype(type)>(values, n, narrow); });
  widen(narrow, dtype, n, values);
}

std::vector<float> widened(const Vector& v, int64_t n) {
  std::vector<float> result;
  if (v.data == nullptr) return result;
  result.resize(static_cast<size_t>(n));
  widen(v.data, v.dtype, n, result.data());
  return result;
}

// ---------------------------------------------------------------------------------------------- sums
// Adds the upper half of `count` runs of `width` to the lower one until one is left.
void fold(float* values, int64_t count, int64_t width) {
  for (int64_t half = count / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half * width; ++i) values[i] += values[half * width + i];
  }
}

// add(total, i): a sum with what value i adds to it.
template <typename Add>
float row_sum(int64_t n, const Add& add) {
  alignas(64) float total[kAccumulators] = {};
  for (int64_t at = 0; at < n; at += kAccumulators) {
    const int64_t count = smaller(kAccumulators, n - at);
    for (int64_t i = 0; i < count; ++i) total[i] = add(total[i], at + i);
  }
  alignas(64) float vectors[kAccumulators / 8];
  for (int64_t v = 0; v < kAccumulators / 8; ++v) {
    const float* a = total + 8 * v;
    vectors[v] = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
  }
  fold(vectors, 4, 32);
  fold(vectors, 32, 1);
  return vectors[0];
}

float row_sum(const float* __restrict values, int64_t n) {
  return row_sum(n, [=](float total, int64_t i) { return total + values[i]; });
}

float row_sum(const float* __restrict values, const float* __restrict factors, int64_t n) {
  return row_sum(n, [=](float total, int64_t i) { return fused_multiply_add(values[i], factors[i], total); });
}

void add_to(float* __restrict total, const float* __restrict values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += values[i];
}

// The sums of every 8 rows, for as long as not all of a partial's 128 rows are there.
class GroupSums {
 public:
  GroupSums(float* partials, int64_t rows, int64_t cols)
      : partials_(partials), tiles_(ceil_div(rows, kGroup * kTileGroups)), cols_(cols) {
    if (partials != nullptr) sums_.assign(static_cast<size_t>(tiles_ * kTileGroups * cols), 0.0f);
  }
  void add(int64_t row, const float* values) {
    if (partials_ != nullptr) add_to(sums_.data() + row / kGroup * cols_, values, cols_);
  }
  void add(int64_t row, const float* __restrict values, const float* __restrict factors) {
    if (partials_ == nullptr) return;
    float* __restrict total = sums_.data() + row / kGroup * cols_;
    for (int64_t i = 0; i < cols_; ++i) total[i] = fused_multiply_add(values[i], factors[i], total[i]);
  }
  void finish(Lane lane) {
    if (partials_ == nullptr) return;
    for_each_task(tiles_, tiles_ * kTileGroups * cols_, lane, [&](int64_t tile) {
      float* sums = sums_.data() + tile * kTileGroups * cols_;
      fold(sums, kTileGroups, cols_);
      __builtin_memcpy(partials_ + tile * cols_, sums, static_cast<size_t>(cols_) * sizeof(float));
    });
  }

 private:
  float* partials_;
  int64_t tiles_;
  int64_t cols_;
  std::vector<float> sums_;
};

// ---------------------------------------------------------------------------------------------- activations
template <typename Body>
void with_activation(Activation kind, const Body& body) {
  switch (kind) {
    case Activation::kGelu: return body([](float x) { return activate<Activation::kGelu>(x); });
    case Activation::kQuickGelu: return body([](float x) { return activate<Activation::kQuickGelu>(x); });
    case Activation::kRelu: return body([](float x) { return activate<Activation::kRelu>(x); });
    case Activation::kSquaredRelu: return body([](float x) { return activate<Activation::kSquaredRelu>(x); });
    case Activation::kSilu: return body([](float x) { return activate<Activation::kSilu>(x); });
  }
}

struct Scratch {
  std::vector<float> x, grad, made;
  std::vector<char> narrow;
};

// scratch.x <- x + bias, rounded as if it had been in memory.
void add_bias(Scratch& scratch, const std::vector<float>& bias, Float dtype) {
  if (bias.empty()) return;
  const auto n = static_cast<int64_t>(bias.size());
  add_to(scratch.x.data(), bias.data(), n);
  round_and_store(scratch.x.data(), n, dtype, nullptr, scratch.narrow);
}

void activation_row(const Source& from, int64_t row, const std::vector<float>& bias, Scratch& scratch) {
  const int64_t n = from.cols;
  const int64_t wide = from.gated ? 2 * n : n;
  scratch.x.resize(static_cast<size_t>(wide));
  widen(element(from.data, from.dtype, row * from.stride), from.dtype, wide, scratch.x.data());
  add_bias(scratch, bias, from.dtype);
  const float* __restrict x = scratch.x.data();
  float* __restrict made = scratch.made.data();
  with_activation(from.activation, [&](auto act) {
    for (int64_t i = 0; i < n; ++i) made[i] = act(x[i]).value;
  });
  if (!from.gated) return;
  for (int64_t i = 0; i < n; ++i) made[i] *= x[n + i];
}

void activation_grad_row(const Source& from, int64_t row, const std::vector<float>& bias, Scratch& scratch) {
  const int64_t n = from.gated ? from.cols / 2 : from.cols;
  scratch.x.resize(static_cast<size_t>(from.cols));
  scratch.grad.resize(static_cast<size_t>(n));
  widen(element(from.data, from.dtype, row * from.stride), from.dtype, from.cols, scratch.x.data());
  widen(element(from.grad, from.dtype, row * from.grad_stride), from.dtype, n, scratch.grad.data());
  add_bias(scratch, bias, from.dtype);
  const float* __restrict x = scratch.x.data();
  const float* __restrict grad = scratch.grad.data();
  float* __restrict made = scratch.made.data();
  with_activation(from.activation, [&](auto act) {
    if (from.gated) {
      for (int64_t i = 0; i < n; ++i) {
        const ValueAndSlope at = act(x[i]);
        made[i] = grad[i] * x[n + i] * at.slope;
        made[n + i] = grad[i] * at.value;
      }
    } else {
      for (int64_t i = 0; i < n; ++i) made[i] = grad[i] * act(x[i]).slope;
    }
  });
}

// ---------------------------------------------------------------------------------------------- norms
std::vector<float> gain_of(const Vector& weight, int64_t n, bool zero_centered) {
  std::vector<float> gain = widened(weight, n);
  if (zero_centered) {
    for (float& g : gain) g += 1.0f;
  }
  return gain;
}

// x <- x * rstd - mean * rstd
void normalize(float* __restrict x, int64_t n, float mean, float rstd, bool centered) {
  if (centered) {
    const float shift = mean * rstd;
    for (int64_t i = 0; i < n; ++i) x[i] = fused_multiply_add(x[i], rstd, -shift);
  } else {
    for (int64_t i = 0; i < n; ++i) x[i] *= rstd;
  }
}

// The mean of a row, and what the squares of its distances from there add up to (_spread of reference_producers.py).
struct Spread {
  float mean;
  float squares;
};

Spread spread_of(const float* __restrict x, int64_t n) {
  constexpr int64_t kGroups = 16;
  constexpr int64_t kCols = kAccumulators / kGroups;  // neighbours of a group
  alignas(64) float total[kGroups][kCols / 2] = {};
  alignas(64) float squares[kGroups][kCols / 2] = {};
  float first[kGroups] = {};
  float counts[kGroups] = {};
  for (int64_t g = 0; g < kGroups && g * kCols < n; ++g) {
    const float* values = x + g * kCols;
    first[g] = g * kCols + 1 < n && __builtin_fabsf(values[1]) < __builtin_fabsf(values[0]) ? values[1] : values[0];
  }
  for (int64_t at = 0; at < n; at += 4) {
    const int64_t g = at / kCols % kGroups;
    const int64_t count = smaller(4, n - at);
    counts[g] += static_cast<float>(count);
    float* __restrict sums = &total[g][at % kCols / 8 * 4];
    float* __restrict sums_of_squares = &squares[g][at % kCols / 8 * 4];
    for (int64_t i = 0; i < count; ++i) {
      const float apart = x[at + i] - first[g];
      sums[i] += apart;
      sums_of_squares[i] = fused_multiply_add(apart, apart, sums_of_squares[i]);
    }
  }
  const auto sum_of = [](float (&values)[kCols / 2]) {
    for (int64_t v = 0; v < kCols / 8; ++v) {
      const float* a = values + 4 * v;
      values[v] = (a[0] + a[2]) + (a[1] + a[3]);
    }
    fold(values, kCols / 8, 1);
    return values[0];
  };
  float sums[kGroups];
  float parts[kGroups];
  for (int64_t g = 0; g < kGroups; ++g) {
    sums[g] = sum_of(total[g]);
    parts[g] = fused_multiply_add(counts[g], first[g], sums[g]);
  }
  fold(parts, kGroups, 1);
  const float mean = parts[0] / static_cast<float>(n);
  for (int64_t g = 0; g < kGroups; ++g) {
    const float off = mean - first[g];
    parts[g] = fused_multiply_add(off, fused_multiply_add(counts[g], off, -2.0f * sums[g]), sum_of(squares[g]));
  }
  fold(parts, kGroups, 1);
  return Spread{mean, parts[0] < 0.0f ? 0.0f : parts[0]};
}

void make_stats(const Source& from, int64_t row, const float* __restrict x) {
  const auto count = static_cast<float>(from.cols);
  float squares;
  if (from.mean != nullptr) {
    const Spread spread = spread_of(x, from.cols);
    from.mean[row] = spread.mean;
    squares = spread.squares;
  } else {
    squares = row_sum(x, x, from.cols);
  }
  from.rstd[row] = 1.0f / __builtin_sqrtf(squares / count + from.eps);
}

void norm_row(const Source& from, int64_t row, const std::vector<float>& gain, const std::vector<float>& bias,
              Scratch& scratch) {
  const int64_t n = from.cols;
  float* __restrict made = scratch.made.data();
  widen(element(from.data, from.dtype, row * from.stride), from.dtype, n, made);
  if (from.make_stats) make_stats(from, row, made);
  const bool centered = from.mean != nullptr;
  normalize(made, n, centered ? from.mean[row] : 0.0f, from.rstd[row], centered);
  const float* __restrict g = gain.data();
  const float* __restrict b = bias.data();
  if (bias.empty()) {
    for (int64_t i = 0; i < n; ++i) made[i] *= g[i];
  } else {
    for (int64_t i = 0; i < n; ++i) made[i] = fused_multiply_add(made[i], g[i], b[i]);
  }
}

// Rows [first, first + kGroup) by one thread: what they add to is theirs alone.
template <typename Body>
void for_each_group(int64_t rows, int64_t cols, Lane lane, const Body& body) {
  for_each_task(ceil_div(rows, kGroup), rows * cols, lane, [&](int64_t group) {
    body(group * kGroup, smaller(rows, (group + 1) * kGroup));
  });
}

}  // namespace

void produce(const Source& x, const Output& out, Lane lane) {
  const int64_t n = x.cols;
  const bool doubled = x.kind == Produce::kActivation && x.gated;
  const std::vector<float> bias = widened(x.bias, doubled ? 2 * n : n);
  const std::vector<float> gain = x.kind == Produce::kNorm ? gain_of(x.weight, n, x.zero_centered) : bias;
  GroupSums sums(x.partials, x.rows, n);
  for_each_group(x.rows, n, lane, [&](int64_t first, int64_t end) {
    thread_local Scratch scratch;
    scratch.made.resize(static_cast<size_t>(n));
    float* made = scratch.made.data();
    for (int64_t row = first; row < end; ++row) {
      switch (x.kind) {
        case Produce::kPlain: widen(element(x.data, x.dtype, row * x.stride), x.dtype, n, made); break;
        case Produce::kNorm: norm_row(x, row, gain, bias, scratch); break;
        case Produce::kActivation: activation_row(x, row, bias, scratch); break;
        case Produce::kActivationGrad: activation_grad_row(x, row, bias, scratch); break;
      }
      void* to = out.data == nullptr ? nullptr : static_cast<char*>(out.data) + row * n * size_of(out.dtype);
      round_and_store(made, n, x.dtype, to, scratch.narrow);
      sums.add(row, made);
    }
  });
  sums.finish(lane);
}

void norm_backward(const NormGrad& from, const Output& dx, float* weight_partials, float* bias_partials, float*,
                   Lane lane) {
  const Input& x = from.x;
  const int64_t n = x.cols;
  const float count = static_cast<float>(n);
  const bool centered = from.mean != nullptr;
  const std::vector<float> gain = gain_of(from.weight, n, from.zero_centered);
  GroupSums weight_sums(weight_partials, x.rows, n);
  GroupSums bias_sums(bias_partials, x.rows, n);
  for_each_group(x.rows, n, lane, [&](int64_t first, int64_t end) {
    thread_local Scratch scratch;
    for (std::vector<float>* v : {&scratch.x, &scratch.grad, &scratch.made}) {
      v->resize(static_cast<size_t>(n));
    }
    float* __restrict normal = scratch.x.data();
    float* __restrict grad = scratch.grad.data();
    float* __restrict inner = scratch.made.data();
    const float* __restrict g = gain.data();
    for (int64_t row = first; row < end; ++row) {
      const float rstd = from.rstd[row];
      widen(element(x.data, x.dtype, row * x.stride), x.dtype, n, normal);
      widen(element(from.grad, x.dtype, row * from.grad_stride), x.dtype, n, grad);
      normalize(normal, n, centered ? from.mean[row] : 0.0f, rstd, centered);
      for (int64_t i = 0; i < n; ++i) inner[i] = grad[i] * g[i];
      const float slope = row_sum(inner, normal, n) / count * rstd;
      if (centered) {
        const float offset = row_sum(inner, n) / count * rstd;
        for (int64_t i = 0; i < n; ++i) {
          inner[i] = fused_multiply_add(inner[i], rstd, -fused_multiply_add(normal[i], slope, offset));
        }
      } else {
        for (int64_t i = 0; i < n; ++i) inner[i] = fused_multiply_add(inner[i], rstd, -(normal[i] * slope));
      }
      round_and_store(inner, n, x.dtype, static_cast<char*>(dx.data) + row * n * size_of(x.dtype),
                      scratch.narrow);
      weight_sums.add(row, grad, normal);
      bias_sums.add(row, grad);
    }
  });
  weight_sums.finish(lane);
  bias_sums.finish(lane);
}

void reduce_partials(const float* partials, int64_t tiles, const Output& out, Lane) {
  const int64_t n = out.cols;
  for (int64_t set = 0; set < out.rows; ++set) {
    std::vector<float> slots(static_cast<size_t>(kSlots * n), 0.0f);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      add_to(slots.data() + tile % kSlots * n, partials + (set * tiles + tile) * n, n);
    }
    fold(slots.data(), kSlots, n);
    void* to = static_cast<char*>(out.data) + set * n * size_of(out.dtype);
    with_float(out.dtype, [&](auto type) { narrow_run<decltype(type)>(slots.data(), n, to); });
  }
}

TED_END_VARIANT
