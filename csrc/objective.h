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
  kReinforce
};
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

// A clamp keeps NaN; its slope is 1 from bound to bound.
struct Clamped {
  double value, slope;
};
HOST_DEVICE Clamped clamped(double x, double low, double high) {
  const double above = x < low ? low : x;
  return {above > high ? high : above, x >= low && x <= high ? 1.0 : 0.0};
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
  HOST_DEVICE double selected_advantage() const { return weight == 0 || policy_weight == 0 ? 0.0 : advantage; }
};

// What d adds to its sequence's sum, and d of that / dd. Token-level objectives have x = d.
HOST_DEVICE Clamped pooled_log_ratio(const ObjectiveOptions& o, const ObjectiveToken& token) {
  const double d = token.log_ratio();
  if (o.kind != ObjectiveKind::kGeometric) return {d, 1.0};
  const Clamped limited = clamped(d, -o.log_ratio_clamp, o.log_ratio_clamp);
  if (o.clips_sequence) return limited;
  const bool rises = token.selected_advantage() > 0;
  const double infinity = std::numeric_limits<double>::infinity();
  const Clamped clipped =
      clamped(limited.value, rises ? -infinity : o.log_ratio_min, rises ? o.log_ratio_max : infinity);
  return {clipped.value, clipped.slope * limited.slope};
}

struct ObjectiveTerms {
  double loss, dx, dlogp;  // L and its two derivatives
  double ratio, kl;
  bool clipped_low, clipped_high;
};

template <ObjectiveKind kKind>
HOST_DEVICE ObjectiveTerms policy_terms(const ObjectiveOptions& o, const ObjectiveToken& token, double x,
                                        double length) {
  const double a = token.selected_advantage();
  if (kKind == ObjectiveKind::kGeometric) {
    Clamped mean = {x, 1.0};
    double low = token.log_ratio(), high = low;
    if (o.clips_sequence) {
      low = high = x;
      mean = a > 0 ? clamped(x, -std::numeric_limits<double>::infinity(), o.log_ratio_max)
                   : clamped(x, o.log_ratio_min, std::numeric_limits<double>::infinity());
      mean = {mean.value / length, mean.slope / length};
    } else {
      low = high = clamped(low, -o.log_ratio_clamp, o.log_ratio_clamp).value;
    }
    const Ratio r = limited_exp(mean.value);
    const double dratio = r.slope * mean.slope;
    return {-a * r.value,
            -a * dratio,
            0.0,
            r.value,
            dratio,
            a < 0 && low < o.log_ratio_min,
            a > 0 && high > o.log_ratio_max};
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
    return {w * value, w * dvalue, 0.0, r.value, r.slope * slope, !is_correct && negative < o.min_ratio, false};
  }
  const Ratio r = limited_exp(y.value);
  const double dratio = r.slope * y.slope;
  if (kKind == ObjectiveKind::kCispo) {
    const double w = clamped(r.value, o.ratio_min, o.ratio_max).value;
    return {-w * a * token.logp, 0.0, -w * a, r.value, dratio, r.value<o.ratio_min, r.value> o.ratio_max};
  }
  if (kKind == ObjectiveKind::kSapo) {
    const double tau = a > 0 ? o.tau_pos : o.tau_neg;
    const Clamped steep = clamped(-tau * (r.value - 1), -700.0, 700.0);
    const double gate = 1 / (1 + exponential(steep.value).value);
    return {-a * (4 / tau) * gate, -a * 4 * gate * (1 - gate) * dratio, 0.0, r.value, dratio, false, false};
  }
  if (kKind == ObjectiveKind::kReinforce) return {-a * token.logp, 0.0, -a, r.value, dratio, false, false};
  const double capped = r.value > o.ratio_cap ? o.ratio_cap : r.value;
  const Clamped clip = clamped(r.value, o.ratio_min, o.ratio_max);
  const double free = -capped * a, bound = -clip.value * a;
  const double dfree = r.value <= o.ratio_cap ? -a : 0.0, dbound = -a * clip.slope;
  // torch halves a tie between the two branches
  double value = free > bound || free != free ? free : bound;
  double dvalue = free > bound ? dfree : free < bound ? dbound : (dfree + dbound) / 2;
  const double dual = -o.dual_clip * a;
  if (a < 0 && value > dual) {
    value = dual;
    dvalue = 0;
  }
  // GSPO-token's ratio follows the token's own logp
  const bool detached = kKind == ObjectiveKind::kClipDetached;
  return {value,  detached ? 0.0 : dvalue * dratio, detached ? dvalue * r.value : 0.0, r.value,
          dratio, a < 0 && r.value < o.ratio_min,   a > 0 && r.value > o.ratio_max};
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
    double kl, dz;
    switch (o.kl_estimator) {
      case KlEstimator::kK1:
        kl = -z.value;
        dz = -1;
        break;
      case KlEstimator::kK2:
        kl = 0.5 * z.value * z.value;
        dz = z.value;
        break;
      default:
        kl = e - z.value;
        dz = e;
    }
    const Clamped estimate = clamped(kl, -o.kl_clamp, o.kl_clamp);
    const double dlogp = -dz * z.slope * estimate.slope;
    const double factor = o.kl_importance_weighted ? terms.ratio : 1.0;
    terms.kl = estimate.value * factor;
    terms.loss += o.kl_coef * terms.kl;
    terms.dlogp += o.kl_coef * dlogp * factor;
    if (o.kl_importance_weighted) {
      const double dfactor = o.kl_coef * estimate.value;
      if (kKind == ObjectiveKind::kClipDetached) {
        terms.dlogp += dfactor * terms.ratio;
      } else {
        terms.dx += dfactor * dratio;
      }
    }
  }
  terms.loss = scaled(terms.loss, token.weight);
  terms.dx = scaled(terms.dx, token.weight);
  terms.dlogp = scaled(terms.dlogp, token.weight);
  return terms;
}

}  // namespace rlk
