// Runs CUDA kernels, compiled as ordinary C++, on the CPU: one fiber a CUDA thread, one block after another.
//
// A fiber runs until it exits or waits: for its block at __syncthreads, for the lanes that it names at __syncwarp, a
// shuffle or a vote. As in CUDA, threads that have exited are not waited for, and a block's last warp may have fewer
// lanes. If nobody can go on, the launch fails and says who waits for what. The order in which fibers run can be
// varied, so that a missing barrier shows in the results; ThreadSanitizer sees it in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace rlk {
namespace host_device {

void run(const char* kernel, int64_t blocks, int threads, size_t dynamic_bytes, const std::function<void()>& body);

// Names of the kernels launched since the process began, as they stand in RLK_LAUNCH.
std::vector<std::string> launched_kernels();

// 0: threads and blocks in rising order, 1: in falling order, others: shuffled.
void set_schedule(uint64_t seed);

int thread_index();
int64_t block_index();
int block_size();

// Memory of the running block, filled with 0xFF.
void* static_shared(const void* key, size_t bytes);
void* dynamic_shared();

enum class WarpOperation { kBarrier, kShuffle, kBallot };

void block_barrier();
// Waits for the lanes of `mask`. A shuffle returns `value` of lane `source`, or 0xFF bytes if it does not take part.
uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, int source);

inline int lane() { return thread_index() % 32; }

}  // namespace host_device
}  // namespace rlk

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline void __stwb(uint4* address, uint4 value) { *address = value; }

inline void __syncthreads() { rlk::host_device::block_barrier(); }

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  rlk::host_device::warp_operation(rlk::host_device::WarpOperation::kBarrier, mask, 0, 0);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  using rlk::host_device::WarpOperation;
  return static_cast<unsigned>(rlk::host_device::warp_operation(WarpOperation::kBallot, mask, predicate != 0, 0));
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  using rlk::host_device::WarpOperation;
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = rlk::host_device::warp_operation(WarpOperation::kShuffle, mask, bits, source);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, rlk::host_device::lane() ^ lanes);
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }
