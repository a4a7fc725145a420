// The two kernels of a norm's gradient.
#pragma once

#include "row_team.cuh"

namespace te_dist {
namespace cuda {

struct NormGradTask {
  RowView x;
  RowView grad;
  RowView dx;
  RowView weight;
  int64_t rows;
  int64_t stride;
  int64_t grad_stride;
  bool zero_centered;
  const float* mean;  // null: RMSNorm
  const float* rstd;
  float* weight_partials;  // may be null
  float* bias_partials;    // may be null
};

// One pass over rows that wait in shared memory; false: it does not take this.
bool launch_norm_grad_rows(const NormGradTask& task, Lane lane);

}  // namespace cuda
}  // namespace te_dist
