"""The state of a row of logits, and the gradient of one logit, as csrc/row_math.h derives and names them.

Shifts are in powers of two here: w = k log2(e) (u - m), so that e^d = 2^w, and t = sum_v 2^w w.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.69314718055994530942)
LOG2_E = tl.constexpr(1.44269504088896340736)


@triton.jit
def floor_shift(w):
    # a power of two that is 0 in w's type even times the largest mantissa: 0 * floor is 0, 0 * -inf is NaN
    if w.dtype == tl.float64:
        return tl.maximum(w, -1076.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.maximum(w, -151.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divide(x, y):
    # plain division of float32 is approximate
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def expm1(x):
    # Kahan: (y - 1) / log y hardly moves with y, so the rounding of y = e^x cancels. Below, nothing cancels.
    y = tl.exp(tl.maximum(x, -1.0, propagate_nan=tl.PropagateNan.ALL))
    log_y = tl.where(y == 1.0, 1.0, tl.log(y))
    near = tl.where(y == 1.0, x, (y - 1.0) * x / log_y)
    return tl.where(x < -1.0, tl.exp(x) - 1.0, near)


@triton.jit
def tanh_with_slope(x):
    # the slope from an exponential: 1 - tanh^2 is 0 in float32 from |x| = 10 on
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    r = 1.0 / (1.0 + e)
    far = (1.0 - e) * r
    value = tl.where(x < 0.0, -far, far)
    slope = 4.0 * e * r * r
    # near 0 that would cancel
    z = x * x
    if x.dtype != tl.float64:  # Cephes' tanhf, as in csrc/row_math.h
        p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
        is_near = tl.abs(x) < 0.625
        value = tl.where(is_near, (p - 3.33332819422e-1) * z * x + x, value)
        slope = tl.where(is_near, 1.0 - value * value, slope)
    else:  # Taylor's, which needs few registers
        p = (-17 / 315 * z + 2 / 15) * z
        value = tl.where(tl.abs(x) < 0.01, (p - 1 / 3) * z * x + x, value)
    return value, slope


@triton.jit
def positive(x):
    return (x > 0.0) & (x < float("inf"))


@triton.jit
def row_transform(temperature, softcap, logit_scale, label_is_valid):
    """k, dz/dx without tanh', and logit_scale / softcap (1 without softcap).

    k is NaN, and with it whatever is made of it, where the label or a number is not one to compute with.
    """
    temperature = tl.load(temperature)
    logit_scale = tl.load(logit_scale)
    valid = label_is_valid & positive(temperature) & positive(logit_scale)
    slope = divide(logit_scale, temperature)
    k = slope
    inner_scale = 1.0
    if softcap is not None:
        softcap = tl.load(softcap)
        valid = valid & positive(softcap)
        k = divide(softcap, temperature)
        inner_scale = divide(logit_scale, softcap)
    return tl.where(valid, k, float("nan")), slope, inner_scale


@triton.jit
def transform_logits(x, inner_scale, CAPPED: tl.constexpr):
    """u and tanh' of logits."""
    if CAPPED:
        return tanh_with_slope(inner_scale * x)
    else:
        return x, 1.0


@triton.jit
def segment_state(u, k, WANT_T: tl.constexpr, WANT_Q: tl.constexpr):
    """(m, s, t, q) of a segment; columns that do not count hold -inf. A sum that is not wanted stays 0."""
    m = tl.max(u, axis=0)
    w = floor_shift(k * LOG2_E * (u - tl.where(m == float("-inf"), 0.0, m)))
    e = tl.exp2(w)
    s = tl.sum(e, axis=0)
    t = tl.sum(e * w, axis=0) if WANT_T else 0.0
    q = tl.sum(e * e, axis=0) if WANT_Q else 0.0
    return m, s, t, q


@triton.jit
def move_to(top, m, s, t, q, k):
    shift = floor_shift(k * LOG2_E * tl.where(m == top, 0.0, m - top))
    factor = tl.exp2(shift)
    return factor * s, factor * (t + s * shift), factor * factor * q


@triton.jit
def merge(m, s, t, q, right_m, right_s, right_t, right_q, k):
    """Appends the columns right of this state's."""
    top = tl.maximum(m, right_m, propagate_nan=tl.PropagateNan.ALL)
    s, t, q = move_to(top, m, s, t, q, k)
    right_s, right_t, right_q = move_to(top, right_m, right_s, right_t, right_q, k)
    return top, s + right_s, t + right_t, q + right_q


@triton.jit
def log_sum(m, s):
    # an all -inf row has no distribution
    return tl.where(m == float("-inf"), float("nan"), tl.log(s))


@triton.jit
def row_gradient(dlogp, dentropy, dlse, entropy, log_s, slope):
    """(a, b) of dx_v = 2^w (a + b w) times tanh', and the a of what is left of the target's without dlogp."""
    inv_s = tl.exp(-log_s) * slope
    # without this test a zero coefficient of a row with infinite entropy terms would be 0 * inf
    centre = tl.where(dentropy == 0.0, 0.0, dentropy * (entropy - log_s))
    target_a = (dlse - centre) * inv_s
    return target_a - dlogp * inv_s, -dentropy * inv_s * LN_2, target_a


@triton.jit
def logit_gradient(u, m, k, a, b):
    w = floor_shift(k * LOG2_E * (u - m))
    return tl.exp2(w) * (a + b * w)
