// The state of a row of logits, and the gradient of one logit. The only place where this is derived.
//
//   u = x                                  z = k u,  k = logit_scale / temperature            without softcap
//   u = tanh(logit_scale x / softcap)      z = k u,  k = softcap / temperature                with softcap
//
//   m = max_v u_v      d_v = k (u_v - m)
//   s = sum_v e^d_v    t = sum_v e^d_v d_v    q = sum_v e^2d_v    w = sum_v u_v
//
//   logp = k (u_y - m) - log s        entropy = log s - t / s        lse = k m + log s
//   log sum p^2 = log q - 2 log s     mean z  = k w / V
//   y is top-1  <=>  u_y >= m and u_y > max_{v<y} u_v                 (the first maximum wins)
//
// The maximum is subtracted before scaling, so an offset common to a row costs nothing. m and log s are kept
// apart: rebuilding p from a rounded k m + log s loses all of it once m is large.
//
// Floor: d is not let below a value whose exponential is 0 in the compute type, so that a logit of -inf gives
// 0 * floor = 0 in t where 0 * -inf would be NaN. Comparisons are ordered so that NaN stays NaN.
//
// Rows are swept in powers of two: k is rounded once, as k log2(e), and e^d = 2^(k log2(e) (u - m)).
//
// Gradient, with p = e^d / s and upstream dlogp, dentropy, dlse:
//
//   dz_v = dlogp (1{v=y} - p_v) - dentropy p_v (log p_v + entropy) + dlse p_v
//        = p_v (a + b d_v) + dlogp 1{v=y},    a = dlse - dlogp - dentropy (entropy - log s),  b = -dentropy
//   dx_v = dz_v k                                                    without softcap
//   dx_v = dz_v (logit_scale / temperature) tanh'                    with softcap
//
// The target's dlogp (1 - p_y) is formed as -dlogp expm1(logp), without cancellation.
#pragma once

#include <cmath>
#include <limits>

#include "host_device.h"

namespace rlk {

constexpr int64_t kSegment = 4096;  // columns reduced in one piece; segments are merged left to right

constexpr double kLn2 = 0.69314718055994530942;

// In powers of two: 2^-151 and 2^-1076 round to 0 even when multiplied by the largest mantissa.
template <class T>
struct Exp2Floor;
template <>
struct Exp2Floor<float> {
  static constexpr float value = -151.0f;
};
template <>
struct Exp2Floor<double> {
  static constexpr double value = -1076.0;
};

template <class T>
HOST_DEVICE T floor_shift(T d) {
  const T floor = static_cast<T>(Exp2Floor<T>::value * kLn2);
  return d < floor ? floor : d;
}

// How one row's logits become z = k u. `slope` is dz/dx without softcap's tanh'.
// The sweep uses k_log2e, rounded to T; k is what that rounding stands for, so that statistics and target agree.
template <class T>
struct RowTransform {
  T k_log2e, inner_scale;  // inner_scale = logit_scale / softcap
  double k, slope;
  bool capped;

  HOST_DEVICE RowTransform(double temperature, const T* softcap, double logit_scale)
      : inner_scale(0), slope(logit_scale / temperature), capped(softcap != nullptr) {
    if (capped) inner_scale = static_cast<T>(logit_scale / *softcap);
    k_log2e = static_cast<T>((capped ? *softcap / temperature : slope) / kLn2);
    k = k_log2e * kLn2;
  }
};

// tanh x = x + x^3 (kTanh[0] + kTanh[1] x^2 + ...) below kTanhNear, where (1 - e) / (1 + e) would cancel. Coefficients
// of Cephes' tanhf.
constexpr float kTanhNear = 0.625f;
constexpr float kTanh[5] = {-3.33332819422e-1f, 1.33314422036e-1f, -5.37397155531e-2f, 2.06390887954e-2f,
                            -5.70498872745e-3f};

template <class V>
struct Tanh {
  V value, slope;
};

// tanh and its derivative, the latter from e = e^-2|x|: 1 - tanh^2 would be 0 in double from |x| = 19 on (in float
// from 10 on). A vector type brings its own.
HOST_DEVICE Tanh<double> tanh_with_slope(double x) {
  const double e = std::exp(-2 * std::abs(x));
  const double r = 1 / (1 + e);
  return {std::tanh(x), 4 * e * r * r};
}

HOST_DEVICE Tanh<float> tanh_with_slope(float x) {
  const float magnitude = std::abs(x), z = x * x;
  const float e = std::exp2(static_cast<float>(-2 / kLn2) * magnitude);
  const float r = 1 / (1 + e);
  const float p = (((kTanh[4] * z + kTanh[3]) * z + kTanh[2]) * z + kTanh[1]) * z + kTanh[0];
  const float far = (1 - e) * r, near = p * z * x + x;
  const bool is_near = magnitude < kTanhNear;
  return {is_near ? near : x < 0 ? -far : far, is_near ? 1 - near * near : 4 * e * r * r};
}

template <class T>
struct RowState {
  T m = -std::numeric_limits<T>::infinity();
  T s = 0, t = 0, q = 0, w = 0;
  T target = 0;  // u_y, set by the segment that holds y
  T max_before_target = -std::numeric_limits<T>::infinity();

  // Appends the columns right of this state's. Each side's sums are moved to the common maximum.
  HOST_DEVICE void merge(const RowState& right, T k) {
    const T top = right.m > m || right.m != right.m ? right.m : m;
    RowState a = *this, b = right;
    a.move_to(top, k);
    b.move_to(top, k);
    m = top;
    s = a.s + b.s;
    t = a.t + b.t;
    q = a.q + b.q;
    w = a.w + b.w;
    target += right.target;
    if (right.max_before_target > max_before_target) max_before_target = right.max_before_target;
  }

 private:
  HOST_DEVICE void move_to(T top, T k) {
    if (m == top) return;
    const T shift = floor_shift(k * (m - top));
    const T factor = std::exp(shift);
    t = factor * (t + s * shift);
    s = factor * s;
    q = factor * factor * q;
  }
};

template <class T>
struct RowStats {
  T logp, entropy, lse, log_sum_sq_probs, mean_logits, log_s;
  bool is_top1;
};

template <class T>
HOST_DEVICE RowStats<T> finish(const RowState<T>& state, T k, T vocab) {
  RowStats<T> out;
  out.log_s = std::log(state.s);
  out.logp = k * (state.target - state.m) - out.log_s;
  out.entropy = out.log_s - state.t / state.s;
  out.lse = k * state.m + out.log_s;
  out.log_sum_sq_probs = std::log(state.q) - 2 * out.log_s;
  out.mean_logits = k * state.w / vocab;
  out.is_top1 = state.s == state.s && state.target >= state.m && state.target > state.max_before_target;
  if (state.m == -std::numeric_limits<T>::infinity()) {  // an all -inf row has no distribution
    const T nan = std::numeric_limits<T>::quiet_NaN();
    out.logp = out.entropy = out.lse = out.log_sum_sq_probs = out.log_s = nan;
    out.is_top1 = false;
  }
  return out;
}

// dx_v = 2^w_v (a + b w_v) times tanh' under softcap, w_v = d_v log2(e); the target's column apart.
template <class T>
struct RowGradient {
  T a, b;

  HOST_DEVICE RowGradient(T dlogp_, T dentropy, T dlse, T entropy, T log_s_, T slope_)
      : dlogp(dlogp_), log_s(log_s_), slope(slope_) {
    const T inv_s = std::exp(-log_s);
    // without this test a zero coefficient of a row with infinite entropy terms would be 0 * inf
    const T centre = dentropy == 0 ? T(0) : dentropy * (entropy - log_s);
    target_rest_a = dlse - centre;
    target_rest_b = -dentropy;
    a = (target_rest_a - dlogp) * inv_s * slope;
    b = target_rest_b * inv_s * slope * static_cast<T>(kLn2);
  }

  // The target column's dx without tanh'; d is k (u_y - m), not floored.
  HOST_DEVICE T target(T d) const {
    const T floored = floor_shift(d);
    const T p = std::exp(floored - log_s);
    return slope * (-dlogp * std::expm1(d - log_s) + p * (target_rest_a + target_rest_b * floored));
  }

 private:
  T dlogp, target_rest_a, target_rest_b, log_s, slope;
};

}  // namespace rlk
