"""An objective's fields as the kernels take them: numbers and codes, the same in C++ (csrc/objective.h) and Triton."""

from __future__ import annotations

import math
from typing import NamedTuple

CLIP, CLIP_DETACHED, GEOMETRIC, CISPO_KIND, SAPO_KIND, NFT_KIND, REINFORCE = range(7)
TOKEN_MEAN, SEQ_MEAN_TOKEN_MEAN, SEQ_MEAN_TOKEN_SUM, SEQ_MEAN_TOKEN_SUM_NORM, TOKEN_SUM = range(5)
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
