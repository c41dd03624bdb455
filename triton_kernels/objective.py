"""The policy objectives, one token at a time: csrc/objective.h again, where everything is derived and named.

Everything is float64: these are N numbers beside N V, and float32 rounds once, at the end.
"""

import triton
import triton.language as tl

from rlkernels.ops import objective_options as fields
from rlkernels.triton_kernels.row_math import expm1

CLIP_DETACHED = tl.constexpr(fields.CLIP_DETACHED)
GEOMETRIC = tl.constexpr(fields.GEOMETRIC)
CISPO = tl.constexpr(fields.CISPO_KIND)
SAPO = tl.constexpr(fields.SAPO_KIND)
NFT = tl.constexpr(fields.NFT_KIND)
REINFORCE = tl.constexpr(fields.REINFORCE)

# where a number stands among the options
LOG_RATIO_CLAMP = tl.constexpr(fields.ObjectiveOptions._fields.index("log_ratio_clamp"))
RATIO_MIN = tl.constexpr(fields.ObjectiveOptions._fields.index("ratio_min"))
RATIO_MAX = tl.constexpr(fields.ObjectiveOptions._fields.index("ratio_max"))
DUAL_CLIP = tl.constexpr(fields.ObjectiveOptions._fields.index("dual_clip"))
RATIO_CAP = tl.constexpr(fields.ObjectiveOptions._fields.index("ratio_cap"))
LOG_RATIO_MIN = tl.constexpr(fields.ObjectiveOptions._fields.index("log_ratio_min"))
LOG_RATIO_MAX = tl.constexpr(fields.ObjectiveOptions._fields.index("log_ratio_max"))
TAU_POS = tl.constexpr(fields.ObjectiveOptions._fields.index("tau_pos"))
TAU_NEG = tl.constexpr(fields.ObjectiveOptions._fields.index("tau_neg"))
MIN_RATIO = tl.constexpr(fields.ObjectiveOptions._fields.index("min_ratio"))
NEGATIVE_WEIGHT = tl.constexpr(fields.ObjectiveOptions._fields.index("negative_weight"))
RATE_MIN = tl.constexpr(fields.ObjectiveOptions._fields.index("rate_min"))
RATE_MAX = tl.constexpr(fields.ObjectiveOptions._fields.index("rate_max"))
PROMPT_WEIGHT = tl.constexpr(fields.ObjectiveOptions._fields.index("prompt_weight"))
KL_COEF = tl.constexpr(fields.ObjectiveOptions._fields.index("kl_coef"))
KL_ESTIMATOR = tl.constexpr(fields.ObjectiveOptions._fields.index("kl_estimator"))
KL_CLAMP = tl.constexpr(fields.ObjectiveOptions._fields.index("kl_clamp"))
KL_IMPORTANCE_WEIGHTED = tl.constexpr(fields.ObjectiveOptions._fields.index("kl_importance_weighted"))
ENTROPY_COEF = tl.constexpr(fields.ObjectiveOptions._fields.index("entropy_coef"))

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def indicator(condition):
    return tl.where(condition, 1.0, 0.0).to(tl.float64)


@triton.jit
def clamped(x, low, high):
    """Keeps NaN; the slope is 1 from bound to bound."""
    above = tl.where(x < low, low, x)
    return tl.where(above > high, high, above), indicator((x >= low) & (x <= high))


@triton.jit
def limited_exp(log_ratio):
    """e^80 fits float32."""
    limited, slope = clamped(log_ratio, -80.0, 80.0)
    value = tl.exp(limited)
    return value, value * slope


@triton.jit
def scaled(value, factor):
    return tl.where(factor == 0.0, 0.0, factor * value)


@triton.jit
def times_logp(coefficient, logp):
    return tl.where(coefficient == 0.0, 0.0, coefficient * logp)  # not 0 * -inf


@triton.jit
def selected_advantage(advantage, weight, policy_weight):
    # 0 selects away, so that an infinite advantage has no gradient either
    return tl.where((weight == 0.0) | (policy_weight == 0.0), 0.0, advantage)


@triton.jit
def pooled_log_ratio(options, d, a, KIND: tl.constexpr, CLIPS_SEQUENCE: tl.constexpr):
    """What d adds to its sequence's sum, and d of that / dd."""
    if KIND != GEOMETRIC:
        return d, indicator(d == d)
    clamp = tl.load(options + LOG_RATIO_CLAMP)
    limited, slope = clamped(d, -clamp, clamp)
    if CLIPS_SEQUENCE:
        return limited, slope
    low = tl.where(a > 0.0, -INFINITY, tl.load(options + LOG_RATIO_MIN))
    high = tl.where(a > 0.0, tl.load(options + LOG_RATIO_MAX), INFINITY)
    value, clip_slope = clamped(limited, low, high)
    return value, clip_slope * slope


@triton.jit
def policy_terms(options, logp, d, x, a, rate, length, KIND: tl.constexpr, CLIPS_SEQUENCE: tl.constexpr):
    """(loss, dloss / dx, dloss / dlogp, ratio, dratio / dx, clipped low, clipped high)."""
    nothing = tl.zeros_like(x)
    nowhere = x != x
    nowhere = nowhere & ~nowhere
    clamp = tl.load(options + LOG_RATIO_CLAMP)
    ratio_min, ratio_max = tl.load(options + RATIO_MIN), tl.load(options + RATIO_MAX)
    if KIND == GEOMETRIC:
        bottom, top = tl.load(options + LOG_RATIO_MIN), tl.load(options + LOG_RATIO_MAX)
        if CLIPS_SEQUENCE:
            at = x
            low = tl.where(a > 0.0, -INFINITY, bottom)
            high = tl.where(a > 0.0, top, INFINITY)
            mean, slope = clamped(x, low, high)
            mean = mean / length
            slope = slope / length
        else:
            at, _slope = clamped(d, -clamp, clamp)
            mean = x
            slope = nothing + 1.0
        ratio, dratio = limited_exp(mean)
        dratio = dratio * slope
        return -a * ratio, -a * dratio, nothing, ratio, dratio, (a < 0.0) & (at < bottom), (a > 0.0) & (at > top)
    y, y_slope = clamped(x, -clamp, clamp)
    if KIND == NFT:
        bounded, bound_slope = clamped(y, -INFINITY, tl.load(options + LOG_RATIO_MAX))
        slope = bound_slope * y_slope
        ratio, dratio = limited_exp(bounded)
        dratio = dratio * slope
        q, _slope = clamped(rate, tl.load(options + RATE_MIN), tl.load(options + RATE_MAX))
        choice = tl.load(options + PROMPT_WEIGHT)
        w = tl.where(choice == 0.0, 1.0 - q, tl.where(choice == 1.0, tl.sqrt((1.0 - q) / q), 1.0))
        is_correct = a > 0.0
        negative = (1.0 - q * ratio) / (1.0 - q)
        min_ratio = tl.load(options + MIN_RATIO)
        floored = tl.where(negative < min_ratio, min_ratio, negative)
        negative_weight = tl.load(options + NEGATIVE_WEIGHT)
        value = tl.where(is_correct, -bounded, -negative_weight * tl.log(floored))
        # the floor is for the value; the gradient passes straight through
        dvalue = tl.where(is_correct, -slope, negative_weight * q / (1.0 - q) * dratio / floored)
        return w * value, w * dvalue, nothing, ratio, dratio, ~is_correct & (negative < min_ratio), nowhere
    ratio, dratio = limited_exp(y)
    dratio = dratio * y_slope
    if KIND == CISPO:
        w, _slope = clamped(ratio, ratio_min, ratio_max)
        return times_logp(-w * a, logp), nothing, -w * a, ratio, dratio, ratio < ratio_min, ratio > ratio_max
    if KIND == SAPO:
        tau = tl.where(a > 0.0, tl.load(options + TAU_POS), tl.load(options + TAU_NEG))
        steep, _slope = clamped(-tau * (ratio - 1.0), -700.0, 700.0)
        gate = 1.0 / (1.0 + tl.exp(steep))
        return (
            -a * (4.0 / tau) * gate,
            -a * 4.0 * gate * (1.0 - gate) * dratio,
            nothing,
            ratio,
            dratio,
            nowhere,
            nowhere,
        )
    if KIND == REINFORCE:
        return times_logp(-a, logp), nothing, -a, ratio, dratio, nowhere, nowhere
    ratio_cap = tl.load(options + RATIO_CAP)
    clip, clip_slope = clamped(ratio, ratio_min, ratio_max)
    free = -tl.where(ratio > ratio_cap, ratio_cap, ratio) * a
    bound = -clip * a
    dfree = -a * indicator(ratio <= ratio_cap)
    dbound = -a * clip_slope
    # torch halves a tie between the two branches
    value = tl.where((free > bound) | (free != free), free, bound)
    dvalue = tl.where(free > bound, dfree, tl.where(free < bound, dbound, (dfree + dbound) / 2.0))
    dual = -tl.load(options + DUAL_CLIP) * a
    is_bounded = (a < 0.0) & (value > dual)
    value = tl.where(is_bounded, dual, value)
    dvalue = tl.where(is_bounded, 0.0, dvalue)
    clipped_low, clipped_high = (a < 0.0) & (ratio < ratio_min), (a > 0.0) & (ratio > ratio_max)
    if KIND == CLIP_DETACHED:  # the ratio follows the token's own logp
        return value, nothing, dvalue * ratio, ratio, dratio, clipped_low, clipped_high
    return value, dvalue * dratio, nothing, ratio, dratio, clipped_low, clipped_high


@triton.jit
def objective_terms(
    options,
    logp,
    d,
    x,
    ref_logp,
    advantage,
    weight,
    policy_weight,
    rate,
    length,
    KIND: tl.constexpr,
    CLIPS_SEQUENCE: tl.constexpr,
    HAS_KL: tl.constexpr,
):
    """(L, dL / dx, dL / dlogp, ratio, kl, clipped low, clipped high)."""
    a = selected_advantage(advantage, weight, policy_weight)
    loss, dx, dlogp, ratio, dratio, low, high = policy_terms(options, logp, d, x, a, rate, length, KIND, CLIPS_SEQUENCE)
    loss, dx, dlogp = scaled(loss, policy_weight), scaled(dx, policy_weight), scaled(dlogp, policy_weight)
    kl = tl.zeros_like(x)
    if HAS_KL:
        clamp, kl_clamp = tl.load(options + LOG_RATIO_CLAMP), tl.load(options + KL_CLAMP)
        limit = tl.where(clamp < 80.0, clamp, 80.0)
        z, z_slope = clamped(ref_logp - logp, -limit, limit)
        e = expm1(z)
        estimator = tl.load(options + KL_ESTIMATOR)
        kl = tl.where(estimator == 1.0, -z, tl.where(estimator == 2.0, 0.5 * z * z, e - z))
        dz = tl.where(estimator == 1.0, -1.0, tl.where(estimator == 2.0, z, e))
        kl, kl_slope = clamped(kl, -kl_clamp, kl_clamp)
        kl_coef = tl.load(options + KL_COEF)
        is_weighted = tl.load(options + KL_IMPORTANCE_WEIGHTED) != 0.0
        factor = tl.where(is_weighted, ratio, 1.0)
        dfactor = tl.where(is_weighted, kl_coef * kl, 0.0)
        dlogp -= kl_coef * dz * z_slope * kl_slope * factor
        if KIND == CLIP_DETACHED:
            dlogp += dfactor * ratio
        else:
            dx += dfactor * dratio
        kl = kl * factor
        loss += kl_coef * kl
    return scaled(loss, weight), scaled(dx, weight), scaled(dlogp, weight), ratio, kl, low, high
