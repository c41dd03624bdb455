"""SKILL0 and AgentOCR: compression reward, budgets, selection."""

from __future__ import annotations

import math

import pytest
import torch

from rlkernels.credit import budget_at_step, compression_reward, select_skills, skill_budget


def test_conventions_are_each_others_negative() -> None:
    factor = torch.tensor([1.0, 1.7, 4.0, 9.0, 0.2], dtype=torch.float64)
    success = torch.tensor([1, 1, 1, 1, 1])
    rewarded = compression_reward(success, factor, coef=0.02)
    punished = compression_reward(success, 1 / factor, coef=0.02, convention="fraction")
    torch.testing.assert_close(rewarded, -punished)
    expected = [0.02 * math.log(min(max(f, 1.0), 5.0)) for f in factor.tolist()]
    assert rewarded.tolist() == pytest.approx(expected)
    assert (rewarded >= 0).all()


@pytest.mark.parametrize("convention", ["factor", "fraction"])
def test_no_reward_for_failures_and_what_cannot_be_read(convention: str) -> None:
    success = torch.tensor([False, True, True, True])
    compression = torch.tensor([2.0, math.nan, math.inf, 1.0], requires_grad=True)
    actual = compression_reward(success, compression, convention=convention)
    assert actual.tolist() == [0.0] * 4 and not actual.requires_grad


def test_what_did_not_succeed_has_no_bonus() -> None:
    success = torch.tensor([1.0, 0.0, -1.0, torch.nan])
    assert (compression_reward(success, torch.full((4,), 2.0)) > 0).tolist() == [True, False, False, False]


def test_bad_compression_arguments() -> None:
    success, compression = torch.ones(3), torch.ones(3)
    with pytest.raises(ValueError, match="success"):
        compression_reward(success[:2], compression)
    with pytest.raises(ValueError, match="convention"):
        compression_reward(success, compression, convention="ratio")
    with pytest.raises(ValueError, match="largest_factor"):
        compression_reward(success, compression, largest_factor=0.5)


def test_budgets() -> None:
    for skills in range(7):
        for stages in range(2, 6):
            budgets = skill_budget(skills, stages)
            expected = [math.floor(skills * (stages - s) / (stages - 1)) for s in range(1, stages + 1)]
            assert budgets == expected
            assert budgets[0] == skills and budgets[-1] == 0
    with pytest.raises(ValueError, match="stages"):
        skill_budget(6, 1)
    with pytest.raises(TypeError, match="skills"):
        skill_budget(6.0, 3)


def test_stages_are_equally_long() -> None:
    by_step = [budget_at_step([5, 3, 0], step, 12) for step in range(1, 13)]
    assert by_step == [5] * 4 + [3] * 4 + [0] * 4
    with pytest.raises(ValueError, match="step"):
        budget_at_step([5, 0], 13, 12)
    with pytest.raises(ValueError, match="step"):
        budget_at_step([5, 0], 0, 12)
    with pytest.raises(ValueError, match="budgets"):
        budget_at_step([], 1, 12)


ACC_WITH = [0.5, 0.875, 0.375, 0.75, 0.625, math.nan]
ACC_WITHOUT = [0.5, 0.5, 0.5, 0.375, 0.5, 0.125]  # deltas 0, 0.375, -0.125, 0.375, 0.125, unknown


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [1, 3, 4]),
        ({"keep_neutral": True}, [1, 3, 4, 0]),
        ({"rank": False}, [1, 3, 4]),
        ({"rank": False, "keep_neutral": True}, [0, 1, 3, 4]),
        ({"filter": False}, [1, 3, 4, 0, 2, 5]),
        ({"filter": False, "rank": False}, [0, 1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_selection(options: dict, expected: list[int]) -> None:
    for budget in range(8):
        assert select_skills(ACC_WITH, ACC_WITHOUT, budget, **options) == expected[:budget]
    assert select_skills(torch.tensor(ACC_WITH), torch.tensor(ACC_WITHOUT), 2, **options) == expected[:2]


def test_ties_keep_their_order() -> None:
    assert select_skills([1.0, 1.0, 1.0], [0.5, 0.0, 0.5], 3) == [1, 0, 2]


@pytest.mark.parametrize("accuracies", [None, ["a"], 0.5], ids=str)
def test_accuracies_that_are_none(accuracies: object) -> None:
    with pytest.raises(TypeError, match="acc_with"):
        select_skills(accuracies, [0.5], budget=1)
    with pytest.raises(ValueError, match="budgets"):
        budget_at_step(6, 1, 10)


def test_bad_selection_arguments() -> None:
    with pytest.raises(ValueError, match="acc_without"):
        select_skills([0.5], [0.5, 0.1], 1)
    with pytest.raises(ValueError, match="budget"):
        select_skills([0.5], [0.5], -1)
