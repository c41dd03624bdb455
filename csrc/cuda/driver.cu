#include "launch.h"

namespace rlk {
namespace cuda {

int driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

int runtime_version() { return CUDART_VERSION; }

DeviceLimits device_limits(int device) {
  int multiprocessors = 0, shared_bytes = 0;
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  check_cuda(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory");
  return {multiprocessors, static_cast<size_t>(shared_bytes)};
}

}  // namespace cuda
}  // namespace rlk
