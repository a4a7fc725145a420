// The ways in which patch_source.cuh makes tiles: what each has in shared memory, which one takes a matrix, and how its
// kernels start.
#pragma once

#include <type_traits>

#include "activation_table.cuh"
#include "made_sums.cuh"
#include "tile_stream.cuh"

namespace te_dist {
namespace cuda {

enum class Way {
  kNone,
  kNorm,        // or a matrix in memory
  kWholeNorm,   // the same of whole tiles, as all that follow
  kActivation,  // not gated
  kStreamed,    // the same, with the next tile on its way to shared memory
  kRectified,   // ReLU or its square, not gated, streamed as well
  kGated,       // an activation
  kSlope,       // GELU's gradient, not gated
  kPaired,      // the gradient of SwiGLU or GEGLU, two tiles at a time
  kBiased,      // kActivation and others with a bias: with a branch, those without one would be slower
  kBiasedStreamed,
  kBiasedSlope,
  kBiasedPaired,
};

template <Way kWay>
struct WayTag {
  static constexpr Way value = kWay;
};

struct PatchConfig {
  static constexpr int kThreads = TileConfig::kThreads;
  static constexpr int kSlot = kThreads * TileConfig::kPatch;  // vectors of one more operand
  static constexpr int kSlotBytes = kSlot * 16;
};

template <Way kWay>
struct WayConfig {
  static constexpr bool kTabled = kWay != Way::kNorm && kWay != Way::kWholeNorm;
  static constexpr bool kWhole = kWay != Way::kNorm;
  static constexpr bool kStreamed = kWay == Way::kStreamed || kWay == Way::kRectified || kWay == Way::kBiasedStreamed;
  static constexpr bool kSums = kWay != Way::kActivation && kWay != Way::kBiased && !kStreamed && kWay != Way::kGated;
  static constexpr bool kPairs = kWay == Way::kPaired || kWay == Way::kBiasedPaired;
  // Whose biases come to registers.
  static constexpr bool kBiased = kWay == Way::kBiased || kWay == Way::kBiasedSlope || kWay == Way::kBiasedPaired;
  static constexpr bool kSloped = kWay == Way::kSlope || kWay == Way::kBiasedSlope;
  // Operands besides the first one.
  static constexpr int kSlots = kPairs ? 2 : kWay == Way::kGated || kSloped ? 1 : 0;
  static constexpr int kBlocksPerSm = 4 - kSlots - (kStreamed ? 1 : 0);
  using Table = std::conditional_t<kWay == Way::kRectified, Rectifier, SigmoidTable<(kSlots > 0)>>;
  static constexpr int kTableBytes = kTabled ? static_cast<int>(round_up(Table::kBytes, 16)) : 0;
  // GELU's gradient has registers enough, and is up to 7 % slower with the near one.
  using Place = std::conditional_t<kSloped, TilePlace, NearPlace>;
  static constexpr int kBiasOffset = kTableBytes + (kStreamed ? StreamConfig::kBytes : 0);
  static constexpr int kWorkOffset = kBiasOffset + (kWay == Way::kBiasedStreamed ? PatchConfig::kThreads * 16 : 0);
  static constexpr int kWorkBytes = kSlots > 0 ? kSlots * PatchConfig::kSlotBytes : static_cast<int>(sizeof(ByteStage));
  static constexpr int kSumsBytes = kPairs ? static_cast<int>(sizeof(GroupSums)) : 0;
  static constexpr int kMostBytes = kWorkOffset + kWorkBytes + kSumsBytes;
  static_assert(sizeof(ByteStage) <= PatchConfig::kSlotBytes, "a stage has room where operands are");
};

// ---------------------------------------------------------------------------------------------- launch
// Whether a block may have as much shared memory as pairs take, and a little of the kernel's own. Not on every GPU.
inline bool has_room_for_pairs() {
  return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= WayConfig<Way::kPaired>::kMostBytes + 4096;
}

// The way to make x; kNone: source.cuh's. Small matrices are not worth a table. whole: where planes go, their rows are
// aligned.
inline Way way_of(const Made& x, bool whole) {
  whole = whole && x.is_whole();
  if (!x.activated()) return whole ? Way::kWholeNorm : Way::kNorm;
  if (!whole || x.pieces < 4u * static_cast<unsigned>(multiprocessors())) return Way::kNone;
  const bool silu = x.activation == Activation::kSilu;
  const bool gelu = x.activation == Activation::kGelu;
  if (x.kind == Produce::kActivationGrad) {
    if (x.gated && !((silu || gelu) && has_room_for_pairs())) return Way::kNone;
    if (x.gated) return x.biased ? Way::kBiasedPaired : Way::kPaired;
    return !gelu ? Way::kNone : x.biased ? Way::kBiasedSlope : Way::kSlope;
  }
  if (x.partials != nullptr) return Way::kNone;
  if (x.biased && (x.gated || is_rectifier(x.activation))) return Way::kNone;
  if (is_rectifier(x.activation)) return x.gated ? Way::kNone : Way::kRectified;
  return x.gated ? Way::kGated : x.biased ? Way::kBiased : Way::kActivation;
}

// stage_bytes: what the consumer of tiles uses of the work area behind the table; 0: nothing, and pairs keep their
// column sums behind it. noop: the kernel's.
template <Way kWay, typename... Parameters, typename... Arguments>
void launch_way(const char* name, void (*kernel)(Parameters...), int stage_bytes, const Made& x, const float* noop,
                Lane lane, const Arguments&... arguments) {
  using Config = WayConfig<kWay>;
  const int least = Config::kSlots * PatchConfig::kSlotBytes;
  const bool sums = x.partials != nullptr && stage_bytes == 0;
  const int work = static_cast<int>(larger(least, stage_bytes)) + (sums ? Config::kSumsBytes : 0);
  const int bytes = Config::kWorkOffset + work;
  if (Config::kTabled) {
    constexpr int kMostBytes = Config::kMostBytes;  // never less: a graph may hold a launch that needs it
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes),
               "shared memory for a table");
  }
  const int64_t most = Config::kTabled ? static_cast<int64_t>(multiprocessors()) * Config::kBlocksPerSm : x.pieces;
  // Blocks have as many pairs each, or all wait for the last ones: a block has few.
  const int blocks =
      grid_size(Config::kPairs ? ceil_div(x.pieces, ceil_div(x.pieces, most)) : smaller(x.pieces, most));
  if (x.order.ordered) {
    launch_mark_pending(Unmade{x.mean, x.rstd, x.rows, nullptr, nullptr, {}}, noop, lane);
    return launch_close(name, kernel, blocks, PatchConfig::kThreads, bytes, lane, x, arguments...);
  }
  kernel<<<blocks, PatchConfig::kThreads, bytes, stream_of(lane)>>>(x, arguments...);
  check_launch(name);
}

// start(way, format), as tags, if the way to make x is one of kTaken; false: source.cuh's. Results of activations are
// E4M3, but for rare recipes; gradients and what is summed up are both.
template <Way... kTaken, typename Start>
bool start_way(Way way, Fp8 format, const Start& start) {
  const auto go = [&](auto tag) {
    constexpr Way kWay = decltype(tag)::value;
    if (format == Fp8::kE4M3) {
      start(tag, Tag<E4M3>{});
      return true;
    }
    if constexpr (kWay == Way::kActivation || kWay == Way::kBiased || kWay == Way::kGated) {
      return false;
    } else {
      start(tag, Tag<E5M2>{});
      return true;
    }
  };
  return ((way == kTaken && go(WayTag<kTaken>{})) || ...);
}

// The work area in a block's dynamic shared memory.
template <Way kWay>
__device__ __forceinline__ void* work_area(float* memory) {
  return reinterpret_cast<char*>(memory) + WayConfig<kWay>::kWorkOffset;
}

// Where pairs have their column sums while operands fill the work area.
template <Way kWay>
__device__ __forceinline__ void* sums_area(float* memory) {
  return static_cast<char*>(work_area<kWay>(memory)) + WayConfig<kWay>::kSlots * PatchConfig::kSlotBytes;
}

}  // namespace cuda
}  // namespace te_dist
