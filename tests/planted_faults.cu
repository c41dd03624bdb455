// Kernels with faults that the emulation of csrc/host_device/ must report, and their right twins.
#include <pybind11/pybind11.h>

#include "../csrc/cuda/launch.h"

namespace {

constexpr int kThreads = 64;

// out[i] = the left neighbour's index, handed over in shared memory.
RLK_KERNEL(kThreads, 1) void hand_over_kernel(int* out, bool with_barrier) {
  RLK_DYNAMIC_SHARED(int, slots);
  const int i = rlk::thread_index();
  slots[i] = i;
  if (with_barrier) __syncthreads();
  out[rlk::block_index() * kThreads + i] = slots[(i + kThreads - 1) % kThreads];
}

// Waits for the block in one warp only, or for a lane that never comes.
RLK_KERNEL(kThreads, 1) void wait_for_each_other_kernel(bool in_warp) {
  const int i = rlk::thread_index();
  if (in_warp) {
    if (i == 5) __syncthreads();
    __syncwarp();
  } else {
    if (i < 32) __syncthreads();
    if (i >= 32) __shfl_sync(rlk::kAllLanes >> 1, i, 0);
  }
}

// Lanes that have exited are not waited for; a value of theirs is no value.
RLK_KERNEL(kThreads, 1) void leave_early_kernel(int* out) {
  const int i = rlk::thread_index();
  if (i % 2 == 1) return;
  out[i] = __shfl_xor_sync(rlk::kAllLanes, i, 2);
  out[i + 1] = __shfl_xor_sync(rlk::kAllLanes, i, 1);
  __syncthreads();
}

RLK_KERNEL(kThreads, 1) void vote_kernel(unsigned* out) {
  const int i = rlk::thread_index();
  out[i] = __ballot_sync(rlk::kAllLanes, i % 3 == 0);
}

// Every block writes the same element.
RLK_KERNEL(kThreads, 1) void write_from_every_block_kernel(int* out) {
  if (rlk::thread_index() == 0) out[0] = static_cast<int>(rlk::block_index());
}

int* pointer(uintptr_t address) { return reinterpret_cast<int*>(address); }

constexpr rlk::LaunchTarget kHere = {nullptr};

}  // namespace

PYBIND11_MODULE(_planted_faults, m) {
  m.attr("threads") = kThreads;
  m.def("set_schedule", &rlk::host_device::set_schedule);
  m.def("hand_over", [](uintptr_t out, bool with_barrier, size_t missing_bytes) {
    RLK_LAUNCH(kHere, (hand_over_kernel), 2, kThreads, kThreads * sizeof(int) - missing_bytes, pointer(out),
               with_barrier);
  });
  m.def("wait_for_each_other",
        [](bool in_warp) { RLK_LAUNCH(kHere, (wait_for_each_other_kernel), 2, kThreads, 0, in_warp); });
  m.def("leave_early",
        [](uintptr_t out, int threads) { RLK_LAUNCH(kHere, (leave_early_kernel), 1, threads, 0, pointer(out)); });
  m.def("vote", [](uintptr_t out, int threads) {
    RLK_LAUNCH(kHere, (vote_kernel), 1, threads, 0, reinterpret_cast<unsigned*>(out));
  });
  m.def("write_from_every_block",
        [](uintptr_t out) { RLK_LAUNCH(kHere, (write_from_every_block_kernel), 2, kThreads, 0, pointer(out)); });
}
