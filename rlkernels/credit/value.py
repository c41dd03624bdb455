"""PPO with a critic: generalised advantages over trained tokens, and the clipped loss of the values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.credit.suffix_scan import suffix_scan
from rlkernels.dtypes import result_dtype, wide
from rlkernels.reductions import Normalizer, check_reduction, reduce_tokens
from rlkernels.segments import Segments


class GeneralizedAdvantages(NamedTuple):
    """Advantages and what the values are trained towards, 0 where the mask is."""

    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T]


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> GeneralizedAdvantages:
    """Generalised advantage estimation over trained tokens alone: tool output is stepped over.

        delta_t = r_t + gamma V_next(t) - V_t       next(t): the next trained token; V = 0 behind the last
        A_t = delta_t + gamma lam A_next(t)         returns_t = A_t + V_t

    Neither discounting nor values see tokens under the mask's zeros. Carries no gradient. Not whitened.

    Args:
        rewards: `[B]` float: a response's reward, paid at its last trained token; NaN (a rejected response) gives
            advantage 0 and the values themselves as returns; leave it out of the mask too, or whitening would move its
            0. Or `[B, T]`: a token's; not read where the mask is 0.
        values: `[B, T]` float, the critic's, before each token.
        mask: `[B, T]`, nonzero = trained.
        gamma, lam: in [0, 1].

    Returns:
        `GeneralizedAdvantages(advantages, returns)`, float32 (float64 for float64 rewards or values).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: GAE (1506.02438); over trained tokens alone as in verl.

    Example:
        >>> import torch
        >>> from rlkernels.credit import generalized_advantages
        >>> values, mask = torch.tensor([[0.5, 9.0, 0.25]]), torch.tensor([[1, 0, 1]])
        >>> out = generalized_advantages(torch.tensor([1.0]), values, mask)
        >>> out.advantages.tolist(), out.returns.tolist()
        ([[0.5, 0.0, 0.75]], [[1.0, 0.0, 1.0]])
    """
    checks.require_floats("values", values, "B", "T")
    rows, width = values.shape
    checks.require_tensor("rewards", rewards)
    checks.require_dtype("rewards", rewards, checks.FLOAT_DTYPES)
    checks.require_shape("rewards", rewards, (rows,), (rows, width))
    checks.require_tensor("mask", mask)
    checks.require_shape("mask", mask, (rows, width))
    checks.require_same_device("values", values, rewards=rewards, mask=mask)
    checks.require_number("gamma", gamma, at_least=0.0, at_most=1.0)
    checks.require_number("lam", lam, at_least=0.0, at_most=1.0)
    trained, dtype = mask != 0, result_dtype(rewards, values)
    value = torch.where(trained, wide(values.detach()), 0)
    following = _next_trained(trained)
    next_value = torch.cat([value, value.new_zeros(rows, 1)], dim=1).gather(1, following)
    reward, counts = wide(rewards.detach()), trained
    if rewards.ndim == 1:
        counts = trained & ~reward.isnan()[:, None]
        reward = torch.where(following == width, reward[:, None], 0)
    delta = torch.where(counts, reward + gamma * next_value - value, 0)
    advantages = suffix_scan(delta, torch.where(trained, gamma * lam, torch.ones_like(delta)))
    advantages = torch.where(trained, advantages, 0)
    return GeneralizedAdvantages(advantages.to(dtype), (advantages + value).to(dtype))


def _next_trained(trained: Tensor) -> Tensor:
    """`[B, T]`: the position of the next trained token behind each one, T where there is none."""
    width = trained.shape[1]
    positions = torch.where(trained, torch.arange(width, device=trained.device), width)
    at_or_after = positions.flip(1).cummin(1).values.flip(1) if width else positions
    return torch.cat([at_or_after[:, 1:], at_or_after.new_full((trained.shape[0], min(1, width)), width)], dim=1)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.5,
    reduction: str = "token_mean",
    normalizer: Normalizer | None = None,
) -> Tensor:
    """PPO's clipped loss of the critic's values.

        1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)

    Only `values` gets gradients.

    Args:
        values: `[B, T]` float, the critic's now.
        old_values: `[B, T]` float, those that the advantages were formed from.
        returns: `[B, T]` float, of `generalized_advantages`.
        mask: `[B, T]`, nonzero = trained. Nothing is read where it is 0.
        clip: > 0; verl's 0.5, TRL's 0.2.
        reduction, normalizer: as in `policy_loss`.

    Returns:
        0-d (`[B, T]` with `reduction="none"`), float32 (float64 for float64 values).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: PPO (1707.06347), its code in openai/baselines (2017); half of the square as in verl.

    Example:
        >>> import torch
        >>> from rlkernels.credit import value_loss
        >>> one = torch.ones(1, 2)
        >>> value_loss(2 * one, one, 3 * one, torch.tensor([[1, 0]])).item()  # (1 + 0.5 - 3)^2 / 2
        1.125
    """
    checks.require_floats("values", values, "B", "T")
    for name, value in (("old_values", old_values), ("returns", returns)):
        checks.require_floats(name, value, *values.shape)
    checks.require_tensor("mask", mask)
    checks.require_shape("mask", mask, tuple(values.shape))
    checks.require_same_device("values", values, old_values=old_values, returns=returns, mask=mask)
    checks.require_number("clip", clip, above=0.0)
    check_reduction(reduction, normalizer)
    trained, dtype = mask != 0, result_dtype(values)
    now, old, target = (torch.where(trained, x.to(dtype), 0) for x in (values, old_values.detach(), returns.detach()))
    near = torch.minimum(torch.maximum(now, old - clip), old + clip)
    losses = 0.5 * torch.maximum((now - target) ** 2, (near - target) ** 2)
    segments = Segments(tuple(values.shape), None)
    loss = reduce_tokens(losses.reshape(-1), trained.reshape(-1), segments, reduction, normalizer)
    return loss.reshape(values.shape) if reduction == "none" else loss
