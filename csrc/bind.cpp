// The Python face of the native code: pointers as integers, everything by keyword, the GIL released.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/buffer_pool.h"
#include "cpu/dispatch.h"
#include "row_math.h"

namespace py = pybind11;

namespace {

template <class T = void>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

rlk::LogitsView logits_view(uintptr_t data, int dtype, py::tuple sizes, py::tuple strides) {
  const auto at = [](const py::tuple& values, size_t i) { return values[i].cast<int64_t>(); };
  return {pointer(data),  static_cast<rlk::DType>(dtype),
          at(sizes, 0),   at(sizes, 1),
          at(sizes, 2),   at(strides, 0),
          at(strides, 1), at(strides, 2)};
}

rlk::RowScaling row_scaling(uintptr_t temperature, int64_t temperature_stride, uintptr_t softcap,
                            uintptr_t logit_scale) {
  return {pointer(temperature), temperature_stride, pointer(softcap), pointer(logit_scale)};
}

// Keyword arguments by the names of a struct's fields.
class Fields {
 public:
  explicit Fields(const py::kwargs& values) : values_(values) {}

  template <class T>
  T get(const char* name) const {
    if constexpr (std::is_enum_v<T>) {
      return static_cast<T>(get<int>(name));
    } else if constexpr (std::is_arithmetic_v<T>) {
      return static_cast<T>(values_[name].cast<double>());  // codes and flags may come as floats
    } else {
      return values_[name].cast<T>();
    }
  }
  template <class T = void>
  T* address(const char* name) const {
    return pointer<T>(values_[name].cast<uintptr_t>());
  }
  template <class T>
  void read(const char* name, T& field) const {
    if constexpr (std::is_pointer_v<T>) {
      field = address<std::remove_pointer_t<T>>(name);
    } else {
      field = get<T>(name);
    }
  }

 private:
  const py::kwargs& values_;
};

#define RLK_READ(name) fields.read(#name, out.name)

rlk::ObjectiveOptions objective_options(const py::kwargs& kwargs) {
  const Fields fields(kwargs);
  rlk::ObjectiveOptions out;
  RLK_READ(kind);
  RLK_READ(level);
  RLK_READ(log_ratio_clamp);
  RLK_READ(ratio_min);
  RLK_READ(ratio_max);
  RLK_READ(dual_clip);
  RLK_READ(ratio_cap);
  RLK_READ(log_ratio_min);
  RLK_READ(log_ratio_max);
  RLK_READ(clips_sequence);
  RLK_READ(tau_pos);
  RLK_READ(tau_neg);
  RLK_READ(min_ratio);
  RLK_READ(negative_weight);
  RLK_READ(rate_min);
  RLK_READ(rate_max);
  RLK_READ(prompt_weight);
  RLK_READ(kl_coef);
  RLK_READ(kl_estimator);
  RLK_READ(kl_clamp);
  RLK_READ(kl_importance_weighted);
  RLK_READ(entropy_coef);
  return out;
}

rlk::PolicyObjectiveParams policy_objective_params(const py::kwargs& kwargs) {
  const Fields fields(kwargs);
  rlk::PolicyObjectiveParams out;
  RLK_READ(options);
  RLK_READ(dtype);
  RLK_READ(tokens);
  RLK_READ(sequences);
  RLK_READ(width);
  RLK_READ(cu_seqlens);
  RLK_READ(mask);
  RLK_READ(logp);
  RLK_READ(entropy);
  RLK_READ(old_logp);
  RLK_READ(ref_logp);
  RLK_READ(weight);
  RLK_READ(advantages);
  RLK_READ(policy_weight);
  RLK_READ(success_rate);
  RLK_READ(advantages_per_token);
  RLK_READ(policy_weight_per_token);
  RLK_READ(success_rate_per_token);
  RLK_READ(reduction);
  RLK_READ(entropy_reduction);
  RLK_READ(normalizer);
  RLK_READ(entropy_normalizer);
  RLK_READ(loss);
  RLK_READ(metrics);
  RLK_READ(dlogp);
  RLK_READ(dentropy);
  RLK_READ(threads);
  return out;
}

#undef RLK_READ

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "CPU kernels of rlkernels. Called by rlkernels.backends.native alone.";

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

  py::class_<rlk::LogitsView>(m, "LogitsView")
      .def(py::init(&logits_view), py::kw_only(), py::arg("data"), py::arg("dtype"), py::arg("sizes"),
           py::arg("strides"));
  py::class_<rlk::RowScaling>(m, "RowScaling")
      .def(py::init(&row_scaling), py::kw_only(), py::arg("temperature"), py::arg("temperature_stride"),
           py::arg("softcap"), py::arg("logit_scale"));

  m.attr("row_state_bytes") = sizeof(rlk::RowState<double>);

  m.def(
      "token_stats_forward",
      [](const rlk::LogitsView& logits, const rlk::RowScaling& scaling, int64_t vocab, int64_t vocab_start,
         uintptr_t targets, int64_t ignore_index, uintptr_t logp, uintptr_t entropy, uintptr_t lse,
         uintptr_t log_sum_sq_probs, uintptr_t mean_logits, uintptr_t is_top1, uintptr_t row_max, uintptr_t log_sum_exp,
         uintptr_t states, int threads) {
        const rlk::RowStatsOut out = {
            pointer(logp),        pointer(entropy),          pointer(lse),     pointer(log_sum_sq_probs),
            pointer(mean_logits), pointer<uint8_t>(is_top1), pointer(row_max), pointer(log_sum_exp)};
        rlk::token_stats_forward({logits, vocab, vocab_start, pointer<int64_t>(targets), ignore_index, scaling, out,
                                  pointer(states), threads});
      },
      py::kw_only(), py::arg("logits"), py::arg("scaling"), py::arg("vocab"), py::arg("vocab_start"),
      py::arg("targets"), py::arg("ignore_index"), py::arg("logp"), py::arg("entropy"), py::arg("lse"),
      py::arg("log_sum_sq_probs"), py::arg("mean_logits"), py::arg("is_top1"), py::arg("row_max"),
      py::arg("log_sum_exp"), py::arg("states"), py::arg("threads"), py::call_guard<py::gil_scoped_release>());

  m.def(
      "token_stats_backward",
      [](const rlk::LogitsView& logits, const rlk::RowScaling& scaling, int64_t vocab, int64_t vocab_start,
         uintptr_t targets, int64_t ignore_index, uintptr_t dlogp, uintptr_t dentropy, uintptr_t dlse,
         uintptr_t row_max, uintptr_t log_sum_exp, uintptr_t entropy, uintptr_t dlogits, uintptr_t dtarget,
         int threads) {
        rlk::token_stats_backward({logits, vocab, vocab_start, pointer<int64_t>(targets), ignore_index, scaling,
                                   pointer(dlogp), pointer(dentropy), pointer(dlse), pointer(row_max),
                                   pointer(log_sum_exp), pointer(entropy), pointer(dlogits), pointer(dtarget),
                                   threads});
      },
      py::kw_only(), py::arg("logits"), py::arg("scaling"), py::arg("vocab"), py::arg("vocab_start"),
      py::arg("targets"), py::arg("ignore_index"), py::arg("dlogp"), py::arg("dentropy"), py::arg("dlse"),
      py::arg("row_max"), py::arg("log_sum_exp"), py::arg("entropy"), py::arg("dlogits"), py::arg("dtarget"),
      py::arg("threads"), py::call_guard<py::gil_scoped_release>());

  py::class_<rlk::ObjectiveOptions>(m, "ObjectiveOptions").def(py::init(&objective_options));
  py::class_<rlk::PolicyObjectiveParams>(m, "PolicyObjectiveParams").def(py::init(&policy_objective_params));
  m.def("policy_objective", &rlk::policy_objective, py::arg("params"), py::call_guard<py::gil_scoped_release>());

  m.def(
      "policy_sweep",
      [](const rlk::LogitsView& logits, const rlk::RowScaling& scaling, uintptr_t targets, int64_t ignore_index,
         uintptr_t logp, uintptr_t entropy, uintptr_t row_max, uintptr_t log_sum_exp,
         const rlk::PolicyObjectiveParams& objective, uintptr_t dlogits, int threads) {
        rlk::RowStatsOut out = {};
        out.logp = pointer(logp);
        out.entropy = pointer(entropy);
        out.row_max = pointer(row_max);
        out.log_sum_exp = pointer(log_sum_exp);
        rlk::policy_sweep(
            {{logits, logits.vocab, 0, pointer<int64_t>(targets), ignore_index, scaling, out, nullptr, threads},
             objective,
             pointer(dlogits)});
      },
      py::kw_only(), py::arg("logits"), py::arg("scaling"), py::arg("targets"), py::arg("ignore_index"),
      py::arg("logp"), py::arg("entropy"), py::arg("row_max"), py::arg("log_sum_exp"), py::arg("objective"),
      py::arg("dlogits"), py::arg("threads"), py::call_guard<py::gil_scoped_release>());

  m.def(
      "prefix_counts",
      [](uintptr_t token_ids, int64_t rows, int64_t width, uintptr_t lengths, uintptr_t row_order,
         uintptr_t group_starts, int64_t groups, uintptr_t counts, int threads) {
        rlk::prefix_counts({pointer<int64_t>(token_ids), rows, width, pointer<int64_t>(lengths),
                            pointer<int64_t>(row_order), pointer<int64_t>(group_starts), groups,
                            pointer<int32_t>(counts), threads});
      },
      py::kw_only(), py::arg("token_ids"), py::arg("rows"), py::arg("width"), py::arg("lengths"), py::arg("row_order"),
      py::arg("group_starts"), py::arg("groups"), py::arg("counts"), py::arg("threads"),
      py::call_guard<py::gil_scoped_release>());
}
