// A sequence's tokens in blocks of doubles, present or not, masked or not: loops over them have no branch and
// vectorise.
#pragma once

#include <algorithm>

#include "../objective.h"
#include "../params.h"
#include "vec.h"

namespace rlk {
namespace RLK_ISA {

// One block of n tokens. Passed by value, so that a loop keeps its pointers in registers.
struct TokenBlock {
  int64_t begin, n;
  const double *used, *logp, *entropy, *old_logp, *ref_logp, *advantage, *weight, *policy_weight, *success_rate;
  double* dlogp;

  RLK_INLINE ObjectiveToken token(int64_t i) const {
    return {logp[i], old_logp[i], ref_logp[i], advantage[i], weight[i], policy_weight[i], success_rate[i]};
  }
};

// A thread's buffers.
template <class T>
class TokenBlocks {
 public:
  explicit TokenBlocks(const PolicyObjectiveParams& params) : p(params) {}

  // body(block) for the blocks of sequence b, from left to right.
  template <class Body>
  void for_each(int64_t b, int64_t begin, int64_t end, const Body& body) {
    for (int64_t i = begin; i < end; i += kTokens) body(block(b, i, std::min(kTokens, end - i)));
  }

  void store_dlogp(const TokenBlock& block) const {
    if (!p.dlogp) return;
    T* const out = static_cast<T*>(p.dlogp) + block.begin;
    for (int64_t i = 0; i < block.n; ++i) out[i] = static_cast<T>(block.used[i] != 0 ? block.dlogp[i] : 0.0);
  }
  void store_dentropy(const TokenBlock& block, double value) const {
    if (!p.dentropy) return;
    T* const out = static_cast<T*>(p.dentropy) + block.begin;
    for (int64_t i = 0; i < block.n; ++i) out[i] = static_cast<T>(block.used[i] != 0 ? value : 0.0);
  }

 private:
  static constexpr int64_t kTokens = 512;
  using Buffer = double[kTokens];

  // A masked token's numbers are those of a missing array, so that its terms are finite.
  TokenBlock block(int64_t b, int64_t begin, int64_t n) {
    for (int64_t i = 0; i < n; ++i) used_[i] = p.mask[begin + i] != 0 ? 1.0 : 0.0;
    const auto gather = [&](const void* values, bool per_token, double missing, Buffer& buffer) {
      const T* const array = static_cast<const T*>(values);
      if (!array) {
        std::fill(buffer, buffer + n, missing);
      } else if (per_token) {
        for (int64_t i = 0; i < n; ++i) {
          const double value = array[begin + i];
          buffer[i] = used_[i] != 0 ? value : missing;
        }
      } else {
        const double value = array[b];
        for (int64_t i = 0; i < n; ++i) buffer[i] = used_[i] != 0 ? value : missing;
      }
    };
    gather(p.logp, true, 0, logp_);
    gather(p.entropy, true, 0, entropy_);
    gather(p.old_logp ? p.old_logp : p.logp, true, 0, old_logp_);
    gather(p.ref_logp, true, 0, ref_logp_);
    gather(p.advantages, p.advantages_per_token, 0, advantage_);
    gather(p.weight, true, 1, weight_);
    gather(p.policy_weight, p.policy_weight_per_token, 1, policy_weight_);
    gather(p.success_rate, p.success_rate_per_token, 0.5, success_rate_);
    return {begin,     n,          used_,   logp_,          entropy_,      old_logp_,
            ref_logp_, advantage_, weight_, policy_weight_, success_rate_, dlogp_};
  }

  const PolicyObjectiveParams& p;
  Buffer used_, logp_, entropy_, old_logp_, ref_logp_, advantage_, weight_, policy_weight_, success_rate_, dlogp_;
};

}  // namespace RLK_ISA
}  // namespace rlk
