// NVFP4's two global amaxes of what an RMSNorm makes of long rows, in whole tiles: 2 bytes an element, read once.
//
// A cluster of eight blocks takes 16 rows at a time. Each block has an eighth of their columns, those of 16 of the 128
// threads by whose sums statistics are defined (TeamOfRows), as one box, with two more on their way. Eight of its warps
// add up squares, which go to the shared memory of all blocks of the cluster, where a ninth warp makes the statistics
// of them, and asks for boxes. Then a thread has 16 rows of four columns. Nothing is made but where it may be larger
// than what is known: of a column's values and the sum of their magnitudes there are bounds, in bf16, two an
// instruction. (A LayerNorm, with two sums that wait for each other, is slower this way than by tiles.)
#include "clusters.cuh"
#include "nvfp4_amax.cuh"
#include "nvfp4_unwritten.cuh"

namespace te_dist {
namespace cuda {
namespace {

struct NvNormRows {
  static constexpr int kWarps = 8;  // that have rows and columns
  static constexpr int kThreads = (kWarps + 1) * 32;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kStages = 3;
  static constexpr int kCluster = 8;
  static constexpr int kLanes = 16;                // of a row
  static constexpr int kVectors = 8;               // of a row, a lane
  static constexpr int kRow = kVectors * kLanes;   // vectors of a row in shared memory
  static constexpr int kStage = kBlock * kRow;     // vectors
  static constexpr int kPiece = 64;                // neighbouring columns; a block has every eighth piece of a row
  static constexpr int kStep = kCluster * kPiece;  // columns from piece to piece
  static constexpr int kPieces = 2 * kVectors;
  static constexpr int kColumns = kPieces * kStep;
  static constexpr int kBytes = kStages * kStage * 16;
  static constexpr int kFew = 8;  // lanes whose columns a warp makes one after another, rather than all lanes' at once
};

// ---------------------------------------------------------------------------------------------- bounds
// What is made is a product of three magnitudes, of which statistics and gains are rounded up.
struct NormBounds {
  // Roundings to bf16 by which a bound may be too small: of two products, and of what is made.
  static constexpr int kOfValues = 3;
  static constexpr int kOfSums = kOfValues + 5;  // four sums of four rows each, and their sum
  static constexpr float kShare = 1.0f - kOfValues / 256.0f;
  // A product that is too small for bf16 is no bound. With gains up to kMostGain, and an amax from kLeastAmax on, such
  // do not matter.
  static constexpr float kMostGain = 0x1p20f;
  static constexpr float kLeastAmax = 0x1p-100f;
};

// Of two bf16 values each. With -0 added: GPUs before Hopper, for which this is compiled, have no other product.
__device__ __forceinline__ uint32_t times_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

// The first bf16 number from each magnitude on; NaN past `most`.
__device__ __forceinline__ uint32_t bounds_of(float low, float high, float most) {
  const auto bound = [&](float v) {
    const uint32_t bits = bits_of(v) & kAbsMask;
    return bits <= bits_of(most) ? (bits + 0xFFFFu) >> 16 : 0x7FC0u;
  };
  return __byte_perm(bound(low), bound(high), 0x5410);
}

// ---------------------------------------------------------------------------------------------- shared memory
// What blocks have sent: eight sums of each row from every one. Where they lie keeps lanes that have neighbouring rows
// off each other's banks.
struct RowParts {
  alignas(16) float part[kBlock][NvNormRows::kCluster * 8];

  static __device__ __forceinline__ int place(int row, int member) { return 8 * (member ^ (row % 4)); }

  // All of a row's, as TeamOfRows adds up: those 32, 16, 8, 4, 2 and 1 apart. Two lanes of a warp have a row.
  __device__ __forceinline__ float sum() const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const float* mine = &part[lane / 2][lane % 2 * 4];
    float4 four[NvNormRows::kCluster];
#pragma unroll
    for (int i = 0; i < NvNormRows::kCluster; ++i) {
      four[i] = *reinterpret_cast<const float4*>(mine + place(lane / 2, i));
    }
    const auto fold = [&](float float4::*of) {
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = four[i].*of;
      const float folded = fold_eight(v);
      return folded + __shfl_xor_sync(kFullWarp, folded, 1);
    };
    return (fold(&float4::x) + fold(&float4::z)) + (fold(&float4::y) + fold(&float4::w));
  }
};

// Of 16 rows, in turn with the next ones.
struct NormRowsShared {
  RowParts parts[2];
  float rstd[2][kBlock];
  alignas(16) uint32_t rstd_bounds[2][kBlock];
  uint32_t known[2];
  Arrival parts_there[2];
  Arrival rows_there[NvNormRows::kStages];
};

// What the ninth warp and the others tell each other, by barriers of the block: those who only tell do not wait. (It
// takes as long by mbarriers, but what those keep apart, racecheck does not see.)
struct Told {
  // Statistics are there. A barrier for each warp, so that none waits for another. Those of the next rows need what all
  // warps send after they have heard this.
  static __device__ __forceinline__ void stats_there() {
#pragma unroll
    for (int warp = 0; warp < NvNormRows::kWarps; ++warp) tell(kStats + warp, 2 * 32);
  }
  static __device__ __forceinline__ void wait_for_stats() {
    wait(kStats + static_cast<int>(threadIdx.x) / 32, 2 * 32);
  }
  // Nobody needs the rows of a round any more, nor their statistics. When a warp is done with the next ones, this may
  // not have been heard yet.
  static __device__ __forceinline__ void rows_done(unsigned round) {
    tell(kRows + static_cast<int>(round % 2u), NvNormRows::kThreads);
  }
  static __device__ __forceinline__ void wait_for_rows(unsigned round) {
    wait(kRows + static_cast<int>(round % 2u), NvNormRows::kThreads);
  }

 private:
  static constexpr int kStats = 1;  // 0 is __syncthreads's
  static constexpr int kRows = kStats + NvNormRows::kWarps;
  static_assert(kRows + 2 <= 16, "a block has 16 barriers");

  static __device__ __forceinline__ void tell(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  }
  static __device__ __forceinline__ void wait(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  }
};

// ---------------------------------------------------------------------------------------------- rows
// The groups of 16 rows that a cluster takes, one after another.
struct RowGroups {
  int first;
  int step;
  unsigned count;

  __device__ __forceinline__ explicit RowGroups(int64_t rows)
      : first(static_cast<int>(blockIdx.x) / NvNormRows::kCluster),
        step(static_cast<int>(gridDim.x) / NvNormRows::kCluster) {
    const int groups = static_cast<int>(rows) / kBlock;  // as many as clusters, at least
    count = static_cast<unsigned>((groups - first - 1) / step + 1);
  }
  __device__ __forceinline__ int row(unsigned round) const {
    return (first + static_cast<int>(round) * step) * kBlock;
  }
};

// Asks for the rows of a round, where there is one. One thread.
__device__ __forceinline__ void fetch(NormRowsShared& shared, uint4* memory, const CUtensorMap& boxes,
                                      const RowGroups& groups, unsigned round) {
  using Config = NvNormRows;
  if (round >= groups.count) return;
  const unsigned stage = round % Config::kStages;
  shared.rows_there[stage].expect(Config::kStage * 16);
  load_box(memory + stage * Config::kStage, boxes, Config::kPiece * cluster_member(), 0, groups.row(round),
           shared.rows_there[stage]);
}

// What the ninth warp does.
__device__ __forceinline__ void make_stats(NormRowsShared& shared, uint4* memory, const CUtensorMap& boxes,
                                           const Made& x, const RowGroups& groups) {
  const RowCount count(x.cols);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int row = lane / 2;
#pragma unroll 1
  for (unsigned round = 0u; round < groups.count; ++round) {
    const unsigned turn = round % 2u;
    shared.parts_there[turn].wait(round / 2u);
    // Written while the kernel before may still run, which knows nothing of it; all before that one has ended.
    const float rstd = reciprocal_deviation(shared.parts[turn].sum(), count, x.eps);
    if (lane % 2 == 0) {
      shared.rstd[turn][row] = rstd;
      shared.rstd_bounds[turn][row] = bounds_of(rstd, rstd, kFloatMax);
      if (cluster_member() == 0) x.rstd[groups.row(round) + row] = rstd;
    }
    if (lane == 0) shared.parts_there[turn].expect(sizeof(RowParts));  // before those who are told send the next ones
    Told::stats_there();
    if (round == 0u) continue;
    // The next ones take the place of the rows before these, and of their statistics.
    Told::wait_for_rows(round - 1u);
    if (lane == 0) fetch(shared, memory, boxes, groups, round - 1u + NvNormRows::kStages);
  }
  Told::wait_for_rows(groups.count - 1u);  // no barrier is left half full
}

// The share of a thread in what the squares of its row add up to. Behind a row's end lie zeros.
struct SquareShare {
  static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / NvNormRows::kLanes; }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % NvNormRows::kLanes; }

  static __device__ __forceinline__ float of(const uint4* stage) {
    const uint4* mine = stage + row() * NvNormRows::kRow + lane();
    float total[8] = {};
#pragma unroll
    for (int k = 0; k < NvNormRows::kVectors; ++k) {
      float v[8];
      unpack_eight<bf16_t>(mine[k * NvNormRows::kLanes], v);
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j] = fused_multiply_add(v[j], v[j], total[j]);
    }
    return fold_eight(total);
  }
  // To all blocks, with those of threads 64 apart added up.
  static __device__ __forceinline__ void send(float share, RowParts& parts, Arrival& arrival) {
    share += __shfl_xor_sync(kFullWarp, share, 8);
    float* to = &parts.part[row()][RowParts::place(row(), cluster_member()) + lane() % 8];
    const int first = lane() / 8 * (NvNormRows::kCluster / 2);
#pragma unroll
    for (int i = 0; i < NvNormRows::kCluster / 2; ++i) send_to_member(to, first + i, share, &arrival);
  }
};

// ---------------------------------------------------------------------------------------------- columns
// Those that a warp has of 16 rows, each lane four.
class NormColumns {
 public:
  // amax_row: null if nobody wants to know.
  __device__ __forceinline__ NormColumns(const Made& x, float* amax_row, float* amax_col, uint32_t (&known)[2])
      : x_(x),
        with_rows_(amax_row != nullptr),
        col_(column_of(static_cast<int>(threadIdx.x) % 32)),
        of_rows_(amax_row, &known[0]),
        of_columns_(amax_col, &known[1]) {
    if (!inside(col_)) return;
    const float4 gain = load_four_gains(x, col_);
    gain_bounds_[0] = bounds_of(gain.x, gain.y, NormBounds::kMostGain);
    gain_bounds_[1] = bounds_of(gain.z, gain.w, NormBounds::kMostGain);
  }

  // rstds, bounds: of the rows.
  __device__ __forceinline__ void take(const uint4* stage, const float (&rstds)[kBlock],
                                       const uint32_t (&bounds)[kBlock]) {
    const auto* words = reinterpret_cast<const uint2*>(stage + threadIdx.x / 32 * NvNormRows::kLanes);
    uint32_t sums[4][2];
    uint32_t largest[2] = {0u, 0u};
#pragma unroll
    for (int four = 0; four < kBlock; four += 4) {
      const uint4 of_four = *reinterpret_cast<const uint4*>(&bounds[four]);
      const uint32_t rstd[4] = {of_four.x, of_four.y, of_four.z, of_four.w};
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        uint32_t bound[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint2 two = words[(four + i + r) * kWordsOfRow + threadIdx.x % 32];
          bound[r][0] = times_bf16(W::magnitude(two.x), rstd[i + r]);
          bound[r][1] = times_bf16(W::magnitude(two.y), rstd[i + r]);
#pragma unroll
          for (int w = 0; w < 2; ++w) sums[i + r][w] = four == 0 ? bound[r][w] : add_bf16(sums[i + r][w], bound[r][w]);
        }
#pragma unroll
        for (int w = 0; w < 2; ++w) largest[w] = W::max(largest[w], bound[0][w], bound[1][w]);
      }
    }
    uint32_t of_sums = 0u;
    uint32_t of_values = 0u;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const uint32_t sum = add_bf16(add_bf16(sums[0][w], sums[1][w]), add_bf16(sums[2][w], sums[3][w]));
      of_sums = W::max(of_sums, times_bf16(sum, gain_bounds_[w]));
      of_values = W::max(of_values, times_bf16(largest[w], gain_bounds_[w]));
    }
    of_rows_.hear();
    of_columns_.hear();
    const uint32_t rising = __ballot_sync(kFullWarp, may_rise(of_sums, of_values));
    if (rising != 0u) raise(rising, words, rstds);
  }

  __device__ __forceinline__ void ask() {
    of_rows_.ask();
    of_columns_.ask();
  }

 private:
  using W = Words<bf16_t>;
  static constexpr int kWordsOfRow = 2 * NvNormRows::kRow;  // pairs of words

  static __device__ __forceinline__ int column_of(int lane) {
    const int piece = static_cast<int>(threadIdx.x) / 32 * 2 + lane / 16;
    return piece * NvNormRows::kStep + cluster_member() * NvNormRows::kPiece + lane % 16 * 4;
  }
  __device__ __forceinline__ bool inside(int col) const { return col < x_.cols; }

  __device__ __forceinline__ bool may_rise(uint32_t of_sums, uint32_t of_values) const {
    using Bounds = NormBounds;
    if (of_columns_.known() < Bounds::kLeastAmax || of_columns_.may_rise_here<Bounds::kOfSums>(of_sums)) return true;
    return with_rows_ &&
           (of_rows_.known() < Bounds::kLeastAmax || of_rows_.is_topped_by(of_values, Bounds::kShare));
  }

  static __device__ __forceinline__ uint32_t made(uint32_t word, float rstd, float first_gain, float second_gain) {
    return norm_of_word<false>(word, rstd, 0.0f, make_float2(first_gain, second_gain), make_float2(0.0f, 0.0f));
  }

  // Makes what lanes have, those that are `rising`, or all if these are many.
  __device__ __forceinline__ void raise(uint32_t rising, const uint2* words, const float (&rstds)[kBlock]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t row_word = 0u;
    uint32_t largest = 0u;
    if (__popc(rising) <= NvNormRows::kFew) {
      const int row = lane % 16;
      const bool second = lane >= 16;
#pragma unroll 1
      for (; rising != 0u; rising &= rising - 1u) {
        const int whose = __ffs(static_cast<int>(rising)) - 1;
        if (!inside(column_of(whose))) continue;  // zeros, of which an infinite rstd makes NaNs
        const float4 gain = load_four_gains(x_, column_of(whose));
        const uint2 two = words[row * kWordsOfRow + whose];
        const uint32_t word = made(second ? two.y : two.x, rstds[row], second ? gain.z : gain.x,
                                   second ? gain.w : gain.y);
        row_word = W::max(row_word, W::magnitude(word));
        largest = max(largest, transformed_across_lanes(word));
      }
    } else if (inside(col_)) {
      const float4 gain = load_four_gains(x_, col_);
      NvPatch<bf16_t, 2> patch;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const uint2 two = words[i * kWordsOfRow + lane];
        patch.word[i][0] = made(two.x, rstds[i], gain.x, gain.y);
        patch.word[i][1] = made(two.y, rstds[i], gain.z, gain.w);
        row_word = max_of_words<bf16_t>(patch.word[i], row_word);
      }
      largest = amax_of_columns(patch);
    }
    __syncwarp();
    of_rows_.raise(W::to_float_of_raw(__reduce_max_sync(kFullWarp, W::fold(row_word))));
    of_columns_.raise(largest);
  }

  const Made& x_;
  bool with_rows_;
  int col_;
  uint32_t gain_bounds_[2] = {0u, 0u};
  KnownAmax of_rows_;
  ColumnAmax of_columns_;
};

// ---------------------------------------------------------------------------------------------- kernel
__global__ void TED_IN_CLUSTERS_OF(NvNormRows::kCluster)
    __launch_bounds__(NvNormRows::kThreads, NvNormRows::kBlocksPerSm)
        nvfp4_amax_norm_rows_kernel(const __grid_constant__ CUtensorMap boxes, const __grid_constant__ Made x,
                                    float* amax_row, float* amax_col, const float* noop) {
  constexpr unsigned kStages = NvNormRows::kStages;
  extern __shared__ __align__(128) uint4 memory[];
  __shared__ NormRowsShared shared;
  let_next_kernel_start();
  if (is_noop(noop)) return;
  const RowGroups groups(x.rows);
  const bool is_ninth = threadIdx.x / 32 == NvNormRows::kWarps;
  if (is_ninth && threadIdx.x % 32 == 0) {
    shared.known[0] = shared.known[1] = 0u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shared.parts_there[i].init();
      shared.parts_there[i].expect(sizeof(RowParts));
    }
#pragma unroll
    for (unsigned stage = 0u; stage < kStages; ++stage) {
      shared.rows_there[stage].init();
      fetch(shared, memory, boxes, groups, stage);
    }
  }
  cluster_arrive();  // all blocks run, and are ready for what others send
  cluster_wait();
  if (is_ninth) return make_stats(shared, memory, boxes, x, groups);

  const auto stage_of = [&](unsigned round) { return memory + round % kStages * NvNormRows::kStage; };
  const auto share_of = [&](unsigned round) {
    shared.rows_there[round % kStages].wait(round / kStages);
    return SquareShare::of(stage_of(round));
  };
  const auto send = [&](unsigned round, float share) {
    SquareShare::send(share, shared.parts[round % 2u], shared.parts_there[round % 2u]);
  };
  send(0u, share_of(0u));
  wait_for_kernel_before();  // which zeroes both amaxes
  NormColumns columns(x, amax_row, amax_col, shared.known);
#pragma unroll 1
  for (unsigned round = 0u; round < groups.count; ++round) {
    const unsigned turn = round % 2u;
    // What the next rows need others for is sent before this one's columns are looked at, and after its statistics are
    // there: then all blocks have read the parts before those.
    const bool more = round + 1u < groups.count;
    const float next = more ? share_of(round + 1u) : 0.0f;
    Told::wait_for_stats();
    if (more) send(round + 1u, next);
    columns.take(stage_of(round), shared.rstd[turn], shared.rstd_bounds[turn]);
    Told::rows_done(round);
    columns.ask();
  }
}

}  // namespace

bool launch_amax_nvfp4_norm_rows(const Made& x, float* amax_row, float* amax_col, const float* noop, Lane lane) {
  using Config = NvNormRows;
  constexpr int kBytesOfBlock = Config::kBytes + static_cast<int>(sizeof(NormRowsShared)) + 128;
  const bool fits = x.cols > Config::kColumns / 2 && x.cols <= Config::kColumns && x.cols % Config::kStep == 0 &&
                    device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= kBytesOfBlock;
  if (!runs_hopper_code() || !fits || is_shifted(x) || !x.order.ordered) return false;
  const auto kernel = nvfp4_amax_norm_rows_kernel;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kBytes),
             "shared memory for rows");
  // GPUs of one machine are alike.
  static const int64_t resident = resident_clusters(kernel, Config::kCluster, Config::kThreads, Config::kBytes);
  const int64_t room = static_cast<int64_t>(multiprocessors()) * Config::kBlocksPerSm / Config::kCluster;
  const int64_t clusters = smaller(resident, larger(1, room));
  if (clusters == 0 || x.rows / kBlock < clusters) return false;
  launch_amax_reset(amax_row, amax_col, noop, lane);
  const BoxedMatrix rows{const_cast<bf16_t*>(x.data),
                         CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                         {Config::kStep, static_cast<cuuint64_t>(x.cols / Config::kStep),
                          static_cast<cuuint64_t>(x.rows)},
                         {2 * Config::kStep, 2 * static_cast<cuuint64_t>(x.stride)},
                         {Config::kPiece, Config::kPieces, kBlock},
                         BoxPlaces::kPlain};
  launch_close("nvfp4_amax_norm_rows_kernel", kernel, grid_size(clusters * Config::kCluster), Config::kThreads,
               Config::kBytes, lane, map_of(rows), x, amax_row, amax_col, noop);
  return true;
}

}  // namespace cuda
}  // namespace te_dist
