"""`rlkernels::policy_objective`: everything between per-token statistics and the loss, forward and backward at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernels import backends
from rlkernels.ops.objective_options import ObjectiveOptions
from rlkernels.ops.token_stats import refuse_double_backward

METRICS = (
    "count",
    "approx_kl_k1",
    "approx_kl_k3",
    "ratio_mean",
    "ratio_variance",  # a sum of (ratio - 1)^2
    "clip_frac_low",
    "clip_frac_high",
    "weight_mean",
    "policy_weight_mean",
    "ref_kl",
    "entropy",
)
MINIMA = ("ratio_min", "clip_frac_low_min", "clip_frac_high_min")
MAXIMA = ("ratio_max", "clip_frac_low_max", "clip_frac_high_max")


class ObjectiveBatch(NamedTuple):
    """A batch as the kernels read it. Floats are of logp's dtype; sequences are packed, or all of one length."""

    mask: Tensor  # [N] bool
    old_logp: Tensor | None  # [N]; None: on-policy
    ref_logp: Tensor | None  # [N]
    weight: Tensor | None  # [N]
    advantages: Tensor  # [N] or [B]; so are the next two
    policy_weight: Tensor | None
    success_rate: Tensor | None
    cu_seqlens: Tensor | None  # [B + 1] int64
    sequences: int
    reduction: int
    entropy_reduction: int
    normalizer: Tensor | None  # [1] float64; None: the reduction's own
    entropy_normalizer: Tensor | None


class ObjectiveResult(NamedTuple):
    """`metrics` are a count, sums (`METRICS`), and extremes (`MINIMA`, `MAXIMA`)."""

    loss: Tensor  # 0-d
    metrics: Tensor  # [17] float64
    dlogp: Tensor  # [N], d loss / d logp; empty without a gradient
    dentropy: Tensor  # [N]; empty without an entropy bonus too


def empty_result(logp: Tensor, options: ObjectiveOptions, need_grad: bool) -> ObjectiveResult:
    count = logp.shape[0] if need_grad else 0
    return ObjectiveResult(
        loss=logp.new_empty(()),
        metrics=logp.new_empty(len(METRICS) + len(MINIMA) + len(MAXIMA), dtype=torch.float64),
        dlogp=logp.new_empty(count),
        dentropy=logp.new_empty(count if options.entropy_coef != 0 else 0),
    )


@torch.library.custom_op("rlkernels::policy_objective", mutates_args=())
def policy_objective(
    logp: Tensor,
    entropy: Tensor | None,
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
    need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    result = empty_result(logp, ObjectiveOptions(*options), need_grad)
    kernels = backends.implementation("policy_objective", logp)
    kernels.policy_objective(logp, entropy, ObjectiveOptions(*options), batch, result)
    return result.loss, result.metrics, result.dlogp, result.dentropy


@policy_objective.register_fake
def _(logp: Tensor, entropy: Tensor | None, options: Sequence[float], *rest: Any) -> tuple[Tensor, ...]:
    return tuple(empty_result(logp, ObjectiveOptions(*options), rest[-1]))


class PolicyObjective(torch.autograd.Function):
    """(loss, metrics). The operation has no derivative of its own: registering one costs 60 us a call in torch 2.13."""

    @staticmethod
    def forward(
        ctx: Any,
        logp: Tensor,
        entropy: Tensor | None,
        options: ObjectiveOptions,
        batch: ObjectiveBatch,
        need_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        result = ObjectiveResult(*policy_objective(logp, entropy, list(options), *batch, need_grad))
        # empty tensors do not tell: there may be no tokens
        ctx.formed = (need_grad, need_grad and options.entropy_coef != 0)
        ctx.save_for_backward(result.dlogp, result.dentropy)
        ctx.mark_non_differentiable(result.metrics)
        ctx.set_materialize_grads(False)
        return result.loss, result.metrics

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("policy_objective")
        gradients: list[Tensor | None] = [None, None]
        if dloss is not None:
            gradients = [
                dloss * gradient if formed and needed else None
                for gradient, formed, needed in zip(
                    ctx.saved_tensors, ctx.formed, ctx.needs_input_grad[:2], strict=True
                )
            ]
        return (*gradients, None, None, None)
