"""What NeMo-RL records of a micro-batch, and by what each of it is divided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernels.integrations.adapter import imported
from rlkernels.objectives import GRPO, Objective, Reinforce, limited_exp

# what each metric's micro-batches are divided by
_BY_TOKENS = (
    "probs_ratio",
    "probs_ratio_clamped",
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "approx_entropy",
)
_BY_NOTHING = (
    "num_valid_samples",
    "positive_nll_loss",
    "probs_ratio_min",
    "probs_ratio_max",
    "probs_ratio_clamped_min",
    "probs_ratio_clamped_max",
)


class Tokens(NamedTuple):
    """NeMo-RL's batch without the first token, which nothing predicts: `[B, S - 1]`."""

    mask: Tensor  # bool
    weight: Tensor  # NeMo-RL's masks as numbers
    sample_mask: Tensor  # [B]
    advantages: Tensor
    prev: Tensor
    generation: Tensor

    @classmethod
    def of(cls, data: Mapping[str, Any], on_policy_logp: Tensor | None) -> Tokens:
        token_mask, sample_mask = data["token_mask"][:, 1:], data["sample_mask"]
        weight = token_mask * sample_mask.unsqueeze(-1)
        return cls(
            mask=weight != 0,
            weight=weight,
            sample_mask=sample_mask,
            advantages=data["advantages"][:, 1:],
            prev=data["prev_logprobs"][:, 1:] if on_policy_logp is None else on_policy_logp.detach(),
            generation=data["generation_logprobs"][:, 1:],
        )

    def weighted(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, self.weight * values, 0)


class Mean(NamedTuple):
    """A micro-batch's share of the means over the global batch."""

    tokens: Tokens
    sequence_count: Tensor
    token_count: Tensor

    def of_tokens(self, values: Tensor) -> Tensor:
        return self.tokens.weighted(values).sum() / self.token_count.clamp(min=1e-8)

    def of_rows(self, values: Tensor) -> Tensor:  # [B, 1]
        return (values.squeeze(-1) * self.tokens.sample_mask).sum() / self.sequence_count.clamp(min=1e-8)


def interfaces() -> Any:
    """NeMo-RL's own enumerations."""
    return imported("nemo_rl.algorithms.loss.interfaces", "install NeMo-RL from github.com/NVIDIA-NeMo/RL")


def normalizers(cfg: Any) -> dict[str, Any]:
    by = interfaces().MetricNormalizer
    as_the_loss = by.TOKENS if cfg.token_level_loss else by.SEQUENCES
    found = dict.fromkeys(("loss", "kl_penalty"), as_the_loss)
    found |= dict.fromkeys(_BY_TOKENS, by.TOKENS) | dict.fromkeys(_BY_NOTHING, by.NONE)
    found["sampling_importance_ratio"] = by.SEQUENCES if cfg.sequence_level_importance_ratios else by.TOKENS
    kind = cfg.truncated_importance_sampling_type
    if kind is not None:
        found["is_oob_ratio"] = by.SEQUENCES if kind == "seq-mask-tis" else by.TOKENS
    return found


def ratios(
    cfg: Any, objective: Objective | None, logp: Tensor, tokens: Tokens, found: Mapping[str, Tensor], mean: Mean
) -> dict[str, Tensor]:
    """Those of the loss's own metrics; of an objective whose clip range is `cfg`'s also the clamped ones."""
    is_any = tokens.mask.any()
    metrics = {
        "probs_ratio": mean.of_tokens(found["ratio_mean"]),
        "probs_ratio_min": torch.where(is_any, found["ratio_min"], math.inf),
        "probs_ratio_max": torch.where(is_any, found["ratio_max"], -math.inf),
    }
    if objective is None:
        return metrics
    log_ratio = torch.where(tokens.mask, logp - tokens.prev, 0)
    if objective.level == "sequence_mean":
        log_ratio = log_ratio.sum(-1, keepdim=True) / tokens.mask.sum(-1, keepdim=True).clamp(min=1)
    low, high = 1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max
    if isinstance(objective, Reinforce):
        low, high = 0.0, math.inf
    ratio = limited_exp(log_ratio)
    metrics["probs_ratio"] = mean.of_tokens(ratio)  # a sequence's multiplier weighs here too
    metrics["probs_ratio_clamped"] = mean.of_tokens(ratio.clamp(low, high))
    for side in ("min", "max"):
        extreme = metrics[f"probs_ratio_{side}"]
        metrics[f"probs_ratio_clamped_{side}"] = torch.where(is_any, extreme.clamp(low, high), extreme)
    return metrics


def rollout_errors(kl: GRPO, logp: Tensor, tokens: Tokens, mean: Mean) -> dict[str, Tensor]:
    """Of the trainer's log-probabilities against the rollout engine's; `kl` has NeMo-RL's estimator."""
    prev, generation = tokens.prev, tokens.generation
    mixture = torch.logaddexp(prev, generation) - math.log(2)

    def k3(x: Tensor) -> Tensor:
        return torch.expm1(x) - x

    per_token = {
        "token_mult_prob_error": ((generation - prev).abs() * tokens.weight).exp(),
        "gen_kl_error": kl.kl_terms(generation, prev, prev),
        "policy_kl_error": kl.kl_terms(prev, generation, prev),
        "js_divergence_error": 0.5 * (k3(prev - mixture) + k3(generation - mixture)),
        "approx_entropy": -(logp - generation).exp() * logp,
    }
    return {name: mean.of_tokens(values) for name, values in per_token.items()}
