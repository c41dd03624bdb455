"""This package's objectives as prime-rl's custom loss.

    [trainer.loss]
    type = "custom"
    import_path = "rlkernels.integrations.prime_rl.policy_loss"

    [trainer.loss.kwargs]
    objective = "gspo"
    clip_low = 3e-4

Written for prime-rl at commit 559b447 (v0.8.1.dev67, August 2026) and tested with its own `compute_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.batch import PolicyBatch
from rlkernels.integrations.adapter import Choice, chosen_objective
from rlkernels.losses import logp_policy_loss
from rlkernels.objectives import GRPO

_NO_CLIP = 1e38  # beyond every ratio, which is e^80 at most


class LossOutputs(NamedTuple):
    """The two fields that prime-rl reads of its own class of this name."""

    loss: Tensor  # 0-d
    metrics: dict[str, Tensor]  # 0-d each


@dataclass(frozen=True, kw_only=True)
class _Default:
    """prime-rl's `type = "default"`: as its configuration names and presets them."""

    dppo_mask_low: float = 0.2
    dppo_mask_high: float = 0.2
    adv_tau: float = 1.0
    kl_tau: float = 1e-3

    def outside(self, change: Tensor, advantages: Tensor) -> Tensor:
        return torch.where(advantages > 0, change > self.dppo_mask_high, change < -self.dppo_mask_low)


@dataclass(frozen=True, kw_only=True)
class _IPO:
    """prime-rl's `type = "ipo"`."""

    ipo_threshold: float = 0.1
    adv_tau: float = 1.0
    kl_tau: float = 1e-3

    def outside(self, change: Tensor, advantages: Tensor) -> Tensor:
        return change.abs() > self.ipo_threshold


_OWN_LOSSES = {"default": _Default, "ipo": _IPO}


def policy_loss(inputs: Any, objective: Choice = "default", **options: Any) -> LossOutputs:
    """One sequence's loss, a sum over its tokens, as prime-rl's trainer wants it; the trainer divides by its tokens.

        default   sum_t m w (-k A adv_tau r + kl_tau d^2),   d = trainer_logprobs - inference_logprobs,   r = e^d
                  k = 0 where A > 0 and p - q > dppo_mask_high, or A <= 0 and p - q < -dppo_mask_low,   else 1
        ipo       the same, k = 0 where |p - q| > ipo_threshold
        others    sum_t m w (the objective's term), old_logp = inference_logprobs, ref_logp = ref_logprobs
        p, q = e^logprobs of trainer and inference,   m = loss_mask,   w = loss_weights

    Nothing is read by the host, and a sequence without a trained token keeps its graph.

    Args:
        inputs: prime-rl's `LossInputs`: `trainer_logprobs`, `inference_logprobs`, `ref_logprobs` or None, `advantages`,
            `loss_mask`, `loss_weights` or None, each `[N]`.
        objective: `"default"`, `"ipo"`, a recipe's name or an instance.
        options: fields of prime-rl's configuration for the first two, of the recipe's objective for a name.

    Returns:
        The 0-d loss and 0-d float32 metrics: of `default` and `ipo` prime-rl's own, of the others `is_masked`,
        `is_masked_low`, `is_masked_high` (the shares of clipped tokens), `importance_ratio` and, with a KL term,
        `ref_kl`.

    Raises:
        TypeError, ValueError: an unknown objective or option, one that needs more than `inputs` holds, such as a
            `kl_coef` without `ref_logprobs`, or inputs of other shapes.

    Source: prime-rl's `trainer/rl/loss.py`.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from rlkernels.integrations.prime_rl import policy_loss
        >>> inputs = SimpleNamespace(
        ...     trainer_logprobs=torch.tensor([-1.0, -2.0], requires_grad=True),
        ...     inference_logprobs=torch.tensor([-1.0, -2.5]), ref_logprobs=None, advantages=torch.ones(2),
        ...     loss_mask=torch.tensor([True, True]), loss_weights=None)
        >>> round(policy_loss(inputs, "grpo", clip_high=0.3).loss.item(), 6)  # -(1 + 1.3)
        -2.3
    """
    if isinstance(objective, str) and objective in _OWN_LOSSES:
        own = _OWN_LOSSES[objective]
        _check_options(objective, own, options)
        return _own_loss(inputs, own(**options))
    chosen = chosen_objective(objective, "prime-rl", has_ref_logp=True)
    if options:
        if not isinstance(objective, str):
            raise ValueError(f"options: expected none with an instance as objective, got {', '.join(options)}")
        _check_options(objective, type(chosen), options)
        chosen = chosen_objective(replace(chosen, **options), "prime-rl", has_ref_logp=True)
    out = logp_policy_loss(inputs.trainer_logprobs, _batch(inputs), chosen, reduction="token_sum")
    low, high = out.metrics["clip_frac_low"], out.metrics["clip_frac_high"]
    metrics = {"is_masked": low + high, "is_masked_low": low, "is_masked_high": high}
    metrics["importance_ratio"] = out.metrics["ratio_mean"]
    if "ref_kl" in out.metrics:
        metrics["ref_kl"] = out.metrics["ref_kl"]
    return LossOutputs(out.loss, {name: value.float() for name, value in metrics.items()})


def _check_options(objective: str, cls: type, options: dict[str, Any]) -> None:
    names = [field.name for field in fields(cls)]
    for name in options:
        checks.require_choice(f"option of {objective!r}", name, names)


def _batch(inputs: Any, **more: Any) -> PolicyBatch:
    arguments = {"advantages": inputs.advantages, "ref_logp": inputs.ref_logprobs} | more
    return PolicyBatch(
        None, mask=inputs.loss_mask, old_logp=inputs.inference_logprobs, weight=inputs.loss_weights, **arguments
    )


def _own_loss(inputs: Any, config: _Default | _IPO) -> LossOutputs:
    """kl_tau d^2 is 2 kl_tau times the k2 estimate of the KL to the inference policy."""
    for field in fields(config):
        checks.require_number(field.name, getattr(config, field.name), at_least=0.0)
    logp, old_logp, mask = inputs.trainer_logprobs.detach(), inputs.inference_logprobs, inputs.loss_mask
    outside = config.outside(logp.exp() - old_logp.exp(), inputs.advantages)
    batch = _batch(
        inputs,
        advantages=config.adv_tau * inputs.advantages,
        ref_logp=old_logp,
        policy_weight=(~outside).float(),
    )
    surrogate = GRPO(clip_low=1.0, clip_high=_NO_CLIP, kl_coef=2 * config.kl_tau, kl_estimator="k2")
    out = logp_policy_loss(inputs.trainer_logprobs, batch, surrogate, reduction="token_sum")

    def mean(values: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, values, 0).sum() / where.sum().clamp(min=1)

    log_ratio, dropped = logp - old_logp, mask & outside
    mismatch_kl = torch.expm1(log_ratio) - log_ratio
    metrics = {
        "masked_mismatch_kl": mean(mismatch_kl, dropped),
        "unmasked_mismatch_kl": mean(mismatch_kl, mask & ~outside),
        "is_masked": mean(outside, mask),
    }
    if isinstance(config, _Default):
        is_positive, is_negative = inputs.advantages > 0, inputs.advantages < 0
        metrics |= {
            "is_masked_low": mean(is_negative & outside, mask),
            "is_masked_high": mean(is_positive & outside, mask),
            "masked_advantage_positive": mean(is_positive, dropped),
            "masked_advantage_negative": mean(is_negative, dropped),
        }
    return LossOutputs(out.loss, metrics)
