"""Numbers of credit's functions: what they are unless given, the last that are allowed, the first that are not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlkernels import credit

DEFAULTS: dict[str, dict[str, Any]] = {
    "ContrastiveHead": {"embedding_size": 512},
    "StdFilter": {"scale": 0.5, "decay": 0.99, "skipped": 5, "warmup": 5},
    "accuracy_filter": {"low": 0.2, "high": 0.8},
    "compression_reward": {"coef": 0.01, "convention": "factor", "largest_factor": 5.0},
    "contrast_by_span": {"mask": None, "reduction": "mean"},
    "contrastive_loss": {"kind": "infonce", "temperature": 0.05, "positives": None, "generator": None, "eps": 0.0},
    "contrastive_reward": {"weight": 0.2, "floor": -0.5},
    "counterfactual_contrast": {
        "rows_with": None,
        "rows_without": None,
        "logp_with": None,
        "temperature": 1.0,
        "softcap": None,
        "logit_scale": 1.0,
        "ignore_index": -100,
    },
    "debias_reward": {"format_rewards": None, "format_coefficient": 0.1},
    "generalized_advantages": {"gamma": 1.0, "lam": 1.0},
    "group_advantages": {"scale": "std", "ddof": 1, "eps": 1e-4},
    "group_std": {"ddof": 1},
    "implicit_prm_loss": {"beta": 0.05},
    "implicit_process_rewards": {"beta": 0.05, "batch_norm": False},
    "linear_counterfactual_contrast": {
        "rows_with": None,
        "rows_without": None,
        "logp_with": None,
        "bias": None,
        "temperature": 1.0,
        "softcap": None,
        "logit_scale": 1.0,
        "ignore_index": -100,
        "chunk_bytes": None,
    },
    "overlong_penalty": {"factor": 1.0},
    "path_annealing": {"length": 0},
    "prime_advantages": {"baseline": "paper", "gamma_process": 1.0, "gamma_outcome": 1.0, "whiten": False},
    "reference_probability_reward": {"kind": "mean"},
    "replay_weights": {"sharpness": 1.0, "offset": 0.0, "strength": 0.5, "ramp": 1.0, "normalize": True},
    "rollout_weights": {"level": "token", "mode": "truncate", "high": 2.0, "low": None},
    "select_skills": {"filter": True, "rank": True, "keep_neutral": False},
    "tool_output_mask": {"spans": None, "token_ids": None, "opening": None, "closing": None},
    "two_channel_advantages": {"variant": "c2", "penalty": 0.5, "credit": 0.5, "count_clip": 2.0},
    "two_channel_zscore": {"ddof": 1, "eps": 1e-4},
    "value_loss": {"clip": 0.5, "reduction": "token_mean", "normalizer": None},
    "verifree_advantages": {"answer_coefficient": "reward"},
    "whiten": {"eps": 1e-8},
}


def test_defaults() -> None:
    found = {}
    for name in credit.__all__:
        function = getattr(credit, name)
        if not (isinstance(function, type) and issubclass(function, tuple)):
            parameters = inspect.signature(function).parameters.values()
            defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
            found |= {name: defaults} if defaults else {}
    assert found == DEFAULTS


ONE, TWO = torch.ones(1), torch.tensor([1.0, 0.0])
TOKEN, MASK = torch.full((1, 1), -1.0), torch.ones(1, 1)


def std_filter(**numbers: float) -> torch.Tensor:
    return credit.StdFilter(**numbers)(TWO, 2)


CALLS: dict[str, Callable[..., Any]] = {
    "StdFilter": std_filter,
    "accuracy_filter": lambda **n: credit.accuracy_filter(TWO, 2, **n),
    "budget_at_step": lambda **n: credit.budget_at_step([2, 1], **{"step": 1, "total_steps": 1} | n),
    "compression_reward": lambda **n: credit.compression_reward(ONE, ONE, **n),
    "contrastive_loss": lambda **n: credit.contrastive_loss(torch.eye(2), TWO, 2, **n),
    "contrastive_reward": lambda **n: credit.contrastive_reward(ONE, **n),
    "debias_reward": lambda **n: credit.debias_reward(ONE, ONE, format_rewards=ONE, **n),
    "generalized_advantages": lambda **n: credit.generalized_advantages(TOKEN, TOKEN, MASK, **n),
    "group_advantages": lambda **n: credit.group_advantages(TWO, 2, **n),
    "group_std": lambda **n: credit.group_std(TWO, 2, **n),
    "group_variance_decomposition": lambda **n: credit.group_variance_decomposition(TWO, TWO, 2, **n),
    "implicit_prm_loss": lambda **n: credit.implicit_prm_loss(TOKEN, TOKEN, MASK, ONE, **n),
    "implicit_process_rewards": lambda **n: credit.implicit_process_rewards(TOKEN, TOKEN, MASK, **n),
    "overlong_penalty": lambda **n: credit.overlong_penalty(ONE, **{"max_length": 9, "buffer_length": 1} | n),
    "path_annealing": lambda **n: credit.path_annealing(3, 1, **n),
    "prime_advantages": lambda **n: credit.prime_advantages(TOKEN, ONE, MASK, 1, **n),
    "replay_weights": lambda **n: credit.replay_weights(TOKEN, MASK, **n),
    "rollout_weights": lambda **n: credit.rollout_weights(TOKEN, TOKEN, MASK, **n),
    "select_skills": lambda **n: credit.select_skills([0.5], [0.5], **n),
    "skill_budget": lambda **n: credit.skill_budget(**{"skills": 6, "stages": 3} | n),
    "smoothstep_ramp": lambda **n: credit.smoothstep_ramp(1.0, 1.0, **n),
    "two_channel_advantages": lambda **n: credit.two_channel_advantages(
        TWO, torch.ones(2, 1), torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64), 2, **n
    ),
    "two_channel_zscore": lambda **n: credit.two_channel_zscore(TWO, TWO, 2, **{"beta": 0.5} | n),
    "value_loss": lambda **n: credit.value_loss(TOKEN, TOKEN, TOKEN, MASK, **n),
    "whiten": lambda **n: credit.whiten(TOKEN, MASK, **n),
}

ALLOWED: list[tuple[str, dict[str, float]]] = [
    ("StdFilter", {"scale": 0.0, "decay": 0.0, "skipped": 0, "warmup": 0}),
    ("StdFilter", {"decay": 1.0}),
    ("accuracy_filter", {"low": 0.5, "high": 0.5}),
    ("budget_at_step", {"step": 2, "total_steps": 2}),
    ("compression_reward", {"coef": 0.0, "largest_factor": 1.0}),
    ("contrastive_loss", {"temperature": 0.01, "eps": 0.01}),
    ("contrastive_reward", {"weight": 0.0, "floor": 0.0}),
    ("debias_reward", {"format_coefficient": 0.0}),
    ("debias_reward", {"format_coefficient": 1.0}),
    ("generalized_advantages", {"gamma": 0.0, "lam": 0.0}),
    ("group_advantages", {"eps": 0.0, "ddof": 0}),
    ("group_variance_decomposition", {"beta": 0.0}),
    ("implicit_prm_loss", {"beta": 0.001}),
    ("implicit_process_rewards", {"beta": 0.001}),
    ("overlong_penalty", {"max_length": 1, "buffer_length": 1, "factor": 0.0}),
    ("path_annealing", {"length": 0.5}),
    ("prime_advantages", {"gamma_process": 0.0, "gamma_outcome": 0.0}),
    ("replay_weights", {"sharpness": 0.0, "strength": 0.0, "ramp": 0.0}),
    ("replay_weights", {"strength": 1.99}),
    ("rollout_weights", {"low": 0.0, "high": 0.01}),
    ("select_skills", {"budget": 0}),
    ("skill_budget", {"skills": 0, "stages": 2}),
    ("smoothstep_ramp", {"length": 0.0}),
    ("two_channel_advantages", {"penalty": 0.0, "credit": 0.0, "count_clip": 0.0}),
    ("two_channel_zscore", {"beta": 0.0, "eps": 0.0, "ddof": 0}),
    ("value_loss", {"clip": 0.001}),
    ("whiten", {"eps": 1e-12}),
]

REFUSED: list[tuple[str, str, float]] = [
    ("StdFilter", "scale", -0.01),
    ("StdFilter", "decay", -0.01),
    ("StdFilter", "decay", 1.01),
    ("StdFilter", "skipped", -1),
    ("StdFilter", "warmup", -1),
    ("accuracy_filter", "high", 0.19),
    ("budget_at_step", "step", 0),
    ("budget_at_step", "step", 2),
    ("budget_at_step", "total_steps", 0),
    ("compression_reward", "coef", -0.01),
    ("compression_reward", "largest_factor", 0.99),
    ("contrastive_loss", "temperature", 0.0),
    ("contrastive_loss", "eps", -0.01),
    ("contrastive_reward", "weight", -0.01),
    ("contrastive_reward", "floor", 0.01),
    ("debias_reward", "format_coefficient", -0.01),
    ("debias_reward", "format_coefficient", 1.01),
    ("generalized_advantages", "gamma", -0.01),
    ("generalized_advantages", "gamma", 1.01),
    ("generalized_advantages", "lam", -0.01),
    ("generalized_advantages", "lam", 1.01),
    ("group_advantages", "eps", -0.01),
    ("group_std", "ddof", 2),
    ("group_std", "ddof", -1),
    ("group_variance_decomposition", "beta", -0.01),
    ("implicit_prm_loss", "beta", 0.0),
    ("implicit_process_rewards", "beta", 0.0),
    ("overlong_penalty", "max_length", 0),
    ("overlong_penalty", "buffer_length", 0),
    ("overlong_penalty", "buffer_length", 10),
    ("overlong_penalty", "factor", -0.01),
    ("path_annealing", "length", -0.01),
    ("prime_advantages", "gamma_process", -0.01),
    ("prime_advantages", "gamma_process", 1.01),
    ("prime_advantages", "gamma_outcome", -0.01),
    ("prime_advantages", "gamma_outcome", 1.01),
    ("replay_weights", "sharpness", -0.01),
    ("replay_weights", "strength", -0.01),
    ("replay_weights", "strength", 2.0),
    ("replay_weights", "ramp", -0.01),
    ("replay_weights", "ramp", 1.01),
    ("rollout_weights", "low", -0.01),
    ("rollout_weights", "low", 2.0),
    ("rollout_weights", "high", 0.0),
    ("select_skills", "budget", -1),
    ("skill_budget", "skills", -1),
    ("skill_budget", "stages", 1),
    ("smoothstep_ramp", "length", -0.01),
    ("two_channel_advantages", "penalty", -0.01),
    ("two_channel_advantages", "credit", -0.01),
    ("two_channel_advantages", "count_clip", -0.01),
    ("two_channel_zscore", "beta", -0.01),
    ("two_channel_zscore", "eps", -0.01),
    ("value_loss", "clip", 0.0),
    ("whiten", "eps", 0.0),
]


@pytest.mark.parametrize("function, numbers", ALLOWED, ids=str)
def test_allowed(function: str, numbers: dict[str, float]) -> None:
    CALLS[function](**numbers)


@pytest.mark.parametrize("function, name, number", REFUSED, ids=str)
def test_refused(function: str, name: str, number: float) -> None:
    named = "high" if (function, name, number) == ("rollout_weights", "low", 2.0) else name  # not above `low`
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        CALLS[function](**{name: number})
