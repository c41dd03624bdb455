"""`rlkernels::token_stats` and `rlkernels::token_stats_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernels import backends
from rlkernels.backends import memory
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Upstream, Wanted, empty_dlogits, empty_row_stats
from rlkernels.ops.vocab_shards import VocabShard, sharded_stats


@torch.library.custom_op("rlkernels::token_stats", mutates_args=())
def token_stats(
    logits: Tensor,
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
    vocab_start: int = 0,
    vocab: int | None = None,
    tp_group: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = Rows(logits, targets, temperature, softcap, logit_scale, ignore_index)
    wanted = Wanted(want_entropy, want_lse, want_log_sum_sq_probs, want_mean_logits, want_is_top1)
    stats = empty_row_stats(rows, wanted)
    kernels = backends.implementation("token_stats", logits)
    if tp_group is None:
        kernels.token_stats_forward(rows, stats)
    else:
        sharded_stats(rows, stats, VocabShard.make(vocab_start, vocab, tp_group, logits.shape[-1]), kernels)
    return stats


@token_stats.register_fake
def _(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    softcap: Tensor | None,
    logit_scale: Tensor,
    ignore_index: int,
    *wanted_and_shard: Any,
) -> tuple[Tensor, ...]:
    rows = Rows(logits, targets, temperature, softcap, logit_scale, ignore_index)
    return tuple(empty_row_stats(rows, Wanted(*wanted_and_shard[: len(Wanted._fields)])))


@torch.library.custom_op("rlkernels::token_stats_backward", mutates_args=())
def token_stats_backward(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    softcap: Tensor | None,
    logit_scale: Tensor,
    ignore_index: int,
    row_max: Tensor,
    log_sum_exp: Tensor,
    entropy: Tensor,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    vocab_start: int = 0,
    vocab: int | None = None,
) -> Tensor:
    rows = Rows(logits, targets, temperature, softcap, logit_scale, ignore_index)
    dlogits = memory.empty(logits.shape, logits.dtype, logits.device)
    width = logits.shape[-1]
    if width:
        tile = VocabShard.make(vocab_start, vocab, None, width).tile(slice(0, width))
        backends.implementation("token_stats", logits).token_stats_backward(
            rows, SavedStats(row_max, log_sum_exp, entropy), Upstream(dlogp, dentropy, dlse), dlogits, tile
        )
    return dlogits


@token_stats_backward.register_fake
def _(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    softcap: Tensor | None,
    logit_scale: Tensor,
    ignore_index: int,
    *saved_upstream_and_shard: Any,
) -> Tensor:
    return empty_dlogits(Rows(logits, targets, temperature, softcap, logit_scale, ignore_index))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, stats = Rows(*inputs[: len(Rows._fields)]), RowStats(*output)
    ctx.ignore_index, ctx.shard = rows.ignore_index, VocabShard(*inputs[-3:])
    ctx.save_for_backward(
        rows.logits,
        rows.targets,
        rows.temperature,
        rows.softcap,
        rows.logit_scale,
        stats.row_max,
        stats.log_sum_exp,
        stats.entropy,
    )
    ctx.mark_non_differentiable(
        stats.log_sum_sq_probs, stats.mean_logits, stats.is_top1, stats.row_max, stats.log_sum_exp
    )
    # an absent gradient stays None instead of becoming zeros that are swept in vain
    ctx.set_materialize_grads(False)


def refuse_double_backward(operation: str, instead: str = "use set_backend('reference')") -> None:
    """`create_graph=True` runs backward with gradients on; a graph would be cut silently there."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{operation}: its gradient cannot be differentiated again (create_graph=True); "
            f"{instead} for second derivatives"
        )


def _backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_double_backward("token_stats")
    logits, targets, temperature, softcap, logit_scale, *saved = ctx.saved_tensors
    dlogp, dentropy, dlse = (None if d is None else d.contiguous() for d in upstream[:3])
    dlogits = None
    if ctx.needs_input_grad[0] and not (dlogp is None and dentropy is None and dlse is None):
        dlogits = token_stats_backward(
            logits,
            targets,
            temperature,
            softcap,
            logit_scale,
            ctx.ignore_index,
            *saved,
            dlogp,
            dentropy,
            dlse,
            *ctx.shard[:2],
        )
    return (dlogits, *[None] * (len(ctx.needs_input_grad) - 1))


token_stats.register_autograd(_backward, setup_context=_setup_context)
