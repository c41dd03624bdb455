"""From per-token statistics to a `PolicyLoss`: by the fused operation, or by the definition and autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernels import backends, checks
from rlkernels.batch import PolicyBatch
from rlkernels.distributed import total_of_shares
from rlkernels.dtypes import wide
from rlkernels.kernel_options import objective_options, reduction_code
from rlkernels.metrics import Metrics
from rlkernels.objectives import LOG_RATIO_LIMIT, Objective, PolicyTerms, Tokens
from rlkernels.ops.objective_options import ObjectiveOptions
from rlkernels.ops.policy_objective import MAXIMA, METRICS, MINIMA, ObjectiveBatch, PolicyObjective
from rlkernels.ops.rows import compute_dtype
from rlkernels.recipes import ObjectiveFunction, Recipe
from rlkernels.reductions import Normalizer, check_reduction, reduce_tokens
from rlkernels.segments import Segments


class PolicyLoss(NamedTuple):
    """A loss, and what was measured on the way; all but `loss` is detached.

    Attributes:
        loss: 0-d (the tokens' shape with `reduction="none"`), float32 (float64 for float64 input).
        metrics: over the trained tokens: `ratio_mean`, `ratio_variance`, `ratio_min` and `ratio_max` of the objective's
            ratio; `clip_frac_low` and `clip_frac_high`, shares of clipped tokens, and `..._min`, `..._max`, the extreme
            sequences' shares; `approx_kl_k1` = mean(-d) and `approx_kl_k3` = mean(e^d - 1 - d), d = logp - old_logp, in
            nats; where there are such, `weight_mean`, `policy_weight_mean`, `ref_kl` and `entropy`. A callable
            objective has no ratio, and nothing of it here.
        logp: the tokens' shape, nats.
        entropy: likewise; None where there is none.
    """

    loss: Tensor
    metrics: Metrics
    logp: Tensor
    entropy: Tensor | None


def token_loss(
    logp: Tensor, entropy: Tensor | None, batch: PolicyBatch, segments: Segments, recipe: Recipe
) -> PolicyLoss:
    # the operation has no sums over ranks
    options = fused_options(logp.device, recipe, "policy_objective") if segments.group is None else None
    if options is not None:
        return _fused_loss(logp, entropy, batch, segments, recipe, options)
    packed = _Packed(logp.to(compute_dtype(logp.dtype)), entropy, batch, segments)
    if isinstance(recipe.objective, Objective):
        values, policy, kl = _objective_values(recipe.objective, packed)
    else:
        values, policy, kl = _callable_values(recipe.objective, logp, packed), None, None
    loss = reduce_tokens(values, packed.mask, segments, recipe.reduction, recipe.normalizer)
    if isinstance(recipe.objective, Objective) and recipe.objective.entropy_coef != 0:
        assert packed.entropy is not None
        reduction = entropy_reduction(recipe)
        bonus = reduce_tokens(packed.entropy, packed.mask, segments, reduction, recipe.entropy_normalizer)
        loss = loss - recipe.objective.entropy_coef * bonus
    if segments.group is not None and recipe.reduction != "none":
        loss = total_of_shares(loss, segments.group)
    with torch.no_grad():
        metrics = _metrics(packed, policy, kl)
    return PolicyLoss(
        loss.reshape(logp.shape) if recipe.reduction == "none" else loss,
        metrics,
        logp.detach(),
        None if entropy is None else entropy.detach(),
    )


def token_terms(logp: Tensor, batch: PolicyBatch, segments: Segments, objective: Objective) -> PolicyTerms:
    """The objective's own terms, `[N]`; loss 0 and nothing clipped where the mask is 0."""
    packed = _Packed(logp.to(compute_dtype(logp.dtype)), None, batch, segments)
    loss, ratio, low, high = objective.policy_terms(packed.tokens)
    return PolicyTerms(torch.where(packed.mask, loss, 0), ratio, low & packed.mask, high & packed.mask)


def _fused_loss(
    logp: Tensor,
    entropy: Tensor | None,
    batch: PolicyBatch,
    segments: Segments,
    recipe: Recipe,
    options: ObjectiveOptions,
) -> PolicyLoss:
    checks.refuse_transforms("policy objective", logp, entropy)
    dtype = compute_dtype(logp.dtype)
    flat_entropy = None if entropy is None else entropy.reshape(-1).to(dtype).contiguous()
    flat_logp = logp.reshape(-1).to(dtype).contiguous()
    wants_gradient = any(value is not None and value.requires_grad for value in (flat_logp, flat_entropy))
    need_grad = torch.is_grad_enabled() and wants_gradient
    fused = objective_batch(batch, segments, recipe, dtype)
    loss, sums = PolicyObjective.apply(flat_logp, flat_entropy, options, fused, need_grad)
    metrics = fused_metrics(sums, batch, options, has_entropy=entropy is not None)
    return PolicyLoss(loss, metrics, logp.detach(), None if entropy is None else entropy.detach())


def fused_options(device: torch.device, recipe: Recipe, operation: str) -> ObjectiveOptions | None:
    """None where the statistics path has to do: an objective that only Python knows, or a loss per token."""
    if recipe.reduction == "none" or not backends.has(operation, device):
        return None
    return objective_options(recipe.objective)


def objective_batch(batch: PolicyBatch, segments: Segments, recipe: Recipe, dtype: torch.dtype) -> ObjectiveBatch:
    device = batch.advantages.device

    def flat(value: Tensor | None) -> Tensor | None:
        """`[N]`, or `[B]` where that cannot be taken for it."""
        if value is None:
            return None
        if tuple(value.shape) != segments.shape and segments.count == segments.tokens:
            return batch.per_token(value, segments, dtype).contiguous()
        return value.reshape(-1).to(dtype).contiguous()

    def number(value: Normalizer | None) -> Tensor | None:
        if value is None:
            return None
        if isinstance(value, Tensor):
            return value.reshape(1).to(device=device, dtype=torch.float64)
        return torch.full((1,), value, dtype=torch.float64, device=device)

    mask = torch.ones(segments.tokens, dtype=torch.bool, device=device) if batch.mask is None else batch.mask
    advantages = flat(batch.advantages)
    assert advantages is not None
    return ObjectiveBatch(
        mask=mask.reshape(-1).contiguous(),
        old_logp=flat(batch.old_logp),
        ref_logp=flat(batch.ref_logp),
        weight=flat(batch.weight),
        advantages=advantages,
        policy_weight=flat(batch.policy_weight),
        success_rate=flat(batch.extras.get("success_rate")),
        cu_seqlens=None if batch.cu_seqlens is None else batch.cu_seqlens.to(torch.int64).contiguous(),
        sequences=segments.count,
        reduction=reduction_code(recipe.reduction),
        entropy_reduction=reduction_code(entropy_reduction(recipe)),
        normalizer=number(recipe.normalizer),
        entropy_normalizer=number(recipe.entropy_normalizer),
    )


def fused_metrics(sums: Tensor, batch: PolicyBatch, options: ObjectiveOptions, has_entropy: bool) -> Metrics:
    values = dict(zip((*METRICS, *MINIMA, *MAXIMA), sums.unbind(), strict=True))
    absent = {
        "weight_mean": batch.weight is None,
        "policy_weight_mean": batch.policy_weight is None,
        "ref_kl": options.kl_coef == 0,
        "entropy": not has_entropy,
    }
    count = values["count"]
    means = {name: (values[name], count) for name in METRICS[1:] if not absent.get(name, False)}
    spread, _ = means.pop("ratio_variance")
    return Metrics(
        means,
        {name: values[name] for name in MINIMA},
        {name: values[name] for name in MAXIMA},
        {"ratio_variance": (values["ratio_mean"], spread, count)},
    )


def entropy_reduction(recipe: Recipe) -> str:
    """The bonus's reduction: per token where the loss is."""
    assert isinstance(recipe.objective, Objective)
    return "none" if recipe.reduction == "none" else recipe.objective.entropy_reduction


def with_entropy_normalizer(recipe: Recipe) -> Recipe:
    """The loss's own normalizer where the reductions agree."""
    reduction = entropy_reduction(recipe)
    normalizer = recipe.normalizer if reduction == recipe.reduction else None
    check_reduction(reduction, normalizer, name="entropy_reduction")
    return recipe._replace(entropy_normalizer=normalizer)


class _Packed:
    """The batch as flat `[N]` tensors of logp's dtype, zero under the mask's zeros: selected, never multiplied."""

    def __init__(self, logp: Tensor, entropy: Tensor | None, batch: PolicyBatch, segments: Segments) -> None:
        self.batch, self.segments = batch, segments
        mask = torch.ones_like(logp, dtype=torch.bool) if batch.mask is None else batch.mask
        self.mask = mask.reshape(-1)

        def flat(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            return torch.where(self.mask, batch.per_token(value, segments, logp.dtype), 0)

        self.logp = torch.where(self.mask, logp.reshape(-1), 0)
        self.entropy, self.old_logp, self.ref_logp = flat(entropy), flat(batch.old_logp), flat(batch.ref_logp)
        self.weight, self.policy_weight = flat(batch.weight), flat(batch.policy_weight)
        old_logp = self.logp.detach() if self.old_logp is None else self.old_logp
        advantages = flat(batch.advantages)
        assert advantages is not None
        for factor in (self.weight, self.policy_weight):
            if factor is not None:  # selects the advantage away, so that an infinite one has no gradient either
                advantages = torch.where(factor == 0, 0, advantages)
        extras = {name: flat(value) for name, value in batch.extras.items()}
        self.tokens = Tokens(
            logp=self.logp,
            old_logp=old_logp,
            log_ratio=self.logp - old_logp,
            advantages=advantages,
            mask=self.mask,
            segments=segments,
            extras=extras,  # type: ignore[arg-type]
        )


def _scaled(values: Tensor, factor: Tensor | None) -> Tensor:
    """`factor * values` where 0 selects away: 0 * inf stays 0."""
    return values if factor is None else torch.where(factor == 0, 0, factor * values)


def _objective_values(objective: Objective, packed: _Packed) -> tuple[Tensor, PolicyTerms, Tensor | None]:
    policy = objective.policy_terms(packed.tokens)
    values = _scaled(policy.loss, packed.policy_weight)
    kl = None
    if objective.kl_coef != 0:
        assert packed.ref_logp is not None
        kl = objective.kl_terms(packed.logp, packed.ref_logp, policy.ratio)
        values = values + objective.kl_coef * kl
    return torch.where(packed.mask, _scaled(values, packed.weight), 0), policy, kl


def _callable_values(function: ObjectiveFunction, logp: Tensor, packed: _Packed) -> Tensor:
    values = function(packed.logp.reshape(logp.shape), packed.batch)
    checks.require_tensor("objective's result", values)
    checks.require_dtype("objective's result", values, checks.FLOAT_DTYPES)
    checks.require_shape("objective's result", values, tuple(logp.shape))
    checks.require_same_device("logp", logp, **{"objective's result": values})
    return torch.where(packed.mask, values.reshape(-1).to(packed.logp.dtype), 0)


def _metrics(packed: _Packed, policy: PolicyTerms | None, kl: Tensor | None) -> Metrics:
    mask, segments = packed.mask, packed.segments
    count = wide(mask.sum())

    def mean(values: Tensor) -> tuple[Tensor, Tensor]:
        return wide(torch.where(mask, values, 0).sum()), count

    log_ratio = packed.tokens.log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    means = {"approx_kl_k1": mean(-log_ratio), "approx_kl_k3": mean(torch.expm1(log_ratio) - log_ratio)}
    minima, maxima, variances = {}, {}, {}
    if policy is not None:
        ratio = policy.ratio.detach()
        means["ratio_mean"] = mean(ratio)
        above = torch.where(mask, wide(ratio) - 1, 0)  # its square can be too large for float32
        variances["ratio_variance"] = (above.sum() + count, (above * above).sum(), count)
        minima["ratio_min"] = torch.where(mask, ratio, torch.inf)
        maxima["ratio_max"] = torch.where(mask, ratio, -torch.inf)
        lengths = segments.sum(mask.to(ratio.dtype))
        for side, clipped in (("low", policy.clipped_low), ("high", policy.clipped_high)):
            clipped = (clipped & mask).to(ratio.dtype)
            means[f"clip_frac_{side}"] = mean(clipped)
            share = segments.sum(clipped) / lengths.clamp(min=1)  # of each sequence
            minima[f"clip_frac_{side}_min"] = torch.where(lengths > 0, share, torch.inf)
            maxima[f"clip_frac_{side}_max"] = torch.where(lengths > 0, share, -torch.inf)
    optional = {
        "weight_mean": packed.weight,
        "policy_weight_mean": packed.policy_weight,
        "ref_kl": kl,
        "entropy": packed.entropy,
    }
    means.update({name: mean(values.detach()) for name, values in optional.items() if values is not None})

    def extreme(values: Tensor, sign: float) -> Tensor:
        # amax of nothing raises; one neutral element keeps N = 0 and B = 0 alive
        neutral = values.new_full((1,), -torch.inf)
        return sign * torch.cat([sign * values, neutral]).amax()

    return Metrics(
        means,
        {name: extreme(values, -1.0) for name, values in minima.items()},
        {name: extreme(values, 1.0) for name, values in maxima.items()},
        variances,
    )
