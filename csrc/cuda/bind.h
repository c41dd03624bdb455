// The CUDA kernels in Python; the same for those that csrc/host_device/ runs on the CPU.
#pragma once

#include "../bind_params.h"
#include "../check_params.h"
#include "../row_math.h"
#include "kernels.h"

namespace rlk {
namespace cuda {

// A pointer's alignment is all that can be known of a workspace.
inline void* workspace_at(uintptr_t address, bool is_needed) {
  const StructCheck s("workspace");
  void* const workspace = bind::pointer(address);
  s.array("address", workspace, is_needed ? 1 : 0, alignof(RowState<double>));
  return workspace;
}

inline void check_multiprocessors(int count) {
  StructCheck("device").within("multiprocessors", count, 1, std::numeric_limits<int>::max());
}

inline void bind_kernels(pybind11::module_& m) {
  namespace py = pybind11;
  using bind::pointer;
  const auto released = py::call_guard<py::gil_scoped_release>();
  m.attr("row_state_bytes") = sizeof(RowState<double>);
  m.def(
      "token_stats_workspace_bytes",
      [](const TokenStatsForwardParams& params, int multiprocessors) {
        check(params, RunsOn::kDevice);
        check_multiprocessors(multiprocessors);
        return token_stats_workspace_bytes(params, multiprocessors);
      },
      py::arg("params"), py::arg("multiprocessors"));
  m.def(
      "token_stats_forward",
      [](const TokenStatsForwardParams& params, uintptr_t stream, uintptr_t workspace) {
        check(params, RunsOn::kDevice);
        token_stats_forward(params, LaunchTarget{pointer(stream)}, workspace_at(workspace, false));
      },
      py::arg("params"), py::kw_only(), py::arg("stream"), py::arg("workspace"), released);
  m.def(
      "token_stats_backward",
      [](const TokenStatsBackwardParams& params, uintptr_t stream, int multiprocessors) {
        check(params, RunsOn::kDevice);
        check_multiprocessors(multiprocessors);
        token_stats_backward(params, LaunchTarget{pointer(stream)}, multiprocessors);
      },
      py::arg("params"), py::kw_only(), py::arg("stream"), py::arg("multiprocessors"), released);
  m.def(
      "policy_objective_workspace_bytes",
      [](const PolicyObjectiveParams& params) {
        check(params, RunsOn::kDevice);
        return policy_objective_workspace_bytes(params);
      },
      py::arg("params"));
  m.def(
      "policy_objective",
      [](const PolicyObjectiveParams& params, uintptr_t stream, uintptr_t workspace) {
        check(params, RunsOn::kDevice);
        policy_objective(params, LaunchTarget{pointer(stream)}, workspace_at(workspace, true));
      },
      py::arg("params"), py::kw_only(), py::arg("stream"), py::arg("workspace"), released);
  m.def(
      "policy_sweep_workspace_bytes",
      [](const PolicySweepParams& params, int multiprocessors) {
        check(params, RunsOn::kDevice);
        check_multiprocessors(multiprocessors);
        return policy_sweep_workspace_bytes(params, multiprocessors);
      },
      py::arg("params"), py::arg("multiprocessors"));
  m.def(
      "policy_sweep",
      [](const PolicySweepParams& params, uintptr_t stream, uintptr_t workspace, int multiprocessors,
         size_t shared_limit) {
        check(params, RunsOn::kDevice);
        check_multiprocessors(multiprocessors);
        policy_sweep(params, LaunchTarget{pointer(stream)}, workspace_at(workspace, true), multiprocessors,
                     shared_limit);
      },
      py::arg("params"), py::kw_only(), py::arg("stream"), py::arg("workspace"), py::arg("multiprocessors"),
      py::arg("shared_limit"), released);
  m.def(
      "scale_unless_one",
      [](uintptr_t values, int dtype, int64_t count, uintptr_t factor, uintptr_t stream) {
        const StructCheck s("scale_unless_one");
        const DType code = static_cast<DType>(dtype);
        s.code("dtype", code, DType::kFloat64, DType::kFloat16);
        s.size("count", count);
        s.array("values", pointer(values), count, element_bytes(code));
        s.array("factor", pointer(factor), count, element_bytes(compute_dtype(code)));
        scale_unless_one(pointer(values), code, count, pointer(factor), LaunchTarget{pointer(stream)});
      },
      py::kw_only(), py::arg("values"), py::arg("dtype"), py::arg("count"), py::arg("factor"), py::arg("stream"),
      released);
  m.def(
      "prefix_counts",
      [](const PrefixCountsParams& params, uintptr_t stream) {
        check(params, RunsOn::kDevice);
        prefix_counts(params, LaunchTarget{pointer(stream)});
      },
      py::arg("params"), py::kw_only(), py::arg("stream"), released);
}

}  // namespace cuda
}  // namespace rlk
