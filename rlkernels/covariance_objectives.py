"""Objectives that treat the few tokens apart whose log-probability and advantage covary most, which cost most entropy.

    cov_t = (A_t - mean A) (logp_t - mean logp),   means over the trained tokens of the batch

They need the whole batch: the losses of micro-batches do not add up to the big batch's. A token of weight 0 takes part
with the advantage 0. The host reads no number of tokens. Notation as in `rlkernels.objectives`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.dtypes import wide
from rlkernels.objectives import GRPO, LOG_RATIO_LIMIT, Objective, PolicyTerms, Tokens, limited, limited_exp


def covariances(tokens: Tokens) -> Tensor:
    """`[N]`, detached; of no meaning where `mask` is zero."""
    count = tokens.mask.sum().clamp(min=1)
    logp, advantages = tokens.logp.detach(), tokens.advantages
    return (advantages - advantages.sum() / count) * (logp - logp.sum() / count)


def number_of(share: float, mask: Tensor) -> Tensor:
    """0-d: a share of the trained tokens, rounded down, at least 1."""
    return (wide(mask.sum()) * share).floor().clamp(min=1)


def largest(scores: Tensor, number: Tensor) -> Tensor:
    """`[N]` bool: where the so many largest are."""
    order = scores.argsort(descending=True, stable=True)
    is_first = torch.arange(scores.shape[0], device=scores.device) < number
    return torch.zeros_like(is_first).scatter(0, order, is_first)


@dataclass(frozen=True, kw_only=True)
class ClipCov(GRPO):
    """Clip-Cov: GRPO's surrogate, 0 for a few tokens drawn from those of high covariance.

        cov = (A - mean A) (logp - mean logp),   means over the batch's n trained tokens
        candidates: cov_low < cov < cov_high, not clipped;   max(1, floor(share n)) of them are drawn

    A drawn token counts as clipped, on its advantage's side.

    Args:
        share: > 0, at most 1: of the batch's trained tokens.
        cov_low, cov_high: bounds of the candidates' covariance, cov_low <= cov_high.
        generator: where the draw's random numbers come from, on the tokens' device; None: PyTorch's own.

    Needs the whole batch: the losses of micro-batches do not add up to the big batch's.

    Source: The Entropy Mechanism (2505.22617), equation 12; batched as verl's `clip_cov`.

    Example:
        >>> import torch, rlkernels
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([[-1.0, 1.0, 3.0]]))
        >>> logp = torch.tensor([[-3.0, -2.0, -1.0]])
        >>> loss = rlkernels.logp_policy_loss(logp, batch, rlkernels.ClipCov(share=1.0), reduction="none").loss
        >>> loss.tolist()  # covariances 2, 0 and 2
        [[0.0, -1.0, 0.0]]
    """

    share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    generator: torch.Generator | None = None

    by_sequence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_number("share", self.share, above=0.0, at_most=1.0)
        checks.require_number("cov_low", self.cov_low)
        checks.require_number("cov_high", self.cov_high, at_least=self.cov_low)
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise TypeError(f"generator: expected a torch.Generator or None, got {checks.describe(self.generator)}")

    def policy_terms(self, tokens: Tokens) -> PolicyTerms:
        loss, ratio, low, high = super().policy_terms(tokens)
        covariance = covariances(tokens)
        is_inside = (covariance > self.cov_low) & (covariance < self.cov_high)
        candidates = tokens.mask & is_inside & ~low & ~high
        scores = torch.where(candidates, self._draw(tokens.mask), -1.0)
        drawn = candidates & largest(scores, number_of(self.share, tokens.mask))
        advantages = tokens.advantages
        loss = torch.where(drawn, 0, loss)
        return PolicyTerms(loss, ratio, low | (drawn & (advantages < 0)), high | (drawn & (advantages > 0)))

    def _draw(self, mask: Tensor) -> Tensor:
        """`[N]`, uniform; the i-th trained token's number is the generator's i-th, wherever padding stands."""
        if self.generator is not None and self.generator.device.type != mask.device.type:
            raise ValueError(f"generator: expected one on {mask.device} like the tokens, got {self.generator.device}")
        numbers = torch.rand(mask.shape[0], generator=self.generator, device=mask.device)
        return numbers[(mask.cumsum(0) - 1).clamp(min=0)]


@dataclass(frozen=True, kw_only=True)
class KLCov(Objective):
    """KL-Cov: the unclipped surrogate, with a penalty on the tokens of highest covariance.

        -r A + penalty |d| where cov is among the max(1, floor(share n)) largest, else -r A;   d = logp - old_logp
        cov = (A - mean A) (logp - mean logp),   means over the batch's n trained tokens

    Args:
        share: > 0, at most 1: of the batch's n trained tokens.
        penalty: >= 0; verl's ppo_kl_coef.

    Needs the whole batch: the losses of micro-batches do not add up to the big batch's.

    Source: The Entropy Mechanism (2505.22617), equation 13; batched as verl's `kl_cov`.

    Example:
        >>> import torch, rlkernels
        >>> old_logp = torch.tensor([[-3.0, -2.0, -1.5]])
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([[-1.0, 0.0, 2.0]]), old_logp=old_logp)
        >>> logp = torch.tensor([[-3.0, -2.0, -1.0]])
        >>> loss = rlkernels.logp_policy_loss(logp, batch, rlkernels.KLCov(), reduction="none").loss
        >>> [round(value, 4) for value in loss[0].tolist()]  # the last: -2 e^0.5 + 0.5
        [1.0, 0.0, -2.7974]
    """

    share: float = 2e-4
    penalty: float = 1.0

    by_sequence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_level("token")
        checks.require_number("share", self.share, above=0.0, at_most=1.0)
        checks.require_number("penalty", self.penalty, at_least=0.0)

    def policy_terms(self, tokens: Tokens) -> PolicyTerms:
        log_ratio = limited(self.clamped_log_ratio(tokens), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        scores = torch.where(tokens.mask, covariances(tokens), -torch.inf)
        penalised = largest(scores, number_of(self.share, tokens.mask))
        ratio = limited_exp(log_ratio)
        loss = -tokens.advantages * ratio + torch.where(penalised, self.penalty * log_ratio.abs(), 0)
        nowhere = torch.zeros_like(tokens.mask)
        return PolicyTerms(loss, ratio, nowhere, nowhere)
