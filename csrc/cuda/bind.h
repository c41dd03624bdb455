// The CUDA kernels in Python; the same for those that csrc/host_device/ runs on the CPU.
#pragma once

#include "../bind_params.h"
#include "../row_math.h"
#include "kernels.h"

namespace rlk {
namespace cuda {

inline void bind_kernels(pybind11::module_& m) {
  namespace py = pybind11;
  using bind::pointer;
  const auto released = py::call_guard<py::gil_scoped_release>();
  m.attr("row_state_bytes") = sizeof(RowState<double>);
  m.def("token_stats_workspace_bytes", &token_stats_workspace_bytes, py::arg("params"), py::arg("multiprocessors"));
  m.def(
      "token_stats_forward",
      [](const TokenStatsForwardParams& params, uintptr_t stream, uintptr_t workspace) {
        token_stats_forward(params, LaunchTarget{pointer(stream)}, pointer(workspace));
      },
      py::arg("params"), py::kw_only(), py::arg("stream"), py::arg("workspace"), released);
  m.def(
      "token_stats_backward",
      [](const TokenStatsBackwardParams& params, uintptr_t stream, int multiprocessors) {
        token_stats_backward(params, LaunchTarget{pointer(stream)}, multiprocessors);
      },
      py::arg("params"), py::kw_only(), py::arg("stream"), py::arg("multiprocessors"), released);
  m.def("policy_objective_workspace_bytes", &policy_objective_workspace_bytes, py::arg("params"));
  m.def(
      "policy_objective",
      [](const PolicyObjectiveParams& params, uintptr_t stream, uintptr_t workspace) {
        policy_objective(params, LaunchTarget{pointer(stream)}, pointer(workspace));
      },
      py::arg("params"), py::kw_only(), py::arg("stream"), py::arg("workspace"), released);
  m.def("policy_sweep_workspace_bytes", &policy_sweep_workspace_bytes, py::arg("params"), py::arg("multiprocessors"));
  m.def(
      "policy_sweep",
      [](const PolicySweepParams& params, uintptr_t stream, uintptr_t workspace, int multiprocessors,
         size_t shared_limit) {
        policy_sweep(params, LaunchTarget{pointer(stream)}, pointer(workspace), multiprocessors, shared_limit);
      },
      py::arg("params"), py::kw_only(), py::arg("stream"), py::arg("workspace"), py::arg("multiprocessors"),
      py::arg("shared_limit"), released);
  m.def(
      "scale_unless_one",
      [](uintptr_t values, int dtype, int64_t count, uintptr_t factor, uintptr_t stream) {
        scale_unless_one(pointer(values), static_cast<DType>(dtype), count, pointer(factor),
                         LaunchTarget{pointer(stream)});
      },
      py::kw_only(), py::arg("values"), py::arg("dtype"), py::arg("count"), py::arg("factor"), py::arg("stream"),
      released);
  m.def(
      "prefix_counts",
      [](const PrefixCountsParams& params, uintptr_t stream) { prefix_counts(params, LaunchTarget{pointer(stream)}); },
      py::arg("params"), py::kw_only(), py::arg("stream"), released);
}

}  // namespace cuda
}  // namespace rlk
