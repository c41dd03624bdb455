#include "launch.h"

namespace rlk {
namespace cuda {

int driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

}  // namespace cuda
}  // namespace rlk
