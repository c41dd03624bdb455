"""This package's objectives in AReaL, in place of its actor's loss functions.

    from rlkernels.integrations import areal

    areal.patch()                   # in each process that trains: what AReaL's configuration says
    areal.patch(objective="gmpo")   # or any of this package's

Written for and tested with areal 1.0.4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.batch import PolicyBatch
from rlkernels.integrations.adapter import Choice, chosen_objective, imported, refuse_correction
from rlkernels.losses import logp_policy_loss, logp_policy_terms
from rlkernels.objectives import GRPO, GSPO, SAPO, Objective, PolicyTerms
from rlkernels.segments import Segments

_ACTOR = "areal.trainer.ppo.actor"
_FUNCTIONAL = "areal.utils.functional.functional"
_INSTALL = "pip install areal"

_undo: list[Callable[[], None]] = []


def patch(objective: Choice | None = None) -> None:
    """Run the actor's loss of this process on this package, until `unpatch()`; calling it again chooses anew.

    Replaces `ppo_actor_loss_fn` and `sapo_loss_fn` where AReaL's `grpo_loss_fn` calls them. What `grpo_loss_fn` does
    around them (proximal log-probabilities, M2PO's mask, distillation, statistics) stays AReaL's.

    Args:
        objective: None for what AReaL's configuration says, else as in `ppo_actor_loss_fn`.

    Raises:
        ImportError: AReaL is not installed.
        RuntimeError: this version of AReaL has no such functions.
        TypeError, ValueError: no such objective, or one that needs what AReaL does not hand over.

    Example:
        >>> from rlkernels.integrations import areal
        >>> areal.patch()
        >>> areal.unpatch()
    """
    if objective is not None:
        chosen_objective(objective, "AReaL")
    actor = imported(_ACTOR, _INSTALL)
    replacements: dict[str, Callable[..., Any]] = {"ppo_actor_loss_fn": ppo_actor_loss_fn, "sapo_loss_fn": sapo_loss_fn}
    for name in replacements:
        if not hasattr(actor, name):
            raise RuntimeError(f"this version of AReaL cannot be patched (1.0.4 can): {_ACTOR} has no {name}")
    unpatch()
    for name, replacement in replacements.items():
        _undo.append(functools.partial(setattr, actor, name, getattr(actor, name)))
        setattr(actor, name, functools.partial(replacement, objective=objective))


def unpatch() -> None:
    """Give AReaL its own loss functions back; does nothing where they are in place.

    Example:
        >>> from rlkernels.integrations import areal
        >>> areal.unpatch()
    """
    while _undo:
        _undo.pop()()


def ppo_actor_loss_fn(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    loss_mask: Tensor,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    rejection_sampling: Any = None,
    importance_sampling_level: str = "token",
    cu_seqlens: Tensor | None = None,
    objective: Choice | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """AReaL's function of this name on `logp_policy_loss`.

        loss = sum_t m w (the objective's term) / sum_t loss_mask,   old_logp = proximal_logprobs
        m, w = loss_mask, 1, or what AReaL's own rejection sampling makes of them

    Args:
        logprobs, proximal_logprobs, old_logprobs, advantages: `[N]` packed, or `[B, T]`, float.
        loss_mask: their shape, any dtype, nonzero = trained.
        eps_clip, eps_clip_higher, c_clip: the clipped surrogate's ranges and its dual clip.
        rejection_sampling: AReaL's `RejectionSamplingConfig` or None.
        importance_sampling_level: `"token"`, or `"sequence"`: GSPO with each sequence's mean advantage.
        cu_seqlens: `[B + 1]` int32 or int64, borders of packed sequences; needed with `"sequence"`.
        objective: None for the clipped surrogate of these arguments; a recipe's name or an instance, whose fields take
            the place of `eps_clip` and `eps_clip_higher`.

    Returns:
        The 0-d loss and AReaL's statistics, each per token, of the losses' float dtype or bool.

    Raises:
        TypeError, ValueError: packed sequences without borders for an objective that needs them, an unknown level, or,
            with an objective, a `c_clip` or another level, which it decides itself, or rejection sampling with VESPO.

    Source: AReaL's `utils/functional/functional.py`.

    Example:
        >>> import torch
        >>> from rlkernels.integrations.areal import ppo_actor_loss_fn
        >>> logp, old = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-1.0, -2.5])
        >>> loss, stat = ppo_actor_loss_fn(logp, old, old, torch.ones(2), 0.2, torch.ones(2, dtype=torch.bool))
        >>> round(loss.item(), 6), stat["clip_mask"].tolist()  # -(1 + 1.2) / 2
        (-1.1, [False, True])
    """
    checks.require_choice("importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    if c_clip is not None:
        checks.require_number("c_clip", c_clip, above=1.0)
    by_sequence = importance_sampling_level == "sequence"
    if objective is None:
        clip_high = eps_clip if eps_clip_higher is None else eps_clip_higher
        cls = GSPO if by_sequence else GRPO
        chosen: Objective = cls(clip_low=eps_clip, clip_high=clip_high, dual_clip=c_clip)
    else:
        for name, value, default in (
            ("c_clip", c_clip, None),
            ("importance_sampling_level", importance_sampling_level, "token"),
        ):
            if value != default:
                raise ValueError(f"{name}: expected {default!r} with objective={objective!r}, got {value!r}")
        chosen = chosen_objective(objective, "AReaL")
    mask, weight = loss_mask.bool(), None
    rejected: dict[str, Any] = {}
    if rejection_sampling is not None:
        refuse_correction("rejection_sampling", None, rejection_sampling, chosen)
        mask, weight, rejected = _rejected(proximal_logprobs, old_logprobs, mask, cu_seqlens, rejection_sampling)
    borders = _borders(logprobs, cu_seqlens, needed=by_sequence or objective is not None)
    if by_sequence:
        advantages = _sequence_means(advantages, mask, borders)
    loss, terms = _evaluate(chosen, logprobs, proximal_logprobs, advantages, mask, loss_mask, borders, weight)
    dual_clip = getattr(chosen, "dual_clip", None)
    is_dual = torch.zeros_like(mask) if dual_clip is None else (advantages < 0) & (terms.ratio > dual_clip)
    stat = {
        "loss": terms.loss if weight is None else terms.loss * weight,
        "importance_weight": torch.where(mask, terms.ratio, 0),
        "approx_kl": (logprobs - proximal_logprobs).detach(),
        "clip_mask": mask & (terms.clipped_low | terms.clipped_high),
        "dual_clip_mask": mask & is_dual,
    }
    return loss, stat | rejected


def sapo_loss_fn(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    tau_pos: float,
    tau_neg: float,
    loss_mask: Tensor,
    importance_sampling_level: str = "token",
    cu_seqlens: Tensor | None = None,
    objective: None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """AReaL's function of this name on `logp_policy_loss`: `SAPO` at either level, over the number of trained tokens.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, importance_sampling_level, cu_seqlens: as in `ppo_actor_loss_fn`.
        tau_pos, tau_neg: > 0, SAPO's temperatures.
        objective: None: with `use_sapo_loss` AReaL's configuration has chosen one.

    Returns:
        The 0-d loss and AReaL's statistics, its gates among them, each per token.

    Raises:
        TypeError, ValueError: packed sequences without borders at `"sequence"`, an unknown level, or any objective.

    Source: AReaL's `utils/functional/functional.py`.

    Example:
        >>> import torch
        >>> from rlkernels.integrations.areal import sapo_loss_fn
        >>> logp = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> loss, _ = sapo_loss_fn(logp, logp.detach(), torch.ones(2), 1.0, 1.05, torch.ones(2, dtype=torch.bool))
        >>> loss.item()  # -4 sigmoid(0)
        -2.0
    """
    if objective is not None:
        raise ValueError(f"use_sapo_loss: expected False with objective={objective!r}, got True")
    checks.require_choice("importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    by_sequence = importance_sampling_level == "sequence"
    chosen = SAPO(tau_pos=tau_pos, tau_neg=tau_neg, level="sequence_mean" if by_sequence else "token")
    mask = loss_mask.bool()
    borders = _borders(logprobs, cu_seqlens, needed=by_sequence)
    if by_sequence:
        advantages = _sequence_means(advantages, mask, borders)
    loss, terms = _evaluate(chosen, logprobs, old_logprobs, advantages, mask, loss_mask, borders, None)
    nowhere = torch.zeros_like(mask)
    gate_pos, gate_neg = (4 / tau * torch.sigmoid(tau * (terms.ratio - 1)) for tau in (tau_pos, tau_neg))
    return loss, {
        "loss": terms.loss,
        "importance_weight": terms.ratio,
        "approx_kl": (logprobs - old_logprobs).detach(),
        "clip_mask": nowhere,
        "dual_clip_mask": nowhere.clone(),
        "sapo_soft_gate": torch.where(advantages > 0, gate_pos, gate_neg),
        "sapo_scaled_gate_pos": gate_pos,
        "sapo_scaled_gate_neg": gate_neg,
    }


def _borders(logprobs: Tensor, cu_seqlens: Tensor | None, needed: bool) -> Tensor | None:
    """Packed tokens' sequences, where a loss depends on them."""
    if not needed or logprobs.ndim == 2:
        return None
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: expected borders of the packed sequences, got None")
    # a context-parallel rank's slice of the tokens still has the whole sequences' borders
    if int(cu_seqlens[-1]) != logprobs.shape[0]:
        raise ValueError(f"cu_seqlens: expected to end at {logprobs.shape[0]} tokens, got {cu_seqlens.tolist()}")
    return cu_seqlens


def _sequence_means(advantages: Tensor, mask: Tensor, borders: Tensor | None) -> Tensor:
    segments = Segments(tuple(mask.shape), borders)
    total = segments.sum(torch.where(mask, advantages, 0).reshape(-1))
    lengths = segments.sum(mask.reshape(-1).to(total.dtype)).clamp(min=1)
    return segments.expand(total / lengths).view_as(mask)


def _evaluate(
    objective: Objective,
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    counted: Tensor,
    borders: Tensor | None,
    weight: Tensor | None,
) -> tuple[Tensor, PolicyTerms]:
    """The loss, and what AReaL records of each token. Tokens that were rejected later still count."""
    batch = PolicyBatch(None, advantages, mask=mask, old_logp=old_logp, policy_weight=weight, cu_seqlens=borders)
    tokens = counted.count_nonzero()
    out = logp_policy_loss(logp, batch, objective, reduction="token_sum", normalizer=tokens)

    with torch.no_grad():
        terms = logp_policy_terms(logp, batch, objective)
    return out.loss, PolicyTerms(*(values.view_as(mask) for values in terms))


def _rejected(
    proximal_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor | None, config: Any
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What AReaL's own rejection sampling leaves: mask, weights and their statistics."""
    result = imported(_FUNCTIONAL, _INSTALL).apply_rejection_sampling(
        proximal_logprobs=proximal_logprobs,
        old_logprobs=old_logprobs,
        loss_mask=mask,
        cu_seqlens=cu_seqlens,
        config=config,
    )
    kept, weight = result.loss_mask.bool(), result.behave_imp_weight
    is_used = kept & (weight > 0)
    return (
        kept,
        weight,
        {
            "behave_approx_kl": torch.where(is_used, (proximal_logprobs - old_logprobs).detach(), 0),
            "behave_imp_weight": weight.detach(),
            "behave_mask": is_used,
            "filtered_fraction": result.filtered_fraction,
        },
    )
