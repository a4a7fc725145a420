// NVFP4's two global amaxes of what a LayerNorm makes of long rows, in whole tiles: 2 bytes an element, read once. (By
// tiles, nvfp4_amax_norm.cu, rows pass L2 twice, which takes longer than anything that is done with them.)
//
// A block stays, and takes 16 rows at a time, in boxes of 1024 columns. Each of 16 warps has one of the rows, and adds
// up what its statistics are made of. It has 64 of the columns, too, a lane two. What becomes of these is not known
// before the statistics are there, at the end of the rows, when the columns are gone. So they are looked at as if
// statistics were those of the first box: u = x * rstd + shift, and what the transform makes of that, in bf16, two
// values an instruction. What is kept of two columns are two words. At the end of the rows these tell of most columns
// that they are below what is known already, and few are made. A 17th warp asks for the boxes.
//
// [Note: bounds] Of each row, u = x r + s with r and s from the first box, and what is made is y = (x R + S) g + b. With
// q = R / r and d = S - q s, y = (q u + d) g + b. Let N be the largest magnitude of the 16 sums that the transform makes
// of a column's u, before its end. The root of the sum of squares of u is at most N: their transform has four times as
// much, of 16 numbers. So the largest sum of y is at most
//   |g| (m N + e N + the sum of |d|) + |b| B,
// where m is the mean of q, e the root of the sum of squares of what they are apart from it, and B the largest sum of
// sixteen ones. In bf16, N is found to 1 / 32 (largest_of_sixteen). Roundings of u take 4 / 512 (magnitudes add up to at
// most four times that root), and those of y as much.
#include "boxes.cuh"
#include "nvfp4_amax.cuh"
#include "nvfp4_unwritten.cuh"
#include "powers.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct LayerRows {
  static constexpr int kWarps = kBlock;
  static constexpr int kThreads = (kWarps + 1) * 32;
  static constexpr unsigned kStages = 5;
  static constexpr int kCols = 1024;     // of a box
  static constexpr int kMostBoxes = 8;   // of a row
  static constexpr int kPiece = 256;     // columns, the widest that a box can have
  static constexpr int kRow = kCols / 8;       // vectors of a box
  static constexpr int kBox = kBlock * kRow;   // likewise
  static constexpr int kVectors = kRow / 32;   // of a row, a lane
  static constexpr int kKept = kMostBoxes * kWarps * 32;  // of two words each
  static constexpr int kBytes = static_cast<int>(kStages) * kBox * 16 + kKept * 8;
  static constexpr int kFew = 8;  // lanes whose columns a warp makes one after another, rather than all lanes' at once
  static constexpr unsigned kBoxNanoseconds = 1000u;  // about what it takes to make one
};

// Where the bounds have room for what roundings take.
struct LayerBounds {
  static constexpr float kOfSums = 1.055f;
  static constexpr float kOfValues = 1.02f;
  // Statistics are floats, and so are q and d: shares of what shift is.
  static constexpr float kOfShift = 0x1p-19f;
  // What is too small for bf16.
  static constexpr float kLeast = 0x1p-128f;

  // The largest sum of sixteen ones.
  static constexpr int ones() {
    int v[kBlock] = {};
    for (int i = 0; i < kBlock; ++i) v[i] = ((kHadamardSigns >> i) & 1u) != 0u ? -1 : 1;
    for (int step = 1; step < kBlock; step *= 2) {
      for (int i = 0; i < kBlock; ++i) {
        if ((i & step) != 0) continue;
        const int a = v[i];
        const int b = v[i + step];
        v[i] = a + b;
        v[i + step] = a - b;
      }
    }
    int largest = 0;
    for (int i = 0; i < kBlock; ++i) largest = v[i] > largest ? v[i] : -v[i] > largest ? -v[i] : largest;
    return largest;
  }
};

// ---------------------------------------------------------------------------------------------- shared memory
// Of 16 rows, in turn with the next ones.
struct LayerRound {
  alignas(16) uint32_t near[kBlock];  // in bf16, r below s
  float rstd[kBlock];
  float shift[kBlock];
  float ratio[kBlock];  // q
  float rest[kBlock];   // d
};

struct LayerShared {
  LayerRound rounds[2];
  uint32_t known[2];
  Arrival there[LayerRows::kStages];
};

struct Met {
  // All warps but the last one.
  static __device__ __forceinline__ void rows() {
    asm volatile("bar.sync 1, %0;" ::"n"(LayerRows::kWarps * 32) : "memory");
  }
  // Nobody needs a stage's box any more.
  static __device__ __forceinline__ void stage_done(unsigned stage) {
    asm volatile("bar.arrive %0, %1;" ::"r"(kStages + stage), "n"(LayerRows::kThreads) : "memory");
  }
  static __device__ __forceinline__ void wait_for_stage(unsigned stage) {
    asm volatile("bar.sync %0, %1;" ::"r"(kStages + stage), "n"(LayerRows::kThreads) : "memory");
  }

 private:
  static constexpr unsigned kStages = 2u;
  static_assert(kStages + LayerRows::kStages <= 16u, "a block has 16 barriers");
};

// One of the stages that boxes come to, in turn.
struct LayerStage {
  unsigned number = 0u;
  unsigned turn = 0u;  // how often it was used before

  __device__ __forceinline__ void next() {
    if (++number == LayerRows::kStages) number = 0u, ++turn;
  }
};

// ---------------------------------------------------------------------------------------------- work
// The boxes of a block, in order: those of 16 rows, and those of the next 16.
struct LayerWork {
  unsigned boxes;   // of a row
  unsigned rounds;  // of 16 rows

  __device__ __forceinline__ explicit LayerWork(const Made& x)
      : boxes(static_cast<unsigned>(x.cols / LayerRows::kCols)),
        rounds((static_cast<unsigned>(x.rows / kBlock) - blockIdx.x - 1u) / gridDim.x + 1u) {}

  __device__ __forceinline__ int row(unsigned round) const {
    return static_cast<int>((blockIdx.x + round * gridDim.x) * kBlock);
  }
};

// What the last warp does.
__device__ __forceinline__ void fetch_boxes(LayerShared& shared, uint4* memory, const CUtensorMap& boxes,
                                            const LayerWork& work) {
  using Config = LayerRows;
  const unsigned all = work.rounds * work.boxes;
  LayerStage stage;
#pragma unroll 1
  for (unsigned round = 0u, box = 0u, n = 0u; n < all + Config::kStages; ++n, stage.next()) {
    // Of the last ones too, so that no barrier is left half full.
    if (stage.turn > 0u && n - Config::kStages < all) Met::wait_for_stage(stage.number);
    if (n < all && threadIdx.x % 32u == 0u) {
      Arrival& there = shared.there[stage.number];
      there.expect(Config::kBox * 16);
      load_box(memory + stage.number * Config::kBox, boxes, 0,
               static_cast<int>(box) * (Config::kCols / Config::kPiece), work.row(round), there);
    }
    if (++box == work.boxes) box = 0u, ++round;
  }
}

// ---------------------------------------------------------------------------------------------- rows
// A warp's row: a lane is four of the 128 threads by whose sums statistics are defined (TeamOfRows), 32 apart.
class LayerSums {
 public:
  // row: of the first box.
  __device__ __forceinline__ void start(const uint4* row) {
#pragma unroll
    for (int k = 0; k < LayerRows::kVectors; ++k) of_[k] = first(row, k);
    add(row);
  }
  __device__ __forceinline__ void add(const uint4* row) {
#pragma unroll
    for (int k = 0; k < LayerRows::kVectors; ++k) {
      float v[8];
      unpack_eight<bf16_t>(row[k * 32 + lane()], v);
#pragma unroll
      for (int j = 0; j < 8; ++j) of_[k].add(v[j], j, true);
    }
  }
  // Of so many columns, in all lanes.
  __device__ __forceinline__ RowSpread spread(int columns, const RowCount& count) const {
    float first[LayerRows::kVectors];
    float sum[LayerRows::kVectors];
    float squares[LayerRows::kVectors];
#pragma unroll
    for (int k = 0; k < LayerRows::kVectors; ++k) {
      const GroupShare share = of_[k].share();
      first[k] = share.first;
      sum[k] = fold_lanes<8>(share.sum);
      squares[k] = fold_lanes<8>(share.squares);
    }
    return spread_of_groups(of_group(first), of_group(sum), of_group(squares),
                            GroupShare::size_of(lane() % GroupShare::kGroups, columns), count);
  }

 private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

  static __device__ __forceinline__ ShareOfGroup first(const uint4* row, int k) {
    const uint32_t two = row[(lane() / 8 + 4 * k) * 8].x;
    return ShareOfGroup(GroupShare::first_of(Words<bf16_t>::element(two, 0), Words<bf16_t>::element(two, 1)));
  }
  // Group lane % 16 is the k-th, k = lane % 16 / 4, of eight lanes from lane % 4 * 8 on.
  static __device__ __forceinline__ float of_group(const float (&of)[LayerRows::kVectors]) {
    float mine = 0.0f;
#pragma unroll
    for (int k = 0; k < LayerRows::kVectors; ++k) {
      const float heard = __shfl_sync(kFullWarp, of[k], lane() % 4 * 8);
      if (lane() % 16 / 4 == k) mine = heard;
    }
    return mine;
  }

  ShareOfGroup of_[LayerRows::kVectors];
};

// What a warp leaves in shared memory of its row: what the first box tells of it,
__device__ __forceinline__ void make_near(LayerRound& shared, const RowSpread& spread, const RowCount& count,
                                          float eps) {
  const float rstd = reciprocal_deviation(spread.squares, count, eps);
  if (threadIdx.x % 32u != 0u) return;
  shared.near[threadIdx.x / 32u] = pack_bf16(rstd, RowStats{spread.mean, rstd}.shift(true));
}

// and what it is. first_row: of the sixteen.
__device__ __forceinline__ void keep_stats(LayerRound& shared, const RowSpread& spread, const RowCount& count,
                                           const Made& x, int first_row) {
  const float rstd = reciprocal_deviation(spread.squares, count, x.eps);
  if (threadIdx.x % 32u != 0u) return;
  const unsigned warp = threadIdx.x / 32u;
  const float shift = RowStats{spread.mean, rstd}.shift(true);
  const uint32_t near = shared.near[warp];
  const float ratio = __fdiv_rn(rstd, Words<bf16_t>::element(near, 0));
  x.mean[first_row + static_cast<int>(warp)] = spread.mean;
  x.rstd[first_row + static_cast<int>(warp)] = rstd;
  shared.rstd[warp] = rstd;
  shared.shift[warp] = shift;
  shared.ratio[warp] = ratio;
  shared.rest[warp] = __fmaf_rn(-ratio, Words<bf16_t>::element(near, 1), shift);
}

// What rows have in common, from what each has left in shared memory.
struct LayerRatios {
  float most;   // m + e, of which no q is above
  float rests;  // the sum of |d|, and more

  __device__ __forceinline__ explicit LayerRatios(const LayerRound& shared) {
    const unsigned row = threadIdx.x % kBlock;
    const float q = shared.ratio[row];
    const float d = fabsf(shared.rest[row]) + fabsf(shared.shift[row]) * LayerBounds::kOfShift +
                    fabsf(q) * LayerBounds::kLeast;
    rests = fold_lanes<kBlock>(d);
    const float mean = fold_lanes<kBlock>(q) * (1.0f / kBlock);
    const float apart = q - mean;
    most = fabsf(mean) + __fsqrt_ru(fold_lanes<kBlock>(apart * apart));
  }
};

// ---------------------------------------------------------------------------------------------- columns
__device__ __forceinline__ float2 load_vector_two(const RowView& from, int64_t col, float none) {
  const float4 four = load_vector_four(from, col / 4 * 4, none);
  return col % 4 != 0 ? make_float2(four.z, four.w) : make_float2(four.x, four.y);
}

__device__ __forceinline__ float2 load_two_gains(const Made& x, int64_t col) {
  const float2 gain = load_vector_two(x.weight, col, 1.0f);
  return x.zero_centered ? make_float2(gain.x + 1.0f, gain.y + 1.0f) : gain;
}

class LayerColumns {
 public:
  // amax_row: null if nobody wants to know.
  __device__ __forceinline__ LayerColumns(const Made& x, float* amax_row, float* amax_col, LayerShared& shared,
                                          uint2* kept)
      : x_(x),
        kept_(kept + threadIdx.x),
        with_rows_(amax_row != nullptr),
        of_rows_(amax_row, &shared.known[0]),
        of_columns_(amax_col, &shared.known[1]) {
    // All loads are on their way at once: behind a row's end, its last ones once more.
    const unsigned last = static_cast<unsigned>(x.cols / LayerRows::kCols) - 1u;
#pragma unroll
    for (unsigned box = 0u; box < LayerRows::kMostBoxes; ++box) {
      const int col = column(min(box, last));
      const float2 gain = load_two_gains(x, col);
      const float2 bias = load_vector_two(x.bias, col, kNoBias);
      most_gain_ = larger_magnitude(larger_magnitude(most_gain_, gain.x), gain.y);
      most_bias_ = larger_magnitude(larger_magnitude(most_bias_, bias.x), bias.y);
    }
  }

  // Looks at a box.
  __device__ __forceinline__ void take(const uint4* box, unsigned number, const LayerRound& round) {
    const auto* words = reinterpret_cast<const uint32_t*>(box) + threadIdx.x;
    uint32_t u[kBlock];
    uint32_t largest = 0u;
#pragma unroll
    for (int i = 0; i < kBlock; i += 4) {
      const uint4 near = *reinterpret_cast<const uint4*>(&round.near[i]);
      const uint32_t of_row[4] = {near.x, near.y, near.z, near.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) u[i + k] = scaled(words[(i + k) * (LayerRows::kRow * 4)], of_row[k]);
      largest = larger_pair(largest, larger_pair(u[i], u[i + 1], u[i + 2], u[i + 3]));
    }
    const uint2 kept = make_uint2(largest_of_sixteen(u), magnitudes(largest));
    kept_[number * (LayerRows::kWarps * 32)] = kept;
    most_ = make_uint2(W::max(most_.x, kept.x), W::max(most_.y, kept.y));
  }

  // At the end of the rows, of so many boxes. Most of a warp's columns are all left out at once, and most of the others
  // a box at once.
  // first: nothing is known yet. Then what all blocks find in a box each is heard before the others are looked at:
  // a block alone would take three times as many columns for large ones.
  __device__ __forceinline__ void raise(unsigned boxes, int first_row, const LayerRound& round, bool first) {
    const LayerRatios ratios(round);
    const auto any_rises = [&](uint2 kept) {
      hear();
      const bool here = rises(ratios, W::fold(kept.x) << 16, W::fold(kept.y) << 16, most_gain_, most_bias_);
      return __any_sync(kFullWarp, here);
    };
    const bool any = any_rises(most_);
    most_ = make_uint2(0u, 0u);
#pragma unroll 1
    for (unsigned box = 0u; any && box < boxes; ++box) {
      const uint2 kept = kept_[box * (LayerRows::kWarps * 32)];
      if (!any_rises(kept)) continue;
      const int col = column(box);
      const float2 gain = load_two_gains(x_, col);
      const float2 bias = load_vector_two(x_.bias, col, kNoBias);
      const bool here = rises(ratios, low_float(kept.x), low_float(kept.y), gain.x, bias.x) ||
                        rises(ratios, high_float(kept.x), high_float(kept.y), gain.y, bias.y);
      const uint32_t rising = __ballot_sync(kFullWarp, here);
      if (rising != 0u) make(rising, first_row, col, gain, bias, round);
      if (first && box == 0u) {
        __nanosleep(LayerRows::kBoxNanoseconds);
        of_rows_.ask_now();
        of_columns_.ask_now();
      }
    }
    // What other blocks have found. There are few rounds.
    if (threadIdx.x >= 32u) return;
    of_rows_.ask_now();
    of_columns_.ask_now();
  }

 private:
  using W = Words<bf16_t>;

  static __device__ __forceinline__ int column(unsigned box) {
    return static_cast<int>(box) * LayerRows::kCols + static_cast<int>(threadIdx.x) * 2;
  }
  // A NaN stays.
  static __device__ __forceinline__ float larger_magnitude(float a, float b) {
    return float_of(max(bits_of(a), bits_of(b) & kAbsMask));
  }
  __device__ __forceinline__ void hear() {
    of_rows_.hear();
    of_columns_.hear();
  }

  // near: r below s.
  static __device__ __forceinline__ uint32_t scaled(uint32_t word, uint32_t near) {
    asm("{\n\t.reg .b16 low, high;\n\t.reg .b32 r, s;\n\t"
        "mov.b32 {low, high}, %1;\n\tmov.b32 r, {low, low};\n\tmov.b32 s, {high, high};\n\t"
        "fma.rn.bf16x2 %0, %0, r, s;\n\t}"
        : "+r"(word)
        : "r"(near));
    return word;
  }

  // sums, value: of a column, the largest of what the transform makes of u, and of u. See [Note: bounds]. Of what is
  // past all numbers, or none, it is true.
  __device__ __forceinline__ bool rises(const LayerRatios& ratios, uint32_t sums, uint32_t value, float gain,
                                        float bias) const {
    using Bounds = LayerBounds;
    constexpr float kFar = 0x1p126f;  // larger ones may be those of infinities
    constexpr float kOnes = static_cast<float>(Bounds::ones());
    const float g = fabsf(gain);
    const float b = fabsf(bias) * Bounds::kOfValues;
    const float rests = Bounds::kOfValues * ratios.rests;
    const float column = g * (Bounds::kOfSums * ratios.most * float_of(sums) + rests) + (b * kOnes + Bounds::kLeast);
    if (!(column <= fminf(4.0f * of_columns_.known(), kFar))) return true;
    if (!with_rows_) return false;
    const float row = g * (Bounds::kOfValues * ratios.most * float_of(value) + rests) + (b + Bounds::kLeast);
    return !(row <= fminf(of_rows_.known(), kFar));
  }

  // Makes what lanes have, those that are `rising`, or all if these are many. first_row, col: of this lane.
  __device__ __forceinline__ void make(uint32_t rising, int first_row, int col, float2 gain, float2 bias,
                                       const LayerRound& round) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bf16_t* from = x_.data + first_row * x_.stride;
    const auto made = [&](int row, int at, float2 gains, float2 biases) {
      const uint32_t word = __ldg(reinterpret_cast<const uint32_t*>(from + row * x_.stride + at));
      return norm_of_word<true>(word, round.rstd[row], round.shift[row], gains, biases);
    };
    uint32_t row_word = 0u;
    uint32_t largest = 0u;
    if (__popc(rising) <= LayerRows::kFew) {
#pragma unroll 1
      for (; rising != 0u; rising &= rising - 1u) {
        const int at = col + (__ffs(static_cast<int>(rising)) - 1 - lane) * 2;
        const uint32_t word = made(lane % kBlock, at, load_two_gains(x_, at), load_vector_two(x_.bias, at, kNoBias));
        row_word = W::max(row_word, W::magnitude(word));
        largest = max(largest, transformed_across_lanes(word));
      }
    } else {
      NvPatch<bf16_t, 1> patch;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        patch.word[i][0] = made(i, col, gain, bias);
        row_word = W::max(row_word, W::magnitude(patch.word[i][0]));
      }
      largest = amax_of_columns(patch);
    }
    of_rows_.raise(W::to_float_of_raw(__reduce_max_sync(kFullWarp, W::fold(row_word))));
    of_columns_.raise(largest);
  }

  const Made& x_;
  uint2* kept_;
  bool with_rows_;
  KnownAmax of_rows_;
  ColumnAmax of_columns_;
  float most_gain_ = 0.0f;  // magnitudes, of the lane's columns
  float most_bias_ = 0.0f;
  uint2 most_ = make_uint2(0u, 0u);  // of what is kept
};

// ---------------------------------------------------------------------------------------------- kernel
__global__ void __launch_bounds__(LayerRows::kThreads, 1)
    nvfp4_amax_layer_rows_kernel(const __grid_constant__ CUtensorMap boxes, const __grid_constant__ Made x,
                                 float* amax_row, float* amax_col, const float* noop) {
  using Config = LayerRows;
  extern __shared__ __align__(128) uint4 memory[];
  __shared__ LayerShared shared;
  let_next_kernel_start();
  if (is_noop(noop)) return;
  const LayerWork work(x);
  if (threadIdx.x == 0u) {
    shared.known[0] = shared.known[1] = 0u;
#pragma unroll
    for (unsigned stage = 0u; stage < Config::kStages; ++stage) shared.there[stage].init();
  }
  __syncthreads();
  const unsigned warp = threadIdx.x / 32u;
  if (warp == Config::kWarps) return fetch_boxes(shared, memory, boxes, work);

  wait_for_kernel_before();  // which zeroes both amaxes
  LayerColumns columns(x, amax_row, amax_col, shared, reinterpret_cast<uint2*>(memory + Config::kStages * Config::kBox));
  const RowCount count(x.cols);
  const RowCount of_first(Config::kCols);
  // Rows are a box ahead of columns, so that what these wait for is there.
  LayerStage of_rows;
  LayerStage of_columns;
  const auto box_at = [&](const LayerStage& stage) { return memory + stage.number * Config::kBox; };
  const auto row_of = [&](const LayerStage& stage) { return box_at(stage) + warp * Config::kRow; };
#pragma unroll 1
  for (unsigned round = 0u;; ++round) {
    LayerRound& mine = shared.rounds[round % 2u];
    LayerSums sums;
    if (round < work.rounds) {
      shared.there[of_rows.number].wait(of_rows.turn);
      sums.start(row_of(of_rows));
      of_rows.next();
      make_near(mine, sums.spread(Config::kCols, of_first), of_first, x.eps);
    }
    // The only time that warps wait for each other: what the first box tells of these rows is there, and what there is
    // to know of the last ones. Those are looked at behind it, so that a warp that has to make much can catch up.
    Met::rows();
    if (round > 0u) columns.raise(work.boxes, work.row(round - 1u), shared.rounds[(round - 1u) % 2u], round == 1u);
    if (round == work.rounds) break;
#pragma unroll 1
    for (unsigned box = 0u; box < work.boxes; ++box, of_columns.next()) {
      if (box + 1u < work.boxes) {
        shared.there[of_rows.number].wait(of_rows.turn);
        sums.add(row_of(of_rows));
        of_rows.next();
      } else {
        keep_stats(mine, sums.spread(static_cast<int>(x.cols), count), count, x, work.row(round));
      }
      columns.take(box_at(of_columns), box, mine);
      Met::stage_done(of_columns.number);
    }
  }
}

}  // namespace

bool launch_amax_nvfp4_layer_rows(const Made& x, float* amax_row, float* amax_col, const float* noop, Lane lane) {
  using Config = LayerRows;
  constexpr int kBytesOfBlock = Config::kBytes + static_cast<int>(sizeof(LayerShared)) + 128;
  const bool fits = x.cols % Config::kCols == 0 && x.cols > Config::kCols &&
                    x.cols <= Config::kCols * Config::kMostBoxes && aligned(x.data, 16) && x.stride % 8 == 0 &&
                    device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= kBytesOfBlock;
  if (!runs_hopper_code() || !fits || !x.centered || !x.order.ordered) return false;
  const auto kernel = nvfp4_amax_layer_rows_kernel;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kBytes),
             "shared memory for rows");
  launch_amax_reset(amax_row, amax_col, noop, lane);
  constexpr auto kPiece = static_cast<cuuint32_t>(Config::kPiece);
  const BoxedMatrix rows{const_cast<bf16_t*>(x.data),
                         CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                         {kPiece, static_cast<cuuint64_t>(x.cols) / kPiece, static_cast<cuuint64_t>(x.rows)},
                         {2 * kPiece, 2 * static_cast<cuuint64_t>(x.stride)},
                         {kPiece, Config::kCols / kPiece, kBlock},
                         BoxPlaces::kPlain};
  const int blocks = grid_size(smaller(multiprocessors(), x.rows / kBlock));
  launch_close("nvfp4_amax_layer_rows_kernel", kernel, blocks, Config::kThreads, Config::kBytes, lane, map_of(rows), x,
               amax_row, amax_col, noop);
  return true;
}

}  // namespace cuda
}  // namespace te_dist
