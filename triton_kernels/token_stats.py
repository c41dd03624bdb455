"""Row statistics of logits, and their gradient: one program a row, sweeping the vocabulary in segments.

The vocabulary may also come in tiles from left to right, one launch each. Between them a row's state is in memory:
(m, s, t, q, sum of u, the target's u, maximum of u before the target).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rlkernels import checks
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Tile, Upstream, compute_dtype
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
_ANY_VALUE = ["temperature_stride", "ignore_index", "inner", "vocab", "vocab_start"]

STATE_SIZE = tl.constexpr(7)
SHIFT_UNIT = LN_2.value  # of t in a row state: powers of two, in nats


@triton.jit
def row_offset(row, inner, stride_outer, stride_inner):
    return (row // inner) * stride_outer + (row % inner) * stride_inner


@triton.jit
def find_row(index, row, stored_rows):
    """Which of the stored rows is meant, and whether it is there; one that is not is never an address."""
    if index is None:
        return row, True
    else:
        stored_row = tl.load(index + row)
        is_stored = (stored_row >= 0) & (stored_row < stored_rows)
        return tl.where(is_stored, stored_row, 0), is_stored


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


@triton.jit
def load_state(states, row, is_later_tile, dtype: tl.constexpr):
    """The state of the columns left of this tile."""
    zero = tl.full((), 0.0, dtype)
    bottom = tl.full((), float("-inf"), dtype)
    if states is None:
        return bottom, zero, zero, zero, zero, zero, bottom
    else:
        state = states + row * STATE_SIZE
        m = tl.load(state, mask=is_later_tile, other=bottom)
        s = tl.load(state + 1, mask=is_later_tile, other=zero)
        t = tl.load(state + 2, mask=is_later_tile, other=zero)
        q = tl.load(state + 3, mask=is_later_tile, other=zero)
        sum_u = tl.load(state + 4, mask=is_later_tile, other=zero)
        target_u = tl.load(state + 5, mask=is_later_tile, other=zero)
        max_before_target = tl.load(state + 6, mask=is_later_tile, other=bottom)
        return m, s, t, q, sum_u, target_u, max_before_target


@triton.jit
def store_state(states, row, m, s, t, q, sum_u, target_u, max_before_target):
    if states is not None:
        state = states + row * STATE_SIZE
        tl.store(state, m)
        tl.store(state + 1, s)
        tl.store(state + 2, t)
        tl.store(state + 3, q)
        tl.store(state + 4, sum_u)
        tl.store(state + 5, target_u)
        tl.store(state + 6, max_before_target)


@triton.jit
def push_row(
    row_logits,
    stride_vocab,
    width,
    target_column,
    k,
    inner_scale,
    state,
    CAPPED: tl.constexpr,
    WANT_T: tl.constexpr,
    WANT_Q: tl.constexpr,
    WANT_SUM: tl.constexpr,
    WANT_TOP1: tl.constexpr,
    dtype: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Appends `width` columns to a row's state."""
    m, s, t, q, sum_u, target_u, max_before_target = state
    for begin in range(0, width, BLOCK):
        columns = (begin + tl.arange(0, BLOCK)).to(tl.int64)
        inside = columns < width
        x = tl.load(row_logits + columns * stride_vocab, mask=inside, other=float("-inf")).to(dtype)
        u, _tanh_slope = transform_logits(x, inner_scale, CAPPED)
        u = tl.where(inside, u, float("-inf"))  # softcap makes -inf finite
        right_m, right_s, right_t, right_q = segment_state(u, k, WANT_T, WANT_Q)
        m, s, t, q = merge(m, s, t, q, right_m, right_s, right_t, right_q, k)
        if WANT_SUM:
            sum_u += tl.sum(tl.where(inside, u, 0.0), axis=0)
        if WANT_TOP1:
            before = tl.max(tl.where(columns < target_column, u, float("-inf")), axis=0)
            max_before_target = tl.maximum(max_before_target, before)

    if (target_column >= 0) & (target_column < width):
        target_x = tl.load(row_logits + target_column * stride_vocab).to(dtype)
        target_u, _tanh_slope = transform_logits(target_x, inner_scale, CAPPED)
    return m, s, t, q, sum_u, target_u, max_before_target


@triton.jit(do_not_specialize=[*_ANY_VALUE, "stored_rows"])
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
    states,
    index,
    temperature_stride,
    ignore_index,
    inner,
    vocab,
    vocab_start,
    width,
    stored_rows,
    stride_outer,
    stride_inner,
    stride_vocab,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = logit_scale.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    is_last_tile = vocab_start + width == vocab
    if target == ignore_index:
        if is_last_tile:
            tl.store(logp + row, 0.0)
            tl.store(row_max + row, 0.0)
            tl.store(log_sum_exp + row, 0.0)
            store_unless_none(entropy, row, 0.0)
            store_unless_none(lse, row, 0.0)
            store_unless_none(log_sum_sq_probs, row, 0.0)
            store_unless_none(mean_logits, row, 0.0)
            store_unless_none(is_top1, row, False)
    else:
        stored_row, is_stored = find_row(index, row, stored_rows)
        is_valid = (target >= 0) & (target < vocab) & is_stored
        k, _slope, inner_scale = row_transform(temperature + row * temperature_stride, softcap, logit_scale, is_valid)
        row_logits = logits + row_offset(stored_row, inner, stride_outer, stride_inner)
        state = load_state(states, row, vocab_start > 0, dtype)
        m, s, t, q, sum_u, target_u, max_before_target = push_row(
            row_logits,
            stride_vocab,
            width,
            target - vocab_start,
            k,
            inner_scale,
            state,
            softcap is not None,
            entropy is not None,
            log_sum_sq_probs is not None,
            mean_logits is not None,
            is_top1 is not None,
            dtype,
            BLOCK,
        )
        store_state(states, row, m, s, t, q, sum_u, target_u, max_before_target)
        if is_last_tile:
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


@triton.jit
def write_zeros(row_dlogits, width, BLOCK: tl.constexpr):
    for begin in range(0, width, BLOCK):
        columns = (begin + tl.arange(0, BLOCK)).to(tl.int64)
        tl.store(row_dlogits + columns, tl.zeros([BLOCK], row_dlogits.dtype.element_ty), mask=columns < width)


@triton.jit
def write_gradient(
    row_logits,
    stride_vocab,
    row_dlogits,
    width,
    target_column,
    k,
    slope,
    inner_scale,
    m,
    log_s,
    entropy,
    dlogp,
    dentropy,
    dlse,
    CAPPED: tl.constexpr,
    TARGET_APART: tl.constexpr,
    dtype: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of a row. Returns the target's, which is written as 0 if it is kept apart, and whether it is here."""
    a, b, target_a = row_gradient(dlogp, dentropy, dlse, entropy, log_s, slope)
    has_target = (target_column >= 0) & (target_column < width)
    # One thread reads it and a sum hands it on, so that no warp can store the gradient in its place before that.
    # A barrier after a load of every warp is not enough: AMD's does not wait for loads.
    lanes = tl.arange(0, BLOCK)
    target_pointers = row_logits + target_column * stride_vocab + lanes
    target_x = tl.sum(tl.load(target_pointers, mask=has_target & (lanes == 0), other=0.0).to(dtype), axis=0)
    target_u, target_tanh_slope = transform_logits(target_x, inner_scale, CAPPED)
    target_dx = logit_gradient(target_u, m, k, target_a, b)
    target_dx -= dlogp * slope * expm1(k * (target_u - m) - log_s)
    target_dx *= target_tanh_slope
    written = target_dx
    if TARGET_APART:
        written = tl.zeros_like(target_dx)

    for begin in range(0, width, BLOCK):
        columns = (begin + tl.arange(0, BLOCK)).to(tl.int64)
        inside = columns < width
        x = tl.load(row_logits + columns * stride_vocab, mask=inside, other=0.0).to(dtype)
        u, tanh_slope = transform_logits(x, inner_scale, CAPPED)
        dx = logit_gradient(u, m, k, a, b) * tanh_slope
        dx = tl.where(columns == target_column, written, dx)
        tl.store(row_dlogits + columns, dx.to(row_dlogits.dtype.element_ty), mask=inside)
    return target_dx, has_target


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
    dtarget,
    temperature_stride,
    ignore_index,
    inner,
    vocab,
    vocab_start,
    width,
    stride_outer,
    stride_inner,
    stride_vocab,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = logit_scale.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    row_dlogits = dlogits + row * width
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
        target_dx, has_target = write_gradient(
            row_logits,
            stride_vocab,
            row_dlogits,
            width,
            target - vocab_start,
            k,
            slope,
            inner_scale,
            m,
            log_s,
            row_entropy,
            row_dlogp,
            row_dentropy,
            row_dlse,
            softcap is not None,
            dtarget is not None,
            dtype,
            BLOCK,
        )
        if dtarget is not None:
            tl.store(dtarget + row, target_dx, mask=has_target)
    else:
        write_zeros(row_dlogits, width, BLOCK)


def row_arguments(rows: Rows, tile: Tile | None) -> dict[str, Any]:
    _, inner, width = rows.logits.shape
    stride_outer, stride_inner, stride_vocab = rows.logits.stride()
    start, vocab = (0, width) if tile is None else tile
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
        "vocab_start": start,
        "width": width,
        "stride_outer": stride_outer,
        "stride_inner": stride_inner,
        "stride_vocab": stride_vocab,
        "BLOCK": launch.block,
        "num_warps": launch.num_warps,
    }


def empty_states(count: int, logits: Tensor) -> Tensor:
    """`[count, ...]` row states for a sweep in tiles; the first tile starts them, column 0 is the running maximum."""
    return logits.new_empty(count, STATE_SIZE.value, dtype=compute_dtype(logits.dtype))


def _none_for_empty(columns: RowStats | SavedStats | Upstream) -> dict[str, Tensor | None]:
    return {
        name: None if column is None or column.numel() == 0 else column for name, column in columns._asdict().items()
    }


def token_stats_forward(
    rows: Rows,
    stats: RowStats,
    tile: Tile | None = None,
    states: Tensor | None = None,
    index: Tensor | None = None,
) -> None:
    """`index [N]` names the stored row of each target; without it they are all rows in their order."""
    arguments = row_arguments(rows, tile)
    checks.check_row_values(
        rows.targets,
        arguments["vocab"],
        rows.ignore_index,
        rows.temperature,
        rows.softcap,
        rows.logit_scale,
    )
    count = rows.targets.shape[0]
    if count == 0:
        return
    if tile is not None and rows.logits.shape[0] == 1:
        # Triton lays a segment out over the threads, and so orders its sums, by what the strides are divisible by.
        # This one is only multiplied by 0 here: it makes that the same for every tile and for whole rows.
        arguments["stride_outer"] = tile.vocab
    with configs.device_of(rows.logits):
        token_stats_forward_kernel[(count,)](
            **arguments,
            **_none_for_empty(stats),
            states=states,
            index=index,
            stored_rows=rows.logits.shape[0] * rows.logits.shape[1],
        )


def token_stats_backward(
    rows: Rows,
    saved: SavedStats,
    upstream: Upstream,
    dlogits: Tensor,
    tile: Tile | None = None,
    dtarget: Tensor | None = None,
) -> None:
    """`dlogits` may be the logits; with `dtarget` the target's gradient goes there, and 0 into `dlogits`."""
    count = rows.targets.shape[0]
    if count == 0:
        return
    arguments = {**row_arguments(rows, tile), **_none_for_empty(saved), **_none_for_empty(upstream)}
    if upstream.dentropy is None:
        arguments["entropy"] = None
    with configs.device_of(rows.logits):
        token_stats_backward_kernel[(count,)](**arguments, dlogits=dlogits, dtarget=dtarget)
