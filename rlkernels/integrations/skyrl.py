"""This package's objectives as SkyRL's policy losses.

    from rlkernels.integrations import skyrl
    skyrl.register()                              # in the entry point, before SkyRL checks its configuration
    trainer.algorithm.policy_loss_type=rlk_gspo   # on its command line

Written for and tested with SkyRL 0.3.0, which is imported by `register()` and where a rollout correction is configured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkernels.covariance_objectives import ClipCov, KLCov
from rlkernels.integrations.adapter import (
    Choice,
    chosen_objective,
    cispo,
    corrected_loss,
    imported,
    named_reduction,
    refuse_correction,
)
from rlkernels.objectives import CISPO, GMPO, GRPO, GSPO, SAPO, GSPOToken, Objective, Reinforce
from rlkernels.weighted_objectives import DPPO, VESPO

_UTILITIES = "skyrl.backends.skyrl_train.utils"

_INSTALL = "pip install skyrl"

_LOG_RATIO_CLAMP = 20.0  # SkyRL's, but of GSPO, where it is 10

# SkyRL scales the advantages by it and sums
_REDUCTIONS = {
    "token_mean": "token_mean",
    "token_mean_legacy": "token_mean",
    "sequence_mean": "seq_mean_token_mean",
    "seq_mean_token_sum_norm": "seq_mean_token_sum_norm",
}

_CORRECTIONS = (
    "tis_ratio_type",
    "sequence_mask_metric",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
)


def _clip_fields(config: Any) -> dict[str, Any]:
    return {"clip_low": config.eps_clip_low, "clip_high": config.eps_clip_high}


def _grpo(config: Any, dual_clip: float | None = None) -> GRPO:
    return GRPO(**_clip_fields(config), dual_clip=dual_clip, log_ratio_clamp=_LOG_RATIO_CLAMP)


def _cispo(config: Any) -> CISPO:
    anchor = getattr(config.cispo, "cispo_anchor", "old")
    if anchor != "old":
        raise ValueError(f"cispo.cispo_anchor: expected 'old' for rlk_cispo, got {anchor!r}")
    low, high = config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high
    return cispo(low, high, log_ratio_clamp=_LOG_RATIO_CLAMP)


def _dppo(config: Any) -> DPPO:
    divergences = {"binary_tv": "tv", "binary_kl": "kl"}
    kind = config.dppo.dppo_type
    if kind not in divergences:
        raise ValueError(f"dppo.dppo_type: expected binary_tv or binary_kl, got {kind!r}")
    return DPPO(
        divergence=divergences[kind],
        threshold_low=config.dppo.delta_low,
        threshold_high=config.dppo.delta_high,
        ratio_max=None,
        log_ratio_clamp=_LOG_RATIO_CLAMP,
    )


def _sapo(config: Any) -> SAPO:
    return SAPO(tau_pos=config.sapo.tau_pos, tau_neg=config.sapo.tau_neg, log_ratio_clamp=_LOG_RATIO_CLAMP)


def _clip_cov(config: Any) -> ClipCov:
    options = config.clip_cov
    bounds = {"cov_low": options.clip_cov_lb, "cov_high": options.clip_cov_ub}
    return ClipCov(**_clip_fields(config), share=options.clip_ratio, **bounds)


POLICY_LOSSES: dict[str, Callable[[Any], Objective]] = {
    "rlk_grpo": _grpo,
    "rlk_dual_clip": lambda config: _grpo(config, config.clip_ratio_c),
    "rlk_gspo": lambda config: GSPO(**_clip_fields(config), log_ratio_clamp=10.0),
    "rlk_gspo_token": lambda config: GSPOToken(**_clip_fields(config), log_ratio_clamp=10.0),
    "rlk_gmpo": lambda config: GMPO(log_clip_low=config.eps_clip_low, log_clip_high=config.eps_clip_high),
    "rlk_cispo": _cispo,
    "rlk_sapo": _sapo,
    "rlk_vespo": lambda config: VESPO(),
    "rlk_dppo": _dppo,
    "rlk_clip_cov": _clip_cov,
    "rlk_kl_cov": lambda config: KLCov(share=config.kl_cov.kl_cov_frac, penalty=config.kl_cov.ppo_kl_coef),
    "rlk_reinforce": lambda config: Reinforce(),
}
"""The names that `register` adds -> how SkyRL's configuration becomes an objective."""


def register(objectives: Mapping[str, Choice] | None = None) -> None:
    """Add this package's objectives to SkyRL's policy losses, as the names of `POLICY_LOSSES`, and others by hand.

        loss = sum policy_weight policy_term(log_probs, old_log_probs, advantages)

    Choose one with `trainer.algorithm.policy_loss_type=rlk_gspo`. Clip ranges and everything else come from SkyRL's
    configuration, in SkyRL's conventions (`docs/trainers.md` has the table). The reduction is in the advantages, the
    rollout correction SkyRL's own function; KL and entropy terms stay SkyRL's. Calling it again does nothing new.

    Args:
        objectives: further losses by name, each a recipe's name or an objective, which takes nothing from the
            configuration; a recipe whose reduction is another than `loss_reduction` raises ValueError when it is used.

    Raises:
        ImportError: SkyRL is not installed.
        ValueError: an objective that SkyRL's configuration cannot serve, or whose name is taken.

    Source: SkyRL 0.3.0, `skyrl/backends/skyrl_train/utils/ppo_utils.py`.

    Example:
        >>> import rlkernels
        >>> from rlkernels.integrations import skyrl
        >>> skyrl.register({"rlk_dro": rlkernels.DRO(beta=0.1)})  # doctest: +SKIP
    """
    registry = imported(f"{_UTILITIES}.ppo_utils", _INSTALL).PolicyLossRegistry
    chosen = {name: _PolicyLoss(name, choice) for name, choice in (objectives or {}).items()}
    present = registry.list_available()
    for name in POLICY_LOSSES:
        if name not in present:
            registry.register(name, _PolicyLoss(name))
    for name, loss in chosen.items():
        registry.register(name, loss)


@dataclass(frozen=True)
class _PolicyLoss:
    """As SkyRL calls it; pickled by reference for its workers."""

    name: str
    choice: Choice | None = None

    def __post_init__(self) -> None:
        if self.choice is not None:
            chosen_objective(self.choice, "SkyRL", has_whole_batch=True)
            reduction = named_reduction(self.choice)
            if reduction is not None and reduction not in _REDUCTIONS.values():
                known = ", ".join(dict.fromkeys(_REDUCTIONS.values()))
                raise ValueError(f"objectives: expected for {self.name} one reduced by {known}, got {self.choice!r}")

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        objective = self._objective(config)
        weights: Tensor | None = None
        metrics: dict[str, float] = {}
        correction = config.off_policy_correction
        given = {name: value for name in _CORRECTIONS if (value := getattr(correction, name, None)) is not None}
        if given and rollout_logprobs is not None:
            setting, value = next(iter(given.items()))
            if isinstance(objective, ClipCov | KLCov):  # SkyRL refuses it too
                raise ValueError(f"off_policy_correction.{setting}: expected None for {self.name}, got {value!r}")
            refuse_correction(f"off_policy_correction.{setting}", None, value, objective)
            mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
            weights, metrics = _correction(old_log_probs, rollout_logprobs, mask, correction)
        if isinstance(objective, DPPO) and rollout_logprobs is not None:  # its trust region is around the rollout's
            old_log_probs = rollout_logprobs
        loss, clip_fraction = corrected_loss(
            log_probs, advantages, loss_mask, old_log_probs, weights, objective, "token_sum", None
        )
        return loss, {"clip_ratio": clip_fraction.item()} | metrics

    def _objective(self, config: Any) -> Objective:
        if self.choice is None:
            return POLICY_LOSSES[self.name](config)
        objective = chosen_objective(self.choice, "SkyRL", has_whole_batch=True)
        reduction = named_reduction(self.choice)
        if reduction is not None and _REDUCTIONS.get(config.loss_reduction) != reduction:
            expected = " or ".join(name for name, value in _REDUCTIONS.items() if value == reduction)
            raise ValueError(f"loss_reduction: expected {expected} for {self.choice!r}, got {config.loss_reduction!r}")
        return objective


def _correction(old: Tensor, rollout: Tensor, mask: Tensor, correction: Any) -> tuple[Tensor, dict[str, float]]:
    """SkyRL's own: weights of the policy term, 0 where it masks, and what it logs."""
    utilities = imported(f"{_UTILITIES}.off_policy_correction_utils", _INSTALL)
    ratio, metrics, kept = utilities.compute_off_policy_correction(old, rollout, mask, correction)
    return (kept if ratio is None else kept * ratio).detach(), metrics
