"""What trainers call a loss type: an objective, a reduction, and what the caller must supply."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from rlkernels import checks
from rlkernels.batch import PolicyBatch
from rlkernels.covariance_objectives import ClipCov, KLCov
from rlkernels.objectives import CISPO, GMPO, GRPO, GSPO, LUSPO, NFT, SAPO, GSPOToken, Objective, Reinforce
from rlkernels.reductions import Normalizer
from rlkernels.weighted_objectives import DPPO, DRO, VESPO

ObjectiveFunction = Callable[[Tensor, PolicyBatch], Tensor]


class Recipe(NamedTuple):
    objective: Objective | ObjectiveFunction
    reduction: str
    normalizer: Normalizer | None = None
    needs: str | None = None  # a tensor of the batch without which the name would be untrue
    entropy_normalizer: Normalizer | None = None  # of the bonus, in the objective's entropy_reduction


RECIPES = {
    "ppo": Recipe(GRPO(), "token_mean"),
    "grpo": Recipe(GRPO(), "seq_mean_token_mean"),
    "dapo": Recipe(GRPO(clip_high=0.28), "token_mean"),
    "bnpo": Recipe(GRPO(), "token_mean"),
    "dr_grpo": Recipe(GRPO(), "seq_mean_token_sum_norm"),
    "lambda_grpo": Recipe(GRPO(), "token_mean", needs="weight"),
    "gspo": Recipe(GSPO(), "seq_mean_token_mean"),
    "gspo_token": Recipe(GSPOToken(), "seq_mean_token_mean"),
    "gmpo": Recipe(GMPO(), "seq_mean_token_mean"),
    "cispo": Recipe(CISPO(ratio_max=5.0), "token_mean"),
    "sapo": Recipe(SAPO(), "seq_mean_token_mean"),
    "nft": Recipe(NFT(), "token_sum", normalizer=1000.0),
    "reinforce": Recipe(Reinforce(), "token_mean"),
    "verifree": Recipe(Reinforce(), "seq_mean_token_sum"),
    "gpg": Recipe(Reinforce(), "token_mean"),
    "luspo": Recipe(LUSPO(), "seq_mean_token_sum"),
    "vespo": Recipe(VESPO(), "token_mean"),
    "dppo_tv": Recipe(DPPO(divergence="tv"), "token_mean"),
    "dppo_kl": Recipe(DPPO(divergence="kl"), "token_mean"),
    "dro": Recipe(DRO(beta=1.0), "token_mean"),
    "clip_cov": Recipe(ClipCov(), "token_mean"),
    "kl_cov": Recipe(KLCov(), "token_mean"),
}
"""Loss types by the names that trainers give them: an objective, a reduction, and what the batch must hold."""

_RECIPE_OF_CLASS = {
    GRPO: "grpo",
    GSPO: "gspo",
    GSPOToken: "gspo_token",
    GMPO: "gmpo",
    CISPO: "cispo",
    SAPO: "sapo",
    NFT: "nft",
    Reinforce: "reinforce",
    LUSPO: "luspo",
    VESPO: "vespo",
    DPPO: "dppo_tv",
    DRO: "dro",
    ClipCov: "clip_cov",
    KLCov: "kl_cov",
}


def resolve(objective: str | Objective | ObjectiveFunction, reduction: str | None) -> Recipe:
    """The recipe of a name; an instance takes the reduction of its class's recipe, anything else `token_mean`.

    A given `reduction` replaces the recipe's reduction and normaliser.
    """
    if isinstance(objective, str):
        checks.require_choice("objective", objective, RECIPES)
        recipe = RECIPES[objective]
    elif type(objective) in _RECIPE_OF_CLASS:
        recipe = RECIPES[_RECIPE_OF_CLASS[type(objective)]]._replace(objective=objective)
    elif isinstance(objective, type):
        raise TypeError(
            f"objective: expected an instance, got the class {objective.__name__}: {objective.__name__}(...)"
        )
    elif isinstance(objective, Objective) or callable(objective):
        recipe = Recipe(objective, "token_mean")
    else:
        raise TypeError(
            f"objective: expected a recipe's name, an objective or a callable, got {checks.describe(objective)}"
        )
    return recipe if reduction is None else recipe._replace(reduction=reduction, normalizer=None)
