// The CUDA kernels' entry points. Pointers are the device's; everything is queued on the target's stream, nothing is
// allocated and nobody waits. The caller makes the device the current one, as only it knows whether one that was
// current before has a context to go back to. `threads` of the parameters is not used. A workspace has the size that
// the operation's `*_workspace_bytes` says for the same parameters, and is null where that is 0.
#pragma once

#include <cstddef>

#include "../params.h"

namespace rlk {

// Where kernels run: a cudaStream_t of the calling thread's current device.
struct LaunchTarget {
  void* stream;
};

namespace cuda {

// As CUDA numbers its versions, 1000 major + 10 minor: what NVIDIA's driver supports, 0 without one; and what the
// kernels were built with.
int driver_version();
int runtime_version();

struct DeviceLimits {
  int multiprocessors;
  size_t shared_bytes;  // that a block may ask for
};
DeviceLimits device_limits(int device);

// Where rows are too few to keep a device's multiprocessors busy, a row is split over blocks.
size_t token_stats_workspace_bytes(const TokenStatsForwardParams& params, int multiprocessors);
void token_stats_forward(const TokenStatsForwardParams& params, LaunchTarget target, void* workspace);
void token_stats_backward(const TokenStatsBackwardParams& params, LaunchTarget target, int multiprocessors);

size_t policy_objective_workspace_bytes(const PolicyObjectiveParams& params);
void policy_objective(const PolicyObjectiveParams& params, LaunchTarget target, void* workspace);

// `shared_limit`: bytes of shared memory that a block may ask for.
size_t policy_sweep_workspace_bytes(const PolicySweepParams& params, int multiprocessors);
void policy_sweep(const PolicySweepParams& params, LaunchTarget target, void* workspace, int multiprocessors,
                  size_t shared_limit);
// Multiplies by a number on the device, which is of the compute type; leaves the values alone where it is 1.
void scale_unless_one(void* values, DType dtype, int64_t count, const void* factor, LaunchTarget target);

void prefix_counts(const PrefixCountsParams& params, LaunchTarget target);

}  // namespace cuda
}  // namespace rlk
