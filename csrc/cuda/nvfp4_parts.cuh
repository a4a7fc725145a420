// What the kernels that find NVFP4's amaxes leave to the casts of whole tiles behind them, and both's launchers.
#pragma once

#include "nvfp4.cuh"

namespace te_dist {
namespace cuda {

// What all codes and scales of whole tiles follow from, once the amaxes are known (nvfp4_whole.cuh). The first block
// makes it for those that start later. Blank before.
struct alignas(16) NvTables {
  static constexpr unsigned kVectors = 68;
  uint4 of_planes[kVectors];
};

// In the last third of the room of quantize_nvfp4_current.
inline NvTables* nv_tables(float* room) {
  static_assert(sizeof(NvTables) <= kAmaxRoom * sizeof(float), "room for tables");
  return reinterpret_cast<NvTables*>(room + 2 * kAmaxRoom);
}

// Amaxes as blocks of the kernel before have found them (AmaxOut). Whole tiles take these as well.
struct NvParts {
  const float* row;
  const float* col;
  int count;  // 0: they are in place
  float* row_amax;  // either may be null; where they go
  float* col_amax;
  NvTables* tables;  // null, or blank, as a kernel before has left them

  ToBlank to_blank() const { return tables != nullptr ? ToBlank{tables->of_planes, NvTables::kVectors} : ToBlank{}; }
};

// What is known of the kernel in front of a cast of whole tiles, which then starts close behind it. (The cast of any
// tile is up to 4 us slower for it.)
enum class Before {
  kUnknown,
  kFindsAmaxes,
  kWritesToo,  // it finds the amaxes, and writes the matrix
};

// Casts of whole tiles, and whether they take it.
using WholeCast = void(const Input& x, const Nvfp4Options& options, const float* amax_row, const float* amax_col,
                       const NvParts& parts, Before before, const Planes& out, const float* noop, Lane lane);
WholeCast launch_nvfp4_whole, launch_nvfp4_whole_random, launch_nvfp4_whole_squares;
using TakesWhole = bool(const Input& x, const Nvfp4Options& options, const Planes& out);
TakesWhole is_nvfp4_whole, is_nvfp4_whole_random, is_nvfp4_whole_squares;

// nvfp4_amax.cu's, as amax_nvfp4. room: [3, kAmaxRoom]. Where parts.count is 0, the amaxes are in place.
NvParts launch_amax_nvfp4(const Input& x, const Nvfp4Options& options, float* amax_row, float* amax_col, float* room,
                          const float* noop, Lane lane);

}  // namespace cuda
}  // namespace te_dist
