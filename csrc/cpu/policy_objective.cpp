// From per-token statistics to a loss, its coefficients and its metrics. Built once per instruction set.
//
// Sequences are shared out among threads; a sequence is summed from left to right in fixed lanes, and sequences are
// added up in order, so the bits depend on nothing but the numbers.
#include "../objective.h"
#include "dispatch.h"
#include "objective_rows.h"
#include "parallel.h"
#include "token_blocks.h"

namespace rlk {
namespace RLK_ISA {
namespace {

constexpr int64_t kTokensPerPiece = 4096;

// What one sequence adds to the metrics; see ObjectiveMetric.
struct SequenceSums {
  double value = 0, entropy = 0, dx = 0;
  double log_ratio = 0, k3 = 0, ratio = 0, ratio_spread = 0, clipped_low = 0, clipped_high = 0;
  double weight = 0, policy_weight = 0, kl = 0;
  double ratio_min = std::numeric_limits<double>::infinity(), ratio_max = -std::numeric_limits<double>::infinity();
};

template <ObjectiveKind kKind>
double pooled_sum(const ObjectiveOptions& options, TokenBlock tokens) {
  const ObjectiveOptions o = options;
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < tokens.n; ++i) total += tokens.used[i] * pooled_log_ratio<kKind>(o, tokens.token(i)).value;
  return total;
}

// What the tokens of a sequence share.
struct SequenceScalars {
  double x, length, loss_scale, entropy_scale;
};

// Where x comes from. A token's own log ratio without a clamp shares its exponential with the metrics.
enum class Path { kToken, kClampedToken, kSequence };

// A masked token has d = 0 and no KL, and adds 0 to their sums by itself.
template <ObjectiveKind kKind, Path kPath, bool kKl>
void add_block(ObjectiveOptions o, TokenBlock tokens, const SequenceScalars& of_sequence, SequenceSums* out) {
  if (!kKl) o.kl_coef = 0;
  if (kPath == Path::kToken) o.log_ratio_clamp = std::numeric_limits<double>::infinity();
  const SequenceScalars shared = of_sequence;
  double value = 0, entropy = 0, dx = 0, log_ratio = 0, k3 = 0, ratio = 0, ratio_spread = 0, low = 0, high = 0;
  double weight = 0, policy_weight = 0, kl = 0, ratio_min = out->ratio_min, ratio_max = out->ratio_max;
#pragma omp simd reduction(+ : value, entropy, dx, log_ratio, k3, ratio, ratio_spread, low, high, weight) \
    reduction(+ : policy_weight, kl) reduction(min : ratio_min) reduction(max : ratio_max)
  for (int64_t i = 0; i < tokens.n; ++i) {
    const double used = tokens.used[i];
    const ObjectiveToken token = tokens.token(i);
    const double x = kPath == Path::kSequence ? shared.x : token.log_ratio();
    const ObjectiveTerms terms = objective_terms<kKind>(o, token, x, shared.length);
    const double d = clamped(token.log_ratio(), -kLogRatioLimit, kLogRatioLimit).value;
    value += used * terms.loss;
    entropy += tokens.entropy[i];
    dx += used * terms.dx;
    log_ratio += d;
    k3 += exponential(d).minus_one - d;
    ratio += used * terms.ratio;
    ratio_spread += used * (terms.ratio - 1) * (terms.ratio - 1);
    low += used * terms.clipped_low;
    high += used * terms.clipped_high;
    weight += used * token.weight;
    policy_weight += used * token.policy_weight;
    kl += terms.kl;
    const double lowest = used != 0 ? terms.ratio : ratio_min, highest = used != 0 ? terms.ratio : ratio_max;
    ratio_min = lowest < ratio_min ? lowest : ratio_min;
    ratio_max = highest > ratio_max ? highest : ratio_max;
    tokens.dlogp[i] = shared.loss_scale * (kPath == Path::kSequence ? terms.dlogp : terms.dlogp + terms.dx);
  }
  out->value += value;
  out->entropy += entropy;
  out->dx += dx;
  out->log_ratio += log_ratio;
  out->k3 += k3;
  out->ratio += ratio;
  out->ratio_spread += ratio_spread;
  out->clipped_low += low;
  out->clipped_high += high;
  out->weight += weight;
  out->policy_weight += policy_weight;
  out->kl += kl;
  out->ratio_min = ratio_min;
  out->ratio_max = ratio_max;
}

template <ObjectiveKind kKind, bool kKl>
void add_through_sequence(ObjectiveOptions o, TokenBlock tokens, const SequenceScalars& of_sequence, double dsum) {
  if (!kKl) o.kl_coef = 0;
  const SequenceScalars shared = of_sequence;
#pragma omp simd
  for (int64_t i = 0; i < tokens.n; ++i) {
    const ObjectiveToken token = tokens.token(i);
    const double direct = objective_terms<kKind>(o, token, shared.x, shared.length).dlogp;
    tokens.dlogp[i] = shared.loss_scale * direct + dsum * pooled_log_ratio<kKind>(o, token).slope;
  }
}

template <class T, ObjectiveKind kKind, Path kPath, bool kKl>
void sequence(const PolicyObjectiveParams& p, const ObjectiveRows<T>& rows, int64_t b, TokenBlocks<T>* tokens,
              SequenceSums* out) {
  const ObjectiveOptions& o = p.options;
  const int64_t begin = rows.begin(b), end = rows.end(b);
  SequenceScalars shared = {0, rows.length(b), rows.loss_scale(b), -o.entropy_coef * rows.entropy_scale(b)};
  const double pooled_tokens = o.sums_sequence() ? 1.0 : shared.length;
  if (kPath == Path::kSequence) {
    tokens->for_each(b, begin, end, [&](const TokenBlock& block) { shared.x += pooled_sum<kKind>(o, block); });
    shared.x /= pooled_tokens;
  }
  tokens->for_each(b, begin, end, [&](const TokenBlock& block) {
    add_block<kKind, kPath, kKl>(o, block, shared, out);
    tokens->store_dentropy(block, shared.entropy_scale);
    if (kPath != Path::kSequence) tokens->store_dlogp(block);
  });
  if (kPath != Path::kSequence || !p.dlogp) return;
  const double dsum = shared.loss_scale * out->dx / pooled_tokens;
  tokens->for_each(b, begin, end, [&](const TokenBlock& block) {
    add_through_sequence<kKind, kKl>(o, block, shared, dsum);
    tokens->store_dlogp(block);
  });
}

template <class T, ObjectiveKind kKind, Path kPath, bool kKl>
void sequences(const PolicyObjectiveParams& p, const ObjectiveRows<T>& rows, SequenceSums* sums) {
  const int64_t grain = rows.sequences_per_piece(kTokensPerPiece);
  std::vector<TokenBlocks<T>> tokens;
  const int64_t workers = std::min<int64_t>(p.threads, p.sequences);
  tokens.reserve(workers);
  for (int64_t i = 0; i < workers; ++i) tokens.emplace_back(p);
  for_each_row_of_worker(p.sequences, grain, p.threads, [&](int worker, int64_t b) {
    sequence<T, kKind, kPath, kKl>(p, rows, b, &tokens[worker], &sums[b]);
  });
}

template <class T, ObjectiveKind kKind, Path kPath>
void sequences(const PolicyObjectiveParams& p, const ObjectiveRows<T>& rows, SequenceSums* sums) {
  if (p.options.kl_coef != 0) {
    sequences<T, kKind, kPath, true>(p, rows, sums);
  } else {
    sequences<T, kKind, kPath, false>(p, rows, sums);
  }
}

template <class T, ObjectiveKind kKind>
void sequences(const PolicyObjectiveParams& p, const ObjectiveRows<T>& rows, SequenceSums* sums) {
  if (is_geometric(kKind) || !p.options.is_token_level()) {
    sequences<T, kKind, Path::kSequence>(p, rows, sums);
  } else if constexpr (!is_geometric(kKind)) {
    if (std::isinf(p.options.log_ratio_clamp)) {
      sequences<T, kKind, Path::kToken>(p, rows, sums);
    } else {
      sequences<T, kKind, Path::kClampedToken>(p, rows, sums);
    }
  }
}

template <class T>
void run(const PolicyObjectiveParams& p) {
  const ObjectiveRows<T> rows(p);
  std::vector<SequenceSums> sums(p.sequences);
  with_kind(p.options, [&](auto kind) { sequences<T, decltype(kind)::value>(p, rows, sums.data()); });

  double loss = 0, bonus = 0, metrics[kObjectiveMetrics] = {};
  for (int i = kFirstMinimum; i < kFirstMaximum; ++i) metrics[i] = std::numeric_limits<double>::infinity();
  for (int i = kFirstMaximum; i < kObjectiveMetrics; ++i) metrics[i] = -std::numeric_limits<double>::infinity();
  for (int64_t b = 0; b < p.sequences; ++b) {
    const SequenceSums& s = sums[b];
    loss += rows.loss_scale(b) * s.value;
    bonus += rows.entropy_scale(b) * s.entropy;
    if (rows.count(b) == 0) continue;
    const double added[] = {rows.count(b),   -s.log_ratio,  s.k3,           s.ratio,
                            s.ratio_spread,  s.clipped_low, s.clipped_high, s.weight,
                            s.policy_weight, s.kl,          s.entropy};
    for (int i = 0; i < kFirstMinimum; ++i) metrics[i] += added[i];
    const double low = s.clipped_low / rows.count(b), high = s.clipped_high / rows.count(b);
    const bool is_nan = std::isnan(s.ratio);  // which the loop's comparisons pass over
    const double ratio_min = is_nan ? s.ratio : s.ratio_min, ratio_max = is_nan ? s.ratio : s.ratio_max;
    const double extremes[] = {ratio_min, low, high, ratio_max, low, high};
    for (int i = kFirstMinimum; i < kFirstMaximum; ++i) {
      metrics[i] = smallest(metrics[i], extremes[i - kFirstMinimum]);
    }
    for (int i = kFirstMaximum; i < kObjectiveMetrics; ++i) {
      metrics[i] = largest(metrics[i], extremes[i - kFirstMinimum]);
    }
  }
  *static_cast<T*>(p.loss) = static_cast<T>(p.options.entropy_coef == 0 ? loss : loss - p.options.entropy_coef * bonus);
  std::copy(metrics, metrics + kObjectiveMetrics, p.metrics);
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
