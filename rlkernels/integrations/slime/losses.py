"""slime's policy loss, and others in its place."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.batch import PolicyBatch
from rlkernels.integrations.adapter import Choice, chosen_objective, cispo, named_reduction, refuse_correction
from rlkernels.integrations.slime.package import function_at, parallel_state, slimes
from rlkernels.integrations.slime.tokens import ResponseTokens, log_probs_and_entropy, response_tokens
from rlkernels.losses import logp_policy_loss, logp_policy_terms
from rlkernels.objectives import GRPO, GSPO, Objective

Reducer = Callable[[Tensor], Tensor]
Loss = Callable[[Namespace, dict[str, Any], Tensor, Reducer], tuple[Tensor, dict[str, Tensor]]]


def policy_loss(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """slime's `policy_loss` on this package's kernels, for `--custom-loss-function-path`.

        loss = reduce(tis policy_term) - entropy_coef reduce(entropy) + kl_loss_coef reduce(kl)

    `advantage_estimator` `gspo` and `cispo` are `GSPO` and `CISPO`, the others `GRPO`, in slime's clip range
    (`docs/trainers.md` has the table). The prompts' logits are not read.

    Args:
        args: slime's configuration.
        batch: a micro-batch of slime's.
        logits: `[1, T, V]`, any float dtype: packed sequences, this rank's columns of a vocabulary that Megatron
            spreads over ranks.
        sum_of_sample_mean: slime's reduction, which has its denominators; of per-token values, `[responses' tokens]`.

    Returns:
        The loss, 0-d float, and slime's metrics under slime's names.

    Raises:
        ValueError: a configuration that it cannot compute, naming the setting.
        ImportError: Megatron-Core is not installed.

    Source: slime 0.3.1, `slime/backends/megatron_utils/loss.py`.

    Example:
        >>> from rlkernels.integrations import slime
        >>> slime.policy_loss(args, batch, logits, sum_of_sample_mean)  # doctest: +SKIP
    """
    return _loss(_configured(args), args, batch, logits, sum_of_sample_mean)


def policy_loss_of(objective: Choice) -> Loss:
    """`policy_loss` of another objective.

    `advantage_estimator` then says how advantages are computed, and nothing else. A recipe whose reduction is another
    than slime's raises ValueError: `token_mean` needs `--calculate-per-token-loss`, `seq_mean_token_mean` its absence.

    Args:
        objective: a recipe's name or an instance, its clip range included.

    Returns:
        A function as `policy_loss`.

    Raises:
        TypeError, ValueError: an objective that slime cannot serve; in a call, a configuration that contradicts it.

    Example:
        >>> from rlkernels.integrations import slime
        >>> loss = slime.policy_loss_of("gmpo")
    """
    chosen, reduction = chosen_objective(objective, "slime", has_whole_batch=True), named_reduction(objective)
    if reduction not in (None, "token_mean", "seq_mean_token_mean"):
        raise ValueError(f"objective: expected one reduced by token_mean or seq_mean_token_mean, got {objective!r}")

    def loss(
        args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        per_token = bool(args.calculate_per_token_loss)
        if reduction is not None and per_token != (reduction == "token_mean"):
            raise ValueError(f"calculate_per_token_loss: expected {not per_token} for {objective!r}, got {per_token}")
        if args.advantage_estimator in ("gspo", "cispo"):
            raise ValueError(
                "advantage_estimator: expected one that says nothing about the loss with an objective of one's own, "
                f"got {args.advantage_estimator!r}"
            )
        if args.eps_clip_c is not None:
            raise ValueError(f"eps_clip_c: expected None with an objective of one's own, got {args.eps_clip_c}")
        return _loss(chosen, args, batch, logits, sum_of_sample_mean)

    return loss


def _configured(args: Namespace) -> Objective:
    clip = {"clip_low": args.eps_clip, "clip_high": args.eps_clip_high}
    if args.advantage_estimator == "cispo":
        return cispo(args.eps_clip, args.eps_clip_high)
    return (GSPO if args.advantage_estimator == "gspo" else GRPO)(**clip, dual_clip=args.eps_clip_c)


def _loss(
    objective: Objective, args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    checks.require_sizes("logits", logits, 1, "T", "V")
    _refuse(args, objective)
    tokens = response_tokens(args, batch, logits)
    logp, entropy = log_probs_and_entropy(args, logits, tokens)
    given = _per_token(batch, "rollout_log_probs") if args.use_rollout_logprobs else batch.get("log_probs")
    old = torch.cat(list(given)) if given else logp.detach()
    policy_batch = PolicyBatch(
        None, torch.cat(list(batch["advantages"])), mask=tokens.mask, old_logp=old, cu_seqlens=tokens.cu_seqlens
    )
    terms = logp_policy_terms(logp, policy_batch, objective, cp_group=tokens.cp_group)
    ppo_kl = (old - logp if objective.level == "token" else -terms.ratio.log()).detach()
    pg_loss, masks, reduce = terms.loss, batch["loss_masks"], sum_of_sample_mean
    correction: dict[str, Tensor] = {}
    if args.use_opsm:
        is_off, off_policy = _off_policy(args, batch, logp, policy_batch, tokens)
        pg_loss = torch.where(is_off, 0, pg_loss)
    if args.use_tis or args.get_mismatch_metrics:
        train_logp = batch.get("log_probs") or list(logp.detach().split(tokens.lengths))
        pg_loss, masks, correction = _corrected(args, batch, pg_loss, train_logp)
        correction = {"ois": (-ppo_kl).exp()} | correction
        if args.custom_tis_function_path is not None:  # it may have rejected tokens
            make = slimes("backends.megatron_utils.cp_utils").get_sum_of_sample_mean
            sums, per_token = batch["rollout_mask_sums"], args.calculate_per_token_loss
            reduce = make(batch["total_lengths"], batch["response_lengths"], masks, sums, per_token)
    reduce_pg = reduce
    path = getattr(args, "custom_pg_loss_reducer_function_path", None)
    if path is not None:
        per_token = args.calculate_per_token_loss
        reduce_pg = function_at(path)(batch["total_lengths"], batch["response_lengths"], masks, per_token)
    losses = {"pg_loss": reduce_pg(pg_loss), "entropy_loss": reduce(entropy)}
    loss = losses["pg_loss"] - args.entropy_coef * losses["entropy_loss"]
    clipped = (terms.clipped_low | terms.clipped_high).to(logp.dtype)
    losses |= {"pg_clipfrac": reduce(clipped), "ppo_kl": reduce(ppo_kl)}
    if batch.get("rollout_log_probs"):
        compared = logp if args.use_rollout_logprobs else old
        apart = (compared - torch.cat(list(batch["rollout_log_probs"]))).abs()
        losses["train_rollout_logprob_abs_diff"] = reduce(apart)
    if args.use_kl_loss:
        reference = torch.cat(list(batch["ref_log_probs"]))
        losses["kl_loss"] = reduce(_kl(args, logp, reference, old, tokens.mask))
        loss = loss + args.kl_loss_coef * losses["kl_loss"]
    losses |= {name: sum_of_sample_mean(values) for name, values in correction.items()}
    if args.use_opsm:
        losses["opsm_clipfrac"] = off_policy
    if batch.get("opd_reverse_kl"):
        losses["opd_reverse_kl"] = reduce(torch.cat(list(batch["opd_reverse_kl"])))
    return loss, {name: value.detach().clone() for name, value in ({"loss": loss} | losses).items()}


def _refuse(args: Namespace, objective: Objective) -> None:
    if getattr(args, "rollout_top_p", 1.0) != 1.0:
        raise ValueError(f"rollout_top_p: expected 1.0, got {args.rollout_top_p}; use slime's loss and patch()")
    if args.allgather_cp and parallel_state().get_context_parallel_world_size() > 1:
        raise ValueError("allgather_cp: expected False, got True; use slime's loss and patch()")
    for name in ("use_tis", "get_mismatch_metrics"):
        refuse_correction(name, False, getattr(args, name), objective)
    if args.use_kl_loss and args.use_unbiased_kl and args.kl_loss_type == "low_var_kl":
        raise ValueError("kl_loss_type: expected k1, k2 or k3 with use_unbiased_kl, got 'low_var_kl'")


def _off_policy(
    args: Namespace, batch: dict[str, Any], logp: Tensor, policy_batch: PolicyBatch, tokens: ResponseTokens
) -> tuple[Tensor, Tensor]:
    """`[N]` bool: tokens of negative advantage in sequences that have moved too far; and what slime logs of them."""
    ratio = logp_policy_terms(logp.detach(), policy_batch, GSPO(), cp_group=tokens.cp_group).ratio
    is_off = (policy_batch.advantages < 0) & (-ratio.log() > args.opsm_delta)
    parts = zip(is_off.split(tokens.lengths), batch["loss_masks"], strict=True)
    return is_off, torch.stack([part.sum() / mask.sum().clamp(min=1) for part, mask in parts]).sum()


def _per_token(batch: dict[str, Any], name: str) -> Sequence[Tensor]:
    if not batch.get(name):
        raise ValueError(f"batch: expected {name}, got none")
    return batch[name]


def _corrected(
    args: Namespace, batch: dict[str, Any], pg_loss: Tensor, train_logp: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """The policy term under truncated importance sampling, or the user's function; masks; per-token metrics."""
    rollout_logp = _per_token(batch, "rollout_log_probs")
    if args.custom_tis_function_path is not None:
        return function_at(args.custom_tis_function_path)(
            args=args,
            pg_loss=pg_loss,
            train_log_probs=train_logp,
            rollout_log_probs=rollout_logp,
            **{name: batch[name] for name in ("loss_masks", "total_lengths", "response_lengths")},
        )
    ratio = (torch.cat(list(train_logp)) - torch.cat(list(rollout_logp))).exp()
    weights = ratio.clamp(args.tis_clip_low, args.tis_clip)
    is_clipped = (weights != ratio).to(ratio.dtype)
    metrics = {"tis": ratio, "tis_clipfrac": is_clipped, "tis_abs": (ratio - 1).abs()}
    return pg_loss * weights, batch["loss_masks"], metrics


def _kl(args: Namespace, logp: Tensor, reference: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """`[N]`, of single tokens, whatever ratio the policy term has."""
    is_clamped = args.kl_loss_type == "low_var_kl"
    estimate = GRPO(
        kl_coef=1.0,
        kl_estimator="k3" if is_clamped else args.kl_loss_type,
        kl_clamp=10.0 if is_clamped else None,
        kl_importance_weighted=bool(args.use_unbiased_kl),
    )
    batch = PolicyBatch(None, torch.zeros_like(logp), mask=mask, old_logp=old, ref_logp=reference)
    return logp_policy_loss(logp, batch, estimate, reduction="none").loss
