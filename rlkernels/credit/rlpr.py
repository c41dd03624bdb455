"""RLPR: debiased probability rewards, and a filter of prompts whose rewards hardly differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.credit.advantages import group_std
from rlkernels.credit.groups import Groups
from rlkernels.dtypes import result_dtype, wide


def debias_reward(
    rewards: Tensor, base_rewards: Tensor, *, format_rewards: Tensor | None = None, format_coefficient: float = 0.1
) -> Tensor:
    """What the reasoning adds to the reference answer's probability, and a share of a format reward.

        r^ = clip(r - r_base, 0, 1);    with format rewards: (1 - c) r^ + c format

    NaN (a rejected response) stays NaN, which `group_advantages` leaves out.

    Args:
        rewards: `[B]` float, of `reference_probability_reward`.
        base_rewards: `[B]` float: the same answer's reward without any reasoning.
        format_rewards: `[B]`, float or integer: 1 where the format is right, else 0.
        format_coefficient: c, in [0, 1].

    Returns:
        `[B]`, float32 (float64 for float64 rewards).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: RLPR (2506.18254); the format's share is that of its code.

    Example:
        >>> import torch
        >>> from rlkernels.credit import debias_reward
        >>> debias_reward(torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.5])).tolist()
        [0.5, 0.0]
    """
    checks.require_floats("rewards", rewards, "B")
    checks.require_floats("base_rewards", base_rewards, rewards.shape[0])
    checks.require_same_device("rewards", rewards, base_rewards=base_rewards)
    checks.require_number("format_coefficient", format_coefficient, at_least=0.0, at_most=1.0)
    debiased = (wide(rewards.detach()) - wide(base_rewards.detach())).clamp(0, 1)
    if format_rewards is not None:
        checks.require_like("rewards", rewards, format_rewards=format_rewards)
        debiased = (1 - format_coefficient) * debiased + format_coefficient * wide(format_rewards.detach())
    return debiased.to(result_dtype(rewards, base_rewards))


class StdFilter:
    """Keeps the responses of prompts whose rewards differ enough, by a moving average of what is usual.

        keep_i = std_g >= scale mean;    after each step: mean <- decay mean + (1 - decay) (the step's mean std)

    The first `skipped` steps are not looked at. The next `warmup` steps form the plain mean of their mean standard
    deviations; every response but rejected ones (NaN) is kept until then. A step is measured against the mean of the
    steps before it, and enters the mean with all its prompts, those that it drops included. Groups with fewer than two
    rewards that are finite count as nothing and are dropped once the filter works. No synchronisation with the host.

    Args:
        scale: >= 0 (beta).
        decay: in [0, 1].
        skipped, warmup: >= 0.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: RLPR (2506.18254); the steps are those of its code (averaging from step 6, filtering from 11).

    Example:
        >>> import torch
        >>> from rlkernels.credit import StdFilter
        >>> keep = StdFilter(skipped=0, warmup=1)
        >>> keep(torch.tensor([0.9, 0.1, 0.4, 0.5]), groups=2).tolist()
        [True, True, True, True]
        >>> keep(torch.tensor([0.9, 0.1, 0.4, 0.5]), groups=2).tolist()
        [True, True, False, False]
    """

    def __init__(self, *, scale: float = 0.5, decay: float = 0.99, skipped: int = 5, warmup: int = 5) -> None:
        checks.require_number("scale", scale, at_least=0.0)
        checks.require_number("decay", decay, at_least=0.0, at_most=1.0)
        checks.require_number("skipped", skipped, at_least=0)
        checks.require_number("warmup", warmup, at_least=0)
        self.scale, self.decay, self.skipped, self.warmup = scale, decay, skipped, warmup
        self.step = 0
        self.mean = torch.zeros(())
        self.averaged = torch.zeros(())  # steps in the mean: those that had a group with a spread

    def __call__(self, rewards: Tensor, groups: int | Tensor) -> Tensor:
        """Which responses of a step are kept, `[B]` bool; `rewards` and `groups` as in `group_std`."""
        std = wide(group_std(rewards, groups))
        self.step += 1
        keep = rewards.isfinite()
        if self.step <= self.skipped:
            return keep
        self.mean, self.averaged = self.mean.to(std), self.averaged.to(std)
        has_spread = Groups(groups, std.shape[0], std.device).count(rewards.isfinite()) >= 2
        rows = has_spread.sum()
        new = torch.where(has_spread, std, 0).sum() / rows.clamp(min=1)
        filters = self.step > self.skipped + self.warmup
        if filters:
            keep = keep & has_spread & (std >= self.scale * self.mean)
        share = 1 / (self.averaged + 1)
        if filters:
            share = torch.where(self.averaged == 0, share, 1 - self.decay)
        self.mean = torch.where(rows > 0, self.mean + share * (new - self.mean), self.mean)
        self.averaged = self.averaged + (rows > 0)
        return keep

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: the step and the mean, as numbers.

        Returns:
            For `load_state_dict`. Reads the mean on the host.
        """
        return {"step": self.step, "mean": float(self.mean), "averaged": int(self.averaged)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was called.

        Args:
            state: what it returned.

        Raises:
            TypeError, ValueError: something else.
        """
        if not isinstance(state, Mapping) or set(state) != {"step", "mean", "averaged"}:
            raise ValueError(f"state: expected step, mean and averaged, got {state!r}")
        for name, value in state.items():
            checks.require_number(f"state[{name!r}]", value, at_least=0.0)
        self.step = int(state["step"])
        self.mean = torch.tensor(float(state["mean"]), dtype=torch.float64)
        self.averaged = torch.tensor(float(state["averaged"]), dtype=torch.float64)
