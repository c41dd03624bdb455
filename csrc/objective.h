// The policy objectives, one token at a time: value and derivatives. The definition is rlkernels/objectives.py; an
// objective's per-token mathematics stands there, here and in triton_kernels/objective.py, and nowhere else.
//
//   d = logp - old_logp             log ratio of a token
//   x = d, or its sum or mean over the sequence's trained tokens (GMPO clips each d first)
//   L = weight (policy_weight P(x, logp, A) + kl_coef KL(logp, ref_logp, x))
//
// A token's loss depends on its own logp directly and through x, so two derivatives are formed: dL/dlogp at fixed x,
// and dL/dx, which `log_ratio_slope` takes on to each d of the sequence. At a bound itself a clamp's slope is 1.
//
// Everything is double: these are N numbers beside N V, and float32 rounds once, at the end.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "host_device.h"

namespace rlk {

// What the codes stand for in rlkernels/ops/objective_options.py. Every number is a double there and here.
enum class ObjectiveKind : int {
  kClip,          // GRPO, GSPO
  kClipDetached,  // GSPO-token
  kGeometric,     // GMPO
  kCispo,
  kSapo,
  kNft,
  kReinforce,
  kGeometricSequence  // kGeometric where clips_sequence, told apart when compiling; not a code
};
constexpr bool is_geometric(ObjectiveKind kind) {
  return kind == ObjectiveKind::kGeometric || kind == ObjectiveKind::kGeometricSequence;
}
enum class Level : int { kToken, kSequenceMean, kSequenceProduct };
enum class KlEstimator : int { kK1 = 1, kK2 = 2, kK3 = 3 };
enum class PromptWeight : int { kFailureRate, kSqrtFailureOdds, kUniform };

// A bound that is not wanted is infinite.
struct ObjectiveOptions {
  ObjectiveKind kind;
  Level level;
  double log_ratio_clamp;
  double ratio_min, ratio_max;  // 1 - clip_low and 1 + clip_high, or CISPO's bounds
  double dual_clip, ratio_cap;
  double log_ratio_min, log_ratio_max;  // GMPO's clip of d; NFT's upper bound
  bool clips_sequence;                  // GMPO clips the sequence's sum instead of each d
  double tau_pos, tau_neg;
  double min_ratio, negative_weight, rate_min, rate_max;
  PromptWeight prompt_weight;
  double kl_coef;
  KlEstimator kl_estimator;
  double kl_clamp;
  bool kl_importance_weighted;
  double entropy_coef;

  // Whether a token's coefficient needs no other token.
  HOST_DEVICE bool is_token_level() const { return level == Level::kToken && kind != ObjectiveKind::kGeometric; }
  HOST_DEVICE bool sums_sequence() const {
    return level == Level::kSequenceProduct || (kind == ObjectiveKind::kGeometric && clips_sequence);
  }
};

constexpr double kLogRatioLimit = 80;  // e^80 fits float32

struct Exp {
  double value, minus_one;
};

// e^x and e^x - 1, the latter without cancellation; |x| <= 700 or NaN. No branch and no call, so that loops vectorise.
HOST_DEVICE Exp exponential(double x) {
  constexpr double kToInteger = 0x1.8p52;
  const double shifted = x * 1.44269504088896340736 + kToInteger;
  const double n = shifted - kToInteger;
  // ln 2 in two parts: the first has 32 bits, so n times it is exact
  const double rest = x - n * 6.93147180369123816490e-01, ln2_low = n * 1.90821492927058770002e-10;
  const double r = rest - ln2_low;
  const double lost = (rest - r) - ln2_low;
  // Taylor to r^13 / 13!; |r| <= ln(2) / 2 leaves 4e-18
  double p = 1.0 / 6227020800;
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  const double curved = r * r * p + lost;
  const double q = r + curved;  // e^r - 1
  // 1 + r in two parts: a ratio that should meet a clip bound exactly does
  const double sum = 1 + r;
  const double whole = sum + ((1 - sum) + r + curved);
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 52) + 0x3ff0000000000000u;
  double scale;  // 2^n
  std::memcpy(&scale, &bits, sizeof scale);
  return {scale * whole, scale * q + (scale - 1)};
}

// Conditions are joined by products and choices made by sums: && and uniform branches keep loops from vectorising.
HOST_DEVICE double indicator(bool condition) { return condition ? 1.0 : 0.0; }

// A clamp keeps NaN; its slope is 1 from bound to bound.
struct Clamped {
  double value, slope;
};
HOST_DEVICE Clamped clamped(double x, double low, double high) {
  const double above = x < low ? low : x;
  return {above > high ? high : above, indicator(x >= low) * indicator(x <= high)};
}

struct Ratio {
  double value, slope;  // d ratio / d log ratio
};
HOST_DEVICE Ratio limited_exp(double log_ratio) {
  const Clamped limited = clamped(log_ratio, -kLogRatioLimit, kLogRatioLimit);
  const double value = exponential(limited.value).value;
  return {value, value * limited.slope};
}

struct ObjectiveToken {
  double logp, old_logp, ref_logp, advantage, weight, policy_weight, success_rate;

  HOST_DEVICE double log_ratio() const { return logp - old_logp; }
  // 0 selects away, so that an infinite advantage has no gradient either
  HOST_DEVICE double selected_advantage() const {
    return indicator(weight == 0) + indicator(policy_weight == 0) != 0 ? 0.0 : advantage;
  }
};

// GMPO's clip, on the side where the advantage pushes.
HOST_DEVICE Clamped clipped_log_ratio(const ObjectiveOptions& o, double log_ratio, double a) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double low = a > 0 ? -infinity : o.log_ratio_min, high = a > 0 ? o.log_ratio_max : infinity;
  return clamped(log_ratio, low, high);
}

// What d adds to its sequence's sum, and d of that / dd. Token-level objectives have x = d.
template <ObjectiveKind kKind>
HOST_DEVICE Clamped pooled_log_ratio(const ObjectiveOptions& o, const ObjectiveToken& token) {
  const double d = token.log_ratio();
  if (!is_geometric(kKind)) return {d, 1.0};
  const Clamped limited = clamped(d, -o.log_ratio_clamp, o.log_ratio_clamp);
  if (kKind == ObjectiveKind::kGeometricSequence) return limited;
  const Clamped clipped = clipped_log_ratio(o, limited.value, token.selected_advantage());
  return {clipped.value, clipped.slope * limited.slope};
}

// NaN, once met, stays.
HOST_DEVICE double smallest(double a, double b) { return b < a || b != b ? b : a; }
HOST_DEVICE double largest(double a, double b) { return b > a || b != b ? b : a; }

struct ObjectiveTerms {
  double loss, dx, dlogp;  // L and its two derivatives
  double ratio, kl;
  double clipped_low, clipped_high;  // 1 or 0
};

// not 0 * -inf
HOST_DEVICE double times_logp(double coefficient, double logp) { return coefficient == 0 ? 0.0 : coefficient * logp; }

template <ObjectiveKind kKind>
HOST_DEVICE ObjectiveTerms policy_terms(const ObjectiveOptions& o, const ObjectiveToken& token, double x,
                                        double length) {
  const double a = token.selected_advantage();
  if (is_geometric(kKind)) {
    const bool of_sequence = kKind == ObjectiveKind::kGeometricSequence;
    const Clamped clipped = clipped_log_ratio(o, x, a);
    const Clamped mean = {of_sequence ? clipped.value / length : x, of_sequence ? clipped.slope / length : 1.0};
    const double at = of_sequence ? x : clamped(token.log_ratio(), -o.log_ratio_clamp, o.log_ratio_clamp).value;
    const Ratio r = limited_exp(mean.value);
    const double dratio = r.slope * mean.slope;
    return {-a * r.value,
            -a * dratio,
            0.0,
            r.value,
            dratio,
            indicator(a < 0) * indicator(at < o.log_ratio_min),
            indicator(a > 0) * indicator(at > o.log_ratio_max)};
  }
  const Clamped y = clamped(x, -o.log_ratio_clamp, o.log_ratio_clamp);
  if (kKind == ObjectiveKind::kNft) {
    const Clamped bounded = clamped(y.value, -std::numeric_limits<double>::infinity(), o.log_ratio_max);
    const double slope = bounded.slope * y.slope;
    const Ratio r = limited_exp(bounded.value);
    const double q = clamped(token.success_rate, o.rate_min, o.rate_max).value;
    const double odds = (1 - q) / q;
    const double w = o.prompt_weight == PromptWeight::kFailureRate       ? 1 - q
                     : o.prompt_weight == PromptWeight::kSqrtFailureOdds ? std::sqrt(odds)
                                                                         : 1.0;
    const bool is_correct = a > 0;
    const double negative = (1 - q * r.value) / (1 - q);
    const double floored = negative < o.min_ratio ? o.min_ratio : negative;
    // the floor is for the value; the gradient passes straight through
    const double value = is_correct ? -bounded.value : -o.negative_weight * std::log(floored);
    const double dvalue = is_correct ? -slope : o.negative_weight * q / (1 - q) * r.slope * slope / floored;
    return {w * value, w * dvalue, 0.0, r.value, r.slope * slope, indicator(a <= 0) * indicator(negative < o.min_ratio),
            0.0};
  }
  const Ratio r = limited_exp(y.value);
  const double dratio = r.slope * y.slope;
  if (kKind == ObjectiveKind::kCispo) {
    const double w = clamped(r.value, o.ratio_min, o.ratio_max).value;
    return {times_logp(-w * a, token.logp),  0.0, -w * a, r.value, dratio, indicator(r.value < o.ratio_min),
            indicator(r.value > o.ratio_max)};
  }
  if (kKind == ObjectiveKind::kSapo) {
    const double tau = a > 0 ? o.tau_pos : o.tau_neg;
    const Clamped steep = clamped(-tau * (r.value - 1), -700.0, 700.0);
    const double gate = 1 / (1 + exponential(steep.value).value);
    return {-a * (4 / tau) * gate, -a * 4 * gate * (1 - gate) * dratio, 0.0, r.value, dratio, 0.0, 0.0};
  }
  if (kKind == ObjectiveKind::kReinforce) {
    return {times_logp(-a, token.logp), 0.0, -a, r.value, dratio, 0.0, 0.0};
  }
  const double capped = r.value > o.ratio_cap ? o.ratio_cap : r.value;
  const Clamped clip = clamped(r.value, o.ratio_min, o.ratio_max);
  const double free = -capped * a, bound = -clip.value * a;
  const double dfree = r.value <= o.ratio_cap ? -a : 0.0, dbound = -a * clip.slope;
  // torch halves a tie between the two branches
  const double unlimited = free <= bound ? bound : free;
  const double dunlimited = free > bound ? dfree : free < bound ? dbound : (dfree + dbound) / 2;
  const double dual = a < 0 ? -o.dual_clip * a : std::numeric_limits<double>::infinity();
  const double value = unlimited > dual ? dual : unlimited;
  const double dvalue = unlimited > dual ? 0.0 : dunlimited;
  // GSPO-token's ratio follows the token's own logp
  const bool detached = kKind == ObjectiveKind::kClipDetached;
  return {value,
          detached ? 0.0 : dvalue * dratio,
          detached ? dvalue * r.value : 0.0,
          r.value,
          dratio,
          indicator(a < 0) * indicator(r.value < o.ratio_min),
          indicator(a > 0) * indicator(r.value > o.ratio_max)};
}

// In place of `kl`, policy_terms leaves d ratio / dx; here it becomes the estimate.
template <ObjectiveKind kKind>
HOST_DEVICE ObjectiveTerms objective_terms(const ObjectiveOptions& o, const ObjectiveToken& token, double x,
                                           double length) {
  ObjectiveTerms terms = policy_terms<kKind>(o, token, x, length);
  const double dratio = terms.kl;
  const auto scaled = [](double value, double factor) { return factor == 0 ? 0.0 : factor * value; };
  terms.loss = scaled(terms.loss, token.policy_weight);
  terms.dx = scaled(terms.dx, token.policy_weight);
  terms.dlogp = scaled(terms.dlogp, token.policy_weight);
  terms.kl = 0;
  if (o.kl_coef != 0) {
    const double limit = o.log_ratio_clamp < kLogRatioLimit ? o.log_ratio_clamp : kLogRatioLimit;
    const Clamped z = clamped(token.ref_logp - token.logp, -limit, limit);
    const double e = exponential(z.value).minus_one;
    const double k1 = indicator(o.kl_estimator == KlEstimator::kK1);
    const double k2 = indicator(o.kl_estimator == KlEstimator::kK2);
    const double k3 = indicator(o.kl_estimator == KlEstimator::kK3);
    const double kl = k2 * 0.5 * z.value * z.value + k3 * e - (k1 + k3) * z.value;
    const double dz = k2 * z.value + k3 * e - k1;
    const Clamped estimate = clamped(kl, -o.kl_clamp, o.kl_clamp);
    const double dlogp = -dz * z.slope * estimate.slope;
    const double weighted = indicator(o.kl_importance_weighted);
    const double factor = weighted * terms.ratio + (1 - weighted);
    terms.kl = estimate.value * factor;
    terms.loss += o.kl_coef * terms.kl;
    terms.dlogp += o.kl_coef * dlogp * factor;
    const double dfactor = weighted * o.kl_coef * estimate.value;
    if (kKind == ObjectiveKind::kClipDetached) {
      terms.dlogp += dfactor * terms.ratio;
    } else {
      terms.dx += dfactor * dratio;
    }
  }
  terms.loss = scaled(terms.loss, token.weight);
  terms.dx = scaled(terms.dx, token.weight);
  terms.dlogp = scaled(terms.dlogp, token.weight);
  return terms;
}

}  // namespace rlk
