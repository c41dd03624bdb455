"""This package's objectives as verl's policy losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernels.batch import PolicyBatch
from rlkernels.covariance_objectives import ClipCov, KLCov
from rlkernels.integrations.adapter import cispo, refuse_correction
from rlkernels.integrations.verl.package import imported
from rlkernels.losses import logp_policy_loss
from rlkernels.objectives import CISPO, GMPO, GRPO, GSPO, LUSPO, SAPO, GSPOToken, Objective, Reinforce
from rlkernels.reductions import Normalizer
from rlkernels.weighted_objectives import DPPO, DRO, VESPO

_ALGORITHMS = "verl.trainer.ppo.core_algos"
_ROLLOUT_CORRECTION = "verl.trainer.ppo.rollout_corr_helper"

_BYPASS = "rlk_bypass_mode"
_BYPASSED = {"ppo_clip": "rlk_grpo", "reinforce": "rlk_reinforce"}

_LOG_RATIO_CLAMP = 20.0  # verl's, but of GSPO, where it is 10

_REDUCTIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}


class _PolicyLoss(NamedTuple):
    """How verl's configuration becomes an objective; `mode` replaces its loss_agg_mode where the method fixes one."""

    objective: Callable[[Any], Objective]
    mode: str | None = None


def _clip(config: Any) -> tuple[float, float]:
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return config.clip_ratio if low is None else low, config.clip_ratio if high is None else high


def _clip_fields(config: Any) -> dict[str, Any]:
    low, high = _clip(config)
    return {"clip_low": low, "clip_high": high}


def _grpo(config: Any) -> GRPO:
    dual_clip = config.get("clip_ratio_c", 3.0)
    return GRPO(**_clip_fields(config), dual_clip=dual_clip, log_ratio_clamp=_LOG_RATIO_CLAMP)


def _gmpo(config: Any) -> GMPO:
    low, high = _clip(config)
    return GMPO(log_clip_low=low, log_clip_high=high)


def _cispo(config: Any) -> CISPO:
    low, high = _clip(config)
    return cispo(low, high, log_ratio_clamp=_LOG_RATIO_CLAMP)


def _sapo(config: Any) -> SAPO:
    return SAPO(tau_pos=config.tau_pos, tau_neg=config.tau_neg, log_ratio_clamp=_LOG_RATIO_CLAMP)


def _dppo(divergence: str) -> Callable[[Any], DPPO]:
    def objective(config: Any) -> DPPO:
        low, high = _clip(config)
        return DPPO(
            divergence=divergence,
            threshold_low=low,
            threshold_high=high,
            ratio_max=config.get("clip_ratio_c", 20.0),
            log_ratio_clamp=_LOG_RATIO_CLAMP,
        )

    return objective


def _dro(config: Any) -> DRO:
    beta = config.policy_loss.get("dro_beta", None)
    if beta is None:
        raise ValueError("policy_loss.dro_beta: expected a number > 0 for rlk_dro, got None")
    return DRO(beta=beta)


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _clip_cov(config: Any) -> ClipCov:
    options = config.policy_loss
    return ClipCov(
        **_clip_fields(config),
        share=_or_default(options.get("clip_cov_ratio", None), 2e-4),
        cov_low=_or_default(options.get("clip_cov_lb", None), 1.0),
        cov_high=_or_default(options.get("clip_cov_ub", None), 5.0),
    )


def _kl_cov(config: Any) -> KLCov:
    options = config.policy_loss
    share = _or_default(options.get("kl_cov_ratio", None), 2e-4)
    return KLCov(share=share, penalty=_or_default(options.get("ppo_kl_coef", None), 1.0))


POLICY_LOSSES = {
    "rlk_grpo": _PolicyLoss(_grpo),
    "rlk_gspo": _PolicyLoss(lambda config: GSPO(**_clip_fields(config), log_ratio_clamp=10.0)),
    "rlk_gspo_token": _PolicyLoss(lambda config: GSPOToken(**_clip_fields(config), log_ratio_clamp=10.0)),
    "rlk_luspo": _PolicyLoss(lambda config: LUSPO(**_clip_fields(config), log_ratio_clamp=10.0), "seq-mean-token-sum"),
    "rlk_gmpo": _PolicyLoss(_gmpo, "seq-mean-token-mean"),
    "rlk_cispo": _PolicyLoss(_cispo),
    "rlk_sapo": _PolicyLoss(_sapo, "seq-mean-token-mean"),
    "rlk_vespo": _PolicyLoss(lambda config: VESPO()),
    "rlk_dppo_tv": _PolicyLoss(_dppo("tv")),
    "rlk_dppo_kl": _PolicyLoss(_dppo("kl")),
    "rlk_dro": _PolicyLoss(_dro),
    "rlk_clip_cov": _PolicyLoss(_clip_cov),
    "rlk_kl_cov": _PolicyLoss(_kl_cov),
    "rlk_reinforce": _PolicyLoss(lambda config: Reinforce()),
}
"""The names that `register` adds -> how verl's configuration becomes an objective."""


def register() -> None:
    """Add this package's objectives to verl's policy losses, as the names of `POLICY_LOSSES`, and `rlk_bypass_mode`.

    Choose one with `actor_rollout_ref.actor.policy_loss.loss_mode=rlk_gspo`. Clip ranges and everything else come from
    verl's configuration, in verl's conventions (`docs/verl.md` has the table); KL and entropy terms stay verl's. The
    denominator is `config.global_batch_info`'s, or the micro-batch's own where that says nothing. Calling it again does
    nothing new.

    Raises:
        ImportError: verl is not installed.

    Example:
        >>> from rlkernels.integrations import verl
        >>> verl.register()
    """
    registry = imported(_ALGORITHMS)
    for name, loss in POLICY_LOSSES.items():
        registry.register_policy_loss(name)(_as_verl_calls_it(name, loss))
    registry.register_policy_loss(_BYPASS)(_bypass_mode)


def _as_verl_calls_it(name: str, loss: _PolicyLoss) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    def policy_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        if config is None:
            raise ValueError(f"config: expected verl's actor configuration for {name}, got None")
        objective = loss.objective(config)
        mode = loss.mode or loss_agg_mode
        policy_weight = rollout_is_weights
        if rollout_is_weights is not None:
            refuse_correction("rollout_is_weights", None, "weights", objective)
        if rollout_is_weights is not None and isinstance(objective, GMPO):
            policy_weight = _geometric_mean(rollout_is_weights, response_mask)
        batch = PolicyBatch(None, advantages, mask=response_mask, old_logp=old_log_prob, policy_weight=policy_weight)
        # GMPO is a mean over all rows of verl's, the empty ones too
        counted = response_mask.new_ones(response_mask.shape) if isinstance(objective, GMPO) else response_mask
        normalizer = _normalizer(mode, counted, config.global_batch_info)
        out = logp_policy_loss(log_prob, batch, objective, reduction=_REDUCTIONS[mode], normalizer=normalizer)
        clipped = out.metrics["clip_frac_low"] + out.metrics["clip_frac_high"]
        clip_fraction, kl = torch.stack([clipped, out.metrics["approx_kl_k1"]]).tolist()
        return out.loss, {"actor/pg_clipfrac": clip_fraction, "actor/ppo_kl": kl}

    policy_loss.__name__ = policy_loss.__qualname__ = name
    return policy_loss


def _bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Mask and weights are formed by verl itself; weights from outside are ignored, as verl ignores them."""
    correction = None if config is None else config.policy_loss.get("rollout_correction", None)
    if correction is None:
        raise ValueError(f"policy_loss.rollout_correction: expected verl's configuration for {_BYPASS}, got None")
    kind = correction.get("loss_type", "ppo_clip")
    if kind not in _BYPASSED:
        raise ValueError(f"rollout_correction.loss_type: expected one of {', '.join(_BYPASSED)}, got {kind!r}")
    helper = imported(_ROLLOUT_CORRECTION)
    options = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    formed, mask, metrics = helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=log_prob.detach(),
        rollout_log_prob=old_log_prob,
        response_mask=response_mask,
        **{name: correction[name] for name in options if name in correction},
    )
    # the clipped ratio is that of the rollout already
    weights = formed.batch["rollout_is_weights"] if formed and kind == "reinforce" else None
    name = _BYPASSED[kind]
    loss = _as_verl_calls_it(name, POLICY_LOSSES[name])
    value, own = loss(old_log_prob, log_prob, advantages, mask, loss_agg_mode, config, weights)
    return value, {**own, **metrics}


def _geometric_mean(weights: Tensor, mask: Tensor) -> Tensor:
    """`[B, 1]`, over the trained tokens."""
    logs = torch.where(mask != 0, (weights + 1e-10).log(), 0)
    return (logs.sum(-1, keepdim=True) / (mask != 0).sum(-1, keepdim=True).clamp(min=1)).exp()


def _normalizer(mode: str, mask: Tensor, info: Mapping[str, Any]) -> Normalizer | None:
    """The denominator of verl's `agg_loss`, which leaves out sequences without a trained token."""
    if mode not in _REDUCTIONS:
        raise ValueError(f"loss_agg_mode: expected one of {', '.join(_REDUCTIONS)}, got {mode!r}")
    ranks = info.get("dp_size", 1)
    if mode == "token-sum":
        return 1 / ranks
    name = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    count = info.get(name)
    if count is None:
        if ranks > 1:
            raise ValueError(f"global_batch_info: expected {name} with dp_size={ranks}, got None")
        is_trained = mask != 0
        count = is_trained.sum() if mode == "token-mean" else is_trained.any(-1).sum()
    if mode == "seq-mean-token-sum-norm":
        scale = info.get("loss_scale_factor")
        count = count * (mask.shape[-1] if scale is None else scale)
    return count / ranks
