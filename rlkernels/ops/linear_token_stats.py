"""`rlkernels::linear_token_stats` and `rlkernels::linear_token_stats_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernels import backends
from rlkernels.ops.linear_rows import (
    HeadGradient,
    Keep,
    Kept,
    LinearRows,
    empty_kept,
    empty_linear_stats,
    linear_backward,
    linear_forward,
)
from rlkernels.ops.rows import RowStats, SavedStats, Upstream, Wanted
from rlkernels.ops.token_stats import refuse_double_backward
from rlkernels.ops.vocab_shards import VocabShard


@torch.library.custom_op("rlkernels::linear_token_stats", mutates_args=())
def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    softcap: Tensor | None,
    logit_scale: Tensor,
    ignore_index: int,
    want_entropy: bool,
    want_lse: bool,
    want_log_sum_sq_probs: bool,
    want_mean_logits: bool,
    want_is_top1: bool,
    keep_direction: bool,
    keep_logits: bool,
    chunk_bytes: int,
    vocab_start: int = 0,
    vocab: int | None = None,
    tp_group: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = LinearRows(hidden, weight, bias, targets, temperature, softcap, logit_scale, ignore_index)
    wanted = Wanted(want_entropy, want_lse, want_log_sum_sq_probs, want_mean_logits, want_is_top1)
    kernels = backends.implementation("linear_token_stats", hidden)
    shard = VocabShard.make(vocab_start, vocab, tp_group, weight.shape[0])
    stats, kept = linear_forward(rows, wanted, chunk_bytes, kernels, Keep(keep_direction, keep_logits), shard)
    return (*stats, *kept)


@linear_token_stats.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    softcap: Tensor | None,
    logit_scale: Tensor,
    ignore_index: int,
    want_entropy: bool,
    want_lse: bool,
    want_log_sum_sq_probs: bool,
    want_mean_logits: bool,
    want_is_top1: bool,
    keep_direction: bool,
    keep_logits: bool,
    chunk_bytes: int,
    *shard: Any,
) -> tuple[Tensor, ...]:
    rows = LinearRows(hidden, weight, bias, targets, temperature, softcap, logit_scale, ignore_index)
    wanted = Wanted(want_entropy, want_lse, want_log_sum_sq_probs, want_mean_logits, want_is_top1)
    keep = Keep(keep_direction, keep_logits)
    return (*empty_linear_stats(rows, wanted), *empty_kept(rows, keep, chunk_bytes))


@torch.library.custom_op("rlkernels::linear_token_stats_backward", mutates_args=())
def linear_token_stats_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    softcap: Tensor | None,
    logit_scale: Tensor,
    ignore_index: int,
    row_max: Tensor,
    log_sum_exp: Tensor,
    entropy: Tensor,
    kept_logits: Tensor,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    chunk_bytes: int,
    vocab_start: int = 0,
    vocab: int | None = None,
    tp_group: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = LinearRows(hidden, weight, bias, targets, temperature, softcap, logit_scale, ignore_index)
    saved, upstream = SavedStats(row_max, log_sum_exp, entropy), Upstream(dlogp, dentropy, dlse)
    kernels = backends.implementation("linear_token_stats", hidden)
    head = HeadGradient(rows, need_weight, need_bias, weight.dtype)
    shard = VocabShard.make(vocab_start, vocab, tp_group, weight.shape[0])
    dhidden = linear_backward(rows, saved, kept_logits, upstream, need_hidden, head, chunk_bytes, kernels, shard)
    return dhidden, head.dweight, head.dbias


# where, among a backward's arguments after hidden, weight and bias, it says which of their gradients are needed
_FIRST_NEED = len(LinearRows._fields) - 3 + len(SavedStats._fields) + 1 + len(Upstream._fields)
_NEEDS = slice(_FIRST_NEED, _FIRST_NEED + 3)


@linear_token_stats_backward.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    need_hidden, need_weight, need_bias = rest[_NEEDS]
    return (
        hidden.new_empty(hidden.shape if need_hidden else (0,)),
        weight.new_empty(weight.shape if need_weight else (0,)),
        weight.new_empty(weight.shape[:1] if need_bias else (0,)),
    )


# where it stands among forward's arguments, before the shard's
_CHUNK_BYTES = len(LinearRows._fields) + len(Wanted._fields) + len(Keep._fields)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows = LinearRows(*inputs[: len(LinearRows._fields)])
    stats, kept = RowStats(*output[: len(RowStats._fields)]), Kept(*output[len(RowStats._fields) :])
    ctx.ignore_index, (ctx.chunk_bytes, *ctx.shard) = rows.ignore_index, inputs[_CHUNK_BYTES:]
    ctx.save_for_backward(*rows[:-1], stats.row_max, stats.log_sum_exp, stats.entropy, *kept)
    ctx.mark_non_differentiable(
        stats.log_sum_sq_probs, stats.mean_logits, stats.is_top1, stats.row_max, stats.log_sum_exp, *kept
    )
    ctx.set_materialize_grads(False)


def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_double_backward("linear_token_stats")
    *tensors, row_max, log_sum_exp, entropy, direction, kept_logits = ctx.saved_tensors
    hidden = tensors[0]
    # an output that was not asked for is empty, and so is a gradient that reaches it
    arrived = (d if d is not None and d.shape == row_max.shape else None for d in gradients[:3])
    upstream = Upstream(*(None if gradient is None else gradient.contiguous() for gradient in arrived))
    needs = ctx.needs_input_grad[:3]
    dinputs: list[Tensor | None] = [None, None, None]
    if any(needs) and any(gradient is not None for gradient in upstream):
        if direction.numel() and upstream.dlogp is not None and upstream[1:] == (None, None):
            dinputs[0] = (upstream.dlogp[:, None] * direction).to(hidden.dtype)
        else:
            results = linear_token_stats_backward(
                *tensors,
                ctx.ignore_index,
                row_max,
                log_sum_exp,
                entropy,
                kept_logits,
                *upstream,
                *needs,
                ctx.chunk_bytes,
                *ctx.shard,
            )
            dinputs = [result if needed else None for result, needed in zip(results, needs, strict=True)]
    return (*dinputs, *[None] * (len(ctx.needs_input_grad) - 3))


linear_token_stats.register_autograd(backward, setup_context=setup_context)
