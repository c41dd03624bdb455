// From per-token statistics to a loss, its coefficients and its metrics. Built once per instruction set.
//
// Sequences are shared out among threads; a sequence is summed from left to right in fixed lanes, and sequences are
// added up in order, so the bits depend on nothing but the numbers.
#include "../objective.h"
#include "dispatch.h"
#include "objective_rows.h"
#include "parallel.h"

namespace rlk {
namespace RLK_ISA {
namespace {

constexpr int64_t kTokensPerPiece = 4096;

// What one sequence adds to the metrics; see ObjectiveMetric.
struct SequenceSums {
  double value = 0, entropy = 0, dx = 0;
  double log_ratio = 0, k3 = 0, ratio = 0, clipped_low = 0, clipped_high = 0;
  double weight = 0, policy_weight = 0, kl = 0;
  double ratio_min = std::numeric_limits<double>::infinity(), ratio_max = -std::numeric_limits<double>::infinity();
};

template <class T, ObjectiveKind kKind>
void sequence(const PolicyObjectiveParams& p, const ObjectiveRows<T>& rows, int64_t b, SequenceSums* out) {
  const ObjectiveOptions& o = p.options;
  const int64_t begin = rows.begin(b), end = rows.end(b);
  const double length = rows.length(b), x_of_sequence = rows.log_ratio(b), scale = rows.loss_scale(b);
  const double entropy_scale = -o.entropy_coef * rows.entropy_scale(b);
  const bool token_level = o.is_token_level();
  T* const dlogp = static_cast<T*>(p.dlogp);
  T* const dentropy = static_cast<T*>(p.dentropy);
  double value = 0, entropy = 0, dx = 0, log_ratio = 0, k3 = 0, ratio = 0, low = 0, high = 0, weight = 0;
  double policy_weight = 0, kl = 0, ratio_min = out->ratio_min, ratio_max = out->ratio_max;
#pragma omp simd reduction(+ : value, entropy, dx, log_ratio, k3, ratio, low, high, weight, policy_weight, kl) \
    reduction(min : ratio_min) reduction(max : ratio_max)
  for (int64_t i = begin; i < end; ++i) {
    const bool used = p.mask[i] != 0;
    const ObjectiveToken token = rows.token(i, b, used);
    const double x = token_level ? token.log_ratio() : x_of_sequence;
    const ObjectiveTerms terms = objective_terms<kKind>(o, token, x, length);
    const double d = clamped(token.log_ratio(), -kLogRatioLimit, kLogRatioLimit).value;
    value += used ? terms.loss : 0.0;
    entropy += used ? rows.entropy(i) : 0.0;
    dx += used ? terms.dx : 0.0;
    log_ratio += used ? d : 0.0;
    k3 += used ? exponential(d).minus_one - d : 0.0;
    ratio += used ? terms.ratio : 0.0;
    low += used && terms.clipped_low ? 1.0 : 0.0;
    high += used && terms.clipped_high ? 1.0 : 0.0;
    weight += used ? token.weight : 0.0;
    policy_weight += used ? token.policy_weight : 0.0;
    kl += used ? terms.kl : 0.0;
    ratio_min = used && terms.ratio < ratio_min ? terms.ratio : ratio_min;
    ratio_max = used && terms.ratio > ratio_max ? terms.ratio : ratio_max;
    if (dlogp) dlogp[i] = static_cast<T>(used ? scale * (terms.dlogp + (token_level ? terms.dx : 0.0)) : 0.0);
    if (dentropy) dentropy[i] = static_cast<T>(used ? entropy_scale : 0.0);
  }
  *out = {value, entropy, dx, log_ratio, k3, ratio, low, high, weight, policy_weight, kl, ratio_min, ratio_max};
  if (!dlogp || token_level) return;
  const double through_sequence = scale * dx / (o.sums_sequence() ? 1.0 : length);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const bool used = p.mask[i] != 0;
    const Clamped pooled = pooled_log_ratio(o, rows.token(i, b, used));
    // the direct part was rounded to T once already; sequence objectives other than GSPO-token have none
    dlogp[i] = static_cast<T>(used ? dlogp[i] + through_sequence * pooled.slope : 0.0);
  }
}

template <class T, ObjectiveKind kKind>
void run(const PolicyObjectiveParams& p) {
  const ObjectiveRows<T> rows(p);
  std::vector<SequenceSums> sums(p.sequences);
  const int64_t grain = rows.sequences_per_piece(kTokensPerPiece);
  for_each_row(p.sequences, grain, p.threads, [&](int64_t b) { sequence<T, kKind>(p, rows, b, &sums[b]); });

  double loss = 0, bonus = 0, metrics[kObjectiveMetrics] = {};
  for (int i = kFirstMinimum; i < kFirstMaximum; ++i) metrics[i] = std::numeric_limits<double>::infinity();
  for (int i = kFirstMaximum; i < kObjectiveMetrics; ++i) metrics[i] = -std::numeric_limits<double>::infinity();
  for (int64_t b = 0; b < p.sequences; ++b) {
    const SequenceSums& s = sums[b];
    loss += rows.loss_scale(b) * s.value;
    bonus += rows.entropy_scale(b) * s.entropy;
    if (rows.count(b) == 0) continue;
    const double added[] = {rows.count(b), -s.log_ratio,    s.k3, s.ratio,  s.clipped_low, s.clipped_high,
                            s.weight,      s.policy_weight, s.kl, s.entropy};
    for (int i = 0; i < kFirstMinimum; ++i) metrics[i] += added[i];
    const double low = s.clipped_low / rows.count(b), high = s.clipped_high / rows.count(b);
    const double extremes[] = {s.ratio_min, low, high, s.ratio_max, low, high};
    for (int i = kFirstMinimum; i < kFirstMaximum; ++i) {
      metrics[i] = std::min(metrics[i], extremes[i - kFirstMinimum]);
    }
    for (int i = kFirstMaximum; i < kObjectiveMetrics; ++i) {
      metrics[i] = std::max(metrics[i], extremes[i - kFirstMinimum]);
    }
  }
  *static_cast<T*>(p.loss) = static_cast<T>(p.options.entropy_coef == 0 ? loss : loss - p.options.entropy_coef * bonus);
  for (int i = 0; i < kObjectiveMetrics; ++i) static_cast<T*>(p.metrics)[i] = static_cast<T>(metrics[i]);
}

template <class T>
void run(const PolicyObjectiveParams& p) {
  with_kind(p.options.kind, [&](auto kind) { run<T, decltype(kind)::value>(p); });
}

}  // namespace

void policy_objective(const PolicyObjectiveParams& p) {
  if (p.dtype == DType::kFloat64) {
    run<double>(p);
  } else {
    run<float>(p);
  }
}

}  // namespace RLK_ISA
}  // namespace rlk
