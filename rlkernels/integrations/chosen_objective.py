"""An objective that is chosen by its name or as an instance, where a trainer's configuration cannot express it."""

from __future__ import annotations

from rlkernels import checks
from rlkernels.objectives import NFT, Objective
from rlkernels.recipes import resolve


def chosen_objective(objective: str | Objective, trainer: str, *, has_ref_logp: bool = False) -> Objective:
    """The objective itself: denominators and rollout weights are the trainer's.

    Args:
        objective: a recipe's name, whose defaults it has then, or an instance.
        trainer: what the errors call it.
        has_ref_logp: whether its loss function is handed a reference model's log-probabilities.

    Raises:
        TypeError, ValueError: no such objective, or one that needs what the trainer does not hand over.

    Example:
        >>> from rlkernels.integrations.chosen_objective import chosen_objective
        >>> chosen_objective("gmpo", "NeMo-RL").log_clip_low
        0.4
    """
    recipe = resolve(objective, None)
    chosen = recipe.objective
    if not isinstance(chosen, Objective):
        raise TypeError(f"objective: expected a recipe's name or an Objective, got {checks.describe(objective)}")
    needs = {
        f"a {recipe.needs} of each token": recipe.needs is not None,
        "the whole batch": not chosen.by_sequence,
        "each prompt's success_rate": isinstance(chosen, NFT),
        f"ref_logp with kl_coef={chosen.kl_coef}": chosen.kl_coef != 0 and not has_ref_logp,
        f"entropies' gradient with entropy_coef={chosen.entropy_coef}": chosen.entropy_coef != 0,
    }
    for need, is_needed in needs.items():
        if is_needed:
            raise ValueError(f"objective: expected one that {trainer} can serve, got {objective!r}, which needs {need}")
    return chosen
