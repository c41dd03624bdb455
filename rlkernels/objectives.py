"""The policy objectives: each one's per-token mathematics in plain PyTorch, and nothing else.

An objective maps the statistics of tokens to one loss per token; what it is summed over and divided by is the
reduction's business (`reductions.py`). Notation of the docstrings:

    r = exp(logp - old_logp)     A = advantage     m = mask     n = sum_t m of the token's sequence

Every ratio is the exponential of a log ratio limited to +-80, so that no finite input overflows float32; the
gradient is 0 beyond, as it is beyond `log_ratio_clamp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.batch import PolicyBatch
from rlkernels.reductions import REDUCTIONS
from rlkernels.segments import Segments

LOG_RATIO_LIMIT = 80.0

LEVELS = ("token", "sequence_mean", "sequence_product")


class Tokens(NamedTuple):
    """What an objective sees: flat `[N]`, zero wherever `mask` is."""

    logp: Tensor  # what gradients reach
    old_logp: Tensor  # on-policy: logp without its gradient
    log_ratio: Tensor  # logp - old_logp
    advantages: Tensor  # 0 where a weight is 0
    mask: Tensor  # bool
    segments: Segments  # the sequences: sums over each, and values of each spread over its tokens
    extras: Mapping[str, Tensor]  # `[N]`, of the batch's extras


class PolicyTerms(NamedTuple):
    """Per token, flat `[N]`: the policy term, the ratio it used, and where it was clipped."""

    loss: Tensor  # the policy term
    ratio: Tensor  # of the objective's level
    clipped_low: Tensor  # bool
    clipped_high: Tensor  # bool


def limited(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """`x.clamp(low, high)` with slope 1 at a bound, where torch's own is 0 from 2.14 on, and at NaN, where it is 0."""
    clamped = x.detach().clamp(low, high)
    return torch.where((x < clamped) | (x > clamped), clamped, x)


def limited_exp(log_ratio: Tensor) -> Tensor:
    return limited(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def times_logp(coefficient: Tensor, logp: Tensor) -> Tensor:
    return torch.where(coefficient == 0, 0, coefficient * logp)  # not 0 * -inf


def level_log_ratio(tokens: Tokens, level: str) -> Tensor:
    """The log ratio of a token, or of its sequence: the mean or the sum over the trained tokens."""
    if level == "token":
        return tokens.log_ratio
    total = tokens.segments.sum(tokens.log_ratio)
    if level == "sequence_mean":
        total = total / sequence_lengths(tokens)
    return tokens.segments.expand(total)


def sequence_lengths(tokens: Tokens) -> Tensor:
    """`[B]`, at least 1."""
    return tokens.segments.sum(tokens.mask.to(tokens.logp.dtype)).clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Fields that every objective shares: the base class, of which a subclass is used.

        L = weight (policy_weight policy_term + kl_coef kl),   loss = reduce(L) - entropy_coef reduce(entropy)

    A subclass of one's own defines `policy_terms`; it runs on every backend and in every path.

    Args:
        level: which ratio: `"token"`, `"sequence_mean"` (geometric mean of the sequence's token ratios) or
            `"sequence_product"`. `GSPO` and its subclasses have the latter two; `GRPO`, `ClipCov`, `CISPO`, `SAPO` and
            `NFT` all three, the others the first.
        log_ratio_clamp: limits the log ratio, and the KL term's, to +- this; the gradient is 0 outside. None: to +-80,
            so that no finite input overflows.
        kl_coef, kl_estimator: KL(policy || reference) from ref_logp: with x = ref_logp - logp,
            k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1.
        kl_clamp: limits the estimate to +- this; the gradient is 0 outside.
        kl_importance_weighted: multiplies the estimate by the ratio, with gradient through both.
        entropy_coef: weight of the entropy bonus; needs entropies.
        entropy_reduction: the bonus's reduction. The loss's `normalizer` applies to it where the two reductions are
            the same; only then does the bonus of micro-batches add up to the big batch's.

    Raises:
        TypeError, ValueError: a field out of its range, naming it. A loss whose batch lacks what a field needs
            (`ref_logp` with `kl_coef`) raises ValueError.
    """

    level: str = "token"
    log_ratio_clamp: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_clamp: float | None = None
    kl_importance_weighted: bool = False
    entropy_coef: float = 0.0
    entropy_reduction: str = "token_mean"

    by_sequence: ClassVar[bool] = True  # whether a sequence's terms need no other sequence of the batch

    def __post_init__(self) -> None:
        checks.require_choice("level", self.level, LEVELS)
        checks.require_choice("kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        checks.require_choice("entropy_reduction", self.entropy_reduction, REDUCTIONS[:-1])
        for name in ("log_ratio_clamp", "kl_clamp"):
            self._require_positive(name, optional=True)
        checks.require_number("kl_coef", self.kl_coef, at_least=0.0)
        checks.require_number("entropy_coef", self.entropy_coef)
        if not isinstance(self.kl_importance_weighted, bool):
            raise TypeError(f"kl_importance_weighted: expected a bool, got {self.kl_importance_weighted!r}")
        for name, value in (
            ("kl_clamp", self.kl_clamp),
            ("kl_importance_weighted", self.kl_importance_weighted),
        ):
            if value and self.kl_coef == 0:
                raise ValueError(f"{name}: expected no value without kl_coef, got {value!r}")

    def check_batch(self, batch: PolicyBatch) -> None:
        """Refuses a batch that lacks what the objective needs.

        Args:
            batch: a loss's, before anything is computed.

        Raises:
            ValueError: naming what is missing.
        """
        if self.kl_coef != 0 and batch.ref_logp is None:
            raise ValueError(f"ref_logp: expected in the batch with kl_coef={self.kl_coef}, got None")

    def kind(self) -> str:
        """What of the fields decides which sums are formed: names, switches, and which of the numbers are 0."""

        def shown(value: Any) -> Any:
            if value is None or isinstance(value, (bool, str)):
                return value
            return 0 if value == 0 else ...

        values = ", ".join(f"{field.name}={shown(getattr(self, field.name))!r}" for field in fields(self))
        return f"{type(self).__name__}({values})".replace("Ellipsis", "...")

    def policy_terms(self, tokens: Tokens) -> PolicyTerms:
        """The objective's mathematics: each token's policy term, without weights, KL term and entropy bonus.

        Args:
            tokens: the batch's, flat `[N]`.

        Returns:
            `[N]` each, of `logp`'s dtype and bool. Gradients go through `loss`, and through `ratio` where it weights
            the KL term. What stands where `mask` is zero is selected away.

        Raises:
            TypeError: by the base class, which has none.
        """
        raise TypeError(f"{type(self).__name__} is a base class; use one of its subclasses")

    def kl_terms(self, logp: Tensor, ref_logp: Tensor, ratio: Tensor) -> Tensor:
        """The KL estimate of every token.

            k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1,   x = ref_logp - logp

        Args:
            logp, ref_logp: `[N]` float, nats.
            ratio: `[N]` float, what an importance-weighted estimate is multiplied by.

        Returns:
            `[N]`, of `logp`'s dtype, limited and weighted as the fields say.
        """
        limit = min(self.log_ratio_clamp or LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        x = limited(ref_logp - logp, -limit, limit)
        estimates = {"k1": lambda: -x, "k2": lambda: 0.5 * x * x, "k3": lambda: torch.expm1(x) - x}
        kl = estimates[self.kl_estimator]()
        if self.kl_clamp is not None:
            kl = limited(kl, -self.kl_clamp, self.kl_clamp)
        return kl * ratio if self.kl_importance_weighted else kl

    def clamped_log_ratio(self, tokens: Tokens) -> Tensor:
        """The log ratio of the objective's level.

            clip(x, -log_ratio_clamp, log_ratio_clamp),   x: d, or its sequence's mean or sum;   d = logp - old_logp

        Args:
            tokens: the batch's, flat `[N]`.

        Returns:
            `[N]`, of `logp`'s dtype, with its gradient.
        """
        log_ratio = level_log_ratio(tokens, self.level)
        if self.log_ratio_clamp is None:
            return log_ratio
        return limited(log_ratio, -self.log_ratio_clamp, self.log_ratio_clamp)

    def _require_positive(self, *names: str, optional: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None or not optional:
                checks.require_number(name, value, above=0.0)

    def _require_level(self, *levels: str) -> None:
        if self.level not in levels:
            allowed = " or ".join(map(repr, levels))
            raise ValueError(f"level: expected {allowed} for {type(self).__name__}, got {self.level!r}")


def clip_sides(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where a surrogate is clipped: the sides from which the advantage pushes further out. A tie is not."""
    return (advantages < 0) & (ratio < low), (advantages > 0) & (ratio > high)


@dataclass(frozen=True, kw_only=True)
class GRPO(Objective):
    """The clipped surrogate of PPO, which GRPO, DAPO and Dr.GRPO share.

        -min(min(r, ratio_cap) A, clip(r, 1 - clip_low, 1 + clip_high) A);   A < 0: at most -dual_clip A

    At a bound itself the gradient is the unclipped one. Zero advantage: value and gradient 0.

    Args:
        clip_low, clip_high: >= 0.
        dual_clip: > 1, or None. Bounds the loss of tokens with A < 0 (verl: 3).
        ratio_cap: > 0, or None. Caps the unclipped branch's ratio (TRL's `delta`).

    Source: PPO (1707.06347), GRPO (2402.03300), DAPO (2503.14476), dual clip (1912.09729).

    Example:
        >>> import torch, rlkernels
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]), old_logp=torch.tensor([[-1.0]]))
        >>> rlkernels.logp_policy_loss(torch.tensor([[-0.5]]), batch, rlkernels.GRPO(clip_high=0.3)).loss.item()
        -1.2999999523162842
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    ratio_cap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_number("clip_low", self.clip_low, at_least=0.0)
        checks.require_number("clip_high", self.clip_high, at_least=0.0)
        if self.dual_clip is not None:
            checks.require_number("dual_clip", self.dual_clip, above=1.0)
        self._require_positive("ratio_cap", optional=True)

    def surrogate_ratio(self, tokens: Tokens) -> Tensor:
        """The ratio that is clipped.

            r, or s of the sequence, by `level`

        Args:
            tokens: the batch's, flat `[N]`.

        Returns:
            `[N]`, of `logp`'s dtype, with its gradient.
        """
        return limited_exp(self.clamped_log_ratio(tokens))

    def policy_terms(self, tokens: Tokens) -> PolicyTerms:
        ratio, advantages = self.surrogate_ratio(tokens), tokens.advantages
        low, high = 1 - self.clip_low, 1 + self.clip_high
        capped = ratio if self.ratio_cap is None else limited(ratio, high=self.ratio_cap)
        # torch halves a tie between the two branches; the clip's slope at its bound is 1, so the halves add up
        loss = torch.maximum(-capped * advantages, -limited(ratio, low, high) * advantages)
        if self.dual_clip is not None:
            bound = -self.dual_clip * advantages
            loss = torch.where((advantages < 0) & (loss > bound), bound, loss)  # a tie is not clipped
        return PolicyTerms(loss, ratio, *clip_sides(ratio, advantages, low, high))


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """GRPO's surrogate of the ratio of whole sequences.

        -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A),   s = exp(sum_t m (logp - old_logp) / n), gradient through s

    Args:
        level: `"sequence_mean"`, or `"sequence_product"`: s without the root 1 / n.
        clip_low, clip_high: as in `GRPO`.

    Source: GSPO (2507.18071), section 4.1; the clip range is its section 5.1's.

    Example:
        >>> import torch, rlkernels
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]), old_logp=torch.tensor([[-1.0, -2.0]]))
        >>> rlkernels.logp_policy_loss(torch.tensor([[-0.5, -2.5]]), batch, rlkernels.GSPO()).loss.item()  # s = 1
        -1.0
    """

    level: str = "sequence_mean"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_level("sequence_mean", "sequence_product")


@dataclass(frozen=True, kw_only=True)
class GSPOToken(GSPO):
    """GSPO whose ratio is s in value, with a token's own gradient.

        -min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A),   s_t = sg[s] exp(logp - sg[logp])

    Equal to `GSPO` while a sequence's advantages are equal; otherwise each token follows its own advantage.

    Source: GSPO (2507.18071), section 4.3.

    Example:
        >>> import torch, rlkernels
        >>> logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([[1.0, 0.0]]), old_logp=logp.detach())
        >>> rlkernels.logp_policy_loss(logp, batch, rlkernels.GSPOToken()).loss.backward()
        >>> logp.grad.tolist()  # GSPO's: -0.25 each
        [[-0.5, 0.0]]
    """

    def surrogate_ratio(self, tokens: Tokens) -> Tensor:
        ratio = limited_exp(self.clamped_log_ratio(tokens)).detach()
        return ratio * (tokens.logp - tokens.logp.detach()).exp()


@dataclass(frozen=True, kw_only=True)
class LUSPO(GSPO):
    """GSPO, whose recipe sums over a sequence's tokens instead of averaging: every sequence weighs by its length.

        mean_i n_i (surrogate of sequence i)

    Source: LUSPO (2602.05261); as TRL's, whose clip range is the configuration's: this is GSPO's.

    Example:
        >>> import torch, rlkernels
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]))
        >>> rlkernels.logp_policy_loss(torch.tensor([[-1.0, -2.0]]), batch, rlkernels.LUSPO()).loss.item()
        -2.0
    """


@dataclass(frozen=True, kw_only=True)
class GMPO(Objective):
    """Geometric-mean policy optimisation.

        -A R,   R = exp(sum_t m c_t / n),   c = min(d, log_clip_high) where A > 0, max(d, -log_clip_low) else,
        d = logp - old_logp

    A clipped token has no gradient, but its clipped value still scales the sequence's other tokens.

    Args:
        log_clip_low, log_clip_high: > 0, bounds of the log ratio.
        clip_level: `"token"`; `"sequence"` clips sum_t m d instead of each d, and divides it by n afterwards, as the
            authors' ablation; None clips nothing. The product itself, clipped and not rooted, is `GSPO`'s
            `level="sequence_product"`.

    Source: GMPO (2507.20673); batched as verl's `geo_mean`.

    Example:
        >>> import torch, rlkernels
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]), old_logp=torch.tensor([[-1.0, -2.0]]))
        >>> out = rlkernels.logp_policy_loss(torch.tensor([[0.0, -2.0]]), batch, rlkernels.GMPO())
        >>> round(out.loss.item(), 6)  # -exp((0.4 + 0) / 2)
        -1.221403
    """

    log_clip_low: float = 0.4
    log_clip_high: float = 0.4
    clip_level: str | None = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_level("token")
        self._require_positive("log_clip_low", "log_clip_high")
        checks.require_choice("clip_level", self.clip_level, ("token", "sequence", None))

    def policy_terms(self, tokens: Tokens) -> PolicyTerms:
        advantages = tokens.advantages
        if self.clip_level == "sequence":
            clamped = tokens._replace(log_ratio=self.clamped_log_ratio(tokens))
            log_ratio = level_log_ratio(clamped, "sequence_product")
            total, low, high = self._clip(log_ratio, advantages)
            mean = total / tokens.segments.expand(sequence_lengths(tokens))
        else:
            log_ratio = self.clamped_log_ratio(tokens)
            clipped, low, high = self._clip(log_ratio, advantages)
            mean = level_log_ratio(tokens._replace(log_ratio=clipped), "sequence_mean")
        ratio = limited_exp(mean)
        return PolicyTerms(-advantages * ratio, ratio, low, high)

    def _clip(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.clip_level is None:
            nowhere = torch.zeros_like(advantages, dtype=torch.bool)
            return log_ratio, nowhere, nowhere
        clipped = torch.where(
            advantages > 0, limited(log_ratio, high=self.log_clip_high), limited(log_ratio, low=-self.log_clip_low)
        )
        return clipped, *clip_sides(log_ratio, advantages, -self.log_clip_low, self.log_clip_high)


@dataclass(frozen=True, kw_only=True)
class CISPO(Objective):
    """Clipped importance-sampling weights on the policy gradient: no token loses its gradient.

        -sg[clip(r, ratio_min, ratio_max)] A logp

    Args:
        ratio_max: > 0. Bounds of the ratio itself: verl's clip_high is ratio_max - 1, TRL's epsilon_high is
            ratio_max.
        ratio_min: >= 0, or None for none.

    Source: MiniMax-M1 (2506.13585).

    Example:
        >>> import torch, rlkernels
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]), old_logp=torch.tensor([[-1.5]]))
        >>> rlkernels.logp_policy_loss(torch.tensor([[-0.5]]), batch, rlkernels.CISPO(ratio_max=2.0)).loss.item()
        1.0
    """

    ratio_max: float
    ratio_min: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("ratio_max")
        if self.ratio_min is not None:
            checks.require_number("ratio_min", self.ratio_min, at_least=0.0, at_most=self.ratio_max)

    def policy_terms(self, tokens: Tokens) -> PolicyTerms:
        ratio = limited_exp(self.clamped_log_ratio(tokens))
        weight = ratio.clamp(self.ratio_min, self.ratio_max).detach()
        return PolicyTerms(
            times_logp(-weight * tokens.advantages, tokens.logp),
            ratio,
            clipped_low=ratio < (self.ratio_min or 0.0),
            clipped_high=ratio > self.ratio_max,
        )


@dataclass(frozen=True, kw_only=True)
class SAPO(Objective):
    """Soft adaptive policy optimisation: a sigmoid gate in place of the clip.

        -A (4 / tau) sigmoid(tau (r - 1)),   tau = tau_pos where A > 0, tau_neg else

    Args:
        tau_pos, tau_neg: > 0.

    Source: SAPO (2511.20347).

    Example:
        >>> import torch, rlkernels
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]))
        >>> rlkernels.logp_policy_loss(torch.tensor([[-1.0]]), batch, rlkernels.SAPO()).loss.item()  # -4 sigmoid(0)
        -2.0
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("tau_pos", "tau_neg")

    def policy_terms(self, tokens: Tokens) -> PolicyTerms:
        ratio, advantages = limited_exp(self.clamped_log_ratio(tokens)), tokens.advantages
        tau = torch.full_like(ratio, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        loss = -advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1))
        nowhere = torch.zeros_like(advantages, dtype=torch.bool)
        return PolicyTerms(loss, ratio, nowhere, nowhere)


@dataclass(frozen=True, kw_only=True)
class NFT(Objective):
    """Negative-aware fine-tuning: correct answers are imitated, wrong ones through the implied negative policy.

        A > 0 (a correct answer):  -w log R
        else:                      -negative_weight w log max(x, min_ratio),   x = (1 - q R) / (1 - q)
        R = exp(min(d, log_ratio_max)), d the log ratio of `level`;  q = extras["success_rate"] within rate_clamp

    The maximum passes the gradient straight through to x. `level="sequence_product"` is the form of whole sequences;
    with `reduction="seq_mean_token_mean", normalizer=1.0` a response is one term, as the authors have it.

    Args:
        min_ratio: > 0 (epsilon).
        prompt_weight: w: `"failure_rate"` = 1 - q, `"sqrt_failure_odds"` = sqrt((1 - q) / q), `"uniform"` = 1.
        negative_weight: 0 is rejection-sampling fine-tuning.
        rate_clamp: (low, high), limits of q, 0 < low <= high < 1, as the authors have them.
        log_ratio_max: > 0, as the authors have it.

    Needs `PolicyBatch(extras={"success_rate": ...})`, `[B]`: the share of correct answers to each one's prompt.
    Advantages say no more than correct or not: pass `2 * correct - 1`, since group advantages are 0 where a whole group
    is correct.

    Source: NFT (2505.18116) and its `dp_actor.py`, which divides the sum over tokens by 1000.

    Example:
        >>> import torch, rlkernels
        >>> old_logp, rate = torch.tensor([[-0.5]]), torch.tensor([0.5])
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]), old_logp=old_logp, extras={"success_rate": rate})
        >>> out = rlkernels.logp_policy_loss(torch.tensor([[-1.0]]), batch, rlkernels.NFT(), reduction="token_sum")
        >>> out.loss.item()  # 0.5 x 0.5
        0.25
    """

    min_ratio: float = 1.0
    prompt_weight: str = "failure_rate"
    negative_weight: float = 1.0
    rate_clamp: tuple[float, float] = (0.02, 0.98)
    log_ratio_max: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("min_ratio", "log_ratio_max")
        checks.require_number("negative_weight", self.negative_weight)
        weights = ("failure_rate", "sqrt_failure_odds", "uniform")
        checks.require_choice("prompt_weight", self.prompt_weight, weights)
        if not isinstance(self.rate_clamp, tuple) or len(self.rate_clamp) != 2:
            raise TypeError(f"rate_clamp: expected a pair (low, high), got {self.rate_clamp!r}")
        for bound in self.rate_clamp:
            checks.require_number("rate_clamp", bound, above=0.0)
        if not self.rate_clamp[0] <= self.rate_clamp[1] < 1:
            raise ValueError(f"rate_clamp: expected 0 < low <= high < 1, got {self.rate_clamp!r}")

    def check_batch(self, batch: PolicyBatch) -> None:
        super().check_batch(batch)
        if "success_rate" not in batch.extras:
            raise ValueError("extras: expected 'success_rate' [B] for NFT, got none")

    def policy_terms(self, tokens: Tokens) -> PolicyTerms:
        rate = tokens.extras["success_rate"].clamp(*self.rate_clamp)
        log_ratio = limited(self.clamped_log_ratio(tokens), high=self.log_ratio_max)
        ratio = limited_exp(log_ratio)
        negative_ratio = (1 - rate * ratio) / (1 - rate)
        floored = negative_ratio.clamp(min=self.min_ratio).detach()
        # log(floored) in value, straight through in gradient
        log_negative = floored.log() + (negative_ratio - negative_ratio.detach()) / floored
        odds = (1 - rate) / rate
        weight = {
            "failure_rate": 1 - rate,
            "sqrt_failure_odds": odds.sqrt(),
            "uniform": torch.ones_like(rate),
        }
        is_correct = tokens.advantages > 0
        loss = torch.where(is_correct, -log_ratio, -self.negative_weight * log_negative)
        nowhere = torch.zeros_like(is_correct)
        return PolicyTerms(
            weight[self.prompt_weight] * loss,
            ratio,
            clipped_low=~is_correct & (negative_ratio < self.min_ratio),
            clipped_high=nowhere,
        )


@dataclass(frozen=True, kw_only=True)
class Reinforce(Objective):
    """The policy gradient itself, without a ratio.

        -A logp

    Source: REINFORCE (Williams, 1992).

    Example:
        >>> import torch, rlkernels
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]))
        >>> rlkernels.logp_policy_loss(torch.tensor([[-0.5]]), batch, rlkernels.Reinforce()).loss.item()
        0.5
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_level("token")

    def policy_terms(self, tokens: Tokens) -> PolicyTerms:
        nowhere = torch.zeros_like(tokens.mask)
        ratio = limited_exp(self.clamped_log_ratio(tokens))
        return PolicyTerms(times_logp(-tokens.advantages, tokens.logp), ratio, nowhere, nowhere)
