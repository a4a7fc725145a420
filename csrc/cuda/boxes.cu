// Asks the driver for what the engine needs to know of a matrix. Not linked with the driver: the library has to load
// where there is none.
#include "boxes.cuh"

namespace te_dist {
namespace cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

constexpr const char* kEncode = "cuTensorMapEncodeTiled";

Encode find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  check_cuda(cudaGetDriverEntryPointByVersion(kEncode, &found, 12000, cudaEnableDefault, &status), kEncode);
#else
  check_cuda(cudaGetDriverEntryPoint(kEncode, &found, cudaEnableDefault, &status), kEncode);
#endif
  if (found == nullptr || status != cudaDriverEntryPointSuccess) {
    check::fail_at_run_time(kEncode, "this driver does not have it");
  }
  return reinterpret_cast<Encode>(found);
}

}  // namespace

CUtensorMap map_of(const BoxedMatrix& matrix) {
  static const Encode encode = find_encode();
  constexpr cuuint32_t kEach[3] = {1u, 1u, 1u};
  const bool spread = matrix.places == BoxPlaces::kSpread;
  CUtensorMap map;
  const CUresult status = encode(&map, matrix.type, 3u, matrix.data, matrix.size, matrix.step, matrix.box, kEach,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 spread ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_NONE,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TED_CHECK(status == CUDA_SUCCESS, kEncode, " answers ", static_cast<int>(status), " for a matrix of ",
            matrix.size[0], " x ", matrix.size[1], " x ", matrix.size[2], ", steps ", matrix.step[0], " and ",
            matrix.step[1], " bytes");
  return map;
}

}  // namespace cuda
}  // namespace te_dist
