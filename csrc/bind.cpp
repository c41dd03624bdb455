// The Python face of the native code: structs by keyword, pointers as integers, the GIL released.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind_params.h"
#include "cpu/buffer_pool.h"
#include "cpu/dispatch.h"
#include "row_math.h"
#ifdef RLK_CUDA
#include "cuda/bind.h"
#endif

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  m.doc() = "CPU and CUDA kernels of rlkernels. Called by rlkernels.backends alone.";

  m.def("available_isas", &rlk::available_isas);
  m.def("current_isa", &rlk::current_isa);
  m.def("set_isa", &rlk::set_isa, py::arg("name"));

  py::class_<rlk::Buffer>(m, "Buffer", py::buffer_protocol())
      .def(py::init<size_t>(), py::arg("bytes"))
      .def_buffer([](rlk::Buffer& buffer) {
        return py::buffer_info(static_cast<uint8_t*>(buffer.data()), static_cast<py::ssize_t>(buffer.bytes()));
      });
  m.def("idle_bytes", &rlk::idle_bytes);
  m.def("free_idle_buffers", &rlk::free_idle_buffers);
  m.attr("idle_limit") = rlk::kIdleLimit;

  const auto released = py::call_guard<py::gil_scoped_release>();
  rlk::bind::bind_params(m);
  m.attr("row_state_bytes") = sizeof(rlk::RowState<double>);
  m.def("token_stats_forward", &rlk::token_stats_forward, py::arg("params"), released);
  m.def("token_stats_backward", &rlk::token_stats_backward, py::arg("params"), released);
  m.def("policy_objective", &rlk::policy_objective, py::arg("params"), released);
  m.def("policy_sweep", &rlk::policy_sweep, py::arg("params"), released);
  m.def("prefix_counts", &rlk::prefix_counts, py::arg("params"), released);

#ifdef RLK_CUDA
  py::module_ cuda = m.def_submodule("cuda", "CUDA kernels.");
  for (const char* name :
       {"LogitsView", "RowScaling", "RowStatsOut", "TokenStatsForwardParams", "TokenStatsBackwardParams",
        "ObjectiveOptions", "PolicyObjectiveParams", "PolicySweepParams", "PrefixCountsParams"}) {
    cuda.attr(name) = m.attr(name);
  }
  rlk::cuda::bind_kernels(cuda);
  cuda.def("driver_version", &rlk::cuda::driver_version);
  cuda.def("runtime_version", &rlk::cuda::runtime_version);
  cuda.def(
      "device_limits",
      [](int device) {
        const rlk::cuda::DeviceLimits limits = rlk::cuda::device_limits(device);
        return py::make_tuple(limits.multiprocessors, limits.shared_bytes);
      },
      py::arg("device"));
#endif
}
