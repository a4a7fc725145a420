// The statistics of a norm's rows, in a launch of their own.
#pragma once

#include "common.cuh"

namespace te_dist {
namespace cuda {

// Fills x.mean (where there is one) and x.rstd; any float type, stride and alignment.
void launch_norm_stats(const Source& x, const float* noop, Lane lane);

}  // namespace cuda
}  // namespace te_dist
