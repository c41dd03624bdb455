"""Row statistics of logits, and their gradient: one program a row, sweeping the vocabulary in segments."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rlkernels import checks
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Upstream
from rlkernels.triton_kernels import configs
from rlkernels.triton_kernels.row_math import (
    LN_2,
    divide,
    expm1,
    log_sum,
    logit_gradient,
    merge,
    row_gradient,
    row_transform,
    segment_state,
    transform_logits,
)

# lengths and layouts that change from call to call and gain nothing from a kernel of their own
_ANY_VALUE = ["temperature_stride", "ignore_index", "inner"]


@triton.jit
def row_offset(row, inner, stride_outer, stride_inner):
    return (row // inner) * stride_outer + (row % inner) * stride_inner


@triton.jit
def store_unless_none(pointer, row, value):
    if pointer is not None:
        tl.store(pointer + row, value)


@triton.jit
def load_or_zero(pointer, row, dtype: tl.constexpr):
    if pointer is None:
        return tl.full((), 0.0, dtype)
    else:
        return tl.load(pointer + row)


@triton.jit(do_not_specialize=_ANY_VALUE)
def token_stats_forward_kernel(
    logits,
    targets,
    temperature,
    softcap,
    logit_scale,
    logp,
    entropy,
    lse,
    log_sum_sq_probs,
    mean_logits,
    is_top1,
    row_max,
    log_sum_exp,
    temperature_stride,
    ignore_index,
    inner,
    vocab,
    stride_outer,
    stride_inner,
    stride_vocab,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = logit_scale.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    if target == ignore_index:
        tl.store(logp + row, 0.0)
        tl.store(row_max + row, 0.0)
        tl.store(log_sum_exp + row, 0.0)
        store_unless_none(entropy, row, 0.0)
        store_unless_none(lse, row, 0.0)
        store_unless_none(log_sum_sq_probs, row, 0.0)
        store_unless_none(mean_logits, row, 0.0)
        store_unless_none(is_top1, row, False)
    else:
        label_is_valid = (target >= 0) & (target < vocab)
        k, _slope, inner_scale = row_transform(
            temperature + row * temperature_stride, softcap, logit_scale, label_is_valid
        )
        row_logits = logits + row_offset(row, inner, stride_outer, stride_inner)

        m = tl.full((), float("-inf"), dtype)
        s = tl.full((), 0.0, dtype)
        t = tl.full((), 0.0, dtype)
        q = tl.full((), 0.0, dtype)
        sum_u = tl.full((), 0.0, dtype)
        max_before_target = tl.full((), float("-inf"), dtype)
        for begin in range(0, vocab, BLOCK):
            columns = (begin + tl.arange(0, BLOCK)).to(tl.int64)
            inside = columns < vocab
            x = tl.load(row_logits + columns * stride_vocab, mask=inside, other=float("-inf")).to(dtype)
            u, _tanh_slope = transform_logits(x, inner_scale, softcap is not None)
            u = tl.where(inside, u, float("-inf"))  # softcap makes -inf finite
            right_m, right_s, right_t, right_q = segment_state(u, k, entropy is not None, log_sum_sq_probs is not None)
            m, s, t, q = merge(m, s, t, q, right_m, right_s, right_t, right_q, k)
            if mean_logits is not None:
                sum_u += tl.sum(tl.where(inside, u, 0.0), axis=0)
            if is_top1 is not None:
                before = tl.max(tl.where(columns < target, u, float("-inf")), axis=0)
                max_before_target = tl.maximum(max_before_target, before)

        target_x = tl.load(row_logits + tl.where(label_is_valid, target, 0) * stride_vocab).to(dtype)
        target_u, _tanh_slope = transform_logits(target_x, inner_scale, softcap is not None)
        log_s = log_sum(m, s)
        tl.store(logp + row, k * (target_u - m) - log_s)
        tl.store(row_max + row, m)
        tl.store(log_sum_exp + row, log_s)
        store_unless_none(entropy, row, log_s - divide(t, s) * LN_2)
        store_unless_none(lse, row, k * m + log_s)
        store_unless_none(mean_logits, row, k * sum_u / vocab)
        if log_sum_sq_probs is not None:
            tl.store(log_sum_sq_probs + row, tl.log(q) - 2.0 * log_s)
        if is_top1 is not None:
            has_distribution = log_s == log_s
            tl.store(is_top1 + row, has_distribution & (target_u >= m) & (target_u > max_before_target))


@triton.jit(do_not_specialize=_ANY_VALUE)
def token_stats_backward_kernel(
    logits,
    targets,
    temperature,
    softcap,
    logit_scale,
    row_max,
    log_sum_exp,
    entropy,
    dlogp,
    dentropy,
    dlse,
    dlogits,
    temperature_stride,
    ignore_index,
    inner,
    vocab,
    stride_outer,
    stride_inner,
    stride_vocab,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = logit_scale.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    row_dlogits = dlogits + row * vocab
    row_dlogp = load_or_zero(dlogp, row, dtype)
    row_dentropy = load_or_zero(dentropy, row, dtype)
    row_dlse = load_or_zero(dlse, row, dtype)
    if (target != ignore_index) & ((row_dlogp != 0.0) | (row_dentropy != 0.0) | (row_dlse != 0.0)):
        label_is_valid = (target >= 0) & (target < vocab)
        k, slope, inner_scale = row_transform(
            temperature + row * temperature_stride, softcap, logit_scale, label_is_valid
        )
        row_logits = logits + row_offset(row, inner, stride_outer, stride_inner)
        m = tl.load(row_max + row)
        log_s = tl.load(log_sum_exp + row)
        row_entropy = load_or_zero(entropy, row, dtype)
        a, b, target_a = row_gradient(row_dlogp, row_dentropy, row_dlse, row_entropy, log_s, slope)

        target_x = tl.load(row_logits + tl.where(label_is_valid, target, 0) * stride_vocab).to(dtype)
        target_u, target_tanh_slope = transform_logits(target_x, inner_scale, softcap is not None)
        target_dx = logit_gradient(target_u, m, k, target_a, b)
        target_dx -= row_dlogp * slope * expm1(k * (target_u - m) - log_s)
        target_dx *= target_tanh_slope

        for begin in range(0, vocab, BLOCK):
            columns = (begin + tl.arange(0, BLOCK)).to(tl.int64)
            inside = columns < vocab
            x = tl.load(row_logits + columns * stride_vocab, mask=inside, other=0.0).to(dtype)
            u, tanh_slope = transform_logits(x, inner_scale, softcap is not None)
            dx = logit_gradient(u, m, k, a, b) * tanh_slope
            dx = tl.where(columns == target, target_dx, dx)
            tl.store(row_dlogits + columns, dx.to(dlogits.dtype.element_ty), mask=inside)
    else:
        for begin in range(0, vocab, BLOCK):
            columns = (begin + tl.arange(0, BLOCK)).to(tl.int64)
            tl.store(row_dlogits + columns, tl.zeros([BLOCK], dlogits.dtype.element_ty), mask=columns < vocab)


def _row_arguments(rows: Rows) -> dict[str, Any]:
    _, inner, vocab = rows.logits.shape
    stride_outer, stride_inner, stride_vocab = rows.logits.stride()
    launch = configs.row_sweep(rows.logits.dtype, vocab)
    return {
        "logits": rows.logits,
        "targets": rows.targets,
        "temperature": rows.temperature,
        "softcap": rows.softcap,
        "logit_scale": rows.logit_scale,
        "temperature_stride": int(rows.temperature.shape[0] > 1),
        "ignore_index": rows.ignore_index,
        "inner": inner,
        "vocab": vocab,
        "stride_outer": stride_outer,
        "stride_inner": stride_inner,
        "stride_vocab": stride_vocab,
        "BLOCK": launch.block,
        "num_warps": launch.num_warps,
    }


def token_stats_forward(rows: Rows, stats: RowStats) -> None:
    checks.check_row_values(
        rows.targets,
        rows.logits.shape[-1],
        rows.ignore_index,
        rows.temperature,
        rows.softcap,
        rows.logit_scale,
    )
    count = rows.targets.shape[0]
    if count == 0:
        return
    outputs = {name: tensor if tensor.numel() else None for name, tensor in stats._asdict().items()}
    with configs.device_of(rows.logits):
        token_stats_forward_kernel[(count,)](**_row_arguments(rows), **outputs)


def token_stats_backward(rows: Rows, saved: SavedStats, upstream: Upstream, dlogits: Tensor) -> None:
    count = rows.targets.shape[0]
    if count == 0:
        return
    arguments = {**_row_arguments(rows), **saved._asdict(), **upstream._asdict(), "dlogits": dlogits}
    if upstream.dentropy is None:
        arguments["entropy"] = None
    with configs.device_of(rows.logits):
        token_stats_backward_kernel[(count,)](**arguments)
