// The two ways to write a produced matrix: aligned bf16 by tiles in shared memory, anything else as it comes.
#pragma once

#include "common.cuh"

namespace te_dist {
namespace cuda {

void launch_produce_made(const Source& x, const Output& out, Lane lane);

}  // namespace cuda
}  // namespace te_dist
