// The native structs in Python: every field by keyword, pointers as integers, 0 for none. The classes belong to the
// module that registers them, so that several modules of one process may.
#pragma once

#include <pybind11/pybind11.h>

#include <limits>
#include <string>
#include <type_traits>

#include "check.h"
#include "params.h"

namespace rlk {
namespace bind {

namespace py = pybind11;

template <class T = void>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Keyword arguments by the names of a struct's fields.
class Fields {
 public:
  Fields(const char* structure, const py::kwargs& values) : structure_(structure), values_(values) {}

  template <class T>
  void read(const char* name, T& field) const {
    if constexpr (std::is_pointer_v<T>) {
      field = pointer<std::remove_pointer_t<T>>(value<uintptr_t>(name, "an address"));
    } else if constexpr (std::is_enum_v<T>) {
      field = static_cast<T>(code(name, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
    } else if constexpr (std::is_same_v<T, bool>) {
      field = code(name, 0, 1) != 0;
    } else if constexpr (std::is_integral_v<T>) {
      field = value<T>(name, sizeof(T) == sizeof(int) ? "an integer of 32 bits" : "an integer of 64 bits");
    } else if constexpr (std::is_floating_point_v<T>) {
      field = value<T>(name, "a number");
    } else {
      field = value<T>(name, "a struct of this module");
    }
  }

 private:
  template <class T>
  T value(const char* name, const char* expected) const {
    const py::object given = values_[name];
    try {
      return given.cast<T>();
    } catch (const py::cast_error&) {
      fail(structure_, ".", name, ": expected ", expected, ", got ", std::string(py::repr(given)));
    }
  }

  // Codes and flags may come as floats.
  int code(const char* name, int low, int high) const {
    const double number = value<double>(name, "a code");
    if (!(number >= low && number <= high) || number != static_cast<int>(number)) {
      fail(structure_, ".", name, ": expected an integer in [", low, ", ", high, "], got ", number);
    }
    return static_cast<int>(number);
  }

  const char* structure_;
  const py::kwargs& values_;
};

#define RLK_READ(name) fields.read(#name, out.name)

inline LogitsView logits_view(const py::kwargs& kwargs) {
  const Fields fields("LogitsView", kwargs);
  LogitsView out;
  RLK_READ(data);
  RLK_READ(dtype);
  RLK_READ(outer);
  RLK_READ(inner);
  RLK_READ(vocab);
  RLK_READ(stride_outer);
  RLK_READ(stride_inner);
  RLK_READ(stride_vocab);
  RLK_READ(index);
  RLK_READ(count);
  return out;
}

inline RowScaling row_scaling(const py::kwargs& kwargs) {
  const Fields fields("RowScaling", kwargs);
  RowScaling out;
  RLK_READ(temperature);
  RLK_READ(temperature_stride);
  RLK_READ(softcap);
  RLK_READ(logit_scale);
  return out;
}

inline RowStatsOut row_stats_out(const py::kwargs& kwargs) {
  const Fields fields("RowStatsOut", kwargs);
  RowStatsOut out;
  RLK_READ(logp);
  RLK_READ(entropy);
  RLK_READ(lse);
  RLK_READ(log_sum_sq_probs);
  RLK_READ(mean_logits);
  RLK_READ(is_top1);
  RLK_READ(row_max);
  RLK_READ(log_sum_exp);
  return out;
}

inline TokenStatsForwardParams token_stats_forward_params(const py::kwargs& kwargs) {
  const Fields fields("TokenStatsForwardParams", kwargs);
  TokenStatsForwardParams out;
  RLK_READ(logits);
  RLK_READ(vocab);
  RLK_READ(vocab_start);
  RLK_READ(targets);
  RLK_READ(ignore_index);
  RLK_READ(scaling);
  RLK_READ(out);
  RLK_READ(states);
  RLK_READ(threads);
  return out;
}

inline TokenStatsBackwardParams token_stats_backward_params(const py::kwargs& kwargs) {
  const Fields fields("TokenStatsBackwardParams", kwargs);
  TokenStatsBackwardParams out;
  RLK_READ(logits);
  RLK_READ(vocab);
  RLK_READ(vocab_start);
  RLK_READ(targets);
  RLK_READ(ignore_index);
  RLK_READ(scaling);
  RLK_READ(dlogp);
  RLK_READ(dentropy);
  RLK_READ(dlse);
  RLK_READ(row_max);
  RLK_READ(log_sum_exp);
  RLK_READ(entropy);
  RLK_READ(dlogits);
  RLK_READ(dtarget);
  RLK_READ(threads);
  return out;
}

inline ObjectiveOptions objective_options(const py::kwargs& kwargs) {
  const Fields fields("ObjectiveOptions", kwargs);
  ObjectiveOptions out;
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

inline PolicyObjectiveParams policy_objective_params(const py::kwargs& kwargs) {
  const Fields fields("PolicyObjectiveParams", kwargs);
  PolicyObjectiveParams out;
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

inline PolicySweepParams policy_sweep_params(const py::kwargs& kwargs) {
  const Fields fields("PolicySweepParams", kwargs);
  PolicySweepParams out;
  RLK_READ(stats);
  RLK_READ(objective);
  RLK_READ(dlogits);
  return out;
}

inline PrefixCountsParams prefix_counts_params(const py::kwargs& kwargs) {
  const Fields fields("PrefixCountsParams", kwargs);
  PrefixCountsParams out;
  RLK_READ(token_ids);
  RLK_READ(rows);
  RLK_READ(width);
  RLK_READ(lengths);
  RLK_READ(row_order);
  RLK_READ(group_starts);
  RLK_READ(groups);
  RLK_READ(counts);
  RLK_READ(threads);
  return out;
}

#undef RLK_READ

template <class Struct>
void bind_struct(py::module_& m, const char* name, Struct (*read)(const py::kwargs&)) {
  py::class_<Struct>(m, name, py::module_local()).def(py::init(read));
}

inline void bind_params(py::module_& m) {
  bind_struct(m, "LogitsView", &logits_view);
  bind_struct(m, "RowScaling", &row_scaling);
  bind_struct(m, "RowStatsOut", &row_stats_out);
  bind_struct(m, "TokenStatsForwardParams", &token_stats_forward_params);
  bind_struct(m, "TokenStatsBackwardParams", &token_stats_backward_params);
  bind_struct(m, "ObjectiveOptions", &objective_options);
  bind_struct(m, "PolicyObjectiveParams", &policy_objective_params);
  bind_struct(m, "PolicySweepParams", &policy_sweep_params);
  bind_struct(m, "PrefixCountsParams", &prefix_counts_params);
}

}  // namespace bind
}  // namespace rlk
