// A batch's tokens and sequences as the objective reads them: built once per call, shared by all threads.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "../objective.h"
#include "../params.h"
#include "vec.h"

namespace rlk {
namespace RLK_ISA {

template <class Function>
void with_kind(const ObjectiveOptions& options, Function function) {
  using K = ObjectiveKind;
  switch (options.kind) {
    case K::kClip:
      return function(std::integral_constant<K, K::kClip>{});
    case K::kClipDetached:
      return function(std::integral_constant<K, K::kClipDetached>{});
    case K::kGeometric:
      if (options.clips_sequence) return function(std::integral_constant<K, K::kGeometricSequence>{});
      return function(std::integral_constant<K, K::kGeometric>{});
    case K::kCispo:
      return function(std::integral_constant<K, K::kCispo>{});
    case K::kSapo:
      return function(std::integral_constant<K, K::kSapo>{});
    case K::kNft:
      return function(std::integral_constant<K, K::kNft>{});
    case K::kReinforce:
      return function(std::integral_constant<K, K::kReinforce>{});
    case K::kGeometricSequence:
      break;
  }
}

template <class T>
class ObjectiveRows {
 public:
  explicit ObjectiveRows(const PolicyObjectiveParams& params) : p(params), counts_(params.sequences) {
    double tokens = 0;
    for (int64_t b = 0; b < p.sequences; ++b) {
      counts_[b] = static_cast<double>(end(b) - begin(b) - std::count(p.mask + begin(b), p.mask + end(b), uint8_t{0}));
      tokens += counts_[b];
    }
    loss_denominator_ = denominator(p.reduction, p.normalizer, tokens);
    entropy_denominator_ = denominator(p.entropy_reduction, p.entropy_normalizer, tokens);
  }

  int64_t begin(int64_t b) const { return p.cu_seqlens ? p.cu_seqlens[b] : b * p.width; }
  int64_t end(int64_t b) const { return p.cu_seqlens ? p.cu_seqlens[b + 1] : (b + 1) * p.width; }
  int64_t sequence_of(int64_t i) const {
    if (!p.cu_seqlens) return i / p.width;
    return std::upper_bound(p.cu_seqlens + 1, p.cu_seqlens + p.sequences, i) - (p.cu_seqlens + 1);
  }
  int64_t sequences_per_piece(int64_t tokens) const { return tokens * p.sequences / (p.tokens + 1) + 1; }

  double count(int64_t b) const { return counts_[b]; }
  double length(int64_t b) const { return std::max(counts_[b], 1.0); }
  // What a token's loss, and its entropy, is multiplied by on the way to the batch's loss.
  double loss_scale(int64_t b) const { return scale(b, p.reduction, loss_denominator_); }
  double entropy_scale(int64_t b) const { return scale(b, p.entropy_reduction, entropy_denominator_); }

  ObjectiveToken token(int64_t i, double logp) const {
    const int64_t b = sequence_of(i);
    return {logp,
            p.old_logp ? at(p.old_logp, i) : logp,
            p.ref_logp ? at(p.ref_logp, i) : 0.0,
            at(p.advantages, p.advantages_per_token ? i : b),
            p.weight ? at(p.weight, i) : 1.0,
            p.policy_weight ? at(p.policy_weight, p.policy_weight_per_token ? i : b) : 1.0,
            p.success_rate ? at(p.success_rate, p.success_rate_per_token ? i : b) : 0.5};
  }

 private:
  static double at(const void* values, int64_t i) { return static_cast<const T*>(values)[i]; }

  double denominator(Reduction reduction, const double* normalizer, double tokens) const {
    const double own = reduction == Reduction::kTokenMean  ? tokens
                       : reduction == Reduction::kTokenSum ? 1.0
                                                           : static_cast<double>(p.sequences);
    const double chosen = normalizer ? *normalizer : own;
    return chosen == 0 ? 1.0 : chosen;
  }
  double scale(int64_t b, Reduction reduction, double denominator) const {
    const double of_sequence = reduction == Reduction::kSeqMeanTokenMean ? length(b) : 1.0;
    return 1 / (of_sequence * denominator);
  }

  const PolicyObjectiveParams& p;
  std::vector<double> counts_;
  double loss_denominator_, entropy_denominator_;
};

}  // namespace RLK_ISA
}  // namespace rlk
