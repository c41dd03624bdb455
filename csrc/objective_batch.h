// A batch's tokens and sequences as the objective reads them, on host and device.
#pragma once

#include <type_traits>

#include "objective.h"
#include "params.h"

namespace rlk {

// Calls function(std::integral_constant<ObjectiveKind, kind>).
template <class Function>
HOST_DEVICE void with_kind(const ObjectiveOptions& options, Function function) {
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

// A border that nobody could look at is not let out of the batch.
HOST_DEVICE int64_t sequence_begin(const PolicyObjectiveParams& p, int64_t b) {
  if (!p.cu_seqlens) return b * p.width;
  const int64_t border = p.cu_seqlens[b];
  return border < 0 ? 0 : border > p.tokens ? p.tokens : border;
}
HOST_DEVICE int64_t sequence_end(const PolicyObjectiveParams& p, int64_t b) { return sequence_begin(p, b + 1); }

// By bisection: the last sequence that begins at or before the token; empty ones are skipped.
HOST_DEVICE int64_t sequence_of(const PolicyObjectiveParams& p, int64_t i) {
  if (!p.cu_seqlens) return i / p.width;
  int64_t low = 0, high = p.sequences;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (p.cu_seqlens[middle] <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class T>
HOST_DEVICE double value_at(const void* values, int64_t i) {
  return static_cast<const T*>(values)[i];
}

// A trained token of sequence b.
template <class T>
HOST_DEVICE ObjectiveToken token_at(const PolicyObjectiveParams& p, int64_t i, int64_t b, double logp) {
  return {logp,
          p.old_logp ? value_at<T>(p.old_logp, i) : logp,
          p.ref_logp ? value_at<T>(p.ref_logp, i) : 0.0,
          value_at<T>(p.advantages, p.advantages_per_token ? i : b),
          p.weight ? value_at<T>(p.weight, i) : 1.0,
          p.policy_weight ? value_at<T>(p.policy_weight, p.policy_weight_per_token ? i : b) : 1.0,
          p.success_rate ? value_at<T>(p.success_rate, p.success_rate_per_token ? i : b) : 0.5};
}

// What a sum over the batch is divided by; `tokens` is the number of trained ones.
HOST_DEVICE double reduction_denominator(Reduction reduction, const double* normalizer, double tokens,
                                         int64_t sequences) {
  const double own = reduction == Reduction::kTokenMean  ? tokens
                     : reduction == Reduction::kTokenSum ? 1.0
                                                         : static_cast<double>(sequences);
  const double chosen = normalizer ? *normalizer : own;
  return chosen == 0 ? 1.0 : chosen;
}

// What a token is multiplied by on its way to the batch's sum; `length` is its sequence's number of trained tokens.
HOST_DEVICE double reduction_scale(Reduction reduction, double denominator, double length) {
  return 1 / (reduction == Reduction::kSeqMeanTokenMean ? length * denominator : denominator);
}

}  // namespace rlk
