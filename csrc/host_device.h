// HOST_DEVICE marks mathematics that g++ and nvcc compile from the same text.
#pragma once

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HOST_DEVICE inline __attribute__((always_inline))
#endif
