"""From per-token statistics to a loss, its coefficients and its metrics, as csrc/cpu/policy_objective.cpp.

Two launches: one program a sequence for its tokens, then one program a metric that adds the sequences up; Triton has no
barrier between programs that works everywhere. No atomics: the same bits every time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernels.ops import objective_options as fields
from rlkernels.ops.objective_options import ObjectiveOptions
from rlkernels.ops.policy_objective import ObjectiveBatch, ObjectiveResult
from rlkernels.triton_kernels import configs
from rlkernels.triton_kernels.objective import (
    ENTROPY_COEF,
    INFINITY,
    clamped,
    objective_terms,
    pooled_log_ratio,
    selected_advantage,
)
from rlkernels.triton_kernels.row_math import expm1

_ANY_VALUE = ["tokens", "sequences", "width"]

TOKEN_MEAN = tl.constexpr(fields.TOKEN_MEAN)
SEQ_MEAN_TOKEN_MEAN = tl.constexpr(fields.SEQ_MEAN_TOKEN_MEAN)
TOKEN_SUM = tl.constexpr(fields.TOKEN_SUM)

# a sequence's sums: value, entropy, then those of METRICS, then three minima and three maxima
SUMS = tl.constexpr(19)
METRIC_SUMS = tl.constexpr(11)


@triton.jit
def load_wide(pointer, index, inside, default):
    """In float64; the default where there is no tensor or no trained token."""
    if pointer is None:
        return tl.where(inside, default, default).to(tl.float64)
    else:
        return tl.load(pointer + index, mask=inside, other=default).to(tl.float64)


@triton.jit
def load_per(pointer, i, b, inside, default, PER_TOKEN: tl.constexpr):
    """Of each token, or of its sequence."""
    if PER_TOKEN:
        return load_wide(pointer, i, inside, default)
    else:
        return load_wide(pointer, i * 0 + b, inside, default)


@triton.jit
def log_ratio(token_logp, old_logp, i, inside):
    if old_logp is None:
        return token_logp - token_logp
    else:
        return token_logp - load_wide(old_logp, i, inside, 0.0)


@triton.jit
def sequence_range(cu_seqlens, b, width, tokens):
    if cu_seqlens is None:
        return b * width, (b + 1) * width
    else:  # a border that nobody could look at is not let out of the batch
        begin, end = tl.load(cu_seqlens + b), tl.load(cu_seqlens + b + 1)
        return tl.maximum(begin, 0), tl.minimum(end, tokens)


@triton.jit
def denominator(normalizer, tokens, sequences, REDUCTION: tl.constexpr):
    if normalizer is not None:
        own = tl.load(normalizer)
    elif REDUCTION == TOKEN_MEAN:
        own = tokens
    elif REDUCTION == TOKEN_SUM:
        own = tokens * 0.0 + 1.0
    else:
        own = tokens * 0.0 + sequences
    return tl.where(own == 0.0, 1.0, own)


@triton.jit
def reduction_scale(length, divisor, REDUCTION: tl.constexpr):
    if REDUCTION == SEQ_MEAN_TOKEN_MEAN:
        return 1.0 / (length * divisor)
    else:
        return 1.0 / divisor


@triton.jit
def total_of(counts, sequences, BLOCK: tl.constexpr):
    total = tl.full((), 0.0, tl.float64)
    for begin in range(0, sequences, BLOCK):
        b = begin + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(counts + b, mask=b < sequences, other=0.0), axis=0)
    return total


@triton.jit
def count_trained(mask, begin, end, BLOCK: tl.constexpr):
    count = tl.full((), 0.0, tl.float64)
    for first in range(begin, end, BLOCK):
        i = first + tl.arange(0, BLOCK).to(tl.int64)
        count += tl.sum((tl.load(mask + i, mask=i < end, other=0) != 0).to(tl.float64), axis=0)
    return count


@triton.jit(do_not_specialize=_ANY_VALUE)
def count_kernel(mask, cu_seqlens, counts, width, tokens, BLOCK: tl.constexpr):
    """The number of each sequence's trained tokens."""
    b = tl.program_id(0).to(tl.int64)
    begin, end = sequence_range(cu_seqlens, b, width, tokens)
    tl.store(counts + b, count_trained(mask, begin, end, BLOCK))


@triton.jit
def pooled_of_token(
    options,
    logp,
    old_logp,
    weight,
    advantages,
    policy_weight,
    i,
    b,
    used,
    ADVANTAGES_PER_TOKEN: tl.constexpr,
    POLICY_WEIGHT_PER_TOKEN: tl.constexpr,
    KIND: tl.constexpr,
    CLIPS_SEQUENCE: tl.constexpr,
):
    d = log_ratio(load_wide(logp, i, used, 0.0), old_logp, i, used)
    a = selected_advantage(
        load_per(advantages, i, b, used, 0.0, ADVANTAGES_PER_TOKEN),
        load_wide(weight, i, used, 1.0),
        load_per(policy_weight, i, b, used, 1.0, POLICY_WEIGHT_PER_TOKEN),
    )
    return pooled_log_ratio(options, d, a, KIND, CLIPS_SEQUENCE)


@triton.jit(do_not_specialize=_ANY_VALUE)
def objective_kernel(
    options,
    mask,
    logp,
    entropy,
    old_logp,
    ref_logp,
    weight,
    advantages,
    policy_weight,
    success_rate,
    cu_seqlens,
    normalizer,
    entropy_normalizer,
    dlogp,
    dentropy,
    sums,
    tokens,
    sequences,
    width,
    ADVANTAGES_PER_TOKEN: tl.constexpr,
    POLICY_WEIGHT_PER_TOKEN: tl.constexpr,
    SUCCESS_RATE_PER_TOKEN: tl.constexpr,
    REDUCTION: tl.constexpr,
    ENTROPY_REDUCTION: tl.constexpr,
    KIND: tl.constexpr,
    CLIPS_SEQUENCE: tl.constexpr,
    POOLS: tl.constexpr,
    SUMS_SEQUENCE: tl.constexpr,
    HAS_KL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A sequence's coefficients, and what it adds to the loss and the metrics."""
    b = tl.program_id(0).to(tl.int64)
    begin, end = sequence_range(cu_seqlens, b, width, tokens)
    count = count_trained(mask, begin, end, BLOCK)
    length = tl.maximum(count, 1.0)
    # a byte a token from the cache, for each sequence: cheaper than a launch that counts
    trained = count_trained(mask, 0, tokens, BLOCK)
    scale = reduction_scale(length, denominator(normalizer, trained, sequences, REDUCTION), REDUCTION)
    entropy_scale = reduction_scale(
        length, denominator(entropy_normalizer, trained, sequences, ENTROPY_REDUCTION), ENTROPY_REDUCTION
    )
    x_of_sequence = tl.full((), 0.0, tl.float64)
    if POOLS:
        for first in range(begin, end, BLOCK):
            i = first + tl.arange(0, BLOCK).to(tl.int64)
            used = tl.load(mask + i, mask=i < end, other=0) != 0
            pooled, _slope = pooled_of_token(
                options,
                logp,
                old_logp,
                weight,
                advantages,
                policy_weight,
                i,
                b,
                used,
                ADVANTAGES_PER_TOKEN,
                POLICY_WEIGHT_PER_TOKEN,
                KIND,
                CLIPS_SEQUENCE,
            )
            x_of_sequence += tl.sum(tl.where(used, pooled, 0.0), axis=0)
        if not SUMS_SEQUENCE:
            x_of_sequence = x_of_sequence / length
    value = tl.full((), 0.0, tl.float64)
    through_x = value
    sum_entropy = value
    sum_d = value
    sum_k3 = value
    sum_ratio = value
    sum_spread = value
    sum_low = value
    sum_high = value
    sum_weight = value
    sum_policy_weight = value
    sum_kl = value
    smallest = tl.full((), float("inf"), tl.float64)
    largest = tl.full((), float("-inf"), tl.float64)
    for first in range(begin, end, BLOCK):
        i = first + tl.arange(0, BLOCK).to(tl.int64)
        inside = i < end
        used = tl.load(mask + i, mask=inside, other=0) != 0
        token_logp = load_wide(logp, i, used, 0.0)
        d = log_ratio(token_logp, old_logp, i, used)
        x = d
        if POOLS:
            x = tl.zeros_like(d) + x_of_sequence
        token_weight = load_wide(weight, i, used, 1.0)
        token_policy_weight = load_per(policy_weight, i, b, used, 1.0, POLICY_WEIGHT_PER_TOKEN)
        loss, dx, direct, ratio, kl, low, high = objective_terms(
            options,
            token_logp,
            d,
            x,
            load_wide(ref_logp, i, used, 0.0),
            load_per(advantages, i, b, used, 0.0, ADVANTAGES_PER_TOKEN),
            token_weight,
            token_policy_weight,
            load_per(success_rate, i, b, used, 0.5, SUCCESS_RATE_PER_TOKEN),
            length,
            KIND,
            CLIPS_SEQUENCE,
            HAS_KL,
        )
        limited, _slope = clamped(d, -80.0, 80.0)
        value += tl.sum(tl.where(used, loss, 0.0), axis=0)
        through_x += tl.sum(tl.where(used, dx, 0.0), axis=0)
        sum_entropy += tl.sum(load_wide(entropy, i, used, 0.0), axis=0)
        sum_d += tl.sum(tl.where(used, limited, 0.0), axis=0)
        sum_k3 += tl.sum(tl.where(used, expm1(limited) - limited, 0.0), axis=0)
        sum_ratio += tl.sum(tl.where(used, ratio, 0.0), axis=0)
        sum_spread += tl.sum(tl.where(used, (ratio - 1.0) * (ratio - 1.0), 0.0), axis=0)
        sum_low += tl.sum((used & low).to(tl.float64), axis=0)
        sum_high += tl.sum((used & high).to(tl.float64), axis=0)
        sum_weight += tl.sum(tl.where(used, token_weight, 0.0), axis=0)
        sum_policy_weight += tl.sum(tl.where(used, token_policy_weight, 0.0), axis=0)
        sum_kl += tl.sum(tl.where(used, kl, 0.0), axis=0)
        smallest = tl.minimum(smallest, tl.min(tl.where(used, ratio, float("inf")), axis=0))
        largest = tl.maximum(largest, tl.max(tl.where(used, ratio, float("-inf")), axis=0))
        if dlogp is not None:
            coefficient = direct
            if not POOLS:
                coefficient = direct + dx
            coefficient = tl.where(used, scale * coefficient, 0.0)
            tl.store(dlogp + i, coefficient.to(dlogp.dtype.element_ty), mask=inside)
        if dentropy is not None:
            bonus = tl.where(used, -tl.load(options + ENTROPY_COEF) * entropy_scale, 0.0)
            tl.store(dentropy + i, bonus.to(dentropy.dtype.element_ty), mask=inside)
    if dlogp is not None and POOLS:
        through_sequence = scale * through_x
        if not SUMS_SEQUENCE:
            through_sequence = through_sequence / length
        for first in range(begin, end, BLOCK):
            i = first + tl.arange(0, BLOCK).to(tl.int64)
            used = tl.load(mask + i, mask=i < end, other=0) != 0
            _pooled, slope = pooled_of_token(
                options,
                logp,
                old_logp,
                weight,
                advantages,
                policy_weight,
                i,
                b,
                used,
                ADVANTAGES_PER_TOKEN,
                POLICY_WEIGHT_PER_TOKEN,
                KIND,
                CLIPS_SEQUENCE,
            )
            coefficient = load_wide(dlogp, i, used, 0.0) + through_sequence * slope
            tl.store(dlogp + i, coefficient.to(dlogp.dtype.element_ty), mask=used)
    sums = sums + b * SUMS
    tl.store(sums, scale * value)
    tl.store(sums + 1, entropy_scale * sum_entropy)
    tl.store(sums + 2, count)
    tl.store(sums + 3, -sum_d)
    tl.store(sums + 4, sum_k3)
    tl.store(sums + 5, sum_ratio)
    tl.store(sums + 6, sum_spread)
    tl.store(sums + 7, sum_low)
    tl.store(sums + 8, sum_high)
    tl.store(sums + 9, sum_weight)
    tl.store(sums + 10, sum_policy_weight)
    tl.store(sums + 11, sum_kl)
    tl.store(sums + 12, sum_entropy)
    is_empty = count == 0.0
    is_nan = sum_ratio != sum_ratio  # which minima and maxima may pass over
    tl.store(sums + 13, tl.where(is_nan, sum_ratio, smallest))
    tl.store(sums + 14, tl.where(is_empty, INFINITY, sum_low / length))
    tl.store(sums + 15, tl.where(is_empty, INFINITY, sum_high / length))
    tl.store(sums + 16, tl.where(is_nan, sum_ratio, largest))
    tl.store(sums + 17, tl.where(is_empty, -INFINITY, sum_low / length))
    tl.store(sums + 18, tl.where(is_empty, -INFINITY, sum_high / length))


@triton.jit(do_not_specialize=_ANY_VALUE)
def add_up_kernel(options, sums, loss, metrics, sequences, BLOCK: tl.constexpr):
    """Program j writes the j-th metric, the one after the last metric the loss."""
    metric = tl.program_id(0)
    is_loss = metric == SUMS - 2
    source = tl.where(is_loss, 0, metric + 2)
    total = tl.full((), 0.0, tl.float64)
    bonus = total
    smallest = tl.full((), float("inf"), tl.float64)
    largest = tl.full((), float("-inf"), tl.float64)
    for begin in range(0, sequences, BLOCK):
        b = begin + tl.arange(0, BLOCK).to(tl.int64)
        inside = b < sequences
        values = tl.load(sums + b * SUMS + source, mask=inside, other=0.0)
        total += tl.sum(values, axis=0)
        bonus += tl.sum(tl.load(sums + b * SUMS + 1, mask=inside, other=0.0), axis=0)
        smallest = tl.minimum(smallest, tl.min(tl.where(inside, values, float("inf")), axis=0))
        largest = tl.maximum(largest, tl.max(tl.where(inside, values, float("-inf")), axis=0))
    if is_loss:
        coefficient = tl.load(options + ENTROPY_COEF)
        result = tl.where(coefficient == 0.0, total, total - coefficient * bonus)
        tl.store(loss, result.to(loss.dtype.element_ty))
    else:
        extreme = tl.where(metric < METRIC_SUMS + 3, smallest, largest)
        result = tl.where((metric < METRIC_SUMS) | (total != total), total, extreme)
        tl.store(metrics + metric, result)


@functools.lru_cache(maxsize=64)
def _options_on(options: ObjectiveOptions, device: torch.device) -> Tensor:
    """Kept: copying them at every call would be a transfer at every call."""
    return torch.tensor(options, dtype=torch.float64, device=device)


def objective_arguments(options: ObjectiveOptions, batch: ObjectiveBatch) -> dict[str, Any]:
    """What the kernels that look at a batch's tokens share."""
    tokens = batch.mask.shape[0]

    def per_token(value: Tensor | None) -> bool:
        return value is not None and value.shape[0] == tokens

    return {
        "options": _options_on(options, batch.mask.device),
        "old_logp": batch.old_logp,
        "weight": batch.weight,
        "advantages": batch.advantages,
        "policy_weight": batch.policy_weight,
        "cu_seqlens": batch.cu_seqlens,
        "width": tokens // max(1, batch.sequences),
        "ADVANTAGES_PER_TOKEN": per_token(batch.advantages),
        "POLICY_WEIGHT_PER_TOKEN": per_token(batch.policy_weight),
        "KIND": int(options.kind),
        "CLIPS_SEQUENCE": bool(options.clips_sequence),
    }


def policy_objective(
    logp: Tensor, entropy: Tensor | None, options: ObjectiveOptions, batch: ObjectiveBatch, result: ObjectiveResult
) -> None:
    sequences, device = batch.sequences, logp.device
    shared = objective_arguments(options, batch)
    sums = torch.empty(sequences, SUMS.value, dtype=torch.float64, device=device)
    is_geometric = int(options.kind) == fields.GEOMETRIC
    sums_sequence = options.level == 2 or (is_geometric and bool(options.clips_sequence))
    block, num_warps = configs.OBJECTIVE_TOKENS
    launch = {"BLOCK": block, "num_warps": num_warps}
    with configs.device_of(logp):
        if sequences:
            objective_kernel[(sequences,)](
                **shared,
                mask=batch.mask.view(torch.uint8),
                logp=logp,
                entropy=entropy,
                ref_logp=batch.ref_logp,
                success_rate=batch.success_rate,
                normalizer=batch.normalizer,
                entropy_normalizer=batch.entropy_normalizer,
                dlogp=result.dlogp if result.dlogp.numel() else None,
                dentropy=result.dentropy if result.dentropy.numel() else None,
                sums=sums,
                tokens=batch.mask.shape[0],
                sequences=sequences,
                SUCCESS_RATE_PER_TOKEN=batch.success_rate is not None
                and batch.success_rate.shape[0] == batch.mask.shape[0],
                REDUCTION=batch.reduction,
                ENTROPY_REDUCTION=batch.entropy_reduction,
                POOLS=not options.is_token_level,
                SUMS_SEQUENCE=sums_sequence,
                HAS_KL=options.kl_coef != 0,
                **launch,
            )
        add_up_kernel[(result.metrics.shape[0] + 1,)](
            shared["options"], sums, result.loss, result.metrics, sequences, **launch
        )
