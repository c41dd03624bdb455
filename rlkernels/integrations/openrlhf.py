"""This package's objectives in OpenRLHF.

    trainer.actor_loss_fn = policy_loss(trainer.actor_loss_fn)           # of an ActorPPOTrainer: as it is configured
    trainer.actor_loss_fn = policy_loss(trainer.actor_loss_fn, "gmpo")   # another objective

Written for and tested with OpenRLHF 0.11.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.credit import rollout_weights
from rlkernels.integrations.adapter import (
    Choice,
    chosen_objective,
    corrected_loss,
    named_reduction,
    refuse_correction,
)
from rlkernels.objectives import GRPO, GSPO, Objective
from rlkernels.reductions import Normalizer

_SETTINGS = (
    "clip_eps_low",
    "clip_eps_high",
    "dual_clip",
    "token_level_loss",
    "policy_loss_type",
    "is_correction_level",
    "is_correction_mode",
    "is_correction_gating",
    "is_correction_threshold",
)

_KNOWN = {
    "policy_loss_type": ("ppo", "gspo"),
    "is_correction_level": ("off", "token", "seq"),
    "is_correction_mode": ("mask", "clip"),
    "is_correction_gating": ("ratio", "binary_kl", "tv"),
}

_LOG_RATIO_CLAMP = 20.0  # OpenRLHF's, but of GSPO, where there is none

_REDUCTIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")

_Result = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def policy_loss(
    settings: Any, objective: Choice | None = None, *, reduction: str | None = None
) -> Callable[..., _Result]:
    """A replacement of `openrlhf.models.PolicyLoss`, to be put in `trainer.actor_loss_fn`.

        loss = reduce(policy_weight policy_term(log_probs, old_log_probs, advantages)) dp_size / global count

    KL loss, auxiliary loss and entropy bonus stay the trainer's.

    Args:
        settings: the loss that is replaced: clip range, aggregation and rollout correction are its own.
        objective: None: the configured one, `GRPO` for `policy_loss_type="ppo"` and `GSPO` for `"gspo"`. A recipe's
            name or an objective replaces it, its clip range included; then `policy_loss_type` has to be `"ppo"`.
        reduction: `token_mean`, `seq_mean_token_mean` or `seq_mean_token_sum` over the trainer's global counts. None:
            of a name (and LUSPO) the recipe's, else the trainer's `loss_agg_mode`.

    Returns:
        What the trainer calls: `(log_probs, old_log_probs, advantages, action_mask, rollout_log_probs, dp_size,
        batch_num_tokens, global_batch_size)`, all of them `[B, T]` or numbers, -> `(loss, clip_ratio, ppo_kl, vllm_kl,
        is_filter_ratio)`, 0-d; the last two None without a correction of `"ppo"`. Nothing trained gives 0, not NaN.

    Raises:
        RuntimeError: settings of another version.
        ValueError: settings or a reduction that cannot be computed; in a call, a correction without rollout_log_probs.

    Source: OpenRLHF 0.11.2, `openrlhf/models/loss.py`.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace as Namespace
        >>> from rlkernels.integrations import openrlhf
        >>> settings = Namespace(
        ...     clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=None, token_level_loss=True, policy_loss_type="ppo",
        ...     is_correction_level="off", is_correction_mode="mask", is_correction_gating="ratio",
        ...     is_correction_threshold=[0.5, 5.0])
        >>> loss_fn = openrlhf.policy_loss(settings)
        >>> logp = torch.tensor([[-1.0, -2.0]])
        >>> loss, clip_ratio, *_ = loss_fn(logp, logp - 0.5, torch.ones(1, 2), action_mask=torch.tensor([[1, 0]]))
        >>> round(loss.item(), 6), clip_ratio.item()
        (-1.2, 1.0)
    """
    missing = [name for name in _SETTINGS if not hasattr(settings, name)]
    if missing:
        raise RuntimeError(f"settings: expected OpenRLHF's PolicyLoss, got one without {missing[0]} (0.11.2 has it)")
    for name, known in _KNOWN.items():
        checks.require_choice(name, getattr(settings, name), known)
    chosen, own_reduction = (_configured(settings), None) if objective is None else _chosen(settings, objective)
    configured = "token_mean" if settings.token_level_loss else "seq_mean_token_mean"
    reduction = reduction or own_reduction or configured
    checks.require_choice("reduction", reduction, _REDUCTIONS)
    is_corrected = settings.is_correction_level != "off"
    is_gspo = settings.policy_loss_type == "gspo"
    refuse_correction("is_correction_level", "off", settings.is_correction_level, chosen)

    def actor_loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: Normalizer | None = None,
        global_batch_size: Normalizer | None = None,
    ) -> _Result:
        mask = torch.ones_like(log_probs, dtype=torch.bool) if action_mask is None else action_mask != 0
        old, weights, vllm_kl, filtered = old_log_probs, None, None, None
        if is_corrected:
            if rollout_log_probs is None:
                level = settings.is_correction_level
                raise ValueError(f"rollout_log_probs: expected with is_correction_level={level!r}, got None")
            if is_gspo:
                old = rollout_log_probs
            else:
                weights, filtered = _correction(settings, old_log_probs, rollout_log_probs, mask)
                vllm_kl = _mean(rollout_log_probs - old_log_probs, mask)
        count = batch_num_tokens if reduction == "token_mean" else global_batch_size
        if count is not None:
            count = count / dp_size
        elif reduction == "token_mean":
            count = mask.sum()
        else:
            count = mask.any(-1).sum()
        loss, clip_ratio = corrected_loss(log_probs, advantages, mask, old, weights, chosen, reduction, count)
        return loss, clip_ratio, _mean(old_log_probs - log_probs.detach(), mask), vllm_kl, filtered

    return actor_loss


def _configured(settings: Any) -> Objective:
    fields = {
        "clip_low": settings.clip_eps_low,
        "clip_high": settings.clip_eps_high,
        "dual_clip": settings.dual_clip,
    }
    if settings.policy_loss_type == "gspo":
        return GSPO(**fields)
    return GRPO(**fields, log_ratio_clamp=_LOG_RATIO_CLAMP)


def _chosen(settings: Any, objective: Choice) -> tuple[Objective, str | None]:
    for name, expected in (("policy_loss_type", "ppo"), ("dual_clip", None)):
        value = getattr(settings, name)
        if value != expected:
            raise ValueError(f"{name}: expected {expected!r} with an objective of one's own, got {value!r}")
    return chosen_objective(objective, "OpenRLHF", has_whole_batch=True), named_reduction(objective)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """0-d, over the trained tokens."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def _correction(settings: Any, old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Weights `[B, T]` of the policy term, and the share of tokens, or of sequences, that are out of bounds."""
    low, high = settings.is_correction_threshold
    weights = rollout_weights(old, rollout, mask, low=None, high=None)
    is_sequence = settings.is_correction_level == "seq"
    statistic = _gated(settings.is_correction_gating, old, rollout, is_sequence, mask)
    is_inside = (statistic >= low) & (statistic <= high)
    is_clip = settings.is_correction_mode == "clip"
    weights = weights.clamp(low, high) if is_clip else torch.where(is_inside, weights, 0)
    outside = (~is_inside).to(weights.dtype)
    # OpenRLHF counts a sequence without a token among those outside
    return weights, outside.mean() if is_sequence else _mean(outside, mask)


def _gated(gating: str, old: Tensor, rollout: Tensor, is_sequence: bool, mask: Tensor) -> Tensor:
    """What the thresholds bound: `[B, T]`, or of a sequence its mean `[B, 1]`, the ratio's being geometric."""
    if gating == "ratio":
        statistic = old - rollout
    else:
        p, q = (logp.exp().clamp(1e-6, 1 - 1e-6) for logp in (rollout, old))
        kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        statistic = kl if gating == "binary_kl" else (p - q).abs()
    if is_sequence:
        statistic = torch.where(mask, statistic, 0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return statistic.exp() if gating == "ratio" else statistic
