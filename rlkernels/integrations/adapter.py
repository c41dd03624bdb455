"""What adapters share for trainers that have a KL term, an entropy bonus and denominators of their own."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.batch import PolicyBatch
from rlkernels.losses import logp_policy_loss
from rlkernels.objectives import CISPO, LUSPO, NFT, Objective
from rlkernels.recipes import resolve
from rlkernels.reductions import Normalizer
from rlkernels.token_loss import PolicyLoss
from rlkernels.weighted_objectives import VESPO

Choice = str | Objective


def chosen_objective(
    objective: Choice, trainer: str, *, has_ref_logp: bool = False, has_whole_batch: bool = False
) -> Objective:
    """The objective itself: denominators and rollout weights are the trainer's.

    Args:
        objective: a recipe's name, whose defaults it has then, or an instance.
        trainer: what the errors call it.
        has_ref_logp: whether its loss function is handed a reference model's log-probabilities.
        has_whole_batch: whether it is handed more than one sequence, as Clip-Cov and KL-Cov are for.

    Raises:
        TypeError, ValueError: no such objective, or one that needs what the trainer does not hand over.

    Example:
        >>> from rlkernels.integrations.adapter import chosen_objective
        >>> chosen_objective("gmpo", "NeMo-RL").log_clip_low
        0.4
    """
    recipe = resolve(objective, None)
    chosen = recipe.objective
    if not isinstance(chosen, Objective):
        raise TypeError(f"objective: expected a recipe's name or an Objective, got {checks.describe(objective)}")
    needs = {
        f"a {recipe.needs} of each token": recipe.needs is not None,
        "the whole batch": not chosen.by_sequence and not has_whole_batch,
        "each prompt's success_rate": isinstance(chosen, NFT),
        f"ref_logp with kl_coef={chosen.kl_coef}": chosen.kl_coef != 0 and not has_ref_logp,
        f"entropies' gradient with entropy_coef={chosen.entropy_coef}": chosen.entropy_coef != 0,
    }
    for need, is_needed in needs.items():
        if is_needed:
            raise ValueError(f"objective: expected one that {trainer} can serve, got {objective!r}, which needs {need}")
    return chosen


def named_reduction(objective: Choice) -> str | None:
    """The reduction that a recipe's name stands for, and LUSPO, which is GSPO but for it; None where any will do."""
    return resolve(objective, None).reduction if isinstance(objective, str | LUSPO) else None


def imported(module: str, install: str) -> Any:
    """A trainer's module, when it is needed; where it is missing ImportError says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # one that the trainer itself lacks
            raise
        raise ImportError(f"{module} is missing: {install}") from None


def cispo(clip_low: float, clip_high: float, **fields: Any) -> CISPO:
    """Of trainers whose bounds are 1 -+ these."""
    return CISPO(ratio_min=max(0.0, 1 - clip_low), ratio_max=1 + clip_high, **fields)


def refuse_correction(setting: str, expected: object, value: object, objective: Objective) -> None:
    """Raises where a correction for the rollout engine, which multiplies the policy term, is not the method's."""
    if value != expected and isinstance(objective, VESPO):
        raise ValueError(
            f"{setting}: expected {expected!r} with VESPO, whose sequence ratio would have to hold it, got {value!r}"
        )


def corrected_loss(
    logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    old_logp: Tensor,
    weights: Tensor | None,
    objective: Objective,
    reduction: str,
    normalizer: Normalizer | None,
) -> tuple[Tensor, Tensor]:
    """The loss, and the share of clipped tokens, among which those count that a weight of 0 rejects."""

    def loss_with(policy_weight: Tensor | None) -> PolicyLoss:
        batch = PolicyBatch(None, advantages, mask=mask, old_logp=old_logp, policy_weight=policy_weight)
        return logp_policy_loss(logp, batch, objective, reduction=reduction, normalizer=normalizer)

    out = loss_with(weights)
    metrics = out.metrics
    if weights is not None:
        with torch.no_grad():
            metrics = loss_with(None).metrics
    return out.loss, metrics["clip_frac_low"] + metrics["clip_frac_high"]
