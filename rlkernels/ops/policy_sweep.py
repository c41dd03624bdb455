"""`rlkernels::policy_sweep`: a token-level loss from logits in one read and one write of `[N, V]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernels import backends
from rlkernels.backends import memory
from rlkernels.ops.objective_options import ObjectiveOptions
from rlkernels.ops.policy_objective import ObjectiveBatch, empty_result
from rlkernels.ops.rows import Rows, Wanted, empty_dlogits, empty_row_stats
from rlkernels.ops.token_stats import refuse_double_backward, token_stats_backward

_WANTED = Wanted(entropy=True, lse=False, log_sum_sq_probs=False, mean_logits=False, is_top1=False)


@torch.library.custom_op("rlkernels::policy_sweep", mutates_args=())
def policy_sweep(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    softcap: Tensor | None,
    logit_scale: Tensor,
    ignore_index: int,
    options: Sequence[float],
    mask: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    weight: Tensor | None,
    advantages: Tensor,
    policy_weight: Tensor | None,
    success_rate: Tensor | None,
    cu_seqlens: Tensor | None,
    sequences: int,
    reduction: int,
    entropy_reduction: int,
    normalizer: Tensor | None,
    entropy_normalizer: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, metrics, logp, entropy, row_max, log_sum_exp, dlogp, dentropy, dlogits), gradients of the loss itself."""
    rows = Rows(logits, targets, temperature, softcap, logit_scale, ignore_index)
    batch = ObjectiveBatch(
        mask,
        old_logp,
        ref_logp,
        weight,
        advantages,
        policy_weight,
        success_rate,
        cu_seqlens,
        sequences,
        reduction,
        entropy_reduction,
        normalizer,
        entropy_normalizer,
    )
    stats = empty_row_stats(rows, _WANTED)
    dlogits = memory.empty(logits.shape, logits.dtype, logits.device)
    objective = ObjectiveOptions(*options)
    result = empty_result(stats.logp, objective, need_grad=True)
    backends.implementation("policy_sweep", logits).policy_sweep(rows, objective, batch, stats, dlogits)
    kernels = backends.implementation("policy_objective", stats.logp)
    kernels.policy_objective(stats.logp, stats.entropy, objective, batch, result)
    saved = stats.row_max, stats.log_sum_exp, result.dlogp, result.dentropy
    return result.loss, result.metrics, stats.logp, stats.entropy, *saved, dlogits


@policy_sweep.register_fake
def _(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    softcap: Tensor | None,
    logit_scale: Tensor,
    ignore_index: int,
    options: Sequence[float],
    *rest: Any,
) -> tuple[Tensor, ...]:
    rows = Rows(logits, targets, temperature, softcap, logit_scale, ignore_index)
    stats = empty_row_stats(rows, _WANTED)
    result = empty_result(stats.logp, ObjectiveOptions(*options), need_grad=True)
    saved = stats.row_max, stats.log_sum_exp, result.dlogp, result.dentropy
    return result.loss, result.metrics, stats.logp, stats.entropy, *saved, empty_dlogits(rows)


class PolicySweep(torch.autograd.Function):
    """(loss, metrics, logp, entropy). The gradient that forward wrote is handed out once, then formed again."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Rows, options: ObjectiveOptions, batch: ObjectiveBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = rows._replace(logits=logits)
        loss, metrics, logp, entropy, *saved, dlogits = policy_sweep(*rows, list(options), *batch)
        ctx.ignore_index, ctx.dlogits = rows.ignore_index, dlogits
        ctx.save_for_backward(*rows[:-1], entropy, *saved)
        ctx.mark_non_differentiable(metrics, logp, entropy)
        ctx.set_materialize_grads(False)
        return loss, metrics, logp, entropy

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("policy_loss")
        if dloss is None:
            return None, None, None, None
        dlogits, ctx.dlogits = ctx.dlogits, None
        if dlogits is None:
            dlogits = _formed_again(ctx, dloss)
        else:
            # in place, before anyone has seen it
            backends.implementation("policy_sweep", dlogits).scale_unless_one(dlogits, dloss)
        return dlogits, None, None, None


def _formed_again(ctx: Any, dloss: Tensor) -> Tensor:
    """In a second sweep: the first gradient may have been changed by whoever got it."""
    *rows, entropy, row_max, log_sum_exp, dlogp, dentropy = ctx.saved_tensors
    dentropy = dloss * dentropy if dentropy.numel() else None
    return token_stats_backward(*rows, ctx.ignore_index, row_max, log_sum_exp, entropy, dloss * dlogp, dentropy, None)
