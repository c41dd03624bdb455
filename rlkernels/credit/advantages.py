"""Advantages of responses within their prompt's group."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.credit.groups import Groups
from rlkernels.dtypes import result_dtype, wide


def group_advantages(
    rewards: Tensor, groups: int | Tensor, *, scale: str = "std", ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    """Rewards centred in their group, and scaled by the group's standard deviation.

        A_i = (r_i - mean_g) / (std_g + eps)            scale="std"  (GRPO)
        A_i = r_i - mean_g                              scale="none" (Dr.GRPO)

    Exactly 0 for a group of equal rewards and for a group of one. A reward that is not finite (NaN for a rejected
    response) is left out of its group's statistics and gets 0. Computed in float64 where the device has it.

    Args:
        rewards: `[B]`, float or integer.
        groups: group size (consecutive rows), or `[B]` integer ids.
        scale: `"std"` or `"none"`.
        ddof: 1 for the sample's standard deviation (every trainer), 0 for the population's.
        eps: >= 0. TRL 1e-4, verl and RLPR 1e-6, oat 1e-8.

    Returns:
        `[B]`, float32 (float64 for float64 rewards).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: GRPO (2402.03300), Dr.GRPO (2503.20783).

    Example:
        >>> import torch
        >>> from rlkernels.credit import group_advantages
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.3, 0.3]), groups=2, eps=0.0).tolist()
        [0.7071067690849304, -0.7071067690849304, 0.0, 0.0]
    """
    checks.require_choice("scale", scale, ("std", "none"))
    checks.require_number("eps", eps, at_least=0.0)
    centred, std = _centred_and_std(rewards, groups, ddof)
    if scale == "none":
        return centred.to(result_dtype(rewards))
    return torch.where(centred == 0, 0, centred / (std + eps)).to(result_dtype(rewards))


def group_std(rewards: Tensor, groups: int | Tensor, *, ddof: int = 1) -> Tensor:
    """The standard deviation of each response's group.

        std_g = sqrt(sum_j (r_j - mean_g)^2 / (n - ddof))          n finite rewards in the group

    Exactly 0 for a group of equal rewards and for a group of one. NaN rewards take no part.

    Args:
        rewards: `[B]`, float or integer.
        groups: group size (consecutive rows), or `[B]` integer ids.
        ddof: 1 for the sample's standard deviation, 0 for the population's.

    Returns:
        `[B]`, float32 (float64 for float64 rewards).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: GRPO (2402.03300).

    Example:
        >>> import torch
        >>> from rlkernels.credit import group_std
        >>> group_std(torch.tensor([1.0, 0.0, 0.3, 0.3]), groups=2, ddof=0).tolist()
        [0.5, 0.5, 0.0, 0.0]
    """
    return _centred_and_std(rewards, groups, ddof)[1].to(result_dtype(rewards))


def _centred_and_std(rewards: Tensor, groups: int | Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    checks.require_reals("rewards", rewards, "B")
    checks.require_choice("ddof", ddof, (0, 1))
    values = wide(rewards.detach())
    group = Groups(groups, rewards.shape[0], rewards.device)
    centred, count = group.centre(values, values.isfinite())
    return centred, (group.sum(centred * centred) / (count - ddof).clamp(min=1)).sqrt()


def leave_one_out_advantages(rewards: Tensor, groups: int | Tensor) -> Tensor:
    """RLOO: rewards less the mean of the group's other rewards.

        A_i = r_i - mean_{j != i} r_j = n / (n - 1) (r_i - mean_g)          n rewards in the group

    Exactly 0 for a group of equal rewards and for a group of one. A reward that is not finite (NaN for a rejected
    response) is nobody's baseline and gets 0. Computed in float64 where the device has it.

    Args:
        rewards: `[B]`, float or integer.
        groups: group size (consecutive rows), or `[B]` integer ids.

    Returns:
        `[B]`, float32 (float64 for float64 rewards).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: RLOO (2402.14740).

    Example:
        >>> import torch
        >>> from rlkernels.credit import leave_one_out_advantages
        >>> leave_one_out_advantages(torch.tensor([1.0, 0.0, 0.5, float("nan")]), groups=4).tolist()
        [0.75, -0.75, 0.0, 0.0]
    """
    checks.require_reals("rewards", rewards, "B")
    values = wide(rewards.detach())
    group = Groups(groups, rewards.shape[0], rewards.device)
    advantages, _ = group.leave_one_out(values, values.isfinite())
    return advantages.to(result_dtype(rewards))


def mixed_groups(rewards: Tensor, groups: int | Tensor) -> Tensor:
    """DAPO's dynamic sampling: which responses belong to a group whose rewards differ.

        keep_i = (rewards of i's group are not all equal)

    A group of one is not kept: its advantage is 0. NaN rewards (rejected responses) take no part and are not kept.

    Args:
        rewards: `[B]`, float or integer.
        groups: group size (consecutive rows), or `[B]` integer ids.

    Returns:
        `[B]` bool.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: DAPO (2503.14476), equation 11.

    Example:
        >>> import torch
        >>> from rlkernels.credit import mixed_groups
        >>> mixed_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), groups=2).tolist()
        [False, False, True, True]
    """
    centred = group_advantages(rewards, groups, scale="none")
    return (Groups(groups, rewards.shape[0], rewards.device).count(centred != 0) > 0) & rewards.isfinite()


def overlong_penalty(lengths: Tensor, max_length: int, buffer_length: int, *, factor: float = 1.0) -> Tensor:
    """DAPO's soft overlong penalty, to be added to the rewards.

        min(0, -factor (length - (max_length - buffer_length)) / buffer_length)

    Args:
        lengths: `[B]`, float or integer, tokens of each response.
        max_length: longest response that is generated.
        buffer_length: > 0, at most `max_length`: the penalty falls linearly over the last tokens.
        factor: >= 0: the penalty at `max_length`.

    Returns:
        `[B]` float32 (float64 for float64 lengths).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: DAPO (2503.14476), equation 13; as in verl, longer responses are not cut off at -factor.

    Example:
        >>> import torch
        >>> from rlkernels.credit import overlong_penalty
        >>> overlong_penalty(torch.tensor([10, 18432, 20480]), 20480, 4096).tolist()
        [0.0, -0.5, -1.0]
    """
    checks.require_tensor("lengths", lengths)
    checks.require_dtype("lengths", lengths, (*checks.FLOAT_DTYPES, *checks.INTEGER_DTYPES))
    checks.require_number("max_length", max_length, above=0)
    checks.require_number("buffer_length", buffer_length, above=0)
    checks.require_number("factor", factor, at_least=0.0)
    if buffer_length > max_length:
        raise ValueError(f"buffer_length: expected at most max_length {max_length}, got {buffer_length}")
    excess = lengths.detach().to(result_dtype(lengths)) - (max_length - buffer_length)
    return 0 - factor * excess.clamp(min=0) / buffer_length  # 0, not -0
