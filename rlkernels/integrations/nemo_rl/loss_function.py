"""NeMo-RL's clipped policy-gradient loss on this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.batch import PolicyBatch
from rlkernels.integrations.adapter import Choice, chosen_objective, cispo, refuse_correction
from rlkernels.integrations.nemo_rl.metrics import Mean, Tokens, interfaces, normalizers, ratios, rollout_errors
from rlkernels.losses import logp_policy_loss
from rlkernels.objectives import GRPO, GSPO, LUSPO, Objective, Reinforce

_FIELDS = (
    "disable_ppo_ratio",
    "token_level_loss",
    "sequence_level_importance_ratios",
    "ratio_clip_min",
    "ratio_clip_max",
    "ratio_clip_c",
    "reference_policy_kl_penalty",
    "reference_policy_kl_type",
    "kl_input_clamp_value",
    "kl_output_clamp_value",
    "use_kl_in_reward",
    "use_importance_sampling_correction",
    "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
    "use_on_policy_kl_approximation",
    "force_on_policy_ratio",
    "use_cispo",
    "positive_example_nll_weight",
)


class PolicyLossFn:
    """NeMo-RL's `ClippedPGLossFn` on `logp_policy_loss`, for its objectives and the others of this package.

        loss = reduce(v objective's term) + reference_policy_kl_penalty reduce(kl) + positive_example_nll_weight nll
        reduce(x) = sum_t x / global_valid_toks with token_level_loss, else sum_i mean_t x / global_valid_seqs
        v = exp(prev - generation), truncated or filtered, with use_importance_sampling_correction, else 1

    Args:
        cfg: NeMo-RL's `ClippedPGLossConfig`.
        use_fused_linear_logprobs: as NeMo-RL's own.
        objective: None for the one that `cfg` describes; else a recipe's name or an instance, in place of
            `ratio_clip_min` and `ratio_clip_max`. Everything else in `cfg` keeps its meaning; what is divided by, too,
            whatever the recipe's reduction.

    A call takes
    `next_token_logprobs [B, S - 1]`, NeMo-RL's batch (`token_mask`, `sample_mask`, `advantages`, `prev_logprobs`,
    `generation_logprobs`, ..., `[B, S]` of the tokens themselves) and the two global counts; it returns the 0-d loss
    and NeMo-RL's metrics, read by the host in one go.

    Raises:
        TypeError, ValueError: what contradicts in `cfg`, a field of a later version that is not at its default, or an
            objective that needs what NeMo-RL does not hand over.

    Source: NeMo-RL's `algorithms/loss/loss_functions.py`.

    Example:
        >>> from nemo_rl.algorithms.loss import ClippedPGLossConfig
        >>> from rlkernels.integrations.nemo_rl import PolicyLossFn
        >>> PolicyLossFn(ClippedPGLossConfig(ratio_clip_max=0.28)).objective.clip_high
        0.28
    """

    def __init__(self, cfg: Any, use_fused_linear_logprobs: bool = False, objective: Choice | None = None) -> None:
        _check(cfg, objective)
        chosen = _objective(cfg) if objective is None else chosen_objective(objective, "NeMo-RL")
        corrected = "use_importance_sampling_correction"
        refuse_correction(corrected, False, getattr(cfg, corrected), chosen)
        if isinstance(chosen, LUSPO) and not cfg.token_level_loss:  # a mean over each sequence would make it GSPO
            raise ValueError("token_level_loss: expected True with LUSPO, got False")
        self.cfg = cfg
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.objective = chosen
        self.is_described = objective is None
        self.reference_policy_kl_penalty = 0 if cfg.use_kl_in_reward else cfg.reference_policy_kl_penalty
        self.kl = GRPO(kl_coef=1.0, kl_estimator=cfg.reference_policy_kl_type)
        self.clamped_kl = replace(self.kl, log_ratio_clamp=cfg.kl_input_clamp_value)

    @property
    def input_type(self) -> Any:
        """NeMo-RL's `LossInputType.LOGPROB`."""
        return interfaces().LossInputType.LOGPROB

    @property
    def loss_type(self) -> Any:
        """NeMo-RL's `LossType`, by `token_level_loss`."""
        types = interfaces().LossType
        return types.TOKEN_LEVEL if self.cfg.token_level_loss else types.SEQUENCE_LEVEL

    @property
    def metric_normalizations(self) -> dict[str, Any]:
        """How NeMo-RL is to put the metrics of micro-batches together, by their names."""
        return normalizers(self.cfg)

    def __call__(
        self, next_token_logprobs: Tensor, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        cfg, logp = self.cfg, next_token_logprobs
        tokens = Tokens.of(data, logp if cfg.force_on_policy_ratio else None)
        correction = self._correction(tokens)
        reduction = "token_mean" if cfg.token_level_loss else "seq_mean_token_mean"
        normalizer = global_valid_toks if cfg.token_level_loss else global_valid_seqs
        counts: dict[str, Any] = {"reduction": reduction, "normalizer": normalizer}
        batch = PolicyBatch(
            None,
            tokens.advantages,
            mask=tokens.mask,
            old_logp=None if cfg.force_on_policy_ratio else tokens.prev,
            weight=tokens.weight,
            policy_weight=correction.weight if cfg.use_importance_sampling_correction else None,
        )
        out = logp_policy_loss(logp, batch, self.objective, **counts)
        kl = nll = torch.zeros_like(out.loss)
        if self.reference_policy_kl_penalty != 0:
            unfiltered, reference = data.get("curr_logprobs_unfiltered", logp), data["reference_policy_logprobs"][:, 1:]
            unweighted = PolicyBatch(None, tokens.advantages, mask=tokens.mask)

            def kl_terms(logp: Tensor, _: PolicyBatch) -> Tensor:
                return tokens.weight * self._kl_terms(logp, reference, tokens.generation)

            kl = logp_policy_loss(unfiltered, unweighted, kl_terms, **counts).loss
        if cfg.positive_example_nll_weight > 0 and "rewards" in data:
            weight = tokens.weight * (data["rewards"] > 0).unsqueeze(-1)
            correct = PolicyBatch(None, torch.ones_like(logp), mask=weight != 0, weight=weight)
            nll = logp_policy_loss(logp, correct, Reinforce(), reduction="token_mean", normalizer=weight.sum()).loss
        loss = out.loss + self.reference_policy_kl_penalty * kl + cfg.positive_example_nll_weight * nll
        with torch.no_grad():
            mean = Mean(tokens, global_valid_seqs, global_valid_toks)
            metrics = {"loss": loss, "kl_penalty": kl, "positive_nll_loss": nll}
            clipped = self.objective if self.is_described else None
            metrics |= ratios(cfg, clipped, logp, tokens, out.metrics, mean)
            metrics |= rollout_errors(self.kl, logp, tokens, mean)
            of_rows = cfg.sequence_level_importance_ratios
            metrics["sampling_importance_ratio"] = (mean.of_rows if of_rows else mean.of_tokens)(correction.weight)
            if correction.outside is not None:
                of_rows = cfg.truncated_importance_sampling_type == "seq-mask-tis"
                metrics["is_oob_ratio"] = (mean.of_rows if of_rows else mean.of_tokens)(correction.outside)
            metrics["num_valid_samples"] = tokens.sample_mask.sum()
            values = torch.stack([value.reshape(()).to(torch.float64) for value in metrics.values()]).tolist()
        return loss, dict(zip(metrics, values, strict=True))

    def _correction(self, tokens: Tokens) -> _Correction:
        """Of what the rollout engine's log-probabilities differ from `prev`; `[B, 1]` at the sequence's level."""
        cfg, log_ratio = self.cfg, tokens.prev - tokens.generation
        if cfg.sequence_level_importance_ratios:
            log_ratio = tokens.weighted(log_ratio).sum(-1, keepdim=True)
        weight = torch.nan_to_num(log_ratio.exp(), nan=0.0, posinf=0.0, neginf=0.0)
        kind, high = cfg.truncated_importance_sampling_type, cfg.truncated_importance_sampling_ratio
        low = cfg.truncated_importance_sampling_ratio_min or 0.0
        if kind is None:
            return _Correction(weight, None)
        tested = weight
        if kind == "seq-mask-tis":
            finite = torch.nan_to_num(log_ratio, nan=0.0, posinf=0.0, neginf=0.0)
            tested = torch.where(tokens.mask, finite, 0).sum(-1, keepdim=True)
            tested = (tested / tokens.mask.sum(-1, keepdim=True).clamp(min=1)).exp()
        outside = (tested < low) | (tested > high)
        weight = weight.clamp(low, high) if kind == "tis" else weight.masked_fill(outside, 0.0)
        return _Correction(weight, outside)

    def _kl_terms(self, logp: Tensor, reference: Tensor, generation: Tensor) -> Tensor:
        """The estimate times exp(logp - sg[logp]), or exp(logp - generation), whose gradient the clamps end too."""
        start = generation if self.cfg.use_on_policy_kl_approximation else logp.detach()
        ratio = torch.nan_to_num((logp - start).exp(), nan=0.0, posinf=0.0, neginf=0.0)
        limit = self.clamped_kl.log_ratio_clamp
        if limit is not None:
            ratio = torch.where((reference - logp).abs() <= limit, ratio, ratio.detach())
        kl = ratio * self.clamped_kl.kl_terms(logp, reference, ratio)
        limit = self.cfg.kl_output_clamp_value
        return kl if limit is None else kl.clamp(-limit, limit)


class _Correction(NamedTuple):
    weight: Tensor
    outside: Tensor | None


def _objective(cfg: Any) -> Objective:
    low, high = cfg.ratio_clip_min, cfg.ratio_clip_max
    if cfg.use_cispo:
        return cispo(low, high)
    if cfg.disable_ppo_ratio and not cfg.force_on_policy_ratio:
        return Reinforce()
    by_sequence = cfg.sequence_level_importance_ratios and not cfg.force_on_policy_ratio
    return (GSPO if by_sequence else GRPO)(clip_low=low, clip_high=high, dual_clip=cfg.ratio_clip_c)


def _check(cfg: Any, given: Choice | None) -> None:
    """NeMo-RL's own assertions, and what an objective of the caller's cannot be told."""
    for name, field in getattr(type(cfg), "model_fields", {}).items():
        if name not in _FIELDS and getattr(cfg, name) != field.default:
            known = f"{field.default!r}, since this adapter does not know the field"
            raise ValueError(f"{name}: expected {known}, got {getattr(cfg, name)!r}")
    checks.require_choice("reference_policy_kl_type", cfg.reference_policy_kl_type, ("k1", "k2", "k3"))
    if cfg.ratio_clip_c is not None:
        checks.require_number("ratio_clip_c", cfg.ratio_clip_c, above=1.0)
    kind = cfg.truncated_importance_sampling_type
    bounds = cfg.truncated_importance_sampling_ratio_min, cfg.truncated_importance_sampling_ratio
    if kind is not None or bounds[1] is not None:
        checks.require_choice("truncated_importance_sampling_type", kind, ("tis", "icepop", "seq-mask-tis"))
        checks.require_number("truncated_importance_sampling_ratio", bounds[1], above=0.0)
        if bounds[0] is not None or kind != "tis":
            checks.require_number("truncated_importance_sampling_ratio_min", bounds[0], at_most=bounds[1])
    no_ratio = {"disable_ppo_ratio": False, "sequence_level_importance_ratios": False, "ratio_clip_c": None}
    rules: tuple[tuple[str, bool, dict[str, Any]], ...] = (
        ("use_cispo", cfg.use_cispo, no_ratio | {"force_on_policy_ratio": False, "token_level_loss": True}),
        ("sequence_level_importance_ratios", cfg.sequence_level_importance_ratios, {"token_level_loss": False}),
        (f"truncation {kind!r}", kind is not None, {"use_importance_sampling_correction": True}),
        (f"truncation {kind!r}", kind == "seq-mask-tis", {"sequence_level_importance_ratios": False}),
        (f"objective={given!r}", given is not None, no_ratio | {"use_cispo": False}),
    )
    for reason, applies, expected in rules:
        for name, value in expected.items():
            if applies and getattr(cfg, name) != value:
                raise ValueError(f"{name}: expected {value} with {reason}, got {getattr(cfg, name)!r}")
