// Sums and maxima over a warp or a block, always added in the same order; every thread gets them.
#pragma once

#include "launch.h"

namespace rlk {
namespace cuda {

template <class T, class Fold>
RLK_DEVICE T warp_reduce(T value, Fold fold) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value = fold(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  return value;
}

template <class T>
RLK_DEVICE T warp_sum(T value) {
  return warp_reduce(value, [](T a, T b) { return a + b; });
}

// Either may be NaN: it is passed over.
template <class T>
RLK_DEVICE T warp_max(T value) {
  return warp_reduce(value, [](T a, T b) { return a > b ? a : b; });
}

// Of a block of kThreads. `scratch` holds kThreads / kWarp values; a barrier must stand between two uses of it.
template <int kThreads, class T, class Fold>
RLK_DEVICE T block_reduce(T value, T* scratch, Fold fold) {
  value = warp_reduce(value, fold);
  if (thread_index() % kWarp == 0) scratch[thread_index() / kWarp] = value;
  __syncthreads();
  T result = scratch[0];
  for (int warp = 1; warp < kThreads / kWarp; ++warp) result = fold(result, scratch[warp]);
  return result;
}

}  // namespace cuda
}  // namespace rlk
