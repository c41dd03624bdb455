"""Fields of objectives: what they are unless given, the last numbers that are allowed, the first that are not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rlkernels import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GRPO,
    GSPO,
    LUSPO,
    NFT,
    SAPO,
    VESPO,
    ClipCov,
    GSPOToken,
    KLCov,
    Objective,
    Reinforce,
)

OF_EVERY = {
    "level": "token",
    "log_ratio_clamp": None,
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "kl_clamp": None,
    "kl_importance_weighted": False,
    "entropy_coef": 0.0,
    "entropy_reduction": "token_mean",
}
_CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "ratio_cap": None}
_SEQUENCE_CLIP = _CLIP | {"level": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4}

DEFAULTS: dict[str, tuple[Objective, dict[str, Any]]] = {
    "GRPO": (GRPO(), _CLIP),
    "GSPO": (GSPO(), _SEQUENCE_CLIP),
    "GSPOToken": (GSPOToken(), _SEQUENCE_CLIP),
    "LUSPO": (LUSPO(), _SEQUENCE_CLIP),
    "GMPO": (GMPO(), {"log_clip_low": 0.4, "log_clip_high": 0.4, "clip_level": "token"}),
    "CISPO": (CISPO(ratio_max=3.0), {"ratio_max": 3.0, "ratio_min": None}),
    "SAPO": (SAPO(), {"tau_pos": 1.0, "tau_neg": 1.05}),
    "NFT": (
        NFT(),
        {
            "min_ratio": 1.0,
            "prompt_weight": "failure_rate",
            "negative_weight": 1.0,
            "rate_clamp": (0.02, 0.98),
            "log_ratio_max": 10.0,
        },
    ),
    "Reinforce": (Reinforce(), {}),
    "VESPO": (
        VESPO(),
        {
            "log_ratio_clamp": 20.0,
            "k_pos": 2.0,
            "lambda_pos": 3.0,
            "k_neg": 3.0,
            "lambda_neg": 2.0,
            "log_weight_clamp": (pytest.approx(-18.420680743952367), 20.0),
        },
    ),
    "DPPO": (DPPO(), {"divergence": "tv", "threshold_low": 0.2, "threshold_high": 0.2, "ratio_max": 20.0}),
    "DRO": (DRO(beta=0.1), {"beta": 0.1}),
    "ClipCov": (ClipCov(), _CLIP | {"share": 2e-4, "cov_low": 1.0, "cov_high": 5.0, "generator": None}),
    "KLCov": (KLCov(), {"share": 2e-4, "penalty": 1.0}),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name: str) -> None:
    objective, own = DEFAULTS[name]
    assert {field.name: getattr(objective, field.name) for field in dataclasses.fields(objective)} == OF_EVERY | own


def name_of(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else "-".join(value) if isinstance(value, dict) else value


ALLOWED: list[tuple[type[Objective], dict[str, Any]]] = [
    (GRPO, {"clip_low": 0.0, "clip_high": 0.0}),
    (GRPO, {"dual_clip": 1.01}),
    (GRPO, {"ratio_cap": 0.01}),
    (GRPO, {"log_ratio_clamp": 0.01}),
    (GRPO, {"kl_coef": 0.01, "kl_clamp": 0.01}),
    (GRPO, {"entropy_coef": -0.01, "entropy_reduction": "token_sum"}),
    (GMPO, {"log_clip_low": 0.01, "log_clip_high": 0.01, "clip_level": None}),
    (CISPO, {"ratio_max": 0.01, "ratio_min": 0.0}),
    (CISPO, {"ratio_max": 0.5, "ratio_min": 0.5}),
    (SAPO, {"tau_pos": 0.01, "tau_neg": 0.01}),
    (NFT, {"rate_clamp": (0.5, 0.5)}),
    (NFT, {"rate_clamp": (0.001, 0.999)}),
    (NFT, {"min_ratio": 0.01, "log_ratio_max": 0.01}),
    (VESPO, {"k_pos": 0.0, "lambda_pos": 0.0, "k_neg": 0.0, "lambda_neg": 0.0}),
    (VESPO, {"log_weight_clamp": (0.0, 0.0)}),
    (VESPO, {"log_weight_clamp": (-200.0, 80.0)}),
    (DPPO, {"threshold_low": 0.0, "threshold_high": 0.0, "ratio_max": 0.01}),
    (DPPO, {"ratio_max": None, "divergence": "kl"}),
    (DRO, {"beta": 0.01}),
    (ClipCov, {"share": 1.0, "cov_low": -1.0, "generator": torch.Generator()}),
    (KLCov, {"share": 1.0, "penalty": 0.0}),
]


@pytest.mark.parametrize("kind, fields", ALLOWED, ids=name_of)
def test_allowed(kind: type[Objective], fields: dict[str, Any]) -> None:
    kind(**fields)


REFUSED: list[tuple[type[Objective], str, dict[str, Any]]] = [
    (GRPO, "clip_low", {"clip_low": -0.01}),
    (GRPO, "clip_high", {"clip_high": -0.01}),
    (GRPO, "clip_high", {"clip_high": float("inf")}),
    (GRPO, "dual_clip", {"dual_clip": 1.0}),
    (GRPO, "ratio_cap", {"ratio_cap": 0.0}),
    (GRPO, "level", {"level": "sequence"}),
    (GRPO, "kl_coef", {"kl_coef": -0.01}),
    (GRPO, "kl_estimator", {"kl_coef": 0.1, "kl_estimator": "k4"}),
    (GRPO, "kl_clamp", {"kl_coef": 0.1, "kl_clamp": 0.0}),
    (GRPO, "kl_clamp", {"kl_clamp": 10.0}),  # without a KL term
    (GRPO, "kl_importance_weighted", {"kl_importance_weighted": True}),
    (GRPO, "kl_importance_weighted", {"kl_coef": 0.1, "kl_importance_weighted": 1}),
    (GRPO, "log_ratio_clamp", {"log_ratio_clamp": 0.0}),
    (GRPO, "entropy_reduction", {"entropy_reduction": "none"}),
    (GSPO, "level", {"level": "token"}),
    (LUSPO, "level", {"level": "token"}),
    (GMPO, "level", {"level": "sequence_mean"}),
    (GMPO, "clip_level", {"clip_level": "row"}),
    (GMPO, "log_clip_low", {"log_clip_low": 0.0}),
    (GMPO, "log_clip_high", {"log_clip_high": 0.0}),
    (CISPO, "ratio_max", {"ratio_max": 0.0}),
    (CISPO, "ratio_min", {"ratio_max": 2.0, "ratio_min": -0.01}),
    (CISPO, "ratio_min", {"ratio_max": 0.5, "ratio_min": 0.51}),
    (SAPO, "tau_pos", {"tau_pos": 0.0}),
    (SAPO, "tau_neg", {"tau_neg": 0.0}),
    (NFT, "rate_clamp", {"rate_clamp": (0.0, 0.5)}),
    (NFT, "rate_clamp", {"rate_clamp": (0.02, 1.0)}),
    (NFT, "rate_clamp", {"rate_clamp": (0.02, 1.5)}),
    (NFT, "rate_clamp", {"rate_clamp": (0.6, 0.5)}),
    (NFT, "rate_clamp", {"rate_clamp": (0.1, 0.2, 0.3)}),
    (NFT, "rate_clamp", {"rate_clamp": (0.1,)}),
    (NFT, "rate_clamp", {"rate_clamp": 0.5}),
    (NFT, "prompt_weight", {"prompt_weight": "none"}),
    (NFT, "min_ratio", {"min_ratio": 0.0}),
    (NFT, "log_ratio_max", {"log_ratio_max": 0.0}),
    (Reinforce, "level", {"level": "sequence_mean"}),
    (VESPO, "level", {"level": "sequence_mean"}),
    (VESPO, "k_pos", {"k_pos": -0.01}),
    (VESPO, "log_weight_clamp", {"log_weight_clamp": (0.5, 2.0)}),
    (VESPO, "log_weight_clamp", {"log_weight_clamp": (-1.0, -0.5)}),
    (VESPO, "log_weight_clamp", {"log_weight_clamp": (-1.0, 80.5)}),
    (VESPO, "log_weight_clamp", {"log_weight_clamp": (-1.0, 0.0, 1.0)}),
    (VESPO, "log_weight_clamp", {"log_weight_clamp": (-1.0,)}),
    (VESPO, "log_weight_clamp", {"log_weight_clamp": 20.0}),
    (DPPO, "divergence", {"divergence": "js"}),
    (DPPO, "threshold_low", {"threshold_low": -0.01}),
    (DPPO, "threshold_high", {"threshold_high": -0.01}),
    (DPPO, "ratio_max", {"ratio_max": 0.0}),
    (DRO, "beta", {"beta": 0.0}),
    (ClipCov, "share", {"share": 0.0}),
    (ClipCov, "share", {"share": 1.01}),
    (ClipCov, "cov_high", {"cov_low": 2.0, "cov_high": 1.0}),
    (ClipCov, "generator", {"generator": 0}),
    (KLCov, "share", {"share": 0.0}),
    (KLCov, "share", {"share": 1.01}),
    (KLCov, "penalty", {"penalty": -0.01}),
]


@pytest.mark.parametrize("kind, name, fields", REFUSED, ids=name_of)
def test_refused(kind: type[Objective], name: str, fields: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
        kind(**fields)
