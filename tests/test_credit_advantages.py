"""Leave-one-out advantages, whitening, and advantages over step rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from rlkernels.credit import group_advantages, leave_one_out_advantages, whiten

REWARDS = st.one_of(st.floats(-1e3, 1e3, width=32), st.just(math.nan))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), REWARDS), max_size=20))
def test_leave_one_out_is_as_written(rows: list[tuple[int, float]]) -> None:
    groups, rewards = [group for group, _ in rows], [reward for _, reward in rows]
    actual = leave_one_out_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups).long())
    for i, (group, reward) in enumerate(rows):
        others = [r for j, (g, r) in enumerate(rows) if g == group and j != i and not math.isnan(r)]
        expected = 0.0 if math.isnan(reward) or not others else reward - sum(others) / len(others)
        assert actual[i].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("value, count", [(0.2, 8), (0.1, 7), (0.7, 16), (0.3, 1)])
def test_leave_one_out_of_equal_rewards_is_exactly_zero(value: float, count: int) -> None:
    assert leave_one_out_advantages(torch.tensor([value] * count), count).tolist() == [0.0] * count


def test_leave_one_out_dtypes_and_gradients() -> None:
    rewards = torch.tensor([1.0, 0.0], dtype=torch.bfloat16, requires_grad=True)
    actual = leave_one_out_advantages(rewards, 2)
    assert actual.dtype == torch.float32 and not actual.requires_grad
    assert leave_one_out_advantages(torch.tensor([3, 1]), 2).tolist() == [2.0, -2.0]
    assert leave_one_out_advantages(torch.zeros(0), 2).shape == (0,)
    with pytest.raises(ValueError, match="rewards"):
        leave_one_out_advantages(torch.zeros(2, 2), 2)


def test_whiten_is_as_written(generator: Generator) -> None:
    x = torch.randn(7, 9, generator=generator, dtype=torch.float64) + 1e3
    mask = torch.rand(7, 9, generator=generator) < 0.6
    mask[3] = False  # an empty response
    poisoned = torch.where(mask, x, math.nan).requires_grad_()
    actual = whiten(poisoned, mask)
    kept = x[mask]
    expected = (kept - kept.mean()) / (kept.var() + 1e-8).sqrt()
    torch.testing.assert_close(actual[mask], expected, rtol=0, atol=1e-9)
    assert (actual[~mask] == 0).all()
    assert not actual.requires_grad
    torch.testing.assert_close(whiten(poisoned.detach().t(), mask.t().float()), actual.t())


def test_whiten_edges() -> None:
    """B99; one entry, none, equal entries; an unmasked NaN stays visible."""
    assert whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0])).tolist() == pytest.approx(
        [-math.sqrt(0.5), math.sqrt(0.5), 0.0]
    )
    assert whiten(torch.tensor([5.0, 1.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([5.0, math.inf]), torch.zeros(2)).tolist() == [0.0, 0.0]
    assert whiten(torch.full((7,), 0.1), torch.ones(7)).tolist() == [0.0] * 7
    assert whiten(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)
    assert whiten(torch.tensor([1.0, math.nan]), torch.ones(2)).isnan().all()
    with pytest.raises(ValueError, match="mask"):
        whiten(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="eps"):
        whiten(torch.zeros(3), torch.zeros(3), eps=0.0)


def test_advantages_over_step_rows(generator: Generator) -> None:
    """SKILL0's statistics weight a trajectory by its steps; those over trajectories are spread over the steps."""
    steps_of = torch.tensor([1, 4, 2, 3, 2, 5])
    trajectory = torch.repeat_interleave(torch.arange(6), steps_of)
    groups, rewards = torch.tensor([0, 0, 0, 1, 1, 1]), torch.rand(6, generator=generator, dtype=torch.float64)
    over_steps = group_advantages(rewards[trajectory], groups[trajectory])
    over_trajectories = group_advantages(rewards, groups)[trajectory]
    for group in (0, 1):
        in_group = groups[trajectory] == group
        for actual, sample in (
            (over_steps, rewards[trajectory][in_group]),
            (over_trajectories, rewards[groups == group]),
        ):
            expected = (rewards[trajectory][in_group] - sample.mean()) / (sample.std() + 1e-4)
            torch.testing.assert_close(actual[in_group], expected)
