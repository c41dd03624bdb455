// Checked entry points; the body that fits the processor is chosen at run time.
#pragma once

#include <string>
#include <vector>

#include "../params.h"

namespace rlk {

std::vector<std::string> available_isas();  // best first; what this build has and this processor runs
std::string current_isa();
void set_isa(const std::string& name);

void token_stats_forward(const TokenStatsForwardParams& params);
void token_stats_backward(const TokenStatsBackwardParams& params);
void policy_objective(const PolicyObjectiveParams& params);
void policy_sweep(const PolicySweepParams& params);
void prefix_counts(const PrefixCountsParams& params);

#define RLK_DECLARE_ISA(isa)                                         \
  namespace isa {                                                    \
  void token_stats_forward(const TokenStatsForwardParams& params);   \
  void token_stats_backward(const TokenStatsBackwardParams& params); \
  void policy_objective(const PolicyObjectiveParams& params);        \
  void policy_sweep(const PolicySweepParams& params);                \
  }
RLK_DECLARE_ISA(generic)
RLK_DECLARE_ISA(avx2)
RLK_DECLARE_ISA(avx512)
RLK_DECLARE_ISA(avx512bf16)
#undef RLK_DECLARE_ISA

}  // namespace rlk
