"""Rollout engines sample with other log-probabilities than the trainer's: weights that make up for it."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.dtypes import result_dtype, wide

_LIMIT = 80.0  # of a log weight: e^80 fits float32


def rollout_weights(
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    mode: str = "truncate",
    high: float | None = 2.0,
    low: float | None = None,
) -> Tensor:
    """Importance weights between the trainer's policy and the rollout engine's, for `PolicyBatch(policy_weight=...)`.

        d = old_logp - rollout_logp
        w = exp(d)                   level="token"
        w = exp(sum_t m d)           level="sequence"
        w = exp(sum_t m d / n)       level="geometric"
        clip(w, low, high)           mode="truncate"
        w, or 0 outside [low, high]  mode="mask"

    A log-probability that is not known (NaN) has d = 0: a token's weight is 1, and in its sequence it counts as equal.
    Each d, and each log weight, is limited to +-80. Carries no gradient.

    Args:
        old_logp: `[B, T]` float: the trainer's log-probabilities before the update.
        rollout_logp: `[B, T]` float: those that the engine returned with the samples.
        mask: `[B, T]`, nonzero = trained. Nothing is read where it is 0; the weight there, and of an empty response,
            is 1.
        level, mode: as above.
        high, low: bounds of the weight, `0 <= low < high`, None for none; at a bound itself a weight stays.

    Returns:
        `[B, T]` for tokens, else `[B, 1]`, float32 (float64 for float64 log-probabilities).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: truncated importance sampling (fengyao.notion.site/off-policy-rl, 2025), masked as in IcePop and in TRL,
    whose default is `level="sequence", mode="mask", high=3.0`; verl's default bound is 2.

    Example:
        >>> import torch
        >>> from rlkernels.credit import rollout_weights
        >>> old, rollout = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.0, -3.0, float("nan")]])
        >>> rollout_weights(old, rollout, torch.ones(1, 3)).tolist()
        [[1.0, 2.0, 1.0]]
        >>> rollout_weights(old, rollout, torch.ones(1, 3), mode="mask").tolist()
        [[1.0, 0.0, 1.0]]
    """
    checks.require_floats("old_logp", old_logp, "B", "T")
    checks.require_floats("rollout_logp", rollout_logp, *old_logp.shape)
    checks.require_tensor("mask", mask)
    checks.require_shape("mask", mask, tuple(old_logp.shape))
    checks.require_same_device("old_logp", old_logp, rollout_logp=rollout_logp, mask=mask)
    checks.require_choice("level", level, ("token", "sequence", "geometric"))
    checks.require_choice("mode", mode, ("truncate", "mask"))
    if low is not None:
        checks.require_number("low", low, at_least=0.0)
    if high is not None:
        checks.require_number("high", high, above=0.0 if low is None else low)
    trained = mask != 0
    difference = wide(old_logp.detach()) - wide(rollout_logp.detach())
    difference = torch.where(trained & ~difference.isnan(), difference, 0).clamp(-_LIMIT, _LIMIT)
    if level != "token":
        difference = difference.sum(-1, keepdim=True)
    if level == "geometric":
        difference = difference / trained.sum(-1, keepdim=True).clamp(min=1)
    weights = difference.clamp(-_LIMIT, _LIMIT).exp()
    if mode == "mask":
        bottom, top = 0.0 if low is None else low, torch.inf if high is None else high
        weights = torch.where((weights >= bottom) & (weights <= top), weights, 0)
    elif low is not None or high is not None:
        weights = weights.clamp(low, high)
    has_ratio = trained if level == "token" else trained.any(-1, keepdim=True)
    return torch.where(has_ratio, weights, 1).to(result_dtype(old_logp, rollout_logp))
