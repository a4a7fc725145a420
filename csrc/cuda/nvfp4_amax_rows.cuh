// NVFP4's two global amaxes of what a norm makes of long rows, in whole tiles: 2 bytes an element, read once.
//
// A cluster of eight blocks takes 16 rows at a time. Each block has an eighth of their columns, those of 16 of the 128
// threads by whose sums statistics are defined (TeamOfRows), as one box, with two more on their way. Eight of its warps
// add up what statistics are made of. Of two rows each, that goes to the shared memory of one block, where a ninth warp
// makes statistics, and sends them to all blocks. Then a thread has 16 rows of four columns. Nothing is made but where
// it may be larger than what is known: of a column's values and the sum of their magnitudes there are bounds, in bf16,
// two an instruction. nvfp4_amax_norm_rows.cu has what an RMSNorm's rows are to this, nvfp4_amax_layer_rows.cu a
// LayerNorm's:
//
//   Parts                  what blocks send to the one that makes the statistics of two rows
//     kBytes               that arrive there
//   Stats                  of 16 rows, in shared memory
//     kBytes               that arrive there
//   Share(x)               of a thread in its row's sums
//     of(stage)            what it has to send
//     send(that, parts, arrival)
//   Maker(x)               of the ninth warp, half of which has a row each
//     read(parts)
//     make(that, row, stats, arrival)  row: the first one's number
//   Columns(x, amax_row, amax_col, known)   a RisingColumns with
//     take(stage, stats)
#pragma once

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
  static constexpr int kFew = 4;  // lanes whose columns a warp makes one after another, rather than all lanes' at once
};

// ---------------------------------------------------------------------------------------------- shared memory
// Of 16 rows, in turn with the next ones.
//
// A warp sends parts of its two rows before it hears the statistics of the 16 before these, and looks at their columns.
// So it has heard the ones before those, whose parts nobody needs any more: there are two places. While a warp looks at
// columns, it has sent the parts of one round on, and others those of three: there are four places for statistics.
template <typename Rows>
struct ClusterShared {
  static constexpr unsigned kStats = 4u;
  typename Rows::Parts parts[2];
  typename Rows::Stats stats[kStats];
  uint32_t known[2];
  Arrival parts_there[2];
  Arrival stats_there[kStats];
  Arrival rows_there[NvNormRows::kStages];
};

// Nobody needs the rows of a round any more, which the ninth warp waits for, and others only tell, by barriers of the
// block. When a warp is done with the next ones, this may not have been heard yet. (It takes as long by mbarriers, but
// what those keep apart, racecheck does not see.)
struct RowsDone {
  static __device__ __forceinline__ void tell(unsigned round) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier(round)), "r"(NvNormRows::kThreads) : "memory");
  }
  static __device__ __forceinline__ void wait(unsigned round) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier(round)), "r"(NvNormRows::kThreads) : "memory");
  }

 private:
  static __device__ __forceinline__ int barrier(unsigned round) {
    return 1 + static_cast<int>(round % 2u);  // 0 is __syncthreads's
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
__device__ __forceinline__ void fetch(Arrival (&there)[NvNormRows::kStages], uint4* memory, const CUtensorMap& boxes,
                                      const RowGroups& groups, unsigned round) {
  using Config = NvNormRows;
  if (round >= groups.count) return;
  const unsigned stage = round % Config::kStages;
  there[stage].expect(Config::kStage * 16);
  load_box(memory + stage * Config::kStage, boxes, Config::kPiece * cluster_member(), 0, groups.row(round),
           there[stage]);
}

// A thread's place in its row.
struct PlaceInRow {
  static constexpr int kRowsOfMember = kBlock / NvNormRows::kCluster;  // whose statistics a block makes

  static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / NvNormRows::kLanes; }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % NvNormRows::kLanes; }
  // Who makes its statistics.
  static __device__ __forceinline__ int maker() { return row() / kRowsOfMember; }
  // Its vectors lie kLanes apart.
  static __device__ __forceinline__ const uint4* vectors(const uint4* stage) {
    return stage + row() * NvNormRows::kRow + lane();
  }
};

// What the lanes of a ninth warp have: half of them a row each, of those whose statistics the block makes.
struct PlaceOfMaker {
  static constexpr int kLanes = 32 / PlaceInRow::kRowsOfMember;  // of a row

  static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x % 32) / kLanes; }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32) % kLanes; }
  // One lane for each member of the cluster, and one for the matrix.
  static __device__ __forceinline__ bool sends() { return lane() < NvNormRows::kCluster; }
  static __device__ __forceinline__ bool writes() { return lane() == NvNormRows::kCluster; }
  // A statistic of the row, to its place in Stats of the lane's member.
  template <typename T>
  static __device__ __forceinline__ void send(T (&of_rows)[kBlock], float value, Arrival& arrival) {
    T* here = &of_rows[cluster_member() * PlaceInRow::kRowsOfMember + row()];
    send_to_member(reinterpret_cast<float*>(here), lane(), value, &arrival);
  }
};

// What the ninth warp does.
template <typename Rows>
__device__ __forceinline__ void make_stats(ClusterShared<Rows>& shared, uint4* memory, const CUtensorMap& boxes,
                                           const Made& x, const RowGroups& groups) {
  constexpr unsigned kStats = ClusterShared<Rows>::kStats;
  const typename Rows::Maker maker(x);
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (unsigned round = 0u; round < groups.count; ++round) {
    const unsigned turn = round % 2u;
    shared.parts_there[turn].wait(round / 2u);
    const auto parts = maker.read(shared.parts[turn]);
    __syncwarp();
    // Before anybody hears the statistics, and sends the next ones.
    if (lane == 0) shared.parts_there[turn].expect(Rows::Parts::kBytes);
    // Written while the kernel before may still run, which knows nothing of it; all before that one has ended.
    maker.make(parts, groups.row(round) + PlaceInRow::kRowsOfMember * cluster_member(), shared.stats[round % kStats],
               shared.stats_there[round % kStats]);
    if (round == 0u) continue;
    // The next ones take the place of the rows before these, and of their statistics, which all have heard.
    RowsDone::wait(round - 1u);
    if (lane != 0) continue;
    shared.stats_there[(round - 1u) % kStats].expect(Rows::Stats::kBytes);
    fetch(shared.rows_there, memory, boxes, groups, round - 1u + NvNormRows::kStages);
  }
  RowsDone::wait(groups.count - 1u);  // no barrier is left half full
}

// ---------------------------------------------------------------------------------------------- columns
// Those that a warp has of 16 rows, each lane four, and the amaxes that they may raise.
template <bool kShifted>
class RisingColumns {
 public:
  // amax_row: null if nobody wants to know.
  __device__ __forceinline__ RisingColumns(const Made& x, float* amax_row, float* amax_col, uint32_t (&known)[2])
      : x_(x),
        with_rows_(amax_row != nullptr),
        col_(column_of(static_cast<int>(threadIdx.x) % 32)),
        of_rows_(amax_row, known[0]),
        of_columns_(amax_col, known[1]) {}

  // For the next rows, when these have raised what they may.
  __device__ __forceinline__ void ask() {
    if (is_time() && KnownAmax::asks(round_)) {
      of_rows_.ask_now();
      of_columns_.ask_now();
    }
    ++round_;
  }

 protected:
  using W = Words<bf16_t>;
  static constexpr int kWordsOfRow = 2 * NvNormRows::kRow;  // pairs of words

  // The lane's columns of row i are pair i * kWordsOfRow + lane.
  static __device__ __forceinline__ const uint2* words_of(const uint4* stage) {
    return reinterpret_cast<const uint2*>(stage + threadIdx.x / 32 * NvNormRows::kLanes);
  }
  __device__ __forceinline__ bool inside(int col) const { return col < x_.cols; }
  // What was asked for last time. False: not this time.
  __device__ __forceinline__ bool hear() {
    if (!is_time()) return false;
    of_rows_.hear();
    of_columns_.hear();
    return true;
  }

  // Makes what lanes have, those that are `rising`, or all if these are many. shifts: where kShifted.
  __device__ __forceinline__ void raise(uint32_t rising, const uint2* words, const float (&rstds)[kBlock],
                                        const float* shifts) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t row_word = 0u;
    uint32_t largest = 0u;
    const auto made = [&](uint32_t word, int row, float2 gain, float2 bias) {
      return norm_of_word<kShifted>(word, rstds[row], kShifted ? shifts[row] : 0.0f, gain, bias);
    };
    if (__popc(rising) <= NvNormRows::kFew) {
      const int row = lane % 16;
      const bool second = lane >= 16;
#pragma unroll 1
      for (; rising != 0u; rising &= rising - 1u) {
        const int whose = __ffs(static_cast<int>(rising)) - 1;
        const int col = column_of(whose);
        if (!inside(col)) continue;  // zeros, of which an infinite rstd makes NaNs
        const float4 gain = load_four_gains(x_, col);
        const float4 bias = biases(col);
        const uint2 two = words[row * kWordsOfRow + whose];
        const uint32_t word = made(second ? two.y : two.x, row,
                                   make_float2(second ? gain.z : gain.x, second ? gain.w : gain.y),
                                   make_float2(second ? bias.z : bias.x, second ? bias.w : bias.y));
        row_word = W::max(row_word, W::magnitude(word));
        largest = max(largest, transformed_across_lanes(word));
      }
    } else if (inside(col_)) {
      const float4 gain = load_four_gains(x_, col_);
      const float4 bias = biases(col_);
      NvPatch<bf16_t, 2> patch;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const uint2 two = words[i * kWordsOfRow + lane];
        patch.word[i][0] = made(two.x, i, make_float2(gain.x, gain.y), make_float2(bias.x, bias.y));
        patch.word[i][1] = made(two.y, i, make_float2(gain.z, gain.w), make_float2(bias.z, bias.w));
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
  KnownAmax of_rows_;
  ColumnAmax of_columns_;

 private:
  // Not every time: what is known changes less and less, and hearing of it takes a tenth of the time.
  __device__ __forceinline__ bool is_time() const {
    constexpr unsigned kAtFirst = 8u;
    constexpr unsigned kOften = 4u;
    return round_ < kAtFirst || round_ % kOften == 0u;
  }
  static __device__ __forceinline__ int column_of(int lane) {
    const int piece = static_cast<int>(threadIdx.x) / 32 * 2 + lane / 16;
    return piece * NvNormRows::kStep + cluster_member() * NvNormRows::kPiece + lane % 16 * 4;
  }
  __device__ __forceinline__ float4 biases(int col) const {
    return kShifted ? load_vector_four(x_.bias, col, kNoBias) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  unsigned round_ = 0u;
};

// ---------------------------------------------------------------------------------------------- kernel
template <typename Rows>
__global__ void TED_IN_CLUSTERS_OF(NvNormRows::kCluster)
    __launch_bounds__(NvNormRows::kThreads, NvNormRows::kBlocksPerSm)
        nvfp4_amax_norm_rows_kernel(const __grid_constant__ CUtensorMap boxes, const __grid_constant__ Made x,
                                    float* amax_row, float* amax_col, const float* noop) {
  constexpr unsigned kStages = NvNormRows::kStages;
  extern __shared__ __align__(128) uint4 memory[];
  __shared__ ClusterShared<Rows> shared;
  let_next_kernel_start();
  if (is_noop(noop)) return;
  const RowGroups groups(x.rows);
  const bool is_ninth = threadIdx.x / 32 == NvNormRows::kWarps;
  const bool asks = is_ninth && threadIdx.x % 32 == 0;
  if (asks) {
    shared.known[0] = shared.known[1] = 0u;
#pragma unroll
    for (Arrival& there : shared.parts_there) there.init(), there.expect(Rows::Parts::kBytes);
#pragma unroll
    for (Arrival& there : shared.stats_there) there.init(), there.expect(Rows::Stats::kBytes);
#pragma unroll
    for (Arrival& there : shared.rows_there) there.init();
  }
  cluster_arrive();  // all blocks run, and are ready for what others send
  // Behind that, which would wait for all that was asked for before: 7 us, in which nobody looks at what has come.
  for (unsigned stage = 0u; asks && stage < kStages; ++stage) fetch(shared.rows_there, memory, boxes, groups, stage);
  cluster_wait();
  if (is_ninth) return make_stats<Rows>(shared, memory, boxes, x, groups);

  const auto stage_of = [&](unsigned round) { return memory + round % kStages * NvNormRows::kStage; };
  const typename Rows::Share share(x);
  const auto share_of = [&](unsigned round) {
    shared.rows_there[round % kStages].wait(round / kStages);
    return share.of(stage_of(round));
  };
  const auto send = [&](unsigned round, const auto& what) {
    share.send(what, shared.parts[round % 2u], shared.parts_there[round % 2u]);
  };
  send(0u, share_of(0u));
  wait_for_kernel_before();  // which zeroes both amaxes
  typename Rows::Columns columns(x, amax_row, amax_col, shared.known);
#pragma unroll 1
  for (unsigned round = 0u; round < groups.count; ++round) {
    // What the next rows need others for is on its way while this one's columns are looked at.
    if (round + 1u < groups.count) send(round + 1u, share_of(round + 1u));
    constexpr unsigned kStats = ClusterShared<Rows>::kStats;
    shared.stats_there[round % kStats].wait(round / kStats);
    columns.take(stage_of(round), shared.stats[round % kStats]);
    RowsDone::tell(round);
    columns.ask();
  }
}

// False: nothing was done.
template <typename Rows>
bool launch_amax_rows(const Made& x, float* amax_row, float* amax_col, const ToBlank& blank, const float* noop,
                      Lane lane) {
  using Config = NvNormRows;
  constexpr int kBytesOfBlock = Config::kBytes + static_cast<int>(sizeof(ClusterShared<Rows>)) + 128;
  const bool fits = x.cols > Config::kColumns / 2 && x.cols <= Config::kColumns && x.cols % Config::kStep == 0 &&
                    device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= kBytesOfBlock;
  if (!runs_hopper_code() || !fits || !x.order.ordered) return false;
  const auto kernel = nvfp4_amax_norm_rows_kernel<Rows>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kBytes),
             "shared memory for rows");
  // GPUs of one machine are alike.
  static const int64_t resident = resident_clusters(kernel, Config::kCluster, Config::kThreads, Config::kBytes);
  const int64_t room = static_cast<int64_t>(multiprocessors()) * Config::kBlocksPerSm / Config::kCluster;
  const int64_t clusters = smaller(resident, larger(1, room));
  if (clusters == 0 || x.rows / kBlock < clusters) return false;
  launch_amax_reset(amax_row, amax_col, noop, lane, blank);
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

}  // namespace
}  // namespace cuda
}  // namespace te_dist
