"""Objectives that act on the policy gradient itself, by a detached weight or a penalty, instead of a ratio's surrogate.

Notation as in `rlkernels.objectives`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.batch import PolicyBatch
from rlkernels.objectives import LOG_RATIO_LIMIT, Objective, PolicyTerms, Tokens, limited, limited_exp, times_logp


@dataclass(frozen=True, kw_only=True)
class VESPO(Objective):
    """Variational sequence-level soft policy optimisation: a smooth weight of the whole sequence's ratio.

        -sg[phi(w)] A logp,   phi(w) = w^k e^(lambda (1 - w)),   w = exp(sum_t m d_t),   d = logp - old_logp
        k, lambda = k_pos, lambda_pos where A >= 0, k_neg, lambda_neg else

    phi(1) = 1. The metrics' ratio, and a weighted KL's, is the token's.

    Args:
        k_pos, k_neg, lambda_pos, lambda_neg: >= 0.
        log_ratio_clamp: limits each d before the sum (TRL's 20).
        log_weight_clamp: (low, high), limits of log w; low <= 0 <= high <= 80.

    A correction of the rollout engine's log-probabilities belongs into w: pass `old_logp - log(correction)` as
    old_logp, and no `policy_weight`.

    Source: VESPO (2602.10693); defaults as TRL's.

    Example:
        >>> import torch, rlkernels
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]), old_logp=torch.tensor([[-1.0]]))
        >>> vespo = rlkernels.VESPO(k_pos=1.0, lambda_pos=0.0)
        >>> round(rlkernels.logp_policy_loss(torch.tensor([[-0.5]]), batch, vespo).loss.item(), 6)  # e^0.5 / 2
        0.824361
    """

    log_ratio_clamp: float | None = 20.0
    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    log_weight_clamp: tuple[float, float] = (math.log(1e-8), 20.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_level("token")
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"):
            checks.require_number(name, getattr(self, name), at_least=0.0)
        if not isinstance(self.log_weight_clamp, tuple) or len(self.log_weight_clamp) != 2:
            raise TypeError(f"log_weight_clamp: expected a pair (low, high), got {self.log_weight_clamp!r}")
        low, high = self.log_weight_clamp
        checks.require_number("log_weight_clamp", low, at_most=0.0)
        checks.require_number("log_weight_clamp", high, at_least=0.0, at_most=LOG_RATIO_LIMIT)

    def check_batch(self, batch: PolicyBatch) -> None:
        super().check_batch(batch)
        if batch.policy_weight is not None:
            given = checks.describe(batch.policy_weight)
            raise ValueError(
                f"policy_weight: expected None with VESPO, whose ratio takes it as old_logp - log(policy_weight), "
                f"got {given}"
            )

    def policy_terms(self, tokens: Tokens) -> PolicyTerms:
        advantages, log_ratio = tokens.advantages, self.clamped_log_ratio(tokens)
        segments = tokens.segments
        log_weight = segments.expand(segments.sum(log_ratio.detach())).clamp(*self.log_weight_clamp)
        is_positive = advantages >= 0
        k = _by_sign(is_positive, self.k_pos, self.k_neg, log_weight)
        decay = _by_sign(is_positive, self.lambda_pos, self.lambda_neg, log_weight)
        phi = torch.exp(k * log_weight - decay * torch.expm1(log_weight))
        nowhere = torch.zeros_like(tokens.mask)
        return PolicyTerms(times_logp(-phi * advantages, tokens.logp), limited_exp(log_ratio), nowhere, nowhere)


def _by_sign(is_positive: Tensor, positive: float, negative: float, like: Tensor) -> Tensor:
    return torch.full_like(like, negative).masked_fill(is_positive, positive)


@dataclass(frozen=True, kw_only=True)
class DPPO(Objective):
    """Divergence PPO: a trust region of the sampled token's probability instead of its ratio.

        -sg[min(r, ratio_max)] A logp   where the token is inside, else 0;   p = e^min(logp, 0), q of old_logp

        tv:  A > 0: p - q <= threshold_high,   else: q - p <= threshold_low
        kl:  A > 0: p <= q or D <= threshold_high,   else: p >= q or D <= threshold_low
             D = q log(q / p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8))

    Args:
        divergence: `"tv"` (total variation) or `"kl"`, of the distribution "this token or another".
        threshold_low, threshold_high: >= 0; verl's clip_ratio_low and clip_ratio_high.
        ratio_max: > 0, or None for none; verl's clip_ratio_c.

    Source: DPPO (2602.04879), its "binary" divergences; batched as verl's `dppo_tv` and `dppo_kl`, whose
    log_ratio_clamp is 20.

    Example:
        >>> import torch, rlkernels
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]), old_logp=torch.tensor([[0.5, 0.5]]).log())
        >>> logp = torch.tensor([[0.9, 0.6]]).log()
        >>> loss = rlkernels.logp_policy_loss(logp, batch, rlkernels.DPPO(), reduction="none").loss
        >>> [round(value, 4) for value in loss[0].tolist()]  # the first is 0.4 above, outside; -1.2 log 0.6
        [0.0, 0.613]
    """

    divergence: str = "tv"
    threshold_low: float = 0.2
    threshold_high: float = 0.2
    ratio_max: float | None = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_level("token")
        checks.require_choice("divergence", self.divergence, ("tv", "kl"))
        checks.require_number("threshold_low", self.threshold_low, at_least=0.0)
        checks.require_number("threshold_high", self.threshold_high, at_least=0.0)
        self._require_positive("ratio_max", optional=True)

    def policy_terms(self, tokens: Tokens) -> PolicyTerms:
        advantages, ratio = tokens.advantages, limited_exp(self.clamped_log_ratio(tokens))
        weight = ratio.detach() if self.ratio_max is None else ratio.detach().clamp(max=self.ratio_max)
        too_low, too_high = self._outside(tokens)
        low, high = (advantages <= 0) & too_low, (advantages > 0) & too_high
        loss = torch.where(low | high, 0, times_logp(-weight * advantages, tokens.logp))
        return PolicyTerms(loss, ratio, low & (advantages < 0), high)

    def _outside(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Where p is too far below q, and too far above."""
        # no log-probability exceeds 0, whatever a rollout engine's rounding says
        logp, old_logp = tokens.logp.detach().clamp(max=0), tokens.old_logp.clamp(max=0)
        p, q = logp.exp(), old_logp.exp()
        if self.divergence == "tv":
            return q - p > self.threshold_low, p - q > self.threshold_high
        others = ((1e-8 - torch.expm1(old_logp)) / (1e-8 - torch.expm1(logp))).log()
        kl = torch.where(q == 0, 0, q * (old_logp - logp)) - torch.expm1(old_logp) * others
        return (p < q) & (kl > self.threshold_low), (p > q) & (kl > self.threshold_high)


@dataclass(frozen=True, kw_only=True)
class DRO(Objective):
    """Direct reward optimisation: the policy gradient with a quadratic penalty on the log ratio.

        -(A logp - beta d^2 / 2),   d = logp - old_logp

    Args:
        beta: > 0.

    Source: DRO (2405.19107); by token as verl's `dro`.

    Example:
        >>> import torch, rlkernels
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]), old_logp=torch.tensor([[-1.0]]))
        >>> rlkernels.logp_policy_loss(torch.tensor([[-0.5]]), batch, rlkernels.DRO(beta=2.0)).loss.item()
        0.75
    """

    beta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_level("token")
        self._require_positive("beta")

    def policy_terms(self, tokens: Tokens) -> PolicyTerms:
        log_ratio = limited(self.clamped_log_ratio(tokens), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        loss = times_logp(-tokens.advantages, tokens.logp) + 0.5 * self.beta * log_ratio**2
        nowhere = torch.zeros_like(tokens.mask)
        return PolicyTerms(loss, log_ratio.exp(), nowhere, nowhere)
