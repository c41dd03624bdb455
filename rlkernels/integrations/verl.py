"""This package's objectives and fused head in verl.

    actor_rollout_ref.model.external_lib: my_package   # which calls `register()` and `patch_fused_forward()`
    actor_rollout_ref.actor.policy_loss.loss_mode: rlk_gspo

Written for and tested with verl 0.9.1.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernels.batch import PolicyBatch
from rlkernels.covariance_objectives import ClipCov, KLCov
from rlkernels.credit import prefix_set_counts
from rlkernels.heads import head_arguments
from rlkernels.losses import logp_policy_loss
from rlkernels.objectives import CISPO, GMPO, GRPO, GSPO, LUSPO, SAPO, GSPOToken, Objective, Reinforce
from rlkernels.reductions import Normalizer
from rlkernels.stats import linear_token_stats
from rlkernels.weighted_objectives import DPPO, DRO, VESPO

_ALGORITHMS = "verl.trainer.ppo.core_algos"
_KERNEL = "verl.utils.kernel.linear_cross_entropy"
_FUSED_LINEAR = "verl.utils.experimental.torch_functional"
_MODEL_PATCH = "verl.models.transformers.monkey_patch"

_LOG_RATIO_CLAMP = 20.0  # verl's, but of GSPO, where it is 10

_REDUCTIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}


# ---------------------------------------------------------------------------------------------------------------
# Policy losses


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
    return CISPO(ratio_min=1 - low, ratio_max=1 + high, log_ratio_clamp=_LOG_RATIO_CLAMP)


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


def register() -> None:
    """Add this package's objectives to verl's policy losses, as the names of `POLICY_LOSSES`.

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
    registry = _module(_ALGORITHMS)
    for name, loss in POLICY_LOSSES.items():
        registry.register_policy_loss(name)(_as_verl_calls_it(name, loss))


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
        if rollout_is_weights is not None and isinstance(objective, VESPO):
            old_log_prob, policy_weight = old_log_prob - rollout_is_weights.clamp(min=1e-8).log(), None
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


# ---------------------------------------------------------------------------------------------------------------
# lambda-GRPO


def fold_lambda_weights(data: Any, config: Any) -> Any:
    """lambda-GRPO's weights, 1 / (size of the token's prefix set), multiplied into a batch's advantages.

    To be called where verl knows token ids and groups: on what `compute_advantage` returned, before the batch is split.

        advantages[i, t] /= prefix_set_counts(responses, lengths, uid)[i, t]

    Exact for the clipped surrogate, whose value and gradient are proportional to |A|; a KL loss of the actor would keep
    the weight 1 and is refused, as is any loss mode but `vanilla` and `rlk_grpo`.

    Args:
        data: verl's `DataProto` of all responses of each group: `batch` with `responses` and `advantages` `[B, T]` and
            `attention_mask` `[B, prompt + T]`, `non_tensor_batch["uid"]` `[B]`.
        config: the trainer's whole configuration.

    Returns:
        `data`, changed.

    Raises:
        ValueError: a KL loss, another loss mode, or a batch that lacks one of these.

    Source: lambda-GRPO, as `rlkernels.credit.prefix_set_counts`.

    Example:
        >>> import numpy, torch
        >>> from types import SimpleNamespace as Namespace
        >>> from rlkernels.integrations import verl
        >>> actor = Namespace(use_kl_loss=False, policy_loss={"loss_mode": "vanilla"})
        >>> batch = {"responses": torch.tensor([[1, 2], [1, 3]]), "advantages": torch.ones(2, 2)}
        >>> batch["attention_mask"] = torch.ones(2, 5, dtype=torch.int64)
        >>> data = Namespace(batch=batch, non_tensor_batch={"uid": numpy.array(["a", "a"])})
        >>> verl.fold_lambda_weights(data, Namespace(actor_rollout_ref=Namespace(actor=actor))).batch["advantages"]
        tensor([[0.5000, 1.0000],
                [0.5000, 1.0000]])
    """
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss:
        raise ValueError(
            "actor.use_kl_loss: expected False, since a KL loss would not get lambda-GRPO's weights, got True"
        )
    mode = actor.policy_loss.get("loss_mode", "vanilla")
    if mode not in ("vanilla", "rlk_grpo"):
        raise ValueError(f"actor.policy_loss.loss_mode: expected vanilla or rlk_grpo for lambda-GRPO, got {mode!r}")
    present = {*data.batch.keys(), *data.non_tensor_batch.keys()}
    missing = [name for name in ("responses", "advantages", "attention_mask", "uid") if name not in present]
    if missing:
        raise ValueError(f"data: expected {', '.join(missing)} in the batch for lambda-GRPO, got none")
    responses, advantages = data.batch["responses"], data.batch["advantages"]
    lengths = (data.batch["attention_mask"][:, -responses.shape[1] :] != 0).sum(-1)
    numbers: dict[Any, int] = {}
    groups = [numbers.setdefault(uid, len(numbers)) for uid in data.non_tensor_batch["uid"].tolist()]
    counts = prefix_set_counts(responses, lengths, torch.tensor(groups, device=responses.device))
    data.batch["advantages"] = advantages / counts
    return data


# ---------------------------------------------------------------------------------------------------------------
# The fused head

_undo: list[Callable[[], None]] = []


def patch_fused_forward() -> None:
    """Run verl's fused forward (`model.use_fused_kernels=True`, any `impl_backend`) on this package, until `unpatch()`.

    Replaces `linear_cross_entropy`, also where Megatron's modules have imported it by name, and the forward of
    `FusedLinearForPPO`. Entropies come back in float32. verl hands over neither bias, softcap nor scale: a model that
    has one raises ValueError when verl patches it, instead of being computed wrongly. Calling it again does nothing.

    Raises:
        ImportError: verl is not installed.
        RuntimeError: this version of verl has no such functions.

    Example:
        >>> from rlkernels.integrations import verl
        >>> verl.patch_fused_forward()
        >>> verl.unpatch()
    """
    if _undo:
        return
    kernel, fused_linear, models = map(_module, (_KERNEL, _FUSED_LINEAR, _MODEL_PATCH))
    wanted = (
        (kernel, "linear_cross_entropy"),
        (fused_linear, "FusedLinearForPPO"),
        (models, "patch_forward_with_backends"),
    )
    for module, name in wanted:
        if not hasattr(module, name):
            raise RuntimeError(f"this version of verl cannot be patched (0.9.1 can): {module.__name__} has no {name}")
    _swap_kernel(kernel.linear_cross_entropy, linear_cross_entropy)
    _replace(fused_linear.FusedLinearForPPO, "forward", _fused_linear_forward)
    _replace(models, "patch_forward_with_backends", _checking_model(models.patch_forward_with_backends))


def unpatch() -> None:
    """Give verl its own fused forward back; does nothing where it is in place.

    Example:
        >>> from rlkernels.integrations import verl
        >>> verl.unpatch()
    """
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, replacement: Any) -> None:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    _undo.append(lambda: setattr(owner, name, original))


def _swap_kernel(old: Any, new: Any) -> None:
    """Wherever verl's modules have `old`, and back again in those that import it in between too."""

    def swap(old: Any, new: Any) -> None:
        modules: list[Any] = [module for name, module in sys.modules.items() if name.startswith("verl.")]
        for module in modules:
            if getattr(module, "linear_cross_entropy", None) is old:
                module.linear_cross_entropy = new

    swap(old, new)
    _undo.append(lambda: swap(new, old))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "verl":
            raise
        raise ImportError("rlkernels.integrations.verl needs verl: pip install verl") from None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """verl's function of this name on `linear_token_stats`: log-probabilities and entropies, both `[N]` float32.

    Raises:
        ValueError: a reduction, or a vocabulary that is spread over several ranks.
    """
    if reduction.lower() != "none":
        raise ValueError(f"reduction: expected 'none', got {reduction!r}")
    if dist_process_group is not None and dist_process_group.size() > 1:
        ranks = dist_process_group.size()
        raise ValueError(f"dist_process_group: expected the whole vocabulary on each rank, got it spread over {ranks}")
    rows = hidden.reshape(-1, hidden.shape[-1])
    stats = linear_token_stats(rows, weight, labels.reshape(-1), temperature=temperature)
    assert stats.entropy is not None
    return stats.logp, stats.entropy


def _fused_linear_forward(
    self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    logp, entropy = linear_cross_entropy(hidden_states, vocab_weights, input_ids, temperature)
    return logp.view(input_ids.shape), entropy.view(input_ids.shape)


def _checking_model(patch_forward: Callable[..., Any]) -> Callable[..., Any]:
    def patch_forward_with_backends(model: Any, use_fused_kernels: bool = False, *args: Any, **kwargs: Any) -> Any:
        if use_fused_kernels:
            _refuse_unknown_head(model)
        return patch_forward(model, use_fused_kernels, *args, **kwargs)

    return patch_forward_with_backends


def _refuse_unknown_head(model: Any) -> None:
    found = [f"{name}={value}" for name, value in head_arguments(model.config).items() if value not in (None, 1.0)]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        found.append("a bias")
    if found:
        raise ValueError(
            f"model: expected a head without bias, softcap and scale, which verl's fused forward does not apply, got "
            f"{type(model).__name__} with {', '.join(found)}; set model.use_fused_kernels=False"
        )
