// The CUDA kernels' entry points. Pointers are the device's; everything is queued on the target's stream, nothing is
// allocated and nobody waits. `threads` of the parameters is not used. A workspace has the size that the operation's
// `*_workspace_bytes` says for the same parameters; a null one is as good where that is 0.
#pragma once

#include "../params.h"
#include "launch.h"

namespace rlk {
namespace cuda {

void prefix_counts(const PrefixCountsParams& params, LaunchTarget target);

}  // namespace cuda
}  // namespace rlk
