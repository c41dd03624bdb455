#include "dispatch.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>

#include "../check_params.h"

namespace rlk {
namespace {

struct Bodies {
  const char* isa;
  void (*token_stats_forward)(const TokenStatsForwardParams&);
  void (*token_stats_backward)(const TokenStatsBackwardParams&);
  void (*policy_objective)(const PolicyObjectiveParams&);
  void (*policy_sweep)(const PolicySweepParams&);
};

#define RLK_BODIES(isa) \
  Bodies { #isa, isa::token_stats_forward, isa::token_stats_backward, isa::policy_objective, isa::policy_sweep }

const std::vector<Bodies>& bodies() {
  static const std::vector<Bodies> available = [] {
    std::vector<Bodies> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    [[maybe_unused]] const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    [[maybe_unused]] const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                                             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                                             __builtin_cpu_supports("avx512vl");
#endif
#ifdef RLK_HAS_avx512bf16
    if (has_avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(RLK_BODIES(avx512bf16));
#endif
#ifdef RLK_HAS_avx512
    if (has_avx512) found.push_back(RLK_BODIES(avx512));
#endif
#ifdef RLK_HAS_avx2
    if (has_avx2) found.push_back(RLK_BODIES(avx2));
#endif
    found.push_back(RLK_BODIES(generic));
    return found;
  }();
  return available;
}

std::atomic<const Bodies*>& selected() {
  static std::atomic<const Bodies*> body{&bodies().front()};
  return body;
}

template <class T>
void check_scaling(const RowScaling& scaling, const int64_t* targets, int64_t ignore_index, int64_t rows) {
  const auto positive = [](T x) { return x > 0 && std::isfinite(x); };
  const T* temperature = static_cast<const T*>(scaling.temperature);
  if (scaling.temperature_stride == 0) {
    if (!positive(*temperature)) fail("temperature: expected a finite number > 0, got ", *temperature);
  } else {
    for (int64_t row = 0; row < rows; ++row) {
      if (targets[row] != ignore_index && !positive(temperature[row])) {
        fail("temperature: expected finite numbers > 0, got ", temperature[row], " at row ", row);
      }
    }
  }
  const T* softcap = static_cast<const T*>(scaling.softcap);
  if (softcap && !positive(*softcap)) fail("softcap: expected a finite number > 0, got ", *softcap);
  const T logit_scale = *static_cast<const T*>(scaling.logit_scale);
  if (!positive(logit_scale)) fail("logit_scale: expected a finite number > 0, got ", logit_scale);
}

// A bad label never becomes an address: everything is checked before a row is read.
template <class Params>
void check_row_values(const Params& params) {
  const int64_t rows = params.logits.rows();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t target = params.targets[row];
    if (target != params.ignore_index && (target < 0 || target >= params.vocab)) {
      fail("targets: expected labels in [0, ", params.vocab, ") or ignore_index ", params.ignore_index, ", got ",
           target, " at row ", row);
    }
    if (target != params.ignore_index && !params.logits.has_row(row)) {
      fail("index: expected rows in [0, ", params.logits.outer * params.logits.inner, "), got ",
           params.logits.index[row], " at row ", row);
    }
  }
  if (rows == 0) return;
  if (params.logits.dtype == DType::kFloat64) {
    check_scaling<double>(params.scaling, params.targets, params.ignore_index, rows);
  } else {
    check_scaling<float>(params.scaling, params.targets, params.ignore_index, rows);
  }
}

void check_normalizer(const char* name, const double* normalizer) {
  if (normalizer && !(*normalizer >= 0 && std::isfinite(*normalizer))) {
    fail(name, ": expected a finite number >= 0, got ", *normalizer);
  }
}

// Nor does a border of a sequence.
void check_batch_values(const PolicyObjectiveParams& params) {
  check_normalizer("normalizer", params.normalizer);
  check_normalizer("entropy_normalizer", params.entropy_normalizer);
  const int64_t* borders = params.cu_seqlens;
  if (!borders) return;
  const bool rises = std::is_sorted(borders, borders + params.sequences + 1);
  if (!rises || borders[0] != 0 || borders[params.sequences] != params.tokens) {
    fail("cu_seqlens: expected borders that rise from 0 to ", params.tokens, ", got ", borders[0], " to ",
         borders[params.sequences], rises ? "" : ", not rising");
  }
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Bodies& body : bodies()) names.emplace_back(body.isa);
  return names;
}

std::string current_isa() { return selected().load()->isa; }

void set_isa(const std::string& name) {
  for (const Bodies& body : bodies()) {
    if (name == body.isa) {
      selected() = &body;
      return;
    }
  }
  std::string names;
  for (const Bodies& body : bodies()) names += std::string(names.empty() ? "" : ", ") + body.isa;
  fail("isa: expected one of ", names, " on this processor, got ", name);
}

void token_stats_forward(const TokenStatsForwardParams& params) {
  check(params, RunsOn::kThreads);
  check_row_values(params);
  selected().load()->token_stats_forward(params);
}

void token_stats_backward(const TokenStatsBackwardParams& params) {
  check(params, RunsOn::kThreads);
  check_row_values(params);
  selected().load()->token_stats_backward(params);
}

void policy_objective(const PolicyObjectiveParams& params) {
  check(params, RunsOn::kThreads);
  check_batch_values(params);
  selected().load()->policy_objective(params);
}

void policy_sweep(const PolicySweepParams& params) {
  check(params, RunsOn::kThreads);
  check_row_values(params.stats);
  check_batch_values(params.objective);
  selected().load()->policy_sweep(params);
}

}  // namespace rlk
