// What the kernels take from CUDA, and the only macros they need. nvcc gives it, or csrc/host_device/ on the CPU.
//
//   RLK_KERNEL(threads, blocks) void name(..)  a kernel of at most that many threads a block, of which as many blocks
//                                            have their registers on a multiprocessor
//   RLK_DEVICE                               a function that kernels call
//   RLK_UNROLL for (...)                     arrays indexed in it can be registers
//   RLK_SHARED(Type, name, count)            Type* name: memory of a block
//   RLK_DYNAMIC_SHARED(Type, name)           the same, of the size that the launch says
//   RLK_LAUNCH(target, (kernel), blocks, threads, dynamic_bytes, arguments...)
#pragma once

#include <cstddef>
#include <cstdint>

#include "../check.h"
#include "kernels.h"

namespace rlk {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

}  // namespace rlk

#ifdef RLK_HOST_DEVICE

#include "../host_device/runtime.h"

#define RLK_KERNEL(threads, blocks) static
#define RLK_DEVICE inline
#define RLK_UNROLL
#define RLK_SHARED(Type, name, count) \
  static char name##_key;             \
  Type* const name = static_cast<Type*>(rlk::host_device::static_shared(&name##_key, (count) * sizeof(Type)))
#define RLK_DYNAMIC_SHARED(Type, name) Type* const name = static_cast<Type*>(rlk::host_device::dynamic_shared())

namespace rlk {

inline int thread_index() { return host_device::thread_index(); }
inline int64_t block_index() { return host_device::block_index(); }
inline int block_size() { return host_device::block_size(); }

template <class... Params, class... Args>
void launch(LaunchTarget, const char* name, void (*kernel)(Params...), int64_t blocks, int threads,
            size_t dynamic_bytes, Args... args) {
  host_device::run(name, blocks, threads, dynamic_bytes, [=] { kernel(args...); });
}

}  // namespace rlk

#else

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#define RLK_KERNEL(threads, blocks) static __global__ __launch_bounds__(threads, blocks)
#define RLK_DEVICE __device__ __forceinline__
#define RLK_UNROLL _Pragma("unroll")
#define RLK_SHARED(Type, name, count)                                          \
  __shared__ __align__(16) unsigned char name##_bytes[(count) * sizeof(Type)]; \
  Type* const name = reinterpret_cast<Type*>(name##_bytes)
#define RLK_DYNAMIC_SHARED(Type, name)                                \
  extern __shared__ __align__(16) unsigned char rlk_dynamic_shared[]; \
  Type* const name = reinterpret_cast<Type*>(rlk_dynamic_shared)

namespace rlk {

RLK_DEVICE int thread_index() { return threadIdx.x; }
RLK_DEVICE int64_t block_index() { return blockIdx.x; }
RLK_DEVICE int block_size() { return blockDim.x; }

inline void check_cuda(cudaError_t status, const char* doing) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(doing) + ": " + cudaGetErrorString(status));
}

// A launch with more than 48 KiB, the kernel's own included, has to be allowed first. All of them are, whatever this
// one needs, so that other threads may launch the kernel with other sizes meanwhile.
template <class Kernel>
void allow_all_shared_memory(Kernel kernel, const char* name) {
  int device = 0, limit = 0;
  cudaFuncAttributes attributes = {};
  check_cuda(cudaGetDevice(&device), name);
  check_cuda(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), name);
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), name);
  const int dynamic = limit - static_cast<int>(attributes.sharedSizeBytes);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic), name);
}

template <class... Params, class... Args>
void launch(LaunchTarget target, const char* name, void (*kernel)(Params...), int64_t blocks, int threads,
            size_t dynamic_bytes, Args... args) {
  if (blocks == 0) return;
  if (blocks > INT32_MAX) fail(name, ": expected at most 2^31 - 1 blocks, got ", blocks);
  if (dynamic_bytes > 0) allow_all_shared_memory(kernel, name);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = dynamic_bytes;
  config.stream = static_cast<cudaStream_t>(target.stream);
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), name);
}

}  // namespace rlk

#endif

#define RLK_LAUNCH(target, kernel, ...) rlk::launch(target, #kernel, kernel, __VA_ARGS__)
