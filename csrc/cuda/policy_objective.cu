// From per-token statistics to a loss, its coefficients and its metrics.
//
// One block a sequence, twice: for what the objective needs of whole sequences, then for the tokens. Sequences are
// added up by one block a number. Nothing is added atomically, so the bits are the same every time.
#include "objective_rows.cuh"

namespace rlk {
namespace cuda {
namespace {

// What a sequence adds to the batch: the metrics, in their order, then its parts of the loss and of the entropy bonus.
constexpr int kLossPart = kObjectiveMetrics, kBonusPart = kLossPart + 1, kParts = kBonusPart + 1;

// Sums over a sequence's trained tokens.
enum TokenSum : int {
  kValueSum,
  kDxSum,
  kLogRatioSum,
  kK3Sum,
  kRatioSum,
  kRatioSpreadSum,
  kLowSum,
  kHighSum,
  kWeightSum,
  kPolicyWeightSum,
  kKlSum,
  kEntropySum,
  kTokenSums
};

struct Smallest {
  RLK_DEVICE double operator()(double a, double b) const { return smallest(a, b); }
};
struct Largest {
  RLK_DEVICE double operator()(double a, double b) const { return largest(a, b); }
};

// Of the threads' tokens; every thread gets the block's.
struct TokenSums {
  double sums[kTokenSums] = {};
  double ratio_min = std::numeric_limits<double>::infinity(), ratio_max = -std::numeric_limits<double>::infinity();

  RLK_DEVICE void add(const ObjectiveToken& token, const ObjectiveTerms& terms, double entropy) {
    const double d = clamped(token.log_ratio(), -kLogRatioLimit, kLogRatioLimit).value;
    const double added[kTokenSums] = {terms.loss,
                                      terms.dx,
                                      d,
                                      exponential(d).minus_one - d,
                                      terms.ratio,
                                      (terms.ratio - 1) * (terms.ratio - 1),
                                      terms.clipped_low,
                                      terms.clipped_high,
                                      token.weight,
                                      token.policy_weight,
                                      terms.kl,
                                      entropy};
    RLK_UNROLL
    for (int i = 0; i < kTokenSums; ++i) sums[i] += added[i];
    ratio_min = smallest(ratio_min, terms.ratio);
    ratio_max = largest(ratio_max, terms.ratio);
  }

  RLK_DEVICE void reduce() {
    constexpr int kWarps = kObjectiveThreads / kWarp;
    RLK_SHARED(double, scratch, (kTokenSums + 2) * kWarps);
    RLK_UNROLL
    for (int i = 0; i < kTokenSums; ++i) {
      sums[i] = block_reduce<kObjectiveThreads>(sums[i], scratch + i * kWarps, Sum{});
    }
    ratio_min = block_reduce<kObjectiveThreads>(ratio_min, scratch + kTokenSums * kWarps, Smallest{});
    ratio_max = block_reduce<kObjectiveThreads>(ratio_max, scratch + (kTokenSums + 1) * kWarps, Largest{});
  }
};

template <class T, ObjectiveKind kKind>
RLK_DEVICE void sequence_terms(const PolicyObjectiveParams& p, const SequenceTotals& totals, double* parts) {
  const ObjectiveOptions& o = p.options;
  const int64_t b = block_index(), begin = sequence_begin(p, b), end = sequence_end(p, b);
  const double length = totals.length(b), scale = totals.loss_scale(p, b), entropy_scale = totals.entropy_scale(p, b);
  const bool token_level = o.is_token_level();
  const double x_of_sequence = token_level ? 0.0 : totals.log_ratios[b];
  T* const dlogp = static_cast<T*>(p.dlogp);
  T* const dentropy = static_cast<T*>(p.dentropy);
  const auto token_of = [&](int64_t i) { return token_at<T>(p, i, b, value_at<T>(p.logp, i)); };
  TokenSums of_tokens;
  for (int64_t i = begin + thread_index(); i < end; i += kObjectiveThreads) {
    double coefficient = 0;
    if (p.mask[i]) {
      const ObjectiveToken token = token_of(i);
      const double x = token_level ? token.log_ratio() : x_of_sequence;
      const ObjectiveTerms terms = objective_terms<kKind>(o, token, x, length);
      of_tokens.add(token, terms, p.entropy ? value_at<T>(p.entropy, i) : 0.0);
      coefficient = scale * (terms.dlogp + terms.dx);
    }
    if (dlogp && token_level) dlogp[i] = static_cast<T>(coefficient);
    if (dentropy) dentropy[i] = static_cast<T>(p.mask[i] ? -o.entropy_coef * entropy_scale : 0.0);
  }
  of_tokens.reduce();
  const double (&sums)[kTokenSums] = of_tokens.sums;

  if (dlogp && !token_level) {
    const double through_sequence = scale * sums[kDxSum] / (o.sums_sequence() ? 1.0 : length);
    for (int64_t i = begin + thread_index(); i < end; i += kObjectiveThreads) {
      double coefficient = 0;
      if (p.mask[i]) {
        const ObjectiveToken token = token_of(i);
        const double direct = objective_terms<kKind>(o, token, x_of_sequence, length).dlogp;
        coefficient = scale * direct + through_sequence * pooled_log_ratio<kKind>(o, token).slope;
      }
      dlogp[i] = static_cast<T>(coefficient);
    }
  }

  if (thread_index() != 0) return;
  const bool is_empty = totals.counts[b] == 0;
  const double infinity = std::numeric_limits<double>::infinity();
  const double low = sums[kLowSum] / length, high = sums[kHighSum] / length;
  const double values[kParts] = {totals.counts[b],
                                 -sums[kLogRatioSum],
                                 sums[kK3Sum],
                                 sums[kRatioSum],
                                 sums[kRatioSpreadSum],
                                 sums[kLowSum],
                                 sums[kHighSum],
                                 sums[kWeightSum],
                                 sums[kPolicyWeightSum],
                                 sums[kKlSum],
                                 sums[kEntropySum],
                                 of_tokens.ratio_min,
                                 is_empty ? infinity : low,
                                 is_empty ? infinity : high,
                                 of_tokens.ratio_max,
                                 is_empty ? -infinity : low,
                                 is_empty ? -infinity : high,
                                 scale * sums[kValueSum],
                                 entropy_scale * sums[kEntropySum]};
  RLK_UNROLL
  for (int i = 0; i < kParts; ++i) parts[b * kParts + i] = values[i];
}

template <class T>
RLK_KERNEL(kObjectiveThreads, 1)
void sequence_terms_kernel(PolicyObjectiveParams p, SequenceTotals totals, double* parts) {
  with_kind(p.options, [&](auto kind) { sequence_terms<T, decltype(kind)::value>(p, totals, parts); });
}

template <class Fold>
RLK_DEVICE double fold_part(const double* parts, int64_t sequences, int part, double start, double* scratch,
                            Fold fold) {
  double result = start;
  for (int64_t b = thread_index(); b < sequences; b += kTotalThreads) result = fold(result, parts[b * kParts + part]);
  return block_reduce<kTotalThreads>(result, scratch, fold);
}

// One block a metric, and one for the loss.
template <class T>
RLK_KERNEL(kTotalThreads, 1)
void add_up_kernel(PolicyObjectiveParams p, const double* parts) {
  RLK_SHARED(double, scratch, 2 * kTotalThreads / kWarp);
  const int part = static_cast<int>(block_index());
  const double infinity = std::numeric_limits<double>::infinity();
  const bool is_minimum = part >= kFirstMinimum && part < kFirstMaximum;
  const bool is_maximum = part >= kFirstMaximum && part < kObjectiveMetrics;
  double result = is_minimum   ? fold_part(parts, p.sequences, part, infinity, scratch, Smallest{})
                  : is_maximum ? fold_part(parts, p.sequences, part, -infinity, scratch, Largest{})
                               : fold_part(parts, p.sequences, part, 0.0, scratch, Sum{});
  if (part == kLossPart && p.options.entropy_coef != 0) {
    double* const second_scratch = scratch + kTotalThreads / kWarp;
    result -= p.options.entropy_coef * fold_part(parts, p.sequences, kBonusPart, 0.0, second_scratch, Sum{});
  }
  if (thread_index() != 0) return;
  if (part == kLossPart) {
    *static_cast<T*>(p.loss) = static_cast<T>(result);
  } else {
    p.metrics[part] = result;
  }
}

template <class T>
void run(const PolicyObjectiveParams& p, LaunchTarget target, void* workspace) {
  const SequenceTotals totals(p, workspace);
  double* const parts = reinterpret_cast<double*>(static_cast<char*>(workspace) + SequenceTotals::bytes(p));
  find_totals<T>(p, totals, target);
  RLK_LAUNCH(target, (sequence_terms_kernel<T>), p.sequences, kObjectiveThreads, 0, p, totals, parts);
  RLK_LAUNCH(target, (add_up_kernel<T>), kLossPart + 1, kTotalThreads, 0, p, parts);
}

}  // namespace

size_t policy_objective_workspace_bytes(const PolicyObjectiveParams& p) {
  return SequenceTotals::bytes(p) + static_cast<size_t>(p.sequences) * kParts * sizeof(double);
}

void policy_objective(const PolicyObjectiveParams& p, LaunchTarget target, void* workspace) {
  if (p.dtype == DType::kFloat64) {
    run<double>(p, target, workspace);
  } else {
    run<float>(p, target, workspace);
  }
}

}  // namespace cuda
}  // namespace rlk
