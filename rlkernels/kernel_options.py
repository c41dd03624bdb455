"""Which numbers an objective and a reduction are to the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlkernels.objectives import CISPO, GMPO, GRPO, GSPO, LEVELS, LUSPO, NFT, SAPO, GSPOToken, Objective, Reinforce
from rlkernels.ops.objective_options import (
    CISPO_KIND,
    CLIP,
    CLIP_DETACHED,
    GEOMETRIC,
    NFT_KIND,
    PROMPT_WEIGHTS,
    REINFORCE,
    SAPO_KIND,
    ObjectiveOptions,
)
from rlkernels.reductions import REDUCTIONS


def _clip(objective: GRPO, kind: int = CLIP) -> dict[str, Any]:
    return {
        "kind": kind,
        "ratio_min": 1 - objective.clip_low,
        "ratio_max": 1 + objective.clip_high,
        "dual_clip": _or_infinite(objective.dual_clip),
        "ratio_cap": _or_infinite(objective.ratio_cap),
    }


def _geometric(objective: GMPO) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": GEOMETRIC, "clips_sequence": objective.clip_level == "sequence"}
    if objective.clip_level is not None:
        fields |= {"log_ratio_min": -objective.log_clip_low, "log_ratio_max": objective.log_clip_high}
    return fields


def _cispo(objective: CISPO) -> dict[str, Any]:
    return {"kind": CISPO_KIND, "ratio_min": objective.ratio_min or 0.0, "ratio_max": objective.ratio_max}


def _sapo(objective: SAPO) -> dict[str, Any]:
    return {"kind": SAPO_KIND, "tau_pos": objective.tau_pos, "tau_neg": objective.tau_neg}


def _nft(objective: NFT) -> dict[str, Any]:
    return {
        "kind": NFT_KIND,
        "log_ratio_max": objective.log_ratio_max,
        "min_ratio": objective.min_ratio,
        "negative_weight": objective.negative_weight,
        "rate_min": objective.rate_clamp[0],
        "rate_max": objective.rate_clamp[1],
        "prompt_weight": PROMPT_WEIGHTS.index(objective.prompt_weight),
    }


# by class itself: a subclass may compute something else
_FIELDS: dict[type[Objective], Callable[[Any], dict[str, Any]]] = {
    GRPO: _clip,
    GSPO: _clip,
    LUSPO: _clip,
    GSPOToken: lambda objective: _clip(objective, CLIP_DETACHED),
    GMPO: _geometric,
    CISPO: _cispo,
    SAPO: _sapo,
    NFT: _nft,
    Reinforce: lambda objective: {"kind": REINFORCE},
}


def objective_options(objective: object) -> ObjectiveOptions | None:
    """None where only Python knows the objective."""
    fields = _FIELDS.get(type(objective))  # type: ignore[arg-type]
    if fields is None:
        return None
    assert isinstance(objective, Objective)
    numbers = {
        "level": LEVELS.index(objective.level),
        "log_ratio_clamp": _or_infinite(objective.log_ratio_clamp),
        "kl_coef": objective.kl_coef,
        "kl_estimator": int(objective.kl_estimator[1]),
        "kl_clamp": _or_infinite(objective.kl_clamp),
        "kl_importance_weighted": objective.kl_importance_weighted,
        "entropy_coef": objective.entropy_coef,
        **fields(objective),
    }
    return ObjectiveOptions(**{name: float(number) for name, number in numbers.items()})


def reduction_code(reduction: str) -> int:
    return REDUCTIONS.index(reduction)


def _or_infinite(bound: float | None) -> float:
    return math.inf if bound is None else bound
