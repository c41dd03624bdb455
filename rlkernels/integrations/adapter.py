"""What adapters share for trainers that have a KL term, an entropy bonus and denominators of their own."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.batch import PolicyBatch
from rlkernels.losses import logp_policy_loss
from rlkernels.objectives import LUSPO, Objective
from rlkernels.recipes import resolve
from rlkernels.reductions import Normalizer
from rlkernels.token_loss import PolicyLoss
from rlkernels.weighted_objectives import VESPO

Choice = str | Objective


def chosen_objective(choice: Choice) -> tuple[Objective, str | None]:
    """An objective named by hand, and the reduction that it stands for; None where the trainer's may take its place.

    A recipe's name stands for its reduction too, and so does LUSPO, which is GSPO but for it.

    Raises:
        ValueError: a KL term or an entropy bonus, or a recipe that needs more than a trainer hands over.
        TypeError: neither a name nor an objective.
    """
    recipe = resolve(choice, None)
    objective = recipe.objective
    if not isinstance(objective, Objective):
        raise TypeError(f"objective: expected a recipe's name or an objective, got {checks.describe(choice)}")
    if recipe.needs is not None or recipe.normalizer is not None:
        raise ValueError(f"objective: expected one that needs no more than the trainer hands over, got {choice!r}")
    for name in ("kl_coef", "entropy_coef"):
        value = getattr(objective, name)
        if value != 0:
            raise ValueError(f"{name}: expected 0, since the trainer adds a term of its own, got {value}")
    return objective, recipe.reduction if isinstance(choice, str | LUSPO) else None


def imported(module: str, install: str) -> Any:
    """A trainer's module, when it is needed; where it is missing ImportError says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # one that the trainer itself lacks
            raise
        raise ImportError(f"{module} is missing: {install}") from None


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
