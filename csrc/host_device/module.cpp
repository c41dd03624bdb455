// A Python module of the CUDA kernels as the CPU runs them: the functions of rlkernels._native.cuda on CPU addresses.
#include <pybind11/stl.h>

#include "../cuda/bind.h"
#include "runtime.h"

PYBIND11_MODULE(_host_device, m) {
  m.doc() = "CUDA kernels of rlkernels, run on the CPU for tests.";
  rlk::bind::bind_params(m);
  rlk::cuda::bind_kernels(m);
  m.def("launched_kernels", &rlk::host_device::launched_kernels);
  m.def("set_schedule", &rlk::host_device::set_schedule, pybind11::arg("seed"));
}
