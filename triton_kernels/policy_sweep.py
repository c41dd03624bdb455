"""Statistics, coefficients and gradient of a row by one program, while the row is in the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernels import checks
from rlkernels.ops.objective_options import ObjectiveOptions
from rlkernels.ops.policy_objective import ObjectiveBatch
from rlkernels.ops.rows import Rows, RowStats
from rlkernels.triton_kernels import configs
from rlkernels.triton_kernels.objective import ENTROPY_COEF, objective_terms
from rlkernels.triton_kernels.policy_objective import (
    count_kernel,
    denominator,
    load_per,
    load_wide,
    log_ratio,
    objective_arguments,
    reduction_scale,
    total_of,
)
from rlkernels.triton_kernels.row_math import LN_2, divide, log_sum, row_transform
from rlkernels.triton_kernels.token_stats import (
    push_row,
    row_arguments,
    row_offset,
    write_gradient,
    write_zeros,
)

# the vocabulary is not among them: what rows are aligned to decides how wide they are read and written
_ANY_VALUE = ["temperature_stride", "ignore_index", "inner", "sequences", "width"]


@triton.jit
def sequence_of(cu_seqlens, row, sequences, width):
    """By bisection where sequences are packed: the last border at or below the row, empty sequences skipped."""
    if cu_seqlens is None:
        return row // width
    else:
        low = row * 0
        high = low + sequences
        while high - low > 1:
            middle = (low + high) // 2
            is_right = tl.load(cu_seqlens + middle) <= row
            low = tl.where(is_right, middle, low)
            high = tl.where(is_right, high, middle)
        return low


@triton.jit(do_not_specialize=_ANY_VALUE)
def policy_sweep_kernel(
    logits,
    targets,
    temperature,
    softcap,
    logit_scale,
    logp,
    entropy,
    row_max,
    log_sum_exp,
    dlogits,
    temperature_stride,
    ignore_index,
    inner,
    vocab,
    stride_outer,
    stride_inner,
    stride_vocab,
    options,
    old_logp,
    ref_logp,
    weight,
    advantages,
    policy_weight,
    success_rate,
    cu_seqlens,
    counts,
    normalizer,
    entropy_normalizer,
    sequences,
    width,
    ADVANTAGES_PER_TOKEN: tl.constexpr,
    POLICY_WEIGHT_PER_TOKEN: tl.constexpr,
    SUCCESS_RATE_PER_TOKEN: tl.constexpr,
    REDUCTION: tl.constexpr,
    ENTROPY_REDUCTION: tl.constexpr,
    KIND: tl.constexpr,
    CLIPS_SEQUENCE: tl.constexpr,
    HAS_KL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = logit_scale.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    row_dlogits = dlogits + row * vocab
    if target == ignore_index:
        tl.store(logp + row, 0.0)
        tl.store(entropy + row, 0.0)
        tl.store(row_max + row, 0.0)
        tl.store(log_sum_exp + row, 0.0)
        write_zeros(row_dlogits, vocab, BLOCK)
    else:
        label_is_valid = (target >= 0) & (target < vocab)
        k, slope, inner_scale = row_transform(
            temperature + row * temperature_stride, softcap, logit_scale, label_is_valid
        )
        row_logits = logits + row_offset(row, inner, stride_outer, stride_inner)
        zero = tl.full((), 0.0, dtype)
        bottom = tl.full((), float("-inf"), dtype)
        m, s, t, _q, _sum_u, target_u, _top = push_row(
            row_logits,
            stride_vocab,
            vocab,
            target,
            k,
            inner_scale,
            (bottom, zero, zero, zero, zero, zero, bottom),
            softcap is not None,
            True,
            False,
            False,
            False,
            dtype,
            BLOCK,
        )
        log_s = log_sum(m, s)
        row_logp = k * (target_u - m) - log_s
        row_entropy = log_s - divide(t, s) * LN_2
        tl.store(logp + row, row_logp)
        tl.store(entropy + row, row_entropy)
        tl.store(row_max + row, m)
        tl.store(log_sum_exp + row, log_s)

        b = sequence_of(cu_seqlens, row, sequences, width)
        length = tl.maximum(tl.load(counts + b), 1.0)
        tokens = total_of(counts, sequences, BLOCK)
        scale = reduction_scale(length, denominator(normalizer, tokens, sequences, REDUCTION), REDUCTION)
        entropy_scale = reduction_scale(
            length, denominator(entropy_normalizer, tokens, sequences, ENTROPY_REDUCTION), ENTROPY_REDUCTION
        )
        used = row >= 0
        wide_logp = row_logp.to(tl.float64)
        d = log_ratio(wide_logp, old_logp, row, used)
        _loss, dx, direct, _ratio, _kl, _low, _high = objective_terms(
            options,
            wide_logp,
            d,
            d,
            load_wide(ref_logp, row, used, 0.0),
            load_per(advantages, row, b, used, 0.0, ADVANTAGES_PER_TOKEN),
            load_wide(weight, row, used, 1.0),
            load_per(policy_weight, row, b, used, 1.0, POLICY_WEIGHT_PER_TOKEN),
            load_per(success_rate, row, b, used, 0.5, SUCCESS_RATE_PER_TOKEN),
            length,
            KIND,
            CLIPS_SEQUENCE,
            HAS_KL,
        )
        dlogp = (scale * (direct + dx)).to(dtype)
        dentropy = (-tl.load(options + ENTROPY_COEF) * entropy_scale).to(dtype)
        if (dlogp != 0.0) | (dentropy != 0.0):
            write_gradient(
                row_logits,
                stride_vocab,
                row_dlogits,
                vocab,
                target,
                k,
                slope,
                inner_scale,
                m,
                log_s,
                row_entropy,
                dlogp,
                dentropy,
                zero,
                softcap is not None,
                False,
                dtype,
                BLOCK,
            )
        else:
            write_zeros(row_dlogits, vocab, BLOCK)


@triton.jit
def scale_kernel(values, factor, count, BLOCK: tl.constexpr):
    """Looks at the factor on the device: no host waits for it."""
    factor = tl.load(factor)
    if factor != 1.0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        scaled = tl.load(values + index, mask=inside) * factor
        tl.store(values + index, scaled.to(values.dtype.element_ty), mask=inside)


def policy_sweep(
    rows: Rows, options: ObjectiveOptions, batch: ObjectiveBatch, stats: RowStats, dlogits: Tensor
) -> None:
    count, vocab = rows.targets.shape[0], rows.logits.shape[-1]
    checks.check_row_values(rows.targets, vocab, rows.ignore_index, rows.temperature, rows.softcap, rows.logit_scale)
    if count == 0:
        return
    arguments = row_arguments(rows, None)
    for name in ("vocab_start", "width"):
        del arguments[name]
    shared = objective_arguments(options, batch)
    counts = torch.empty(batch.sequences, dtype=torch.float64, device=rows.logits.device)
    block, num_warps = configs.OBJECTIVE_TOKENS
    with configs.device_of(rows.logits):
        count_kernel[(batch.sequences,)](
            batch.mask.view(torch.uint8),
            batch.cu_seqlens,
            counts,
            shared["width"],
            batch.mask.shape[0],
            BLOCK=block,
            num_warps=num_warps,
        )
        policy_sweep_kernel[(count,)](
            **arguments,
            **shared,
            logp=stats.logp,
            entropy=stats.entropy,
            row_max=stats.row_max,
            log_sum_exp=stats.log_sum_exp,
            dlogits=dlogits,
            ref_logp=batch.ref_logp,
            success_rate=batch.success_rate,
            counts=counts,
            normalizer=batch.normalizer,
            entropy_normalizer=batch.entropy_normalizer,
            sequences=batch.sequences,
            SUCCESS_RATE_PER_TOKEN=batch.success_rate is not None
            and batch.success_rate.shape[0] == batch.mask.shape[0],
            REDUCTION=batch.reduction,
            ENTROPY_REDUCTION=batch.entropy_reduction,
            HAS_KL=options.kl_coef != 0,
        )


def scale_unless_one(dlogits: Tensor, factor: Tensor) -> None:
    block, num_warps = configs.SCALE
    with configs.device_of(dlogits):
        scale_kernel[(triton.cdiv(dlogits.numel(), block),)](
            dlogits, factor, dlogits.numel(), BLOCK=block, num_warps=num_warps
        )
