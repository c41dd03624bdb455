"""An objective's fields as the kernels take them: numbers and codes, the same in C++ (csrc/objective.h) and Triton."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from rlkernels.objectives import CISPO, GMPO, GRPO, GSPO, LEVELS, NFT, SAPO, GSPOToken, Objective, Reinforce
from rlkernels.reductions import REDUCTIONS

CLIP, CLIP_DETACHED, GEOMETRIC, CISPO_KIND, SAPO_KIND, NFT_KIND, REINFORCE = range(7)
PROMPT_WEIGHTS = ("failure_rate", "sqrt_failure_odds", "uniform")


class ObjectiveOptions(NamedTuple):
    """The fields of csrc/objective.h's struct, in its order. A bound that is not wanted is infinite."""

    kind: float
    level: float
    log_ratio_clamp: float = math.inf
    ratio_min: float = -math.inf
    ratio_max: float = math.inf
    dual_clip: float = math.inf
    ratio_cap: float = math.inf
    log_ratio_min: float = -math.inf
    log_ratio_max: float = math.inf
    clips_sequence: float = 0
    tau_pos: float = 1
    tau_neg: float = 1
    min_ratio: float = 1
    negative_weight: float = 1
    rate_min: float = 0.5
    rate_max: float = 0.5
    prompt_weight: float = 0
    kl_coef: float = 0
    kl_estimator: float = 3
    kl_clamp: float = math.inf
    kl_importance_weighted: float = 0
    entropy_coef: float = 0

    @property
    def is_token_level(self) -> bool:
        """Whether a token's coefficient needs no other token."""
        return self.level == 0 and self.kind != GEOMETRIC


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
